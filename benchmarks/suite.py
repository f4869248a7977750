"""All benchmarks but F-TIS's own: `python -m benchmarks.suite`, or `make bench`.

Owns: which groups of rows there are, the command line, the files that are written.
Does not know: how a row is measured (a module each), how rows are shown (`benchmarks.report`).

A run measures every group, or those of `--only`; what the others had stays in the result. The
result is one JSON, from which docs/BENCHMARKS.md is rendered; a line of figures is appended to
benchmarks/history.jsonl. `--quick` only shows that everything runs: it writes to OUT alone.
"""

import argparse
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Before numpy and torch: the rows are of one thread, and threads that wait spoil a shared machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.measure import ROOT, NotMeasuredError, Row, machine
from benchmarks.report import SCHEMA, render
from swarm.paths import write_atomic, write_json

log = logging.getLogger(__name__)

GROUPS = {
    "codec": "Bytes of groups",
    "transport": "From one node to another",
    "node_process": "The processes of a node",
    "training": "Training step and log-probs",
    "sampling": "Sampling",
    "loop": "What the learner's time goes into",
    "growth": "Growth with the swarm",
    "speedup": "Time to accuracy",
}
"""Module and heading, in the order in which they run and stand in the report."""

DEFAULT_OUT = Path("build/bench")
REPORT = ROOT / "docs" / "BENCHMARKS.md"
HISTORY = ROOT / "benchmarks" / "history.jsonl"


def measure(name: str, quick: bool) -> dict[str, Any]:
    """One group: its rows, or why there are none."""
    started = time.monotonic()
    try:
        rows: list[Row] = importlib.import_module(f"benchmarks.{name}").rows(quick)
        error = ""
    except NotMeasuredError as problem:
        rows, error = [], str(problem)
    except Exception as problem:
        log.exception("%s failed", name)
        rows, error = [], f"failed: {type(problem).__name__}"
    return {
        "title": GROUPS[name],
        "machine": machine(),
        "seconds": round(time.monotonic() - started, 1),
        "error": error,
        "rows": [row.to_json() for row in rows],
    }


def history_line(groups: dict[str, Any]) -> dict[str, Any]:
    """What is worth comparing over time: each row's figure and ratio."""
    return {
        "schema": "swarm-bench-history/1",
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": next(iter(groups.values()))["machine"],
        "figures": {
            name: {row["what"]: [row["ours"], row["unit"], row["ratio"]] for row in group["rows"]}
            for name, group in groups.items()
        },
    }


def run(options: argparse.Namespace) -> int:
    """Measure, then write result, report and history; 1 where a group failed."""
    result_path = options.out / "results.json"
    try:
        earlier = json.loads(result_path.read_bytes())
    except FileNotFoundError:
        earlier = {}
    known = earlier.get("groups", {}) if earlier.get("quick") == options.quick else {}
    measured = {}
    for name in options.only or GROUPS:
        print(f"{name} ...", flush=True)
        measured[name] = measure(name, options.quick)
        print(f"{name}: {measured[name]['seconds']:.0f} s {measured[name]['error']}", flush=True)
    groups = {name: (known | measured)[name] for name in GROUPS if name in known | measured}
    result = {"schema": SCHEMA, "quick": options.quick, "groups": groups}
    write_json(result_path, result)
    report_path = options.out / "BENCHMARKS.md" if options.quick else options.report
    write_atomic(report_path, render(result).encode())
    print(f"{report_path}")
    if not options.quick:
        with options.history.open("a") as file:
            file.write(json.dumps(history_line(measured), sort_keys=True) + "\n")
    return 1 if any(group["error"] for group in measured.values()) else 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite",
        description="Measure swarm-node against its limits and against what one would use instead.",
    )
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="GROUP", help="these")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    parser.add_argument("--list", action="store_true", help="print the groups and stop")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    parser.add_argument("--report", type=Path, default=REPORT, metavar="FILE")
    parser.add_argument("--history", type=Path, default=HISTORY, metavar="FILE")
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    options = parse()
    if options.list:
        print("\n".join(f"{name:12} {title}" for name, title in GROUPS.items()))
        return
    try:
        sys.exit(run(options))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
