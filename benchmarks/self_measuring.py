"""The child's side of `benchmarks.measure.Worker`: answer calls with what they took.

Owns: the line protocol, and the peak of this process's memory. Knows nothing of swarm-node, so that
it runs under the peers' interpreter too.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve(operations: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer until the input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = operations[arguments.pop("op")](**arguments)
        print(json.dumps(answer), file=answers, flush=True)


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Run something once: wall and CPU seconds, and how far memory rose above where it began."""
    _reset_peak()
    before = _status_bytes("VmRSS")
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return {
        "cpu_s": time.process_time() - cpu_s,
        "wall_s": time.perf_counter() - wall_s,
        "before_bytes": before,
        "peak_bytes": _status_bytes("VmHWM"),
        "rise_bytes": max(0, _status_bytes("VmHWM") - before),
    }


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
