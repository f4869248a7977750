"""steps.jsonl of a run: what each step trained on, and what became of every sample.

Owns: the record of a step, written and read; which of several attempts at a step counts.
Does not know: blobs, models, what is made of the figures.

A line is one step: {"step", "time_s", "config" (digest; see run.json), "charter" (amendments
known), "stepped", "ratio_edges", "groups": [{"hash", "publisher", "own", "epoch", "prompt_id",
"policy_step", "rewards", "samples"}]}, groups in the order of the batch, each reward in the
shortest decimal form that gives the same float32 again.

"samples" (with train.log_samples) describes the G samples of a group in columns: "outcome" has one
letter each (`OUTCOMES`); "advantage" and "length" (tokens) one number each; "cut" the indices of
completions cut at the length limit. "scored" has the indices of the samples that went through the
model, and only those have: "kl" {estimator: [nats]}, "ratio_mean" and "ratio_max" (importance
ratios before truncation), "above" (tokens whose ratio exceeds each of "ratio_edges", zeros at the
end left out). Samples without an advantage, or that the filter drops for it, skip the forward pass:
their divergence is not known.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.errors import DataError
from swarm.paths import parse_json
from swarm.protocol.pool import PooledGroup

OUTCOMES: Mapping[str, str] = {
    "trained": "t",
    "no_signal": "n",
    "dropped_advantage": "a",
    "dropped_kl": "k",
    "dropped_duplicate": "d",
    "masked_truncated": "m",
    "invalid": "i",
    "not_finite": "f",
    "skipped": "s",
}
"""What became of a sample (swarm.rl.trainer.Outcome), and its letter."""

_OUTCOME_OF = {letter: outcome for outcome, letter in OUTCOMES.items()}


@dataclass(frozen=True, slots=True)
class LoggedDivergence:
    """How far a sample was from the policy that trained on it."""

    kl: Mapping[str, float]
    ratio_mean: float
    ratio_max: float
    tokens_above: tuple[int, ...]
    """For each of the step's ratio edges."""


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """One sample in a step; `divergence` is None where it did not go through the model."""

    outcome: str
    advantage: float
    length: int
    truncated: bool
    divergence: LoggedDivergence | None


@dataclass(frozen=True, slots=True, eq=False)
class LoggedGroup:
    """One group of a batch; `samples` is None where they were not logged."""

    hash: bytes
    publisher: str
    own: bool
    epoch: int
    prompt_id: int
    rewards: NDArray[np.float32]
    samples: tuple[LoggedSample, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class LoggedStep:
    """One step: `step` counts from 1, `config` is the digest of what it ran with."""

    step: int
    config: str
    ratio_edges: tuple[float, ...]
    groups: tuple[LoggedGroup, ...]


def step_record(
    answer: Mapping[str, Any],
    batch: Sequence[PooledGroup],
    *,
    config: str,
    amendments: int,
    time_s: float,
) -> dict[str, Any]:
    """The line of a step.

    Args:
        answer: the learner's, to "train".
        batch: what it was given.
        config: the configuration's digest.
        amendments: how many were known.
        time_s: Unix time.
    """
    record: dict[str, Any] = {
        "step": answer["step"],
        "time_s": round(time_s, 3),
        "config": config,
        "charter": amendments,
        "stepped": answer["stepped"],
    }
    samples = answer["per_sample"]
    if samples:
        record["ratio_edges"] = list(answer["ratio_edges"])
    record["groups"] = groups = []
    start = 0
    for item in batch:
        groups.append(
            {
                "hash": item.hash.hex(),
                "publisher": item.publisher,
                "own": item.own,
                "epoch": item.group.epoch,
                "prompt_id": item.group.prompt_id,
                "policy_step": item.group.policy_step,
                # As text a float32 has the fewest digits that name it.
                "rewards": [float(str(reward)) for reward in item.rewards.astype(np.float32)],
            }
        )
        end = start + len(item.rewards)
        if samples:
            groups[-1]["samples"] = _columns(samples[start:end])
        start = end
    return record


class StepLog:
    """The steps of a run that count.

    A run that was killed is resumed from its last checkpoint and trains the steps after it again,
    on other groups: a step's record takes the place of all earlier records of that step and of
    those after it.

    Args:
        path: steps.jsonl. A last line without its end is being written, and is left out.

    Raises:
        DataError: there is no such file, or a line is none of this log's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Step -> (line number, offset, size), the steps rising.
        self._places: dict[int, tuple[int, int, int]] = {}
        offset = 0
        try:
            self._file = path.open("rb")  # kept open, since the node that runs may shorten the log
            weakref.finalize(self, self._file.close)
            for number, line in enumerate(self._file, start=1):
                if line.endswith(b"\n"):
                    step = self._parse(line, number).step
                    while self._places and next(reversed(self._places)) >= step:
                        self._places.popitem()
                    self._places[step] = (number, offset, len(line))
                offset += len(line)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read: {error.strerror or error}; a run writes it with its "
                "first step"
            ) from None

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps, rising."""
        return list(self._places)

    def read(self, step: int) -> LoggedStep:
        """One step.

        Raises:
            DataError: it is not in the log.
        """
        if step not in self._places:
            raise DataError(f"{self._path}: step {step} is not in it")
        number, offset, size = self._places[step]
        self._file.seek(offset)
        return self._parse(self._file.read(size), number)

    def _parse(self, line: bytes, number: int) -> LoggedStep:
        try:
            record = parse_json(line)
            step: int = record["step"]
            if type(step) is not int or step < 1:
                raise ValueError(f"step {step!r}")
            return LoggedStep(
                step=step,
                config=record["config"],
                ratio_edges=tuple(record.get("ratio_edges", ())),
                groups=tuple(_group(group) for group in record["groups"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise DataError(f"{self._path}:{number}: not the record of a step: {error!r}") from None


def _columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = [i for i, sample in enumerate(samples) if sample["divergence"] is not None]
    columns: dict[str, Any] = {
        "outcome": "".join(OUTCOMES[sample["outcome"]] for sample in samples),
        "advantage": [_rounded(sample["advantage"], 4) for sample in samples],
        "length": [sample["length"] for sample in samples],
    }
    cut = [i for i, sample in enumerate(samples) if sample["truncated"]]
    if cut:
        columns["cut"] = cut
    if scored:
        found = [samples[i]["divergence"] for i in scored]
        columns |= {
            "scored": scored,
            "kl": {name: [_rounded(d["kl"][name], 5) for d in found] for name in found[0]["kl"]},
            "ratio_mean": [_rounded(d["ratio_mean"], 4) for d in found],
            "ratio_max": [_rounded(d["ratio_max"], 4) for d in found],
            "above": [_without_trailing_zeros(d["tokens_above"]) for d in found],
        }
    return columns


def _group(record: Mapping[str, Any]) -> LoggedGroup:
    rewards = np.array(record["rewards"], dtype=np.float32)
    columns = record.get("samples")
    samples = None
    if columns is not None:
        samples = tuple(_samples(columns))
        if len(samples) != len(rewards):
            raise ValueError(f"{len(samples)} samples, {len(rewards)} rewards")
    return LoggedGroup(
        hash=bytes.fromhex(record["hash"]),
        publisher=record["publisher"],
        own=record["own"],
        epoch=record["epoch"],
        prompt_id=record["prompt_id"],
        rewards=rewards,
        samples=samples,
    )


def _samples(columns: Mapping[str, Any]) -> list[LoggedSample]:
    cut = set(columns.get("cut", ()))
    place = {index: i for i, index in enumerate(columns.get("scored", ()))}
    found = []
    for index, (letter, advantage, length) in enumerate(
        zip(columns["outcome"], columns["advantage"], columns["length"], strict=True)
    ):
        divergence = None
        if index in place:
            i = place[index]
            divergence = LoggedDivergence(
                kl={name: values[i] for name, values in columns["kl"].items()},
                ratio_mean=columns["ratio_mean"][i],
                ratio_max=columns["ratio_max"][i],
                tokens_above=tuple(columns["above"][i]),
            )
        found.append(LoggedSample(_OUTCOME_OF[letter], advantage, length, index in cut, divergence))
    return found


def _rounded(value: float, digits: int) -> float:
    """To so many significant digits: the sign and the order of magnitude stay."""
    return float(f"{value:.{digits}g}")


def _without_trailing_zeros(counts: Sequence[int]) -> list[int]:
    kept = list(counts)
    while kept and not kept[-1]:
        kept.pop()
    return kept
