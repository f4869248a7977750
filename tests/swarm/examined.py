"""What a node left on disk, and how its processes grew: for tests that end with a report."""

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from nodes import Node, command_line

from swarm.errors import SwarmError
from swarm.paths import DataDir, RunDir, SwarmDir
from swarm.stored import load_charter

ROLES = {
    "swarm.rl.learner": "learner",
    "p2pd": "p2pd",
    "swarm.rewards.child": "reward worker",
    "swarm.cli": "node",
}
"""A word of the command line of each kind of process."""

DRAFTS = ("*.draft", "*.tmp", ".writing-*", ".deleting-*", ".publishing-*")
"""Names of what is half written; none may be left by a node that ended in order."""


def faulty_files(data_dir: DataDir) -> list[str]:
    """Every file of a node that ended which is damaged or left over, in words."""
    found = [f"left over: {path}" for name in DRAFTS for path in data_dir.root.rglob(name)]
    for folder in sorted((data_dir.root / "swarms").glob("*")):
        found += _faults_of_swarm(SwarmDir(folder))
    return found


def _faults_of_swarm(swarm_dir: SwarmDir) -> Iterator[str]:
    try:
        load_charter(swarm_dir, swarm_dir.swarm_id)
    except SwarmError as error:
        yield str(error)
    for path in swarm_dir.prompts_dir.glob("*.jsonl"):
        if _sha256(path) != path.stem:
            yield f"damaged: {path}"
    for path in swarm_dir.rollouts_dir.glob("*.blob"):
        if _sha256(path) != path.stem:
            yield f"damaged: {path}"
    if swarm_dir.ledger_path.exists():
        with sqlite3.connect(swarm_dir.ledger_path) as ledger:
            (verdict,) = ledger.execute("PRAGMA integrity_check").fetchone()
        ledger.close()
        if verdict != "ok":
            yield f"damaged: {swarm_dir.ledger_path}: {verdict}"
    for run_dir in swarm_dir.runs():
        yield from _faults_of_run(run_dir)


def _faults_of_run(run_dir: RunDir) -> Iterator[str]:
    for path in (run_dir.steps_path, run_dir.metrics_path):
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
            try:
                json.loads(line)
            except ValueError:
                yield f"damaged: {path}:{number}"
    for path in run_dir.checkpoints().values():
        manifest = json.loads((path / "checkpoint.json").read_text())
        for name, file in manifest["files"].items():
            if _sha256(path / name) != file["sha256"]:
                yield f"damaged: {path / name}"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(slots=True)
class Growth:
    """Memory and file descriptors of processes over time.

    Attributes:
        lives: (kind, pid, start) of a process -> (seconds, bytes, descriptors) as measured.
    """

    lives: dict[tuple[str, int, float], list[tuple[float, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def measure(self, node: Node, now_s: float) -> None:
        """Note what a node and its children take now; those that end meanwhile are left out."""
        for process in [psutil.Process(node.process.pid), *node.children()]:
            try:
                words = command_line(process)
                role = next((role for word, role in ROLES.items() if word in words), "")
                if role:
                    key = (role, process.pid, process.create_time())
                    sample = (now_s, process.memory_info().rss, process.num_fds())
                    self.lives[key].append(sample)
            except psutil.Error:
                continue

    def write(self, path: Path) -> None:
        """All that was measured, a line each."""
        with path.open("w") as file:
            for (role, pid, _), samples in self.lives.items():
                for seconds, memory, files in samples:
                    record = {"role": role, "pid": pid, "s": seconds, "bytes": memory, "fds": files}
                    file.write(json.dumps(record) + "\n")

    def report(self, long_s: float) -> dict[str, dict[str, float]]:
        """For each kind of process: the most it took, and how fast those that lived long grew.

        Growth is that of a life's second half: in the first, caches fill and the model loads.

        Args:
            long_s: a life must last so long.
        """
        found = {}
        for role in ROLES.values():
            lives = [samples for (kind, _, _), samples in self.lives.items() if kind == role]
            late = [
                samples[len(samples) // 2 :]
                for samples in lives
                if samples[-1][0] - samples[0][0] >= long_s
            ]
            memory = [_slope(samples, 1) * 3600 / 1e6 for samples in late]
            files = [_slope(samples, 2) * 3600 for samples in late]
            found[role] = {
                "lives": len(lives),
                "long_lives": len(late),
                "most_mb": max((s[1] for samples in lives for s in samples), default=0) / 1e6,
                "most_descriptors": max((s[2] for samples in lives for s in samples), default=0),
                "median_mb_per_hour": float(np.median(memory)) if memory else 0.0,
                "worst_mb_per_hour": max(memory, default=0.0),
                "worst_descriptors_per_hour": max(files, default=0.0),
            }
        return found


def _slope(samples: Sequence[tuple[float, int, int]], column: int) -> float:
    """By least squares, a second."""
    if len(samples) < 3:
        return 0.0
    return float(np.polyfit([s[0] for s in samples], [s[column] for s in samples], 1)[0])
