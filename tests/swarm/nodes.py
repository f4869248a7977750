"""Real nodes for tests: `swarm-node` in processes of their own, on loopback, all reaped.

A `Swarm` starts an organizer and volunteers through the command line, as a user would, and asks
them through it. Leaving it kills whatever is still there and fails if a child outlived its node.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

MODELS = Path(__file__).parents[2] / "swarm" / "models"
SMALL = MODELS / "arith-small"
LARGE = MODELS / "arith-large"

QUICK: Mapping[str, str] = {
    "network.host": "127.0.0.1",
    "network.heartbeat_s": "1",
    "network.use_relay": "false",
    "model.threads": "1",
    "model.device": "cpu",
    "train.groups_per_step": "6",
    "train.learning_rate": "1e-4",
    "engine.prompts_per_call": "3",
    "eval.every_steps": "0",
    "eval.max_prompts": "10",
    "checkpoint.every_steps": "2",
}
"""Settings of a volunteer that steps a few times a second."""


@dataclass
class Node:
    """One `swarm-node` process."""

    name: str
    data_dir: Path
    arguments: list[str]
    process: subprocess.Popen[bytes]
    children: list[psutil.Process] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        """`swarm-node status --json`; {} while the node does not answer."""
        result = cli("status", "--json", "--data-dir", str(self.data_dir))
        return json.loads(result.stdout) if result.returncode in (0, 4) else {}

    def log(self) -> str:
        return (self.data_dir / "console.log").read_text(errors="replace")

    def note_children(self) -> list[psutil.Process]:
        """Remember the children of now: p2pd, learner, workers."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.children += [c for c in children if c not in self.children]
        return children

    def kill(self) -> None:
        """kill -9, as the kernel does when memory runs out."""
        self.note_children()
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; returns the exit code."""
        self.note_children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def cli(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run one `swarm-node` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "swarm.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class Swarm:
    """A swarm of real nodes under one folder.

    Args:
        folder: for data directories; the test's `tmp_path`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.invite = ""

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.note_children()
        for node in self.nodes:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        for node in self.nodes:
            try:
                node.process.wait(30)
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        orphans = [c for node in self.nodes for c in gone_or_kill(node.children)]
        if orphans:
            raise AssertionError(f"processes outlived their node: {orphans}")

    def start(self, name: str, *arguments: str) -> Node:
        """Start `swarm-node ARGUMENTS` with a data directory of its own."""
        data_dir = self.folder / name
        data_dir.mkdir(exist_ok=True)
        full = [*arguments, "--data-dir", str(data_dir), "--name", name]
        with (data_dir / "console.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "swarm.cli", *full],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        node = Node(name, data_dir, list(arguments), process)
        self.nodes.append(node)
        return node

    def restart(self, node: Node, *arguments: str) -> Node:
        """Start a node again on its data directory."""
        return self.start(node.name, *(arguments or node.arguments))

    def seed(self, prompts: Path, *extra: str, name: str = "organizer") -> Node:
        """Start the organizer and keep its invite."""
        node = self.start(
            name,
            "seed",
            str(prompts),
            "--tokenizer",
            str(SMALL),
            "--group-size",
            "4",
            "--max-prompt-tokens",
            "16",
            "--max-completion-tokens",
            "10",
            *settings({k: v for k, v in QUICK.items() if k.startswith("network.")}),
            *extra,
        )
        self.invite = read_invite(node)
        return node

    def join(self, name: str, model: Path = SMALL, invite: str = "", **changes: str) -> Node:
        """Start a volunteer; `changes` are settings with `__` for the dot."""
        chosen = {**QUICK, **{key.replace("__", "."): value for key, value in changes.items()}}
        return self.start(
            name, "join", invite or self.invite, "--model", str(model), *settings(chosen)
        )


def read_invite(node: Node) -> str:
    """The invite that `seed` prints first."""
    stdout = node.process.stdout
    line = stdout.readline().decode().strip() if stdout else ""
    if not line.startswith("swarm1"):
        raise AssertionError(f"no invite: {line!r}\n{node.log()}")
    return line


def settings(values: Mapping[str, str]) -> list[str]:
    """`--set KEY=VALUE` for each."""
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def wait_until(
    condition: Callable[[], bool], what: str, nodes: list[Node], timeout_s: float = 90.0
) -> None:
    """Poll until a condition holds; fails with the nodes' logs when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        dead = [n for n in nodes if n.process.poll() is not None]
        if dead or time.monotonic() > deadline:
            logs = "\n".join(f"--- {n.name}\n{n.log()[-3000:]}" for n in nodes)
            why = f"{[n.name for n in dead]} ended" if dead else f"not within {timeout_s} s"
            raise AssertionError(f"{what}: {why}\n{logs}")
        time.sleep(0.3)


def step_of(node: Node) -> int:
    """The node's training step; 0 before it trains."""
    return int(node.status().get("training", {}).get("step", 0))


def gone_or_kill(processes: list[psutil.Process], timeout_s: float = 5.0) -> list[str]:
    """Wait for processes to end; kills and names those that do not."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    names = []
    for process in alive:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            names.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return names
