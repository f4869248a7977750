"""The poisoning benchmark: shares of a batch, a malicious node in a round, resuming, the table."""

import dataclasses
import hashlib
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import poisoning
from benchmarks.poisoning import (
    ALL,
    HONEST,
    HONEST_FOURTH,
    NO_DEFENCE,
    NOBODY,
    SETTING,
    SHARE,
    Case,
    Defence,
    interval,
    run_case,
    table,
)
from swarm.evil.attacks import Attack
from swarm.paths import write_json
from swarm.protocol.identity import Identity
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

TINY = dataclasses.replace(SETTING, steps=2, groups=8, group_size=4)
PROMPTS = poisoning.arithmetic()
PROMPTS = dataclasses.replace(PROMPTS, held_out=PROMPTS.held_out[:8])


def tiny(fourth: str, defence: Defence = NO_DEFENCE) -> Case:
    return Case(fourth, defence, 0, TINY, HONEST[:2])


def pooled(publisher: str, own: bool, epoch: int) -> PooledGroup:
    rollout = Rollout(np.ones(1, np.int32), np.zeros(1, np.float32), Finish.STOP)
    rewards = np.zeros(1, np.float32)
    group = RolloutGroup(bytes(32), publisher, epoch, 0, bytes(32), 0, 0, 1.0, (rollout,), rewards)
    digest = hashlib.sha256(f"{publisher} {epoch}".encode()).digest()
    return PooledGroup(digest, publisher, own, group, rewards, np.ones(1, np.int32), float(epoch))


@pytest.mark.parametrize("defence", [NO_DEFENCE, SHARE])
@pytest.mark.parametrize("fourth", [NOBODY, HONEST_FOURTH, Attack.POISON])
def test_shares_of_a_batch_are_the_pools(fourth: str, defence: Defence) -> None:
    case = Case(str(fourth), defence, 0)
    me, *others = (Identity(bytes([n]) * 32).peer_id for n in range(1, 4 + (fourth != NOBODY)))
    pool = Pool(SETTING.groups, defence.max_peer_share)
    for epoch in range(SETTING.groups):
        pool.add(pooled(me, True, epoch))
    for epoch in range(2 * SETTING.groups // len(others)):
        for other in others:
            pool.add(pooled(other, False, epoch))
    batch = pool.compose(1 + len(others))
    assert batch is not None
    own, of_each = case.shares()
    assert sum(item.own for item in batch) == own
    assert {sum(item.publisher == other for item in batch) for other in others} == {of_each}


@pytest.mark.parametrize("attack", [Attack.POISON, Attack.UNDER_REPORTED])
def test_an_attack_reaches_the_trainers_and_is_told_apart(attack: Attack) -> None:
    result = run_case(tiny(attack), PROMPTS)
    assert [node["name"] for node in result["nodes"]] == ["small", "large"]
    assert all(0 <= node["accuracy"] <= 1 for node in result["nodes"])
    assert (result["nodes"][0]["marked"] is None) == (attack is Attack.UNDER_REPORTED)
    assert result["evil"]["trained"] > 0
    assert result["peers"]["trained"] > 0
    assert run_case(tiny(attack), PROMPTS)["nodes"] == result["nodes"]


def test_without_a_fourth_node_there_is_nothing_to_tell() -> None:
    assert run_case(tiny(NOBODY, ALL), PROMPTS)["evil"] is None
    assert len(run_case(tiny(HONEST_FOURTH), PROMPTS)["nodes"]) == 2


def result(fourth: str, defence: Defence, seed: int, accuracy: float) -> dict[str, Any]:
    fate = {"trained": 0.5, "dropped_kl": 0.1}
    return {
        "case": Case(fourth, defence, seed).describe(),
        "nodes": [{"name": "small", "accuracy": accuracy, "marked": 0.25}],
        "evil": None if fourth == NOBODY else fate,
        "peers": fate,
        "groups_sampled": 4,
        "groups_of_each": 4,
        "cpu_s": 1.0,
    }


def test_differences_are_paired_by_seed() -> None:
    rows = [result(NOBODY, NO_DEFENCE, seed, 0.5 + 0.1 * seed) for seed in range(3)]
    rows += [result("poison", ALL, seed, 0.4 + 0.1 * seed) for seed in range(2)]
    nobody, poison = table(rows).splitlines()[2:]
    assert nobody.startswith("| nobody | none | 0.600 | +0.000 ± 0.000 |  |  | 50% | 3 |")
    assert poison.startswith("| poison | all | 0.450 | \N{MINUS SIGN}0.100 ± 0.000 | 25% | 50% |")


def test_interval_by_hand() -> None:
    mean, half = interval([0.1, 0.2, 0.3])
    assert mean == pytest.approx(0.2)
    assert half == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_a_case_that_is_there_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(NOBODY, NO_DEFENCE, 0)
    write_json(tmp_path / f"{case.id}.json", result(NOBODY, NO_DEFENCE, 0, 0.5))
    found = poisoning.finished(tmp_path, case)
    assert found is not None
    assert found["nodes"][0]["accuracy"] == 0.5
    assert poisoning.finished(tmp_path, dataclasses.replace(case, setting=TINY)) is None
    options = Namespace(
        seeds=[0], cells=re.compile("nobody/none"), list=False, out=tmp_path, jobs=1
    )
    assert poisoning.run(options) == 0
    assert json.loads((tmp_path / f"{case.id}.json").read_text()) == found
    assert "| nobody | none | 0.500 |" in capsys.readouterr().out
