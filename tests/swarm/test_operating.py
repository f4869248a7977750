"""What an operator sees and does of a running node: figures, probes."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from nodes import LARGE, Node, Swarm, cli, sums, wait_until, write_prompts


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """An organizer and two volunteers that trade."""
    folder = tmp_path_factory.mktemp("swarm")
    with Swarm(folder) as swarm:
        prompts = write_prompts(folder / "prompts.jsonl", sums(range(1, 9), range(1, 9)))
        swarm.seed(prompts, "--set", "metrics.enabled=true", "--set", "metrics.port=0")
        for name in ("ada", "bob"):
            swarm.join(
                name,
                metrics__enabled="true",
                metrics__port="0",
                metrics__tensorboard="true",
                ftis__filter="none",
            )
        wait_until(
            lambda: all(
                node.step > 3 and node.status()["exchange"]["groups_accepted"] > 3
                for node in swarm.nodes[1:]
            ),
            "both train and trade",
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


def test_a_swarm_seen_from_outside_says_who_is_useful(swarm: Swarm) -> None:
    def useful() -> int:
        result = cli("status", swarm.invite, "--json")
        assert result.returncode == 0, result.stderr
        snapshot = json.loads(result.stdout)
        by_name = {member["name"]: member for member in snapshot["members"]}
        return int(by_name["ada"]["groups_accepted_by_others"])

    wait_until(lambda: useful() > 0, "tallies are in the DHT", swarm.nodes)


def test_the_doctor_beside_a_running_node(swarm: Swarm, ada: Node) -> None:
    result = cli(
        "doctor", swarm.invite, "--model", str(LARGE), "--set", "model.device=cpu", "--json",
        "--data-dir", str(ada.data_dir),
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["counts"]["failed"] == 0, report
    assert result.returncode == report["exit_code"] == 4
    found = {f["check"]: f for f in report["findings"]}
    for check in ("packages", "node", "data path", "swarm", "tokenizer", "clock"):
        assert found[check]["verdict"] == "ok", found[check]
    assert found["reachable"]["figure"] == "only from this machine"
    assert [f["verdict"] for check, f in found.items() if check.startswith("address ")] == ["ok"]
