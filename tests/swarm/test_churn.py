"""A swarm of four that loses its organizer, gains a member, and ends node by node."""

import json
import signal
import time
from collections.abc import Iterator

import pytest
from nodes import (
    LARGE,
    PATIENCE_S,
    Node,
    Swarm,
    cli,
    sums,
    wait_until,
    write_prompts,
)

from swarm.paths import DataDir


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """An organizer and three volunteers of different kind that train."""
    folder = tmp_path_factory.mktemp("churn")
    with Swarm(folder) as swarm:
        swarm.seed(write_prompts(folder / "prompts.jsonl", sums(range(3, 40), range(2, 12))))
        swarm.join("small")
        swarm.join("large", LARGE)
        swarm.join("adapter", LARGE, model__mode="lora", model__lora_rank="4")
        for node in swarm.nodes[1:]:
            wait_until(lambda node=node: node.step > 0, f"{node.name} trains", swarm.nodes)
        yield swarm


@pytest.fixture
def volunteer(swarm: Swarm) -> Node:
    """One that trains."""
    return next(node for node in swarm.nodes[1:] if node.running)


def assert_ended_in_order(node: Node) -> None:
    """No process, no socket, and a checkpoint of the last step."""
    assert node.leftovers() == []
    assert not DataDir(node.data_dir).runtime_dir.exists()
    last = node.steps()[-1]["step"]
    saved = node.run_dir.checkpoints_dir / f"step-{last:08d}"
    assert json.loads((saved / "checkpoint.json").read_text())["step"] == last


def test_without_the_organizer_a_newcomer_joins_and_all_train_on_all(swarm: Swarm) -> None:
    organizer, *members = swarm.nodes
    organizer.kill()
    assert organizer.leftovers() == []
    steps = [node.step for node in members]

    invite = cli("invite", "--data-dir", str(members[0].data_dir)).stdout.strip()
    newcomer = swarm.join("newcomer", invite=invite)

    shown = cli("status", invite, "--json")
    assert shown.returncode == 0, shown.stderr
    snapshot = json.loads(shown.stdout)
    names = {member["name"]: member for member in snapshot["members"]}
    assert {"small", "large", "adapter"} <= names.keys()
    assert names["adapter"]["mode"] == "lora"
    assert snapshot["swarm"]["prompts"] > 0
    dead = cli("status", swarm.invite, "--timeout", "0.5")  # it has the organizer's address only
    assert dead.returncode == 69, dead.stderr
    assert "/ip4/127.0.0.1/tcp/" in dead.stderr

    volunteers = [*members, newcomer]
    wait_until(lambda: newcomer.step > 0, "the newcomer trains", volunteers)
    ids = {node.name: node.peer_id for node in volunteers}
    for node in volunteers:
        others = {peer for name, peer in ids.items() if name != node.name}
        wait_until(
            lambda node=node, others=others: others <= node.trained_on(),
            f"{node.name} trains on all others",
            volunteers,
        )
        publishers = {group["publisher"] for step in node.steps() for group in step["groups"]}
        assert publishers == set(ids.values())
    assert all(node.step > step for node, step in zip(members, steps, strict=True))
    for node in volunteers:
        wait_until(
            lambda node=node: node.status()["reception"]["reporting"] > 0,
            f"{node.name} hears what others make of its groups",
            volunteers,
        )
        # Nobody lies here, whatever churn there is.
        assert [row for row in node.status()["peers"] if row["strikes"] > 0] == []


def test_stop_ends_the_node_with_a_checkpoint(volunteer: Node) -> None:
    volunteer.children()
    result = cli("stop", "--data-dir", str(volunteer.data_dir))
    assert (result.returncode, result.stderr) == (0, "")
    assert volunteer.process.wait(PATIENCE_S) == 0
    assert_ended_in_order(volunteer)
    again = cli("stop", "--data-dir", str(volunteer.data_dir))
    assert again.returncode == 3
    assert "no node is running" in again.stderr


def test_ctrl_c_ends_the_node_with_a_checkpoint(volunteer: Node) -> None:
    volunteer.signal(signal.SIGINT)
    assert volunteer.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in volunteer.log()
    assert_ended_in_order(volunteer)


def test_a_second_ctrl_c_ends_the_node_at_once(volunteer: Node) -> None:
    learner = volunteer.child("swarm.rl.learner")
    learner.suspend()  # its step never ends
    time.sleep(1.0)  # nor the next one, if it had just ended one: else there is nothing to wait for
    try:
        volunteer.signal(signal.SIGINT)
        wait_until(lambda: "asked to stop" in volunteer.log(), "the first Ctrl-C", [volunteer])
        volunteer.signal(signal.SIGINT)
        assert volunteer.process.wait(30.0) == 130  # a step may take 60
    finally:
        learner.resume()
    assert volunteer.leftovers() == []
