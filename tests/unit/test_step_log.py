"""steps.jsonl: exact rewards, every sample's figures, and which attempt at a step counts."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.errors import DataError
from swarm.protocol.identity import Identity
from swarm.protocol.pool import PooledGroup
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.replay.step_log import OUTCOMES, StepLog, step_record
from swarm.rl.sample_report import ESTIMATORS, Divergence, SampleReport
from swarm.rl.step_report import Outcome

EDGES = [1.0, 2.0, 5.0]
FAR = Divergence(
    {"grpo": 123.456789, "k3": 0.000123456, "k1": -1.5, "reverse": 2.0}, 1.23456, 9.0, (3, 2, 1)
)
NEAR = Divergence(dict.fromkeys(ESTIMATORS, 0.0), 1.0, 1.0, (0, 0, 0))
SAMPLES = [
    SampleReport("dropped_kl", 1.2345678, 7, False, FAR),
    SampleReport("dropped_advantage", -1e-9, 3, True, None),
    SampleReport("trained", 0.5, 4, False, NEAR),
    SampleReport("no_signal", 0.0, 5, False, None),
]


def pooled(rewards: Any, *, seed: int = 0, own: bool = False) -> PooledGroup:
    rewards = np.asarray(rewards, np.float32)
    rollout = Rollout(np.ones(2, np.int32), np.zeros(2, np.float32), Finish.STOP)
    group = RolloutGroup(
        swarm_id=bytes(32),
        publisher=Identity(bytes([seed]) * 32).peer_id,
        epoch=2,
        prompt_id=seed,
        prompt_sha256=bytes(32),
        policy_step=1,
        created_ms=0,
        temperature=1.0,
        rollouts=(rollout,) * len(rewards),
        claimed_rewards=rewards,
    )
    return PooledGroup(
        bytes([seed]) * 32, group.publisher, own, group, rewards, np.ones(1, np.int32), 0.0
    )


def record(
    step: int, batch: list[PooledGroup] | None = None, samples: list[SampleReport] | None = None
) -> dict[str, Any]:
    answer = {
        "step": step,
        "stepped": True,
        "ratio_edges": EDGES,
        "per_sample": [asdict(sample) for sample in samples or []],
    }
    return step_record(answer, batch or [pooled([1, 0])], config="c", amendments=0, time_s=1.0)


def write(path: Path, *records: dict[str, Any]) -> StepLog:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return StepLog(path)


def test_rewards_come_back_bit_by_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rewards = np.concatenate([rng.standard_normal(500), np.exp(20 * rng.standard_normal(500))])
    rewards = rewards.astype(np.float32)
    assert np.isfinite(rewards).all()
    log = write(tmp_path / "steps.jsonl", record(1, [pooled(rewards)]))
    found = log.read(1).groups[0].rewards
    assert found.dtype == np.float32
    assert found.tobytes() == rewards.tobytes()


def test_groups_and_samples_come_back(tmp_path: Path) -> None:
    batch = [pooled([1, 0], own=True), pooled([0.5, 0.25], seed=3)]
    step = write(tmp_path / "steps.jsonl", record(1, batch, SAMPLES)).read(1)
    assert (step.step, step.config, step.ratio_edges) == (1, "c", tuple(EDGES))
    for item, group in zip(batch, step.groups, strict=True):
        assert (group.hash, group.publisher, group.own) == (item.hash, item.publisher, item.own)
        assert (group.epoch, group.prompt_id) == (item.group.epoch, item.group.prompt_id)
    found = [sample for group in step.groups for sample in group.samples or ()]
    for expected, sample in zip(SAMPLES, found, strict=True):
        assert (sample.outcome, sample.length) == (expected.outcome, expected.length)
        assert sample.truncated == expected.truncated
        assert sample.advantage == pytest.approx(expected.advantage, rel=1e-3)
        assert (sample.divergence is None) == (expected.divergence is None)
    assert found[1].advantage < 0  # however small
    far = found[0].divergence
    assert far is not None
    assert far.kl == pytest.approx(FAR.kl, rel=1e-4)
    assert (far.ratio_mean, far.ratio_max) == pytest.approx((1.23456, 9.0), rel=1e-3)
    assert far.tokens_above == (3, 2, 1)


def test_samples_can_be_left_out(tmp_path: Path) -> None:
    line = record(1)
    assert "ratio_edges" not in line
    assert write(tmp_path / "steps.jsonl", line).read(1).groups[0].samples is None


def test_every_outcome_has_a_letter_of_its_own() -> None:
    assert set(OUTCOMES) == {outcome.value for outcome in Outcome}
    assert len(set(OUTCOMES.values())) == len(Outcome)


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([1, 2, 3], {1: 0, 2: 1, 3: 2}),
        ([1, 2, 3, 4, 3, 4, 5], {1: 0, 2: 1, 3: 4, 4: 5, 5: 6}),
        # Killed again before it came as far: the steps 3 and 4 followed the old step 2.
        ([1, 2, 3, 4, 2], {1: 0, 2: 4}),
        ([1, 2, 1, 2, 3, 2, 3], {1: 2, 2: 5, 3: 6}),
    ],
)
def test_the_last_attempt_at_a_step_counts(
    attempts: list[int], expected: dict[int, int], tmp_path: Path
) -> None:
    lines = [record(step, [pooled([1, 0], seed=i)]) for i, step in enumerate(attempts)]
    log = write(tmp_path / "steps.jsonl", *lines)
    assert log.steps == list(expected)
    for step, attempt in expected.items():
        assert log.read(step).groups[0].prompt_id == attempt


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, record(1))
    with path.open("a") as file:
        file.write('{"step": 2, "gro')
    assert StepLog(path).steps == [1]


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"step": 0, "config": "", "groups": []}', '{"step": 2, "groups": [{}]}', "\xff"],
)
def test_a_foreign_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(json.dumps(record(1)).encode() + b"\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=r"steps\.jsonl:2: not the record of a step"):
        StepLog(path)


def test_fewer_samples_than_rewards(tmp_path: Path) -> None:
    line = record(1, [pooled([1, 0, 0, 0])], SAMPLES)
    line["groups"][0]["rewards"].append(1.0)
    with pytest.raises(DataError, match="4 samples, 5 rewards"):
        write(tmp_path / "steps.jsonl", line)


def test_no_log_and_no_such_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        StepLog(tmp_path / "none.jsonl")
    log = write(tmp_path / "steps.jsonl", record(1))
    with pytest.raises(DataError, match="step 2 is not in it"):
        log.read(2)
