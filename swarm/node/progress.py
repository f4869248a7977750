"""What a run has done so far, and what it is doing now.

Owns: counters, the reward and accuracy curves, where the learner's time goes, and how all that
travels in a checkpoint. Does not know: how groups are sampled, trained on or published.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from swarm.protocol.pool import PooledGroup
from swarm.protocol.rollout import Finish, RolloutGroup

HISTORY = 512
"""Points of the accuracy and reward curves kept in memory and in the checkpoint."""


BARREN_STEPS = 20
"""Steps in a row that change nothing before the status calls it a problem."""


_LEFT_OUT = (
    "dropped_kl",
    "dropped_advantage",
    "dropped_duplicate",
    "masked_truncated",
    "invalid",
    "not_finite",
)


@dataclass(slots=True)
class Counts:
    """What this node did since the run began; survives restarts with the checkpoint."""

    groups_made: int = 0
    own_trained: int = 0
    foreign_groups: int = 0
    foreign_seen: int = 0
    foreign_trained: int = 0
    samples_filtered: int = 0
    steps_without_signal: int = 0
    steps_skipped_nonfinite: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    bytes_published: int = 0
    truncated: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    """By what the learner did; `waiting`: nothing, between two calls of a run that goes on."""


@dataclass(slots=True)
class Activity:
    """What the run is doing, since when (Unix seconds), and what it waits for."""

    doing: str = "starting"
    since_s: float = field(default_factory=time.time)
    waiting_for: str = ""
    expected_s: float | None = None
    """How long it took the last time."""

    def set(self, doing: str, waiting_for: str = "", expected_s: float | None = None) -> None:
        if (doing, waiting_for) != (self.doing, self.waiting_for):
            self.doing, self.waiting_for, self.since_s = doing, waiting_for, time.time()
            self.expected_s = expected_s


class Progress:
    """Of one run, across restarts.

    Attributes:
        step: batches trained on.
        counts: what was made and trained on.
        activity: what is being done now.
        rewards: mean reward of each call to the engine, the newest last.
        accuracies: of each evaluation its step, its time (Unix seconds) and the share of prompts
            with the full reward in each set.
        evaluated_step: the step of the last evaluation; -1 before the first.
        barren_steps: so many of the last steps, in a row, changed no weight.
        last_report: of the last step.
        tokens_per_s: of sampling, smoothed.
        step_s: seconds of a training step, smoothed.
    """

    def __init__(self) -> None:
        self.step = 0
        self.counts = Counts()
        self.activity = Activity()
        self.rewards: deque[float] = deque(maxlen=HISTORY)
        self.accuracies: list[dict[str, float]] = []
        self.evaluated_step = -1
        self.barren_steps = 0
        self.last_report: dict[str, Any] = {}
        self.tokens_per_s = 0.0
        self.step_s = 1.0
        self._usual_s: dict[str, float] = {}
        self._free_since: float | None = None

    # -- what is being done ----------------------------------------------------------------------

    @contextmanager
    def working(self, phase: str) -> Iterator[None]:
        """The learner works on something; what fails takes no time of the run's."""
        started = time.monotonic()
        if self._free_since is not None:
            self._add_seconds("waiting", started - self._free_since)
        self._free_since = None
        self.activity.set(phase, expected_s=self._usual_s.get(phase))
        yield
        self._free_since = time.monotonic()
        self._usual_s[phase] = self._free_since - started
        self._add_seconds(phase, self._usual_s[phase])

    def resting(self, doing: str, waiting_for: str = "") -> None:
        """The run does not go on for now, so that the learner waits for nothing of it."""
        self._free_since = None
        self.activity.set(doing, waiting_for)

    def _add_seconds(self, phase: str, took_s: float) -> None:
        seconds = self.counts.seconds
        seconds[phase] = seconds.get(phase, 0.0) + took_s

    # -- what was done ---------------------------------------------------------------------------

    def sampled(
        self,
        groups: Sequence[RolloutGroup],
        rewards: Sequence[np.ndarray],
        *,
        blob_bytes: int,
        tokens_per_s: float,
    ) -> None:
        """Groups were made and published, with the rewards [G] of each."""
        counts = self.counts
        counts.groups_made += len(groups)
        counts.tokens_sampled += sum(group.n_tokens for group in groups)
        counts.bytes_published += blob_bytes
        counts.truncated += sum(
            rollout.finish is Finish.LENGTH for group in groups for rollout in group.rollouts
        )
        self.rewards.append(float(np.mean([reward.mean() for reward in rewards])))
        self.tokens_per_s = _smoothed(self.tokens_per_s or tokens_per_s, tokens_per_s)

    def trained(
        self, report: Mapping[str, Any], batch: Sequence[PooledGroup], took_s: float
    ) -> None:
        """A step was made on a batch; `report` is what `step_report` read."""
        self.step = report["step"]
        self.last_report = dict(report)
        self.barren_steps = 0 if report["stepped"] else self.barren_steps + 1
        self.step_s = _smoothed(self.step_s, took_s)
        counts = self.counts
        counts.own_trained += report["own_trained"]
        counts.foreign_groups += sum(not item.own for item in batch)
        counts.foreign_seen += report["foreign_samples"]
        counts.foreign_trained += report["foreign_trained"]
        counts.samples_filtered += sum(
            report[name] for name in ("dropped_advantage", "dropped_kl", "dropped_duplicate")
        )
        counts.tokens_trained += report["tokens"]
        counts.steps_without_signal += not (report["stepped"] or report["nonfinite_gradient"])
        counts.steps_skipped_nonfinite += report["nonfinite_gradient"]

    @property
    def trouble(self) -> str:
        """Why the run goes on and learns nothing; empty while it learns."""
        if self.barren_steps < BARREN_STEPS:
            return ""
        report, reward = self.last_report, self.rewards[-1] if self.rewards else None
        if report["nonfinite_gradient"]:
            reason = "gradients are not finite; a lower train.learning_rate and --new-run may help"
        elif report["groups_without_signal"] == report["groups"]:
            reason = "the completions of a prompt all get the same reward" + (
                f" (mean {reward:.2f})" if reward is not None else ""
            )
        else:
            left_out = [f"{report[why]} {why}" for why in _LEFT_OUT if report[why]]
            reason = f"all samples that teach are left out ({', '.join(left_out)})"
        return f"the last {self.barren_steps} steps changed nothing: {reason}"

    @property
    def accuracy(self) -> float | None:
        """The last held-out accuracy."""
        return self.accuracies[-1].get("held_out") if self.accuracies else None

    @property
    def accuracy_of_step(self) -> float | None:
        """The held-out accuracy of the model as it is now, where it was evaluated."""
        return self.accuracy if self.evaluated_step == self.step else None

    def is_best(self) -> bool:
        """Whether this step was evaluated, and is better than every evaluation before."""
        accuracy = self.accuracy_of_step
        earlier = [point["held_out"] for point in self.accuracies[:-1] if "held_out" in point]
        return accuracy is not None and all(accuracy > value for value in earlier)

    def status(self) -> dict[str, Any]:
        """For `swarm-node status --json`, under `training`."""
        counts = self.counts
        trained = counts.own_trained + counts.foreign_trained
        return {
            "step": self.step,
            "accuracy": self.accuracy,
            "accuracy_start": self.accuracies[0].get("held_out") if self.accuracies else None,
            "accuracies": self.accuracies,
            "rewards": [round(value, 4) for value in self.rewards],
            "tokens_per_s": round(self.tokens_per_s, 1),
            "groups_made": counts.groups_made,
            "foreign_groups_trained": counts.foreign_groups,
            "own_samples_trained": counts.own_trained,
            "foreign_samples_seen": counts.foreign_seen,
            "foreign_samples_trained": counts.foreign_trained,
            "foreign_share": round(counts.foreign_trained / trained, 4) if trained else 0.0,
            "samples_filtered": counts.samples_filtered,
            "steps_without_signal": counts.steps_without_signal,
            "steps_skipped_nonfinite": counts.steps_skipped_nonfinite,
            "completions_truncated": counts.truncated,
            "tokens_sampled": counts.tokens_sampled,
            "tokens_trained": counts.tokens_trained,
            "bytes_published": counts.bytes_published,
            "seconds": {k: round(v, 2) for k, v in counts.seconds.items()},
            "last_step": self.last_report,
        }

    # -- in a checkpoint -------------------------------------------------------------------------

    def export(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, beside the step; for `restore`."""
        return {
            "counts": asdict(self.counts),
            "accuracies": self.accuracies[-HISTORY:],
            "rewards": list(self.rewards),
            "evaluated_step": self.evaluated_step,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Another version of the program may have written more, or less."""
        known = {f.name for f in fields(Counts)}
        values = {k: v for k, v in state.get("counts", {}).items() if k in known}
        self.counts = Counts(**values)
        self.accuracies = list(state.get("accuracies", []))
        self.rewards.extend(state.get("rewards", ()))
        self.evaluated_step = state.get("evaluated_step", -1)


def _smoothed(old: float, new: float) -> float:
    return 0.8 * old + 0.2 * new
