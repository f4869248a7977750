"""What another filter or truncation would have made of a run's samples, without training.

Owns: the verdict on a logged sample under given terms, and its sums over peers.
Does not know: how samples were logged (`step_log`), how runs are trained again (`retrain`).

The samples are taken as they were: had the run really been trained so, later ones would differ.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.config import FtisSection
from swarm.errors import DataError, UsageError
from swarm.replay.logged_run import LoggedRun
from swarm.replay.step_log import LoggedDivergence, LoggedSample
from swarm.terminal import safe

SCHEMA = "swarm-node/what-if/1"

OWN = "own"
"""Key of the node's own samples, as in its metrics."""

FIELDS: Mapping[str, str] = {
    "g": "kl_threshold",
    "kl_threshold": "kl_threshold",
    "c": "clip_max",
    "clip_max": "clip_max",
    "filter": "filter",
    "scope": "filter_scope",
    "filter_scope": "filter_scope",
    "estimator": "kl_estimator",
    "kl_estimator": "kl_estimator",
    "mask_truncated": "mask_truncated",
}
"""What can be asked for, and its field in [ftis]."""


class Verdict(StrEnum):
    """What becomes of a sample; each has exactly one."""

    TRAINED = "trained"
    NO_SIGNAL = "no_signal"
    DROPPED_ADVANTAGE = "dropped_advantage"
    DROPPED_KL = "dropped_kl"
    DROPPED_DUPLICATE = "dropped_duplicate"
    MASKED_TRUNCATED = "masked_truncated"
    INVALID = "invalid"
    NOT_FINITE = "not_finite"
    UNKNOWN = "unknown"
    """Its divergence decides, and is not known: it did not go through the model."""


@dataclass(slots=True)
class Tally:
    """Sums over samples."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    trained_unscored: int = 0
    """Trained samples whose ratios are not known."""
    tokens: int = 0
    """Of the trained samples whose ratios are known."""
    truncated_least: int = 0
    truncated_most: int = 0
    """Bounds of how many of `tokens` have a ratio above the truncation."""
    kl: list[float] = field(default_factory=list)
    """Of all samples where it is known."""

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.verdicts + other.verdicts,
            self.trained_unscored + other.trained_unscored,
            self.tokens + other.tokens,
            self.truncated_least + other.truncated_least,
            self.truncated_most + other.truncated_most,
            self.kl + other.kl,
        )

    def to_dict(self) -> dict[str, Any]:
        samples = self.verdicts.total()
        quantiles: list[float | None] = [None, None, None]
        if self.kl:
            quantiles = np.quantile(self.kl, [0.5, 0.9, 0.99], method="lower").tolist()
        return {
            "samples": samples,
            **{verdict.value: self.verdicts[verdict] for verdict in Verdict},
            "trained_share": _ratio(self.verdicts[Verdict.TRAINED], samples),
            "trained_unscored": self.trained_unscored,
            "tokens": self.tokens,
            "tokens_truncated": [self.truncated_least, self.truncated_most],
            "truncated_share": [
                _ratio(self.truncated_least, self.tokens),
                _ratio(self.truncated_most, self.tokens),
            ],
            **dict(zip(("kl_p50", "kl_p90", "kl_p99"), quantiles, strict=True)),
        }


def parse(expression: str) -> dict[str, str]:
    """An expression like "g=5,filter=and" as settings: `section.key` to text.

    Raises:
        UsageError: names what can be asked for.
    """
    changes = {}
    for item in expression.split(","):
        name, equals, value = item.partition("=")
        known = FIELDS.get(name.strip().lower())
        if not equals or known is None:
            raise UsageError(
                f"--what-if {expression}: {item!r}: expected NAME=VALUE,... with the names "
                f"{', '.join(FIELDS)}"
            )
        changes[f"ftis.{known}"] = value.strip()
        if known == "kl_threshold":
            changes["ftis.kl_threshold_schedule"] = "[]"
    return changes


def answer(
    run: LoggedRun, expressions: Sequence[str], start: int = 0, count: int | None = None
) -> dict[str, Any]:
    """Answer questions about a run's steps; the first answer is what was.

    Args:
        run: with its samples logged.
        expressions: see `parse`.
        start: only the steps after this one.
        count: at most so many steps.

    Returns:
        JSON-able.

    Raises:
        UsageError, ConfigError: an expression is wrong.
        DataError: there are no such steps, or their samples were not logged.
    """
    questions = [("as trained", {}), *((text, parse(text)) for text in expressions)]
    numbers = [number for number in run.log.steps if number > start][:count]
    sections: dict[tuple[str, str], FtisSection] = {}
    tallies: list[dict[str, Tally]] = [{} for _ in questions]
    counted = 0
    for number in numbers:
        step = run.step(number)
        if any(group.samples is None for group in step.groups):
            continue
        counted += 1
        for (text, changes), tally in zip(questions, tallies, strict=True):
            key = (text, step.config)
            if key not in sections:
                sections[key] = run.config(step.config, changes).ftis
            ftis = sections[key]
            for group in step.groups:
                theirs = tally.setdefault(OWN if group.own else group.publisher, Tally())
                for sample in group.samples or ():
                    _count(theirs, sample, group.own, ftis, number, step.ratio_edges)
    if not counted:
        where = f"after step {start}" if start else "at all"
        raise DataError(
            f"{run.dir.steps_path}: no steps {where} with their samples logged "
            "(train.log_samples, on by default)"
        )
    return {
        "schema": SCHEMA,
        "run": str(run.dir.root),
        "first_step": numbers[0],
        "last_step": numbers[-1],
        "steps": counted,
        "steps_without_samples": len(numbers) - counted,
        "answers": [
            {
                "what_if": text,
                "changes": changes,
                "peers": {peer: theirs.to_dict() for peer, theirs in tally.items()},
                "all": sum(tally.values(), Tally()).to_dict(),
            }
            for (text, changes), tally in zip(questions, tallies, strict=True)
        ],
    }


def judge(sample: LoggedSample, own: bool, ftis: FtisSection, threshold: float) -> Verdict:
    """What becomes of a sample, in the order in which a training step decides.

    Args:
        sample: as it was logged.
        own: sampled by the node itself.
        ftis: the terms.
        threshold: of the divergence, g.
    """
    if sample.outcome in (Verdict.INVALID, Verdict.DROPPED_DUPLICATE):
        return Verdict(sample.outcome)
    subject = not own or ftis.filter_scope == "all"
    if subject and ftis.filter == "or" and sample.advantage <= 0:
        return Verdict.DROPPED_ADVANTAGE
    if ftis.mask_truncated and sample.truncated:
        return Verdict.MASKED_TRUNCATED
    if sample.advantage == 0:
        return Verdict.NO_SIGNAL
    if sample.outcome == "not_finite":
        return Verdict.NOT_FINITE
    may_drop = ftis.filter == "or" or (ftis.filter == "and" and sample.advantage < 0)
    if not (subject and may_drop):
        return Verdict.TRAINED
    if sample.divergence is None:
        return Verdict.UNKNOWN
    far = sample.divergence.kl[ftis.kl_estimator] > threshold
    return Verdict.DROPPED_KL if far else Verdict.TRAINED


def tokens_above(
    divergence: LoggedDivergence, length: int, edges: Sequence[float], clip_max: float
) -> tuple[int, int]:
    """Bounds of how many of a sample's tokens have a ratio above `clip_max`; equal at an edge."""
    counts = [*divergence.tokens_above, *[0] * (len(edges) - len(divergence.tokens_above))]
    place = bisect_left(edges, clip_max)
    if place < len(edges) and edges[place] == clip_max:
        return counts[place], counts[place]
    if divergence.ratio_max <= clip_max:
        return 0, 0
    least = counts[place] if place < len(edges) else 0
    return max(least, 1), counts[place - 1] if place else length


def view(result: Mapping[str, Any]) -> RenderableType:
    """The answers as a table."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in ("what if", "peer"):
        table.add_column(column, no_wrap=True)
    columns = ("samples", "trained", "A <= 0", "KL > g", "no signal", "other", "unknown")
    for column in (*columns, "KL p50", "p90", "p99", "ratios > C"):
        table.add_column(column, justify="right", no_wrap=True)
    for item in result["answers"]:
        rows = list(item["peers"].items())
        if len(rows) > 1:
            rows.append(("all", item["all"]))
        for index, (peer, figures) in enumerate(rows):
            other = ("dropped_duplicate", "masked_truncated", "invalid", "not_finite")
            table.add_row(
                safe(item["what_if"], 40) if not index else "",
                peer if peer in (OWN, "all") else f"..{safe(peer, 64)[-6:]}",
                str(figures["samples"]),
                _percent(figures["trained"], figures["samples"]),
                _percent(figures["dropped_advantage"], figures["samples"]),
                _percent(figures["dropped_kl"], figures["samples"]),
                _percent(figures["no_signal"], figures["samples"]),
                _percent(sum(figures[name] for name in other), figures["samples"]),
                _percent(figures["unknown"], figures["samples"]),
                *(_short(figures[name]) for name in ("kl_p50", "kl_p90", "kl_p99")),
                _interval(figures["tokens_truncated"], figures["tokens"]),
            )
    notes = [
        f"Steps {result['first_step']} to {result['last_step']} of {result['run']}, "
        "with the samples as they were."
    ]
    if any(item["all"]["unknown"] or item["all"]["trained_unscored"] for item in result["answers"]):
        notes.append(
            "unknown: these samples skipped the forward pass, so that neither their KL nor their "
            "ratios are known; a replay with --method tis finds them out."
        )
    if result["steps_without_samples"]:
        notes.append(f"{result['steps_without_samples']} steps left out: no samples in their log.")
    return Group(table, *(Text(note) for note in notes))


def _count(
    tally: Tally,
    sample: LoggedSample,
    own: bool,
    ftis: FtisSection,
    step: int,
    edges: Sequence[float],
) -> None:
    verdict = judge(sample, own, ftis, _threshold(ftis, step))
    tally.verdicts[verdict] += 1
    divergence = sample.divergence
    if divergence is not None:
        tally.kl.append(divergence.kl[ftis.kl_estimator])
    if verdict is not Verdict.TRAINED:
        return
    if divergence is None:
        tally.trained_unscored += 1
        return
    least, most = tokens_above(divergence, sample.length, edges, ftis.clip_max)
    tally.tokens += sample.length
    tally.truncated_least += least
    tally.truncated_most += most


def _threshold(ftis: FtisSection, step: int) -> float:
    """g in a step; a schedule counts the steps made before it."""
    started = [g for start, g in ftis.kl_threshold_schedule if start < step]
    return started[-1] if started else ftis.kl_threshold


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _interval(bounds: Sequence[int], whole: int) -> str:
    least, most = (_percent(bound, whole) for bound in bounds)
    return least if least == most else f"{least} to {most}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
