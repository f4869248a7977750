"""Measuring side by side: interleaved rounds, medians of ratios, what the machine is.

Owns: the order in which candidates run, the summary of what was timed, one row of the result, and
child processes that measure themselves. Does not know: what is measured, or how it is shown.

Two candidates never run one after the other for long: each round runs all of them once, in another
order, and a ratio is the median of the rounds' ratios. So what else the machine does meanwhile
falls on all of them.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
"""The interpreter of the environment that has the peers; `make bench` makes it."""

_VERSIONS = ("torch", "transformers", "numpy", "hivemind", "cryptography", "msgpack")


class NotMeasuredError(Exception):
    """A row cannot be measured here, and why."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What a candidate took in each round, in one unit."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def summary(self) -> dict[str, float | int]:
        """Median, quartiles and number of rounds, as JSON has it."""
        low, high = self.values[0], self.values[0]
        if len(self.values) > 1:
            low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return {
            "median": _short(self.median),
            "p25": _short(low),
            "p75": _short(high),
            "rounds": len(self.values),
        }


def interleave(
    candidates: Mapping[str, Callable[[], float | None]], rounds: int, *, warm_up: int = 1
) -> dict[str, Timing]:
    """Run all candidates once a round, in rotating order.

    Args:
        candidates: each returns its own measure, or None to be timed by the wall clock, in seconds.
        rounds: at least 1.
        warm_up: rounds before those, not counted.
    """
    names = list(candidates)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            started = time.perf_counter()
            own = candidates[name]()
            took = time.perf_counter() - started if own is None else own
            if turn >= 0:
                taken[name].append(took)
    return {name: Timing(tuple(values)) for name, values in taken.items()}


def on_cpu(work: Callable[[], object]) -> Callable[[], float]:
    """A candidate that is timed by this thread's CPU seconds, which other processes leave alone."""

    def run() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return run


def ratio(above: Timing, below: Timing) -> float:
    """Median over the rounds of above / below."""
    return statistics.median(a / b for a, b in zip(above.values, below.values, strict=True))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        what: is measured.
        unit: of the three figures that follow.
        ours: this program's figure.
        peer: what one would use instead; None: there is none, or it is not installed.
        limit: what cannot be beaten, as plain bytes moved or memory copied.
        ratio: of what the aim speaks, ours to the peer or to the limit.
        ratio_of: in words, such as "limit / ours".
        aim: in words.
        met: whether the aim is; None: it has none, or the figure it needs is missing.
        how: it was measured.
        cause: why the aim is not reached, where that is known, and what was tried.
        details: anything else, as JSON has it.
    """

    what: str
    unit: str
    ours: float | None
    how: str
    peer: float | None = None
    peer_name: str = ""
    limit: float | None = None
    limit_name: str = ""
    ratio: float | None = None
    ratio_of: str = ""
    aim: str = ""
    met: bool | None = None
    cause: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Its fields, with figures of four digits."""
        values = asdict(self)
        for name in ("ours", "peer", "limit", "ratio"):
            values[name] = None if values[name] is None else _short(values[name])
        return values


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def machine() -> dict[str, Any]:
    """What it ran on, without names of hosts or folders."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version for name in _VERSIONS if (version := _version(name))},
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


class Worker:
    """A child process that measures itself, so that its memory and its libraries are its own.

    It reads a JSON line for each call and answers with one (`serve` below).

    Args:
        command: the interpreter and its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def call(self, **arguments: Any) -> dict[str, Any]:
        """One call; lines that are no JSON objects are other programs' words.

        Raises:
            NotMeasuredError: it ended, or says why it cannot.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise NotMeasuredError("a worker without pipes")
        try:
            stdin.write(json.dumps(arguments) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise NotMeasuredError(f"the worker ended: {self._process.wait()}") from None
        for line in stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise NotMeasuredError(str(answer["error"]))
                return answer
        raise NotMeasuredError(f"the worker ended with code {self._process.wait()}")


def peers_python() -> str:
    """The interpreter with the peers.

    Raises:
        NotMeasuredError: there is none.
    """
    if not PEERS_PYTHON.exists():
        raise NotMeasuredError("the peers are not installed: make bench does it")
    return str(PEERS_PYTHON)


def group_of(process: psutil.Process) -> list[psutil.Process]:
    """A process and all below it."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
