"""One node and its run: alone, locked, killed, resumed, refused, begun anew."""

import hashlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hub_stand_in import Hub
from nodes import (
    ENVIRONMENT,
    LARGE,
    LOOPBACK,
    PATIENCE_S,
    SMALL,
    Node,
    Swarm,
    cli,
    settings,
    sums,
    wait_until,
    write_prompts,
)
from safetensors.numpy import load

from swarm.checkpoint_files import digest
from swarm.paths import RunDir
from tests.documented import ROOT


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """An organizer, which trains nothing, and one volunteer."""
    folder = tmp_path_factory.mktemp("resume")
    with Swarm(folder) as swarm:
        swarm.seed(write_prompts(folder / "prompts.jsonl", sums(range(3, 9), range(2, 12))))
        swarm.join("lone")
        yield swarm


@pytest.fixture
def node(swarm: Swarm) -> Node:
    """The volunteer, with a few steps made; resumed where a test before has ended it."""
    node = swarm.nodes[-1]
    if not node.running:
        node = swarm.restart(node, "join")
    wait_until(lambda: node.step >= 3, "three steps", [node])
    return node


def checkpoints(run_dir: RunDir) -> dict[int, Path]:
    """Step to folder; each one is whole."""
    found = {}
    for path in run_dir.checkpoints_dir.glob("step-*"):
        manifest = json.loads((path / "checkpoint.json").read_text())
        for name, file in manifest["files"].items():
            data = (path / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == file["sha256"], path / name
        found[manifest["step"]] = path
    return found


def test_a_lone_node_trains_alone_and_says_so(node: Node) -> None:
    # Steps on prompts that the model has always or never right train nothing.
    wait_until(lambda: node.status()["training"]["own_samples_trained"] > 0, "it trains", [node])
    status = node.status()
    assert status["alone"] is True
    assert status["problems"] == []
    assert status["training"]["foreign_samples_seen"] == 0
    assert {group["publisher"] for step in node.steps() for group in step["groups"]} == {
        node.peer_id
    }
    assert "training alone" in node.log()
    shown = cli("status", "--data-dir", str(node.data_dir))
    assert shown.returncode == 0
    assert "training alone" in shown.stdout


def test_a_data_dir_in_use_is_refused(node: Node) -> None:
    settings = node.swarm_dir.config_path.read_bytes()
    result = cli("join", "--data-dir", str(node.data_dir), "--learning-rate", "0.5")
    assert result.returncode == 75, result.stderr
    assert f"pid {node.process.pid}" in result.stderr
    assert str(node.data_dir) in result.stderr
    assert node.swarm_dir.config_path.read_bytes() == settings
    step = node.step
    wait_until(lambda: node.step > step, "a step after the refusal", [node])


def test_a_killed_node_resumes_from_its_last_checkpoint(swarm: Swarm, node: Node) -> None:
    peer_id, run_dir = node.peer_id, node.run_dir
    wait_until(lambda: bool(list(run_dir.checkpoints_dir.glob("step-*"))), "a checkpoint", [node])
    node.child("swarm.rl.learner")
    node.child("p2pd")
    node.child("swarm.rewards.child")
    node.kill()
    assert node.leftovers() == []
    assert "Traceback" not in (run_dir.root / "learner.log").read_text()
    *whole, cut = run_dir.steps_path.read_text().split("\n")
    assert [json.loads(line)["step"] for line in whole] == list(range(1, len(whole) + 1))
    saved = max(checkpoints(run_dir))
    assert 0 < saved <= len(whole)
    if not cut:  # the kernel writes short lines whole; a power cut does not
        with run_dir.steps_path.open("a") as file:
            file.write('{"step": 7, "gro')

    node = swarm.restart(node, "join")
    wait_until(lambda: node.step >= saved + 2, "steps after the restart", [node])
    assert node.peer_id == peer_id
    assert node.run_dir == run_dir
    assert f"resumed at step {saved}" in node.log()
    resumed = [record["step"] for record in node.steps()[len(whole) :]]
    assert resumed == list(range(saved + 1, saved + 1 + len(resumed)))
    assert node.status()["training"]["groups_made"] > saved


def test_another_model_is_refused_or_begins_anew(swarm: Swarm, node: Node) -> None:
    old_run = node.run_dir
    node.signal(signal.SIGHUP)  # the terminal is closed: as SIGTERM
    assert node.process.wait(PATIENCE_S) == 0
    last_epoch = int(node.swarm_dir.epoch_path.read_text())
    steps = node.steps()
    assert max(checkpoints(old_run)) == steps[-1]["step"]
    data_dir = str(node.data_dir)
    settings = node.swarm_dir.config_path.read_bytes()

    result = cli("join", "--data-dir", data_dir, "--model", str(LARGE))
    assert result.returncode == 78, result.stderr
    assert f"model: was {str(SMALL)!r}, is {str(LARGE)!r}" in result.stderr
    assert "--new-run" in result.stderr
    assert node.swarm_dir.config_path.read_bytes() == settings

    record = old_run.record_path.read_bytes()
    old_run.record_path.write_bytes(record[:-9])
    result = cli("join", "--data-dir", data_dir)
    old_run.record_path.write_bytes(record)
    assert result.returncode == 78, result.stderr
    assert f"{old_run.record_path}: damaged" in result.stderr
    assert node.run_dir == old_run

    lora = ("--mode", "lora", "--lora-rank", "4")
    node = swarm.restart(node, "join", "--new-run", *lora)
    wait_until(lambda: node.step >= 1, "a step of the new run", [node])
    assert node.run_dir != old_run
    assert node.steps()[0]["step"] == 1
    # To others, groups of an epoch that they know would be the old run's.
    assert int(node.swarm_dir.epoch_path.read_text()) > last_epoch
    assert json.loads(node.run_dir.record_path.read_text())["trained"]["lora_rank"] == 4
    assert len(old_run.steps_path.read_text().splitlines()) == len(steps)
    assert node.stop() == 0

    result = cli("join", "--data-dir", data_dir, "--lora-rank", "8")
    assert result.returncode == 78, result.stderr
    assert "lora_rank: was 4, is 8" in result.stderr
    assert node.leftovers() == []


@pytest.mark.slow
def test_a_data_dir_of_another_version_goes_on(swarm: Swarm, node: Node) -> None:
    """It lacks what this version adds, and has what this version does not know."""
    assert node.stop() == 0
    path = node.swarm_dir.config_path
    saved = json.loads(path.read_text())
    saved["train"]["of_another_version"] = 1
    saved["of_another_version"] = {"x": True}
    path.write_text(json.dumps(saved))
    newest = checkpoints(node.run_dir)[max(checkpoints(node.run_dir))]
    state = msgpack.unpackb((newest / "node_state.bin").read_bytes())
    aged = msgpack.packb({"cursor": state["cursor"], "seen": state["seen"], "other": 1})
    (newest / "node_state.bin").write_bytes(aged)
    manifest = json.loads((newest / "checkpoint.json").read_text())
    manifest["files"]["node_state.bin"] |= {
        "sha256": hashlib.sha256(aged).hexdigest(),
        "size_bytes": len(aged),
    }
    del manifest["sha256"]
    manifest["sha256"] = digest(manifest)
    (newest / "checkpoint.json").write_text(json.dumps(manifest))
    step = manifest["step"]
    node = swarm.restart(node, "join")
    wait_until(lambda: node.step > step, "it goes on", [node])
    assert f"resumed at step {step}" in node.log()
    assert "train.of_another_version" in node.log()
    assert node.status()["problems"] == []


def finished_run(swarm: Swarm, name: str, identity: bytes | None, kill_at: int | None) -> Node:
    """A node that makes 20 steps alone, and then ends; killed once after a certain one."""
    (swarm.folder / name).mkdir()
    if identity is not None:
        key = swarm.folder / name / "identity.key"
        key.touch(0o600)
        key.write_bytes(identity)
    steps = {"train__max_steps": "20", "checkpoint__every_steps": "4", "checkpoint__keep": "9"}
    node = swarm.join(name, **steps)
    if kill_at is not None:
        wait_until(lambda: node.step >= kill_at, "some steps", [node])
        node.kill()
        node = swarm.restart(node, "join")
    wait_until(lambda: bool(node.status().get("training", {}).get("finished")), "its end", [node])
    assert node.stop() == 0
    return node


@pytest.mark.slow
def test_a_run_that_was_killed_is_the_run_that_was_not(tmp_path: Path) -> None:
    """Bit by bit, from the checkpoint on that the killed node resumed from."""
    kill_at = random.randrange(5, 17)
    with Swarm(tmp_path) as swarm:
        organizer = swarm.seed(write_prompts(tmp_path / "p.jsonl", sums(range(3, 9), range(2, 12))))
        straight = finished_run(swarm, "straight", None, None)
        identity = (straight.data_dir / "identity.key").read_bytes()
        organizer.kill()  # and what the DHT knows of that identity
        swarm.restart(organizer, "seed", *settings(LOOPBACK))
        killed = finished_run(swarm, "killed", identity, kill_at)
    assert "resumed at step" in killed.log()
    expected, found = checkpoints(straight.run_dir), checkpoints(killed.run_dir)
    assert set(expected) == set(found) == {4, 8, 12, 16, 20}
    for step in expected:
        for name in ("model.safetensors", "trainer.safetensors"):
            assert (expected[step] / name).read_bytes() == (found[step] / name).read_bytes(), (
                f"{name} of step {step}, killed after step {kill_at}"
            )


def test_an_adapter_goes_to_the_hub_merged(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(node.run_dir.record_path.read_text())["trained"]["mode"] == "lora"
    assert node.stop() == 0
    with Hub("hf_right") as hub:
        monkeypatch.setitem(ENVIRONMENT, "HF_ENDPOINT", hub.url)
        monkeypatch.setitem(ENVIRONMENT, "HF_TOKEN", "hf_right")
        result = cli("publish", "me/sums", "--merge", "--data-dir", str(node.data_dir))
        assert result.returncode == 0, result.stderr
    names = set(load(hub.files["model.safetensors"]))
    assert "model.embed_tokens.weight" in names
    assert not any("lora" in name for name in names)
    assert "config.json" in hub.files
    assert not any("adapter" in name for name in hub.files)
    assert "LoRA adapter merged into it" in hub.files["README.md"].decode()
    assert not list(node.run_dir.root.glob(".publishing-*"))


def test_a_run_and_its_model_are_evaluated_and_tabulated(node: Node) -> None:
    assert node.stop() == 0
    last = max(checkpoints(node.run_dir))
    here = ("--data-dir", str(node.data_dir), "--max-prompts", "4", "--json")
    by_run = json.loads(cli("eval", str(node.run_dir.root), "--step", str(last), *here).stdout)
    assert by_run["step"] == last
    assert by_run["checkpoint"] == str(checkpoints(node.run_dir)[last])
    held_out = by_run["sets"]["held_out"]
    assert held_out["prompts"] == 4
    assert 0.0 <= held_out["low"] <= held_out["accuracy"] <= held_out["high"] <= 1.0
    table = subprocess.run(
        [sys.executable, "recipes/tabulate.py", "--max-prompts", "4", str(node.data_dir)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert table.returncode == 0, table.stderr
    head, _, row = table.stdout.splitlines()
    assert head == "| node | held out |"
    assert row.startswith(f"| lone: {SMALL.name}, lora, step {last} | ")
    assert row.endswith(
        f"→ {held_out['accuracy']:.1%} ({held_out['low']:.1%} to {held_out['high']:.1%}) |"
    )
