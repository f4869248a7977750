"""Answers from a log, against training steps that were really made with the other terms."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from test_trainer import BATCH, Bigram, group, section

from swarm.config import FtisSection, NodeConfig
from swarm.errors import ConfigError, DataError, UsageError
from swarm.paths import RunDir
from swarm.protocol.pool import PooledGroup
from swarm.protocol.rollout import RolloutGroup
from swarm.replay.logged_run import LoggedRun
from swarm.replay.step_log import LoggedDivergence, step_record
from swarm.replay.what_if import FIELDS, Verdict, answer, parse, tokens_above, view
from swarm.rl.loss import FtisConfig
from swarm.rl.sample_report import ratio_edges
from swarm.rl.step_report import StepReport
from swarm.rl.trainer import Trainer, TrainGroup

LIVE = {"filter": "none", "kl_threshold": 1.0, "clip_max": 1.1}
"""Drops nothing, so that every sample with an advantage went through the model."""

MIXED = [*BATCH, group([1, 0, 0, 1], seed=9, publisher="peer-c", noise=2.0, truncated=2)]


def train(terms: Mapping[str, Any], steps: int = 2) -> list[StepReport]:
    """Reports of steps with these terms; without learning, so that terms alone differ."""
    ftis = FtisConfig.from_section(FtisSection(**terms))
    trainer = Trainer(Bigram(), section(learning_rate=0.0), ftis)
    return [trainer.step(MIXED) for _ in range(steps)]


def pooled(item: TrainGroup) -> PooledGroup:
    rewards = np.zeros(len(item.rewards), np.float32)
    sampled = RolloutGroup(
        bytes(32), item.publisher, 0, 0, bytes(32), 0, 0, 1.0, item.rollouts, rewards
    )
    return PooledGroup(
        item.hash, item.publisher, item.own, sampled, item.rewards, np.ones(1, np.int32), 0.0
    )


@pytest.fixture
def logged(tmp_path: Path) -> Callable[..., LoggedRun]:
    """A run's folder with the reports of steps in its log."""

    def logged(reports: list[StepReport], terms: Mapping[str, Any]) -> LoggedRun:
        run_dir = RunDir.create(tmp_path / "runs" / "0001")
        config = NodeConfig(ftis=FtisSection(**terms))
        record = {
            "schema": "swarm-node/run/1",
            "configs": {config.digest(): config.model_dump(mode="json")},
        }
        run_dir.record_path.write_text(json.dumps(record))
        with run_dir.steps_path.open("w") as file:
            for report in reports:
                reply = report.to_dict() | {
                    "ratio_edges": ratio_edges(config.ftis.clip_max),
                    "per_sample": [asdict(sample) for sample in report.per_sample],
                }
                line = step_record(
                    reply,
                    [pooled(item) for item in MIXED],
                    config=config.digest(),
                    amendments=0,
                    time_s=0.0,
                )
                file.write(json.dumps(line) + "\n")
        return LoggedRun(run_dir)

    return logged


def test_what_was_dropped_as_a_repetition_stays_dropped(logged: Callable[..., LoggedRun]) -> None:
    trainer = Trainer(
        Bigram(), section(learning_rate=0.0, drop_duplicates=True), FtisConfig(filter="none")
    )
    first = group([1, 1, 0, 0], noise=0.0)
    rollouts = (first.rollouts[0], *first.rollouts[:3])
    batch = [
        TrainGroup(b"", "peer-a", False, first.prompt_ids, rollouts, first.rewards),
        *MIXED[1:],
    ]
    run = logged([trainer.step(batch)], {"filter": "none"})
    for item in answer(run, ["filter=or"])["answers"]:
        assert item["all"]["dropped_duplicate"] == 1


def counts(figures: Mapping[str, Any]) -> dict[str, int]:
    names = ("samples", "trained", "no_signal", "dropped_advantage", "dropped_kl")
    return {name: figures[name] for name in (*names, "masked_truncated", "invalid", "not_finite")}


def reported(reports: list[StepReport]) -> dict[str, int]:
    names = ("samples", "no_signal", "dropped_advantage", "dropped_kl", "masked_truncated")
    found = {name: sum(getattr(r, name) for r in reports) for name in (*names, "invalid")}
    return found | {
        "not_finite": sum(r.not_finite for r in reports),
        "trained": sum(r.trained + r.skipped for r in reports),
    }


@pytest.mark.parametrize(
    "asked",
    [
        "filter=or,g=0.4",
        "filter=or,g=0.4,estimator=k3",
        "filter=or,g=0.1,estimator=k1",
        "filter=or,g=0.4,estimator=reverse",
        "filter=and,g=0.4",
        "filter=and,g=0.4,scope=peers",
        "filter=or,g=0.4,scope=peers,c=2",
        "filter=or,g=1000,clip_max=1.25",
        "mask_truncated=true",
        "filter=and,kl_threshold=0.4,mask_truncated=true",
    ],
)
def test_answer_is_what_the_step_would_have_done(
    asked: str, logged: Callable[..., LoggedRun]
) -> None:
    live, other = answer(logged(train(LIVE), LIVE), [asked])["answers"]
    assert counts(live["all"]) == reported(train(LIVE))
    changes = {key.removeprefix("ftis."): value for key, value in parse(asked).items()}
    changes.pop("kl_threshold_schedule", None)
    terms = FtisSection.model_validate_strings({k: str(v) for k, v in (LIVE | changes).items()})
    made = train(terms.model_dump())
    assert counts(other["all"]) == reported(made)
    assert other["all"]["unknown"] == 0
    assert counts(live["all"]) != counts(other["all"])
    for peer, theirs in made[0].per_peer.items():
        for name in ("samples", "trained", "dropped_advantage", "dropped_kl"):
            assert other["peers"][peer][name] == 2 * getattr(theirs, name)
    tokens = sum(s.length for s in made[0].per_sample if s.outcome == "trained")
    above = round(made[0].truncated_share * tokens)
    assert other["all"]["tokens"] == 2 * tokens
    assert other["all"]["tokens_truncated"] == [2 * above, 2 * above]
    assert above or terms.clip_max > 1.1


def test_what_skipped_the_model_is_unknown_where_its_divergence_decides(
    logged: Callable[..., LoggedRun],
) -> None:
    terms = {"filter": "or", "kl_threshold": 1000.0}
    reports = train(terms)
    found = answer(logged(reports, terms), ["filter=and,g=0.4", "filter=none"])["answers"]
    negative = sum(s.advantage < 0 for r in reports for s in r.per_sample)
    assert found[0]["all"]["unknown"] == 0
    assert found[1]["all"]["unknown"] == negative > 0
    assert (found[2]["all"]["unknown"], found[2]["all"]["trained_unscored"]) == (0, negative)
    assert found[2]["all"]["tokens"] == found[0]["all"]["tokens"]


def test_threshold_schedule_counts_the_steps_before(logged: Callable[..., LoggedRun]) -> None:
    terms = {"filter": "or", "kl_threshold_schedule": ((0, 1e-9), (2, 1e9))}
    reports = train(terms, steps=3)
    run = logged(reports, terms)
    kept, constant = answer(run, ["g=1e9"])["answers"]
    assert counts(kept["all"]) == reported(reports)
    assert kept["all"]["dropped_kl"] == reports[0].dropped_kl + reports[1].dropped_kl > 0
    assert constant["all"]["dropped_kl"] == 0  # a number takes the place of the schedule
    last = answer(run, [], start=2)
    assert (last["first_step"], last["last_step"]) == (3, 3)
    assert last["answers"][0]["all"]["dropped_kl"] == 0
    assert answer(run, [], start=0, count=1)["answers"][0]["all"]["samples"] == reports[0].samples


def test_divergences_of_each_peer(logged: Callable[..., LoggedRun]) -> None:
    reports = train(LIVE, steps=1)
    grpo, k3 = answer(logged(reports, LIVE), ["estimator=k3"])["answers"]
    assert grpo["peers"]["peer-a"]["kl_p50"] is None  # a group without a signal
    for peer in ("own", "peer-b", "peer-c"):
        theirs = reports[0].per_peer[peer]
        assert grpo["peers"][peer]["kl_p50"] == pytest.approx(theirs.kl_p50, rel=1e-4)
        assert grpo["peers"][peer]["kl_p99"] == pytest.approx(theirs.kl_p99, rel=1e-4)
    assert k3["peers"]["peer-c"]["kl_p50"] != grpo["peers"]["peer-c"]["kl_p50"]


@pytest.mark.parametrize(
    ("clip_max", "expected"),
    [
        (1.0, (5, 5)),
        (1.5, (3, 3)),
        (2.0, (3, 5)),
        (1.2, (3, 5)),
        (4.0, (1, 3)),
        (5.0, (0, 0)),
        (4.6, (0, 0)),
        (9.0, (0, 0)),
    ],
)
def test_bounds_of_truncated_tokens(clip_max: float, expected: tuple[int, int]) -> None:
    divergence = LoggedDivergence({}, 1.0, 4.5, (5, 3))
    edges = (1.0, 1.5, 5.0) if clip_max != 2.0 else (1.0, 3.0, 5.0)
    assert tokens_above(divergence, 9, edges, clip_max) == expected


def test_a_run_without_its_samples_in_the_log(logged: Callable[..., LoggedRun]) -> None:
    ftis = FtisConfig.from_section(FtisSection(**LIVE))
    quiet = Trainer(Bigram(), section(log_samples=False), ftis)
    with pytest.raises(DataError, match=r"train\.log_samples"):
        answer(logged([quiet.step(MIXED)], LIVE), ["g=1"])


def test_steps_without_samples_are_left_out_and_counted(logged: Callable[..., LoggedRun]) -> None:
    ftis = FtisConfig.from_section(FtisSection(**LIVE))
    quiet = Trainer(Bigram(), section(log_samples=False), ftis)
    quiet.step(MIXED)
    found = answer(logged([train(LIVE)[0], quiet.step(MIXED)], LIVE), ["g=1"])
    assert (found["steps"], found["steps_without_samples"]) == (1, 1)


@pytest.mark.parametrize("expression", ["", "g", "h=1", "g=1,,filter=or", "train.max_steps=1"])
def test_expressions_that_are_none(expression: str) -> None:
    with pytest.raises(UsageError, match="expected NAME=VALUE") as error:
        parse(expression)
    assert "filter" in str(error.value)


def test_values_that_are_none(logged: Callable[..., LoggedRun]) -> None:
    run = logged(train(LIVE), LIVE)
    for expression in ("g=-1", "filter=xor", "clip_max=0.5", "estimator=kl"):
        with pytest.raises(ConfigError, match="ftis"):
            answer(run, [expression])


def test_every_name_is_a_field() -> None:
    assert set(FIELDS.values()) <= set(FtisSection.model_fields)


def test_table_names_what_is_not_known(logged: Callable[..., LoggedRun]) -> None:
    terms = {"filter": "or"}
    found = answer(logged(train(terms), terms), ["filter=and"])
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view(found))
    text = capture.get()
    assert "as trained" in text
    assert "filter=and" in text
    assert "skipped the forward pass" in text
    figures = found["answers"][0]["all"]
    assert sum(figures[verdict] for verdict in Verdict) == figures["samples"]
