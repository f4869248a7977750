"""Malicious volunteers among real nodes: what can be proven is quarantined, training goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Node, Swarm, cli, sums, wait_until, write_prompts

from swarm.evil.attacks import PROOF, Attack
from swarm.protocol.reasons import PROVABLE_REASONS


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as swarm:
        swarm.seed(write_prompts(tmp_path / "prompts.jsonl", sums(range(10, 40), range(10, 40))))
        yield swarm


def row(node: Node, peer_id: str) -> dict[str, Any]:
    """What a node knows of a peer."""
    rows = {row["peer_id"]: row for row in node.status().get("peers", [])}
    return rows.get(peer_id, {})


def more_steps(nodes: list[Node], count: int) -> None:
    goals = [node.step + count for node in nodes]
    wait_until(
        lambda: all(node.step >= goal for node, goal in zip(nodes, goals, strict=True)),
        f"{count} more steps",
        nodes,
    )


def test_what_can_be_proven_is_quarantined(swarm: Swarm) -> None:
    honest = [swarm.join("ada"), swarm.join("bob")]
    wait_until(lambda: all(node.step for node in honest), "the honest ones train", honest)
    evil = {attack: swarm.attack(attack) for attack in PROOF}
    wait_until(lambda: all(n.status().get("node") for n in evil.values()), "all are up", honest)
    ids = {attack: node.peer_id for attack, node in evil.items()}

    def quarantined() -> bool:
        return all(row(n, peer).get("quarantined") for n in honest for peer in ids.values())

    wait_until(quarantined, "all honest nodes have all others in quarantine", honest)
    more_steps(honest, 5)
    for node in honest:
        for attack, peer in ids.items():
            theirs = row(node, peer)
            # Who just came may besides be refused for what is no offence, such as ownership.
            assert PROVABLE_REASONS & set(theirs["rejected"]) == {PROOF[attack]}
            assert (theirs["accepted"], theirs["samples_trained"]) == (0, 0)
            assert peer not in node.trained_on()
        others = {other.peer_id for other in honest if other is not node}
        assert others <= node.trained_on()
        assert "Traceback" not in node.log()


def test_what_cannot_be_proven_is_told_by_the_demo(tmp_path: Path) -> None:
    attack = ("--evil", "1", "--attack", "poison")
    done = cli("demo", "--nodes", "2", "--steps", "16", *attack, "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [node["name"] for node in results["nodes"]] == ["small", "large"]
    for node in results["nodes"]:
        assert node["steps"] >= 16  # time enough for one that started last to be heard of
        assert node["foreign_samples_trained"] > 0
    (evil,) = results["evil"]
    assert (evil["name"], evil["attack"], evil["proof"]) == ("evil", "poison", None)
    assert (evil["quarantined_after_s"], evil["honest_nodes"]) == ({}, 2)
    assert evil["groups_accepted"] > 0
    assert evil["rejected_by_reason"].get("token", 0) == 0
    assert evil["samples_trained"] > 0


@pytest.mark.slow
def test_pests_keep_nobody_from_training_together(swarm: Swarm) -> None:
    honest = [swarm.join("ada"), swarm.join("bob")]
    pests = [swarm.attack(Attack.STALL), swarm.attack(Attack.FLOOD)]
    wait_until(lambda: all(n.status().get("node") for n in pests), "all are up", honest)
    stall, flood = (node.peer_id for node in pests)

    def not_to_be_had() -> bool:
        rows = [row(node, peer) for node in honest for peer in (stall, flood)]
        return all(theirs.get("fetch_failures", 0) > 1 for theirs in rows)

    wait_until(not_to_be_had, "fetches from both fail", [*honest, *pests])
    before = [node.status()["exchange"] for node in honest]
    more_steps(honest, 20)
    for node, then in zip(honest, before, strict=True):
        status = node.status()
        assert status["exchange"]["groups_accepted"] > then["groups_accepted"]
        assert status["exchange"]["notices_sent"] > then["notices_sent"]
        assert status["network"]["p2pd_restarts"] == 0
        assert row(node, stall)["accepted"] == 0
        assert {other.peer_id for other in honest if other is not node} <= node.trained_on()
        assert "Traceback" not in node.log()
