"""What a run did: where the learner's time goes, which step is best, what a checkpoint keeps."""

import re
from contextlib import suppress
from typing import Any

import pytest

from swarm.node import progress as module
from swarm.node.progress import BARREN_STEPS, HISTORY, Counts, Progress


class Clock:
    """`time.monotonic`, set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    @staticmethod
    def time() -> float:
        return 1e9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def work(progress: Progress, clock: Clock, phase: str, seconds: float) -> None:
    with progress.working(phase):
        clock.now_s += seconds


def test_time_between_two_calls_is_the_learners_waiting(clock: Clock) -> None:
    progress = Progress()
    work(progress, clock, "sampling", 2.0)
    clock.now_s += 0.25
    work(progress, clock, "training", 3.0)
    clock.now_s += 0.5
    work(progress, clock, "sampling", 1.0)
    assert progress.counts.seconds == {"sampling": 3.0, "waiting": 0.75, "training": 3.0}


@pytest.mark.parametrize("why", ["paused", "finished", "learner down", "loading the model"])
def test_a_rest_is_not_waiting(clock: Clock, why: str) -> None:
    progress = Progress()
    work(progress, clock, "writing a checkpoint", 1.0)
    progress.resting(why, "something")
    assert (progress.activity.doing, progress.activity.waiting_for) == (why, "something")
    clock.now_s += 3600.0
    work(progress, clock, "sampling", 1.0)
    assert "waiting" not in progress.counts.seconds


def test_a_call_that_fails_is_neither_work_nor_waiting(clock: Clock) -> None:
    progress = Progress()
    work(progress, clock, "sampling", 1.0)
    with suppress(RuntimeError), progress.working("training"):
        clock.now_s += 60.0
        raise RuntimeError
    clock.now_s += 60.0
    work(progress, clock, "sampling", 1.0)
    assert progress.counts.seconds == {"sampling": 2.0, "waiting": 0.0}


def test_what_a_phase_took_is_expected_of_the_next(clock: Clock) -> None:
    progress = Progress()
    for seconds, expected in ((2.0, None), (3.0, 2.0), (1.0, 3.0)):
        with progress.working("sampling"):
            assert progress.activity.expected_s == expected
            clock.now_s += seconds
        progress.activity.set("between")


@pytest.mark.parametrize(
    ("accuracies", "evaluated_step", "best"),
    [
        ([], -1, False),
        ([0.5], 7, True),
        ([0.5, 0.6], 7, True),
        ([0.6, 0.6], 7, False),  # as good as one before
        ([0.6, 0.5, 0.55], 7, False),
        ([0.5, 0.6], 6, False),  # of a step before
    ],
)
def test_best_is_above_all_before(accuracies: list[float], evaluated_step: int, best: bool) -> None:
    progress = Progress()
    progress.step = 7
    progress.accuracies = [{"step": n, "held_out": a} for n, a in enumerate(accuracies)]
    progress.evaluated_step = evaluated_step
    assert progress.is_best() is best


REPORT = {
    "step": 1, "stepped": False, "nonfinite_gradient": False, "groups": 4,
    "groups_without_signal": 4, "own_trained": 0, "foreign_samples": 0, "foreign_trained": 0,
    "dropped_advantage": 0, "dropped_kl": 0, "dropped_duplicate": 0, "masked_truncated": 0,
    "invalid": 0, "not_finite": 0, "tokens": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        ({}, r"completions of a prompt all get the same reward \(mean 0\.25\)"),
        (
            {"groups_without_signal": 3, "dropped_kl": 5, "invalid": 1},
            r"all samples that teach are left out \(5 dropped_kl, 1 invalid\)",
        ),
        ({"nonfinite_gradient": True, "groups_without_signal": 0}, "gradients are not finite"),
    ],
)
def test_a_run_that_learns_nothing_says_so(report: dict[str, Any], reason: str) -> None:
    progress = Progress()
    progress.rewards.append(0.25)
    for _ in range(BARREN_STEPS - 1):
        progress.trained(REPORT | report, [], 1.0)
    assert progress.trouble == ""
    progress.trained(REPORT | report, [], 1.0)
    assert re.fullmatch(
        f"the last {BARREN_STEPS} steps changed nothing: .*{reason}.*", progress.trouble
    )
    progress.trained(REPORT | {"stepped": True, "groups_without_signal": 0}, [], 1.0)
    assert progress.trouble == ""


def test_a_checkpoint_brings_everything_back() -> None:
    before = Progress()
    before.counts = Counts(groups_made=3, foreign_trained=5, seconds={"sampling": 2.5})
    before.rewards.extend(range(HISTORY + 5))
    before.accuracies = [{"step": n, "held_out": 0.5} for n in range(HISTORY + 5)]
    before.evaluated_step = 12
    after = Progress()
    after.restore(before.export())
    assert after.counts == before.counts
    assert list(after.rewards) == list(range(5, HISTORY + 5))
    assert after.accuracies == before.accuracies[5:]
    assert after.evaluated_step == 12


@pytest.mark.parametrize(
    "state", [{}, {"counts": {"groups_made": 0, "of_the_future": 3}, "new": 1}]
)
def test_state_of_another_version(state: dict[str, Any]) -> None:
    progress = Progress()
    progress.restore(state)
    assert progress.export() == Progress().export()
