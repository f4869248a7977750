"""What an operator sees and does of a running node: figures, probes."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tarfile
import termios
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stand_in import Hub
from nodes import ENVIRONMENT, Node, Swarm, cli, sums, wait_until, write_prompts

from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite

STEPS = 40
"""Enough for two nodes that start at once to learn from each other, one seconds after the other."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """An organizer and two volunteers that trade."""
    folder = tmp_path_factory.mktemp("swarm")
    with Swarm(folder) as swarm:
        prompts = write_prompts(folder / "prompts.jsonl", sums(range(11, 19), range(11, 19)))
        swarm.seed(prompts, "--set", "metrics.enabled=true", "--set", "metrics.port=0")
        for name in ("ada", "bob"):
            swarm.join(
                name,
                metrics__enabled="true",
                metrics__port="0",
                metrics__tensorboard="true",
                ftis__filter="none",
                train__max_steps=str(STEPS),  # then they idle, and leave the machine to the tests
            )
        wait_until(
            lambda: all(node.step == STEPS for node in swarm.nodes[1:]),
            "both train to the end",
            swarm.nodes,
        )
        yield swarm


@pytest.fixture
def ada(swarm: Swarm) -> Node:
    return swarm.nodes[1]


def page(node: Node, path: str) -> tuple[int, str]:
    port = node.status()["node"]["metrics_port"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_metrics_and_probes_of_a_volunteer(ada: Node) -> None:
    before = ada.step
    status, text = page(ada, "/metrics")
    assert status == 200
    assert before <= metric(text, "swarm_steps_total") <= ada.step
    assert metric(text, "swarm_groups_accepted_total") > 0
    assert ada.peer_id not in text
    assert page(ada, "/livez") == (200, "ok\n")
    status, text = page(ada, "/readyz")
    assert (status, json.loads(text)) == (200, {"ready": True, "reasons": []})


def test_metrics_of_an_organizer(swarm: Swarm) -> None:
    _, text = page(swarm.nodes[0], "/metrics")
    assert metric(text, "swarm_connections") >= 2
    assert "swarm_steps_total" not in text
    assert page(swarm.nodes[0], "/readyz")[0] == 200


def test_curves_are_written_beside_the_metrics(ada: Node) -> None:
    (events,) = ada.run_dir.tensorboard_dir.iterdir()
    assert "tfevents" in events.name


def test_the_ledger_tells_what_was_given_and_got(swarm: Swarm, ada: Node) -> None:
    bob = swarm.nodes[2]

    def rows() -> dict[str, dict[str, object]]:
        return {row["peer_id"]: row for row in ada.status()["ledger"]["peers"]}

    wait_until(
        lambda: bool(rows().get(bob.peer_id, {}).get("accepted_of_mine")),
        "the other says what it accepted",
        swarm.nodes,
    )
    result = cli("ledger", "--json", "--data-dir", str(ada.data_dir))
    assert result.returncode == 0, result.stderr
    ledger = json.loads(result.stdout)
    assert ledger["schema"] == "swarm-node/ledger/1"
    assert ledger["gave"]["blobs_sent"] > 0
    (row,) = [row for row in ledger["peers"] if row["peer_id"] == bob.peer_id]
    assert row["groups_accepted"] > 0
    assert row["bytes_got"] > 0
    assert 0 < row["update_share"] < 1
    assert row["kl_p50"] is not None
    assert 0 <= row["mean_reward"] <= 1
    table = cli("ledger", "--data-dir", str(ada.data_dir)).stdout
    assert bob.peer_id in table
    assert "groups accepted by 1 peers" in table


def test_used_are_the_groups_of_others_that_were_trained_on(ada: Node) -> None:
    def count() -> int:
        return sum(
            group["publisher"] != ada.peer_id for step in ada.steps() for group in step["groups"]
        )

    before = count()
    shown = ada.status()["training"]["foreign_groups_trained"]
    assert 0 < before <= shown <= count()


def test_a_swarm_seen_from_outside_says_who_is_useful(swarm: Swarm) -> None:
    def useful() -> int:
        result = cli("status", swarm.invite, "--json")
        assert result.returncode == 0, result.stderr
        snapshot = json.loads(result.stdout)
        by_name = {member["name"]: member for member in snapshot["members"]}
        return int(by_name["ada"]["groups_accepted_by_others"])

    wait_until(lambda: useful() > 0, "tallies are in the DHT", swarm.nodes)


def test_the_doctor_beside_a_running_node(swarm: Swarm, ada: Node) -> None:
    """With the settings that the node was started with: its model, where it listens."""
    result = cli("doctor", swarm.invite, "--json", "--data-dir", str(ada.data_dir), timeout_s=600)
    report = json.loads(result.stdout)
    assert report["counts"]["failed"] == 0, report
    assert result.returncode == report["exit_code"] == 4
    found = {f["check"]: f for f in report["findings"]}
    for check in ("packages", "node", "data path", "swarm", "tokenizer", "clock"):
        assert found[check]["verdict"] == "ok", found[check]
    assert found["reachable"]["figure"] == "only from this machine"
    assert "(is 127.0.0.1)" in found["reachable"]["fix"]
    assert [f["verdict"] for check, f in found.items() if check.startswith("address ")] == ["ok"]


def test_groups_as_people_read_them(ada: Node, swarm: Swarm) -> None:
    here = ("--data-dir", str(ada.data_dir))
    listed = json.loads(cli("rollouts", "list", "--limit", "500", "--json", *here).stdout)
    bob = swarm.nodes[2].peer_id
    theirs = [g for g in listed["groups"] if g["publisher"] == bob and g["step"] is not None]
    assert {g["publisher"] for g in listed["groups"]} == {ada.peer_id, bob}
    shown = json.loads(cli("rollouts", "show", theirs[0]["hash"][:16], "--json", *here).stdout)
    assert shown["prompt"].endswith("=")
    assert int(shown["answer"]) == sum(map(int, shown["prompt"].rstrip("=").split("+")))
    for item in shown["completions"]:
        assert item["reward"] in (0.0, 1.0)
        # The last number counts: "1501;10" is as right as "10".
        assert shown["answer"] in item["text"] or not item["reward"]
        assert item["outcome"] is not None
        assert all(logprob <= 0 for _, logprob in item["tokens"])
    text = cli("rollouts", "show", theirs[0]["hash"][:16], *here).stdout
    assert f"trained on in step {theirs[0]['step']}" in text
    table = cli("rollouts", "list", "--peer", bob[-6:], *here).stdout
    assert f"..{bob[-6:]}" in table
    assert f"..{ada.peer_id[-6:]}" not in table


def test_groups_on_disk_are_checked(ada: Node) -> None:
    here = ("--data-dir", str(ada.data_dir))
    result = cli("rollouts", "verify", "--limit", "40", "--json", *here)
    found = json.loads(result.stdout)
    assert result.returncode == 0, found
    assert found["bad"] == 0
    assert len(found["groups"]) == 40
    assert any(row["rewards_as_logged"] for row in found["groups"])
    blob = ada.swarm_dir.rollouts_dir / f"{found['groups'][0]['hash']}.blob"
    whole = blob.read_bytes()
    try:
        blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        result = cli("rollouts", "verify", blob.name[:16], *here)
        assert result.returncode == 1
        assert "damaged" in result.stdout
    finally:
        blob.write_bytes(whole)


def test_what_one_would_join(swarm: Swarm) -> None:
    result = cli("invite", "show", swarm.invite, "--json")
    shown = json.loads(result.stdout)
    assert shown["schema"] == "swarm-node/offer/1"
    assert shown["organizers"] == [swarm.nodes[0].peer_id]
    assert shown["sampling"]["group_size"] == 4
    assert shown["totals"]["members"] == 3
    text = cli("invite", "show", swarm.invite).stdout
    assert "4 completions a prompt" in text
    assert "not your weights" in text


def test_a_paused_node_frees_its_learner_and_stays(swarm: Swarm, ada: Node) -> None:
    here = ("--data-dir", str(ada.data_dir))
    learner = ada.child("swarm.rl.learner").pid
    result = cli("pause", *here)
    assert result.returncode == 0, result.stderr
    assert learner not in [child.pid for child in ada.children()]
    assert ada.status()["activity"]["doing"] == "paused by its owner"
    assert page(ada, "/readyz")[0] == 503
    assert ada.status()["network"]["connected"] >= 2
    assert cli("resume", *here).returncode == 0
    wait_until(lambda: ada.status()["activity"]["doing"] == "finished", "goes on", swarm.nodes)
    assert ada.step == STEPS
    assert page(ada, "/readyz")[0] == 200
    assert "not paused" in cli("resume", *here).stdout


def test_an_organizer_has_nothing_to_pause(swarm: Swarm) -> None:
    for verb in ("pause", "resume"):
        result = cli(verb, "--data-dir", str(swarm.nodes[0].data_dir))
        assert result.returncode == 2
        assert "no model to pause" in result.stderr


def test_a_bug_report_tells_nothing_private(swarm: Swarm, ada: Node, tmp_path: Path) -> None:
    path = tmp_path / "report.tar.gz"
    result = cli("bugreport", "--no-doctor", "--out", str(path), "--data-dir", str(ada.data_dir))
    assert result.returncode == 0, result.stderr
    with tarfile.open(path) as archive:
        texts = {m.name: archive.extractfile(m).read().decode() for m in archive}  # type: ignore[union-attr]
    assert json.loads(texts["bugreport/status.json"])["training"]["step"] == STEPS
    assert f"step {STEPS}" in texts["bugreport/node.log"]
    everything = "".join(texts.values())
    for node in swarm.nodes:
        assert node.peer_id not in everything
    for volunteer in swarm.nodes[1:]:  # the organizer is called what its role is
        assert f'"{volunteer.name}"' not in everything
        assert f"'{volunteer.name}'" not in everything
    assert swarm.invite[:40] not in everything


def test_a_result_on_the_hub(ada: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("me/sums", "--data-dir", str(ada.data_dir))
    with Hub("hf_right") as hub:
        for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_wrong"}.items():
            monkeypatch.setitem(ENVIRONMENT, name, value)
        result = cli("publish", *here)
        assert result.returncode == 1
        assert "HF_TOKEN" in result.stderr
        assert "Traceback" not in result.stderr
        monkeypatch.setitem(ENVIRONMENT, "HF_TOKEN", "hf_right")
        result = cli("publish", *here)
        assert result.returncode == 0, result.stderr
    assert hub.created[-1]["visibility"] == "private"
    assert hub.summary == f"Step {STEPS}"
    checkpoint = ada.run_dir.checkpoints()[STEPS]
    weights = (checkpoint / "model.safetensors").read_bytes()
    assert hub.files["model.safetensors"] == weights
    assert {"config.json", "tokenizer.json", "README.md", "swarm-run.json"} <= set(hub.files)
    assert not {"trainer.safetensors", "node_state.bin"} & set(hub.files)
    card = hub.files["README.md"].decode()
    assert f"{STEPS} steps" in card
    assert "of those trained on" in card
    everything = b"".join(hub.files[name] for name in ("README.md", "swarm-run.json")).decode()
    for private in (str(ada.data_dir), ada.peer_id, "127.0.0.1"):
        assert private not in everything


def test_status_refreshes_in_place(ada: Node) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm.cli", "status", "--watch", "--data-dir", str(ada.data_dir)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**ENVIRONMENT, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    try:
        shown = b""
        while shown.count(b"health") < 3:
            shown += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the end of a terminal
            while rest := os.read(ours, 65536):
                shown += rest
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[?1049h" in shown  # a screen of its own
    assert b"\x1b[?1049l" in shown  # and the one before is back
    assert b"finished" in shown
    assert b"Traceback" not in shown


def test_leave_ends_the_node_and_forgets_the_swarm(swarm: Swarm) -> None:
    bob = swarm.nodes[2]
    here = ("--data-dir", str(bob.data_dir))
    folder = bob.swarm_dir.root
    result = cli("leave", "--delete", *here)
    assert result.returncode == 0, result.stderr
    assert not folder.exists()
    assert not bob.running
    assert "invite" in cli("join", *here).stderr


def test_leave_ends_a_node_that_has_found_nobody(tmp_path: Path) -> None:
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity(bytes(32)).peer_id}"
    with Swarm(tmp_path) as swarm:
        node = swarm.join("ada", invite=Invite(bytes(32), (nobody,), "gone").encode())
        wait_until(lambda: bool(node.status()), "it answers", swarm.nodes)
        result = cli("leave", "--data-dir", str(node.data_dir))
        assert "no swarm has been joined" in result.stderr  # nothing to forget
        assert not node.running


def test_a_node_that_learns_nothing_says_so(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        never = dict.fromkeys(sums(range(11, 19), range(11, 19)), "-1")
        swarm.seed(write_prompts(tmp_path / "prompts.jsonl", never))
        node = swarm.join("ada", train__max_steps="25")
        wait_until(lambda: node.step >= 20, "it takes its steps", swarm.nodes)
        wait_until(
            lambda: (
                "steps changed nothing: the completions of a prompt all get the same reward "
                "(mean 0.00)" in " ".join(node.status()["problems"])
            ),
            "the status says so",
            swarm.nodes,
        )
