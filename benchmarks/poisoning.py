"""The poisoning benchmark: `python -m benchmarks.poisoning`. Three honest nodes, one that is not.

Owns: which attacks and defences are compared, a round with a malicious node in it, running the
cells so that a second run goes on where the first one stopped, the table.
Does not know: what an attack writes (`swarm.evil.forgery`), how an honest node samples and trains
(`benchmarks.ftis_lab`).

Only attacks whose groups pass the gate are here; the others never reach a trainer
(`tests/swarm/test_evil.py`). The malicious node is as strong as can be: it reports the log-probs
that an honest node's own policy of this moment gives to its texts, and it never is late.
"""

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from math import ceil, isnan, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from benchmarks.ftis_lab import (
    Cell,
    Member,
    Method,
    Node,
    Prompts,
    Sampled,
    Setting,
    Task,
    rounds_of,
    seed_of,
    shared_tokenizer,
    tasks_of,
    train_group,
)
from scripts.make_models import MODELS
from swarm.errors import SwarmError
from swarm.evil.attacks import MARKS, Attack
from swarm.evil.forgery import Forger
from swarm.paths import write_json
from swarm.protocol.prompts import Prompt
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.loss import FtisConfig
from swarm.rl.step_report import StepReport
from swarm.rl.trainer import TrainGroup
from swarm.tasks import arithmetic_prompts
from swarm.text.tokenizer import Tokenizer

DEFAULT_OUT = Path("build/bench-poisoning")
SEEDS = (0, 1, 2, 3, 4)

HONEST = (
    Member("small", str(MODELS / "arith-small")),
    Member("large", str(MODELS / "arith-large")),
    Member("lora", str(MODELS / "arith-large"), mode="lora", learning_rate_factor=3.0),
)
SETTING = Setting("poisoning", learning_rate=5e-4, steps=120, groups=16)
EVIL = "evil"

T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's two-sided 95 % quantile, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Defence:
    """Settings of node.toml that are meant to help."""

    name: str
    settings: str
    """As the table shows them."""
    train: Mapping[str, Any] = field(default_factory=dict)
    ftis: FtisConfig = field(default_factory=FtisConfig)
    max_peer_share: float = 0.5


K3 = FtisConfig(kl_estimator="k3", kl_threshold=1.5)
NO_DEFENCE = Defence("none", "the defaults")
DUPLICATES = Defence("duplicates", "train.drop_duplicates", {"drop_duplicates": True})
CAP = Defence("cap", "train.max_advantage = 0.5", {"max_advantage": 0.5})
ON_K3 = Defence("k3", 'ftis.kl_estimator = "k3", kl_threshold = 1.5', {}, K3)
SHARE = Defence("share", "pool.max_peer_share = 0.125", max_peer_share=0.125)
ALL = Defence("all", "all four", {**DUPLICATES.train, **CAP.train}, K3, SHARE.max_peer_share)
DEFENCES = (NO_DEFENCE, DUPLICATES, CAP, ON_K3, SHARE, ALL)

NOBODY = "nobody"
"""The swarm without a fourth node: what all others are compared with."""
HONEST_FOURTH = "an honest node"

PLANNED: Mapping[str, Sequence[Defence]] = {
    NOBODY: DEFENCES,
    HONEST_FOURTH: (NO_DEFENCE,),
    Attack.WRONG: (NO_DEFENCE,),
    Attack.UNDER_REPORTED: (NO_DEFENCE, ON_K3),
    Attack.OVER_REPORTED: (NO_DEFENCE,),
    Attack.PADDED: (NO_DEFENCE, ALL),
    Attack.REPEAT: DEFENCES,
    Attack.POISON: DEFENCES,
    Attack.SLY_POISON: (NO_DEFENCE, ON_K3, ALL),
}
"""Who the fourth node is, and the defences tried against it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    fourth: str
    defence: Defence
    seed: int
    setting: Setting = SETTING
    honest: tuple[Member, ...] = HONEST

    @property
    def id(self) -> str:
        return f"{self.fourth.replace(' ', '-')}/{self.defence.name}/seed{self.seed}"

    def describe(self) -> dict[str, Any]:
        """Everything that the result depends on, but the models and prompts that ship."""
        described: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for member in described["honest"]:
            member["model"] = Path(member["model"]).name
        return described

    def shares(self) -> tuple[int, int]:
        """Groups of a batch: of oneself, and of each other node; as swarm.protocol.pool does."""
        live = len(self.honest) + (self.fourth != NOBODY)
        batch = self.setting.groups
        share = ceil(batch / live)
        cap = max(1, min(share, ceil(batch * self.defence.max_peer_share)))
        of_each = min(cap, (batch - share) // (live - 1))
        return batch - (live - 1) * of_each, of_each


def arithmetic() -> Prompts:
    """What is trained on, and what is measured."""
    sets = arithmetic_prompts(0, train=4000, held_out=400)
    return Prompts(
        *(
            [Prompt(record["prompt"], None, record["answer"]) for record in part]
            for part in (sets.train, sets.held_out)
        )
    )


class Attacker:
    """The fourth node: publishes lies about texts that it chose, or about honest samples."""

    def __init__(self, attack: Attack, case: Case, tokenizer: Tokenizer, accomplice: Node) -> None:
        self._setting = case.setting
        self._forger = Forger(attack, tokenizer, case.setting.max_completion_tokens, case.seed)
        self._accomplice = accomplice

    def sample(self, tasks: Sequence[tuple[int, Task]], seeds: Sequence[int]) -> list[Sampled]:
        """A group for each (place in the round, task), with the rewards that others give it."""
        size, honest = self._setting.group_size, self._accomplice
        made = []
        for (place, task), seed in zip(tasks, seeds, strict=True):
            texts = self._forger.texts(task.answer, size)
            if texts is None:
                (sampled,) = honest.sample([(place, task)], size, [seed])
                rollouts: Sequence[Rollout] = sampled.rollouts
            else:
                with torch.no_grad():
                    rows, mask = honest.policy.completion_logprobs(
                        [task.token_ids] * size, texts, self._setting.temperature
                    )
                rollouts = [
                    Rollout(ids, row[live].numpy().astype(np.float32), Finish.STOP)
                    for ids, row, live in zip(texts, rows, mask, strict=True)
                ]
            claimed = tuple(self._forger.claimed(rollouts))
            made.append(Sampled(place, EVIL, task, claimed, honest.score(task, claimed)))
        return made


def run_case(case: Case, prompts: Prompts) -> dict[str, Any]:
    """Train one small swarm to its last step.

    Returns:
        JSON-able: `case`, `nodes` (accuracy at the end; share of greedy completions with the mark
        of the attack), `evil` (what became of its samples), `cpu_s`.
    """
    started, setting = time.process_time(), case.setting
    members = case.honest
    if case.fourth == HONEST_FOURTH:
        members = (*members, Member("fourth", case.honest[0].model))
    method = Method(case.defence.name, case.defence.ftis)
    cell = Cell("poisoning", members, setting, method, case.seed)
    tokenizer = shared_tokenizer(cell)
    train, held_out = (tasks_of(part, tokenizer) for part in (prompts.train, prompts.held_out))
    nodes = [Node(cell, member, tokenizer, case.defence.train) for member in members]
    attack = Attack(case.fourth) if case.fourth in list(Attack) else None
    evil = Attacker(attack, case, tokenizer, nodes[0]) if attack else None
    own, of_each = case.shares()
    rounds = rounds_of(train, own * len(nodes) + of_each * (evil is not None), case.seed)
    reports: list[StepReport] = []
    for turn in range(setting.steps):
        placed = list(enumerate(next(rounds)))
        sampled = []
        for index, node in enumerate(nodes):
            share = placed[index * own :][:own]
            seeds = [seed_of(case.seed, turn, place, index) for place, _ in share]
            sampled.append(node.sample(share, setting.group_size, seeds))
        if evil:
            share = placed[len(nodes) * own :]
            seeds = [seed_of(case.seed, turn, place, len(nodes)) for place, _ in share]
            sampled.append(evil.sample(share, seeds))
        reports += [node.train(_batch(sampled, index, of_each)) for index, node in enumerate(nodes)]
    honest = [
        _examined(node, held_out, tokenizer, attack and MARKS.get(attack))
        for node in nodes[: len(case.honest)]
    ]
    return {
        "case": case.describe(),
        "nodes": honest,
        "evil": _fate(reports, {EVIL}),
        "peers": _fate(reports, {member.name for member in members}),
        "groups_sampled": own,
        "groups_of_each": of_each,
        "cpu_s": round(time.process_time() - started, 1),
    }


def _batch(sampled: Sequence[Sequence[Sampled]], me: int, of_each: int) -> list[TrainGroup]:
    """What node `me` trains on: all of its own, a share of each other's."""
    return [
        train_group(one.task, one.publisher, publisher == me, [one])
        for publisher, theirs in enumerate(sampled)
        for one in (theirs if publisher == me else theirs[:of_each])
    ]


def _examined(
    node: Node, tasks: Sequence[Task], tokenizer: Tokenizer, mark: str | None
) -> dict[str, Any]:
    """How well a node answers, and how often with an attack's mark."""
    groups = node.greedy(tasks)
    texts = [tokenizer.decode(group[0].token_ids.tolist()) for group in groups]
    scores = [node.score(task, group) for task, group in zip(tasks, groups, strict=True)]
    return {
        "name": node.name,
        "accuracy": round(float(np.concatenate(scores).mean()), 4),
        "marked": fmean(text.startswith(mark) for text in texts) if mark else None,
    }


def _fate(reports: Sequence[StepReport], publishers: set[str]) -> dict[str, float] | None:
    """Shares of some publishers' samples, seen by others, that were trained on or dropped."""
    theirs = [r for report in reports for name, r in report.per_peer.items() if name in publishers]
    samples = sum(r.samples for r in theirs)
    if not samples:
        return None
    return {
        "trained": round(sum(r.trained for r in theirs) / samples, 4),
        "dropped_kl": round(sum(r.dropped_kl for r in theirs) / samples, 4),
    }


# -- the table -----------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the 95 % interval by Student's t; NaN for one value."""
    if len(values) < 2:
        return values[0], float("nan")
    return fmean(values), T_95[len(values) - 1] * stdev(values) / sqrt(len(values))


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: each kind of fourth node and defence, against nobody without defences."""
    by_place: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for result in results:
        case = result["case"]
        key = (case["fourth"], case["defence"]["name"])
        by_place.setdefault(key, {})[case["seed"]] = result
    reference = by_place.get((NOBODY, NO_DEFENCE.name), {})
    lines = [
        "| fourth node | defence | accuracy | against nobody, no defence | marked "
        "| evil trained on | peers trained on | seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for fourth, defences in PLANNED.items():
        for defence in defences:
            found = by_place.get((fourth, defence.name), {})
            if not found:
                continue
            differences = [
                _accuracy(found[seed]) - _accuracy(reference[seed])
                for seed in sorted(found)
                if seed in reference
            ]
            rows = list(found.values())
            cells = [
                str(fourth),
                defence.name,
                f"{fmean(map(_accuracy, rows)):.3f}",
                _signed(*interval(differences)) if differences else "",
                _mean_share([fmean(n["marked"] or 0.0 for n in r["nodes"]) for r in rows])
                if fourth in MARKS
                else "",
                _mean_share([r["evil"]["trained"] for r in rows if r["evil"]]),
                _mean_share([r["peers"]["trained"] for r in rows if r["peers"]]),
                str(len(rows)),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _accuracy(result: Mapping[str, Any]) -> float:
    return fmean(node["accuracy"] for node in result["nodes"])


def _signed(value: float, spread: float) -> str:
    text = f"{value:+.3f}" if isnan(spread) else f"{value:+.3f} ± {spread:.3f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _mean_share(values: Sequence[float]) -> str:
    return f"{fmean(values):.0%}" if values else ""


# -- running -------------------------------------------------------------------------------------


def finished(out: Path, case: Case) -> dict[str, Any] | None:
    """A case's result, unless it is missing or of another description."""
    try:
        result: dict[str, Any] = json.loads((out / f"{case.id}.json").read_bytes())
    except FileNotFoundError:
        return None
    return result if result["case"] == case.describe() else None


def _run_and_write(out: Path, case: Case) -> str:
    torch.set_num_threads(1)
    result = run_case(case, arithmetic())
    write_json(out / f"{case.id}.json", result)
    return f"{case.id}: accuracy {_accuracy(result):.3f}, {result['cpu_s']:.0f} CPU s"


def run(options: argparse.Namespace) -> int:
    """Run what is missing, seed by seed, then write the table over everything that is there."""
    planned = [
        Case(str(fourth), defence, seed)
        for seed in options.seeds
        for fourth, defences in PLANNED.items()
        for defence in defences
    ]
    chosen = [case for case in planned if options.cells.search(case.id)]
    if options.list:
        print("\n".join(case.id for case in chosen))
        return 0
    left = [case for case in chosen if finished(options.out, case) is None]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context) as pool:
        jobs = [pool.submit(_run_and_write, options.out, case) for case in left]
        for count, job in enumerate(as_completed(jobs), start=1):
            print(f"[{count}/{len(left)}] {job.result()}", flush=True)
    results = [r for case in planned if (r := finished(options.out, case)) is not None]
    text = table(results)
    (options.out / "results.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.poisoning",
        description="What a malicious node costs three honest ones, and what helps.",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="N")
    parser.add_argument(
        "--cells", type=re.compile, default="", metavar="REGEX", help="only cells whose id matches"
    )
    parser.add_argument("--list", action="store_true", help="print the cells' ids and stop")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    try:
        sys.exit(run(parse()))
    except SwarmError as error:
        sys.exit(f"benchmarks.poisoning: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
