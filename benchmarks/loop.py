"""Rows of a node's loop: how much of the learner's time is spent, and how much it waits.

Owns: a node alone and a swarm of two, both real, by `swarm-node demo`. Does not know: what the
phases are; the node counts them, and exports them as `swarm_phase_seconds_total`.
"""

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.measure import ROOT, NotMeasuredError, Row

AIMS = {1: 0.005, 2: 0.05}
"""Nodes to the largest share of the time in which a learner may wait."""


def rows(quick: bool) -> list[Row]:
    """A node alone, and two that trade."""
    steps = 3 if quick else 40
    return [_row(nodes, steps, quick) for nodes in AIMS]


def _row(nodes: int, steps: int, quick: bool) -> Row:
    found = [node["seconds"] for node in _demo(nodes, steps)["nodes"]]
    shares = [seconds.get("waiting", 0.0) / sum(seconds.values()) for seconds in found]
    largest = max(shares)
    by_phase = found[shares.index(largest)]
    total = sum(by_phase.values())
    phases = ", ".join(f"{name} {took / total:.0%}" for name, took in sorted(by_phase.items()))
    aim = AIMS[nodes]
    return Row(
        what=f"learner waits, {'a node alone' if nodes == 1 else f'{nodes} nodes'}",
        unit="%",
        ours=100 * largest,
        aim="0 %" if nodes == 1 else f"< {aim:.0%}",
        met=None if quick else largest < aim,
        cause="Between two calls a node scores completions, signs and takes in groups; "
        "that takes as long where a step takes seconds, and is no share of it then.",
        how=f"real processes, tiny models, {steps} steps; the node that waits most: {phases}; "
        f"it waits {1e3 * by_phase.get('waiting', 0.0) / steps:.0f} ms a step",
        details={"seconds": found},
    )


def _demo(nodes: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "swarm.cli", "demo", "--json", "--out", out]
        done = subprocess.run(
            [*command, "--nodes", str(nodes), "--steps", str(steps)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise NotMeasuredError(f"the demo failed: {done.stderr.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result
