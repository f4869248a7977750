"""Evaluate nodes' runs and the models they started from, as the paper's tables do.

    python recipes/tabulate.py DATA_DIR... [--max-prompts N]

`swarm-node eval` evaluates each on all evaluation sets of its swarm, greedy pass@1: the last run's
last checkpoint, as the paper reports final scores. The table is Markdown, on stdout.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def evaluated(data_dir: Path, subject: Sequence[str], limit: int | None) -> dict[str, Any]:
    """What `swarm-node eval` found.

    Raises:
        SystemExit: it failed; its message is on stderr.
    """
    command = [sys.executable, "-m", "swarm.cli", "eval", *subject, "--data-dir", str(data_dir)]
    command += ["--json"] if limit is None else ["--json", "--max-prompts", str(limit)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(data_dir: Path, limit: int | None) -> tuple[str, dict[str, str]]:
    """A node's name and mode, and for each set its accuracy at start and end."""
    end = evaluated(data_dir, ["--last"], limit)
    start = evaluated(data_dir, [end["model"]], limit)
    run = json.loads((Path(end["checkpoint"]).parents[1] / "run.json").read_text())["trained"]
    cells = {
        name: f"{_interval(start['sets'][name])} → {_interval(found)}"
        for name, found in end["sets"].items()
    }
    return f"{data_dir.name}: {Path(run['model']).name}, {run['mode']}, step {end['step']}", cells


def _interval(found: Mapping[str, Any]) -> str:
    return f"{found['accuracy']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tabulate", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("data_dirs", nargs="+", type=Path, metavar="DATA_DIR")
    parser.add_argument("--max-prompts", type=int, metavar="N", help="of each set; default: all")
    options = parser.parse_args()
    rows = [row(data_dir, options.max_prompts) for data_dir in options.data_dirs]
    sets = list(dict.fromkeys(name for _, cells in rows for name in cells))
    print("| node | " + " | ".join(name.replace("_", " ") for name in sets) + " |")
    print("|---|" + "---|" * len(sets))
    for name, cells in rows:
        print(f"| {name} | " + " | ".join(cells.get(one, "") for one in sets) + " |")


if __name__ == "__main__":
    main()
