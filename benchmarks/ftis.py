"""The F-TIS benchmark: `python -m benchmarks.ftis`, or `make bench-ftis`.

Owns: which methods, settings and pairs of models are compared, the command line, and running the
cells in parallel so that a second run goes on where the first one stopped.
Does not know: how a cell is run (`benchmarks.ftis_lab`), how results are shown
(`benchmarks.ftis_report`).

Without options it makes the main table: a small and a large model, two settings, three seeds.
`--full` adds two more pairs and the ablations. Each cell is written to its own file under
OUT/cells as soon as it is done, and is not run again while that file fits.
"""

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from benchmarks.ftis_lab import Cell, Member, Method, Prompts, Setting, run_cell
from benchmarks.ftis_report import write_report
from scripts.make_models import METADATA, MODELS, RECIPES, Recipe, save, warm_start
from swarm.config import METHODS
from swarm.errors import SwarmError
from swarm.paths import write_json
from swarm.protocol.prompts import Prompt, read_jsonl
from swarm.rl.filter import KlEstimator
from swarm.rl.loss import FtisConfig
from swarm.tasks import arithmetic_prompts

log = logging.getLogger(__name__)

DEFAULT_OUT = Path("build/bench-ftis")
SEEDS = (0, 1, 2)

STRESS = Setting("stress", learning_rate=1e-3, steps=150)
GENTLE = Setting("gentle", learning_rate=5e-4, steps=250)
QUICK = Setting("stress", learning_rate=1e-3, steps=60, evaluate_every=20)
REAL = Setting(
    "paper",
    learning_rate=1e-6,
    steps=50,
    groups=16,
    group_size=12,
    max_completion_tokens=512,
    evaluate_every=10,
    rows_per_call=96,
    micro_batch_tokens=16_384,
)
"""For `--models`: the paper's learning rate, group size and number of steps."""

SIZE = (
    Member("small", str(MODELS / "arith-small")),
    Member("large", str(MODELS / "arith-large")),
)
ADAPTER = (
    Member("full", str(MODELS / "arith-large")),
    Member("lora", str(MODELS / "arith-large"), mode="lora", learning_rate_factor=3.0),
)
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "adder": {"mix": {**RECIPES[0].mix, "add": 2.0}, "reversed_share": 0.2},
    "subtractor": {"mix": {**RECIPES[0].mix, "sub": 2.0}, "reversed_share": 0.8},
}
"""Two small models that differ in what they saw and in how they write; made anew for each seed."""

NO_LIMIT = 1e9
"""A KL threshold that drops nothing."""
KL_SWEEP: Mapping[KlEstimator, Sequence[float]] = {
    "grpo": (1.0, 5.0, 20.0, 200.0, NO_LIMIT),
    "k3": (0.5, 1.5, 5.0),
    "k1": (1.0, 2.0, 5.0),
    "reverse": (0.5, 1.0, 4.0),
}
"""The last three estimators' thresholds drop about 25, 10 and 1 % of the samples with A > 0."""
CLIP_SWEEP = (1.0, 5.0, NO_LIMIT)
STALENESS_SWEEP = (2, 8)


def method(name: str) -> Method:
    """A method by the name that `swarm-node --method` takes, in a vertical swarm."""
    fields = {key.removeprefix("ftis."): value for key, value in METHODS[name].items()}
    return Method(name, FtisConfig(**fields))  # type: ignore[arg-type]  # literals, not any text


FTIS = method("ftis")
# Alone a node is on-policy: every importance weight is 1, and the loss is plain GRPO's.
ALONE = (
    Method("alone-seen", method("nois").ftis, sharing="alone-seen"),
    Method("alone-generated", method("nois").ftis, sharing="alone-generated"),
)
COMPARED = (*ALONE, *(method(name) for name in METHODS))
ESSENTIAL = (*ALONE, *(method(name) for name in ("nois", "tis", "f-nois", "ftis")))
BEYOND = (
    Method("f-alone-seen", method("f-nois").ftis, "alone-seen", study="variants"),
    Method("f-alone-generated", method("f-nois").ftis, "alone-generated", study="variants"),
    Method("ftis-horizontal", FTIS.ftis, "horizontal", study="variants"),
    Method("ftis-peers", FtisConfig(filter_scope="peers"), study="variants"),
    Method("ftis-sequence", FtisConfig(importance_level="sequence"), study="variants"),
)
SWEEPS = (
    *(Method(f"ftis-c{c:g}", FtisConfig(clip_max=c), study="C") for c in CLIP_SWEEP),
    *(
        Method(f"ftis-stale{age}", FTIS.ftis, staleness=age, study="staleness")
        for age in STALENESS_SWEEP
    ),
)


def _kl_sweep(estimators: Sequence[KlEstimator] = tuple(KL_SWEEP)) -> list[Method]:
    """Thresholds of F-TIS by estimator."""
    return [
        Method(
            f"ftis-{estimator}-g{threshold:g}",
            FtisConfig(kl_estimator=estimator, kl_threshold=threshold),
            study="threshold",
        )
        for estimator in estimators
        for threshold in KL_SWEEP[estimator]
    ]


def plan(options: argparse.Namespace) -> tuple[list[Cell], dict[Path, Recipe]]:
    """The cells that the options ask for, and the models that have to be made for them."""
    cells: list[Cell] = []
    made: dict[Path, Recipe] = {}

    def add(
        pair: str,
        members: Callable[[int], tuple[Member, ...]],
        setting: Setting,
        methods: Sequence[Method],
    ) -> None:
        changed = dataclasses.replace(setting, **options.set)
        cells.extend(
            Cell(pair, members(seed), changed, one, seed, options.device, options.precision)
            for seed in options.seeds
            for one in methods
        )

    def experts(seed: int) -> tuple[Member, ...]:
        members = []
        for name, changes in EXPERTS.items():
            folder = (options.out / "models" / f"{name}-seed{seed}").absolute()
            made[folder] = dataclasses.replace(RECIPES[0], name=name, seed=seed, **changes)
            members.append(Member(name, str(folder)))
        return tuple(members)

    if options.models:
        members = tuple(_member(text) for text in options.models)
        further = (*BEYOND, *SWEEPS, *_kl_sweep()) if options.full else ()
        add("models", lambda _: members, REAL, (*COMPARED, *further))
    elif options.quick:
        add("size", lambda _: SIZE, QUICK, ESSENTIAL)
    else:
        for setting in (STRESS, GENTLE):
            add("size", lambda _: SIZE, setting, COMPARED)
        if options.full:
            add("expertise", experts, GENTLE, COMPARED)
            add("lora", lambda _: ADAPTER, GENTLE, ESSENTIAL)
            add("size", lambda _: SIZE, GENTLE, (*BEYOND, *SWEEPS, *_kl_sweep()))
            add("size", lambda _: SIZE, STRESS, (*BEYOND, *_kl_sweep(["grpo"])))
    return cells, made


def _member(text: str) -> Member:
    """`MODEL` or `MODEL:lora`."""
    model, _, mode = text.rpartition(":")
    if mode != "lora" or not model:
        model, mode = text, "full"
    name = Path(model).name
    if mode == "lora":
        return Member(f"{name}-lora", model, "lora", learning_rate_factor=3.0)
    return Member(name, model)


def result_path(out: Path, cell: Cell) -> Path:
    """Where a cell's result is."""
    return out / "cells" / f"{cell.id}.json"


def finished(out: Path, cell: Cell, prompts: Prompts) -> dict[str, Any] | None:
    """A cell's result, unless it is missing or of another description."""
    try:
        result: dict[str, Any] = json.loads(result_path(out, cell).read_bytes())
    except FileNotFoundError:
        return None
    return result if result["cell"] == cell.describe(prompts) else None


def run_and_write(out: Path, cell: Cell, prompts: Prompts) -> dict[str, Any]:
    """Run a cell and write its result; what a worker process does."""
    result = run_cell(cell, prompts, lambda text: print(text, flush=True))
    write_json(result_path(out, cell), result)
    return result


def make_model(folder: Path, recipe: Recipe) -> None:
    """Warm a model up from its seed and save it; what a worker process does."""
    model, steps = warm_start(recipe)
    metadata = save(model, recipe, steps, folder)
    print(
        f"{folder.name}: {steps} steps, greedy held-out {metadata['greedy_held_out']}", flush=True
    )


def _start_worker() -> None:
    from transformers.utils import logging as transformers_logging

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def run(options: argparse.Namespace) -> int:
    """Run what is missing, then write the report over everything that is there."""
    started = time.monotonic()
    prompts = _prompts(options)
    planned, recipes = plan(options)
    chosen = [cell for cell in planned if options.cells.search(cell.id)]
    if options.list:
        print("\n".join(cell.id for cell in chosen))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=_start_worker) as pool:
        needed = {Path(member.model) for cell in chosen for member in cell.members}
        missing = {
            folder: recipe
            for folder, recipe in recipes.items()
            if folder in needed and not (folder / METADATA).exists()
        }
        for _ in pool.map(make_model, missing.keys(), missing.values()):
            pass
        left = [cell for cell in chosen if finished(options.out, cell, prompts) is None]
        print(f"{len(left)} of {len(chosen)} cells to run, {options.jobs} at a time", flush=True)
        jobs = {pool.submit(run_and_write, options.out, cell, prompts): cell for cell in left}
        for count, job in enumerate(as_completed(jobs), start=1):
            cell = jobs[job]
            try:
                cpu_s = sum(job.result()["cpu_s"].values())
            except SwarmError as error:
                failed += 1
                log.error("%s: %s", cell.id, error)
                continue
            except Exception:
                failed += 1
                log.exception("%s failed", cell.id)
                continue
            elapsed = time.monotonic() - started
            print(
                f"[{count}/{len(left)}] {cell.id}: {cpu_s:.0f} CPU s; {elapsed / 60:.1f} min, "
                f"about {elapsed / count * (len(left) - count) / 60:.1f} left",
                flush=True,
            )
    there = [
        cell
        for cell in planned
        if all(
            Path(m.model) not in recipes or (Path(m.model) / METADATA).exists()
            for m in cell.members
        )
    ]
    results = [r for cell in there if (r := finished(options.out, cell, prompts)) is not None]
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": options.device,
    }
    report = write_report(results, options.out, machine)
    print(f"{len(results)} of {len(planned)} cells in {report}")
    return 1 if failed else 0


def _prompts(options: argparse.Namespace) -> Prompts:
    if options.prompts:
        return Prompts(*(read_jsonl(path) for path in options.prompts))
    sets = arithmetic_prompts(0, train=4000, held_out=400, out_of_distribution=128)
    return Prompts(
        *(
            [Prompt(record["prompt"], None, record["answer"]) for record in part]
            for part in (sets.train, sets.held_out, sets.out_of_distribution)
        )
    )


class _SetFields(argparse.Action):
    """FIELD=VALUE pairs of `Setting`, in the field's own type."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        known = {field.name: field.type for field in dataclasses.fields(Setting)}
        del known["name"]
        chosen = dict(getattr(namespace, self.dest))
        for text in values:
            name, equals, value = text.partition("=")
            kind = known.get(name)
            if not equals or kind is None:
                parser.error(f"{option_string} {text}: FIELD=VALUE, FIELD of {', '.join(known)}")
            try:
                chosen[name] = kind(value)  # type: ignore[operator]  # int, float or str
            except ValueError:
                parser.error(f"{option_string} {text}: not a number")
        setattr(namespace, self.dest, chosen)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ftis",
        description="Compare methods of collaborative GRPO in small swarms.",
    )
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--full", action="store_true", help="all pairs and ablations")
    scope.add_argument("--quick", action="store_true", help="one seed, few methods, 60 steps")
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help="folders or Hub ids, one for each node, in place of the shipped pairs; "
        "MODEL:lora trains an adapter",
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=Path,
        metavar="JSONL",
        help="two or three files in place of the arithmetic: train, held-out, out of distribution",
    )
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="default: 0 1 2")
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda", "mps"])
    parser.add_argument("--precision", default="fp32", choices=["auto", "fp32", "bf16"])
    parser.add_argument(
        "--set",
        nargs="+",
        default={},
        action=_SetFields,
        metavar="FIELD=VALUE",
        help="change all settings, e.g. steps=20 learning_rate=1e-6 max_completion_tokens=256",
    )
    parser.add_argument(
        "--cells", type=re.compile, default="", metavar="REGEX", help="only cells whose id matches"
    )
    parser.add_argument("--list", action="store_true", help="print the cells' ids and stop")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    options = parser.parse_args(arguments)
    if options.prompts and not 2 <= len(options.prompts) <= 3:
        parser.error("--prompts: two or three files")
    if options.jobs < 1:
        parser.error("--jobs: at least 1")
    options.seeds = options.seeds or ([SEEDS[0]] if options.quick else list(SEEDS))
    return options


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        sys.exit(run(parse()))
    except SwarmError as error:
        sys.exit(f"benchmarks.ftis: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
