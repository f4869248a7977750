"""Faults between real nodes: a swarm that is cut in two, packets lost and late, a wrong clock."""

import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import wires
from nodes import ENVIRONMENT, PATIENCE_S, Node, Swarm, sums, wait_until, write_prompts
from wires import Wires

PROMPTS = sums(range(3, 20), range(2, 12))


def groups_of(node: Node, publisher: str) -> int:
    """How many groups of a peer a node has trained on."""
    return sum(group["publisher"] == publisher for s in node.steps() for group in s["groups"])


def trains_on_news_of(node: Node, other: Node, ids: Mapping[str, str]) -> None:
    seen = groups_of(node, ids[other.name])
    wait_until(
        lambda: groups_of(node, ids[other.name]) > seen,
        f"{node.name} trains on {other.name}'s groups",
        [node, other],
    )


def names_here(node: Node) -> set[str]:
    return {member["name"] for member in node.status()["members"]}


def no_strikes(*nodes: Node) -> bool:
    return not [peer for node in nodes for peer in node.status()["peers"] if peer["strikes"] > 0]


@pytest.fixture
def wired(tmp_path: Path) -> Iterator[tuple[Swarm, Wires]]:
    """An organizer, and a network for five more."""
    if not wires.allowed():
        pytest.skip("this user cannot make network namespaces")
    with Wires(["organizer", "ada", "bob", "carl", "dora"]) as net, Swarm(tmp_path) as swarm:
        for name in net.names:
            swarm.prefixes[name] = net.prefix(name)
        prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
        swarm.seed(prompts, "--set", f"network.host={net.host('organizer')}")
        yield swarm, net


def joined(swarm: Swarm, net: Wires, *names: str) -> list[Node]:
    nodes = [swarm.join(name, network__host=net.host(name)) for name in names]
    for node in nodes:
        wait_until(lambda node=node: node.step >= 2, f"{node.name} trains", swarm.nodes)
    return nodes


def test_a_swarm_is_seen_over_a_bad_line_and_not_over_a_cut_one(
    wired: tuple[Swarm, Wires],
) -> None:
    """Without models: quick."""
    swarm, net = wired

    def look(timeout_s: int) -> subprocess.CompletedProcess[str]:
        command = ("-m", "swarm.cli", "status", swarm.invite, "--timeout", str(timeout_s))
        return subprocess.run(
            [*net.prefix("ada"), sys.executable, *command],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=PATIENCE_S,
        )

    net.loss, net.delay_s = 0.05, 0.1
    seen = look(60)
    assert seen.returncode == 0, seen.stderr
    assert net.dropped > 0
    net.split({"organizer"}, {"ada"})
    for timeout_s, said in ((10, f"{net.host('organizer')}/tcp/"), (1, "allow more time")):
        cut = look(timeout_s)
        assert cut.returncode == 69, cut.stderr
        assert said in cut.stderr
    net.heal()
    assert look(60).returncode == 0


@pytest.mark.slow
def test_two_halves_train_on_and_find_each_other_again(wired: tuple[Swarm, Wires]) -> None:
    swarm, net = wired
    ada, bob, carl, dora = joined(swarm, net, "ada", "bob", "carl", "dora")
    ids = {node.name: node.peer_id for node in swarm.nodes}
    trains_on_news_of(ada, carl, ids)
    net.split({"organizer", "ada", "bob"}, {"carl", "dora"})
    for node, left in (
        (ada, {"organizer", "bob"}),
        (bob, {"organizer", "ada"}),
        (carl, {"dora"}),
        (dora, {"carl"}),
    ):
        wait_until(
            lambda node=node, left=left: names_here(node) == left,
            f"{node.name} sees its half",
            swarm.nodes,
            timeout_s=150,
        )
    trains_on_news_of(ada, bob, ids)
    trains_on_news_of(dora, carl, ids)
    steps = {node.name: node.step for node in swarm.nodes[1:]}
    net.heal()
    for node, other in ((ada, carl), (carl, ada), (dora, bob), (bob, dora)):
        trains_on_news_of(node, other, ids)
    for node in swarm.nodes[1:]:
        assert node.step > steps[node.name]
        everyone = set(ids) - {node.name}
        wait_until(
            lambda node=node, everyone=everyone: names_here(node) == everyone,
            f"{node.name} sees all",
            swarm.nodes,
            timeout_s=150,
        )
        assert node.status()["problems"] == []
    assert no_strikes(ada, bob, carl, dora)


@pytest.mark.slow
def test_on_a_bad_line_nodes_join_and_learn_from_each_other(wired: tuple[Swarm, Wires]) -> None:
    swarm, net = wired
    net.loss, net.delay_s = 0.05, 0.1
    ada, bob = joined(swarm, net, "ada", "bob")
    ids = {node.name: node.peer_id for node in swarm.nodes}
    trains_on_news_of(ada, bob, ids)
    trains_on_news_of(bob, ada, ids)
    assert net.dropped > 10
    assert no_strikes(ada, bob)
    net.loss, net.delay_s = 0.0, 0.0
    for node in (ada, bob):
        wait_until(lambda node=node: node.status()["problems"] == [], "all is well", swarm.nodes)
        assert node.stop() == 0


@pytest.mark.slow
def test_a_wrong_clock_is_named_and_the_right_one_found_again(tmp_path: Path) -> None:
    """Off at the start, then while it runs: it trains alone at worst, and comes back."""
    offset = tmp_path / "offset"
    clock = Path(__file__).parent / "clock"
    with Swarm(tmp_path) as swarm:
        swarm.seed(write_prompts(tmp_path / "prompts.jsonl", PROMPTS))
        bob = swarm.join("bob")
        offset.write_bytes(struct.pack("d", 10.0))
        swarm.environments["ada"] = {"PYTHONPATH": str(clock), "TEST_CLOCK": str(offset)}
        ada = swarm.join("ada")
        both = [ada, bob]

        def says_so() -> bool:
            problems = " ".join(ada.status().get("problems", []))
            return "clock is +10.0 s off" in problems

        def move(seconds: float) -> None:
            with offset.open("r+b") as file:
                file.write(struct.pack("d", seconds))

        wait_until(says_so, "status names the clock", both)
        move(0.0)
        wait_until(lambda: ada.step >= 2, "it trains", both)
        ids = {node.name: node.peer_id for node in swarm.nodes}
        trains_on_news_of(ada, bob, ids)
        trains_on_news_of(bob, ada, ids)
        wait_until(lambda: ada.status()["problems"] == [], "all is well", both)
        move(10.0)
        wait_until(says_so, "status names the clock", both)
        steps = ada.step, bob.step
        wait_until(lambda: ada.step > steps[0] and bob.step > steps[1], "both train on", both)
        move(0.0)
        wait_until(lambda: ada.status()["problems"] == [], "all is well again", both)
        trains_on_news_of(ada, bob, ids)
        trains_on_news_of(bob, ada, ids)
        assert no_strikes(ada, bob)
