"""Rows of time to accuracy: one, two and four nodes that all sample at the same fixed rate.

Owns: the rate, the target, the sum of seconds. Does not know: how a round is run
(`benchmarks.ftis_lab`): nodes in one process, each of them trains on what all sampled.

A node's sampling would take all of two cores, so the time that it takes is reckoned, from the
tokens that it samples and the fixed rate; the time that its training takes is measured. Samples of
a swarm are one step old when they are trained on; those of a node alone are its newest.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.ftis_lab import Cell, Member, Method, Prompts, Setting, run_cell
from benchmarks.measure import ROOT, NotMeasuredError, Row
from swarm.protocol.prompts import Prompt
from swarm.rl.loss import FtisConfig
from swarm.tasks import arithmetic_prompts

MODEL = str(ROOT / "swarm" / "models" / "arith-small")
TOKENS_PER_S = 500.0
"""Of each node: a batch of some 1,000 tokens takes one node two seconds."""
RISE = 0.15
"""The target is so much above the accuracy at the start."""
SMOOTHED = 3
"""Evaluations whose mean has to reach it: one alone is uncertain by some 2 %."""
AIMS = {2: 1.7, 4: 3.0}


@dataclass(frozen=True, slots=True)
class Run:
    """One swarm's way to the target."""

    nodes: int
    seconds: float
    steps: int
    sampling_share: float


def rows(quick: bool) -> list[Row]:
    """Seconds to the target, and how many times sooner than alone."""
    setting = Setting(
        "speedup",
        learning_rate=5e-4,
        steps=4 if quick else 80,
        groups=4 if quick else 32,
        evaluate_every=2 if quick else 4,
    )
    sets = arithmetic_prompts(0, train=4000, held_out=20 if quick else 400, out_of_distribution=8)
    prompts = Prompts(
        *(
            [Prompt(record["prompt"], None, record["answer"]) for record in part]
            for part in (sets.train, sets.held_out)
        )
    )
    seeds = (0,) if quick else (0, 1)
    runs = {
        nodes: [_run(nodes, setting, prompts, seed, -1.0 if quick else RISE) for seed in seeds]
        for nodes in ((1, 2) if quick else (1, 2, 4))
    }
    alone = [run.seconds for run in runs[1]]
    return [_row(nodes, found, alone, quick) for nodes, found in runs.items()]


def _row(nodes: int, found: list[Run], alone: list[float], quick: bool) -> Row:
    sooner = fmean(before / run.seconds for before, run in zip(alone, found, strict=True))
    aim = AIMS.get(nodes)
    return Row(
        what=f"time to {RISE:.0%} more accuracy, {nodes} node{'s' if nodes > 1 else ''}",
        unit="s",
        ours=fmean(run.seconds for run in found),
        ratio=sooner,
        ratio_of="1 node / ours",
        aim=f">= {aim}" if aim else "",
        met=sooner >= aim if aim and not quick else None,
        cause="A swarm takes as many steps or more than a node alone, and steps are few here: "
        "two seeds differ by a third.",
        how=f"in one process, {len(found)} seeds; sampling reckoned at {TOKENS_PER_S:.0f} tokens/s "
        f"and node ({found[0].sampling_share:.0%} of a step), training measured; "
        f"{fmean(run.steps for run in found):.0f} steps",
    )


def _run(nodes: int, setting: Setting, prompts: Prompts, seed: int, rise: float) -> Run:
    method = Method(
        "ftis",
        FtisConfig(),
        sharing="vertical" if nodes > 1 else "alone-seen",
        staleness=1 if nodes > 1 else 0,
    )
    members = tuple(Member(f"node{number}", MODEL) for number in range(nodes))
    result = run_cell(Cell("speedup", members, setting, method, seed), prompts)
    target = _mean_accuracy(result, 0) + rise
    reached = _step_of(result, target)
    # Each of the nodes samples its part and trains on all of it, in a process of its own.
    tokens = result["nodes"][0]["steps"]["batch_tokens"][:reached]
    sampling_s = sum(tokens) / nodes / TOKENS_PER_S
    training_s = result["cpu_s"]["training"] / nodes / setting.steps * reached
    total_s = sampling_s + training_s
    return Run(nodes, total_s, reached, sampling_s / total_s)


def _mean_accuracy(result: dict[str, Any], index: int) -> float:
    return fmean(node["evaluations"][index]["in_distribution"] for node in result["nodes"])


def _step_of(result: dict[str, Any], target: float) -> int:
    """The first evaluated step at which the nodes' mean accuracy has been there for a while.

    Raises:
        NotMeasuredError: it never is.
    """
    evaluations = result["nodes"][0]["evaluations"]
    accuracies = [_mean_accuracy(result, index) for index in range(len(evaluations))]
    for index in range(1, len(evaluations)):
        lately = accuracies[max(1, index + 1 - SMOOTHED) : index + 1]
        if len(lately) == min(SMOOTHED, len(evaluations) - 1) and fmean(lately) >= target:
            return int(evaluations[index]["step"])
    raise NotMeasuredError(f"no accuracy of {target:.3f} in {evaluations[-1]['step']} steps")
