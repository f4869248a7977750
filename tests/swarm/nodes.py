"""Real nodes for tests: `swarm-node` in processes of their own, on loopback, all reaped.

A `Swarm` starts an organizer and volunteers through the command line, as a user would. Leaving it
stops whatever is still there and fails if a process outlived its node.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from swarm.control import control_request
from swarm.errors import NotRunningError
from swarm.evil.attacks import Attack
from swarm.paths import DataDir, RunDir, SwarmDir

MODELS = Path(__file__).parents[2] / "swarm" / "models"
SMALL = MODELS / "arith-small"
LARGE = MODELS / "arith-large"

PATIENCE_S = 400.0
"""Limit of one wait; only a failing test or a very busy machine comes near it."""

LOOPBACK: Mapping[str, str] = {
    "network.host": "127.0.0.1",
    "network.heartbeat_s": "1",
    "network.use_relay": "false",
}

QUICK: Mapping[str, str] = {
    **LOOPBACK,
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

ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("SWARM_")} | {
    "OMP_NUM_THREADS": "1"
}


@dataclass
class Node:
    """One `swarm-node` process."""

    name: str
    data_dir: Path
    arguments: list[str]
    process: subprocess.Popen[bytes]
    seen: set[psutil.Process] = field(default_factory=set)
    """Children that it ever had, as far as they were noticed."""

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def status(self) -> dict[str, Any]:
        """What `swarm-node status --json` prints; {} while the node does not answer."""
        try:
            socket = DataDir(self.data_dir).control_socket
            return control_request(socket, "status", timeout_s=PATIENCE_S)
        except NotRunningError:
            return {}

    @property
    def peer_id(self) -> str:
        return str(self.status()["node"]["peer_id"])

    @property
    def step(self) -> int:
        """Training steps made; 0 before it trains."""
        return int(self.status().get("training", {}).get("step", 0))

    @property
    def swarm_dir(self) -> SwarmDir:
        data_dir = DataDir(self.data_dir)
        return data_dir.swarm(data_dir.current or bytes(32))

    @property
    def run_dir(self) -> RunDir:
        """The newest run; in a place that does not exist before there is one."""
        return (self.swarm_dir.runs() or [RunDir(self.swarm_dir.root / "none")])[-1]

    def steps(self) -> list[dict[str, Any]]:
        """What it trained on, step by step."""
        return read_jsonl(self.run_dir.steps_path)

    def metrics(self) -> list[dict[str, Any]]:
        """The reports of its training steps."""
        return [line for line in read_jsonl(self.run_dir.metrics_path) if "loss" in line]

    def trained_on(self) -> set[str]:
        """Publishers that it took a sample of through the filter into the loss; itself is "own"."""
        return {
            peer
            for report in self.metrics()
            for peer, theirs in report["per_peer"].items()
            if theirs["trained"]
        }

    def log(self) -> str:
        """Its messages."""
        return (self.data_dir / "console.log").read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """Its processes of now: p2pd, learner, reward workers."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update(children)
        return children

    def child(self, word: str) -> psutil.Process:
        """The child whose command line has `word` in it."""
        (found,) = [c for c in self.children() if word in command_line(c)]
        return found

    def signal(self, number: int) -> None:
        self.children()
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, as the kernel does when memory runs out."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def leftovers(self) -> list[str]:
        """What still runs some seconds after its end; it is killed."""
        _, alive = psutil.wait_procs(self.seen, timeout=20.0)
        left = []
        for process in alive:
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{process.pid} {command_line(process)[:120]}")
                    process.kill()
            except psutil.NoSuchProcess:
                continue
        return left


def command_line(process: psutil.Process) -> str:
    """Program and arguments; empty for a process that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that is being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def cli(
    *arguments: str, timeout_s: float = PATIENCE_S, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run one `swarm-node` command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "swarm.cli", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=ENVIRONMENT,
    )


class Swarm:
    """A swarm of real nodes under one folder.

    Args:
        folder: for data directories; the test's temporary folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.invite = ""
        self.prefixes: dict[str, Sequence[str]] = {}
        """What starts the command of a node, by name."""
        self.environments: dict[str, Mapping[str, str]] = {}
        """Variables that a node has besides, by name."""

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.running:
                node.signal(signal.SIGTERM)
        for node in self.nodes:
            try:
                node.process.wait(60)
            except subprocess.TimeoutExpired:
                node.kill()
            if node.process.stdout is not None:
                node.process.stdout.close()
        left = [process for node in self.nodes for process in node.leftovers()]
        for node in self.nodes:
            shutil.rmtree(DataDir(node.data_dir).runtime_dir, ignore_errors=True)
        if left:
            raise AssertionError(f"processes outlived their node: {left}")

    def start(self, name: str, *arguments: str, program: str = "swarm.cli") -> Node:
        """Start `swarm-node ARGUMENTS` with a data directory of its own."""
        data_dir = self.folder / name
        data_dir.mkdir(exist_ok=True)
        full = [*arguments, "--data-dir", str(data_dir), "--name", name]
        with (data_dir / "console.log").open("ab") as log:
            process = subprocess.Popen(
                [*self.prefixes.get(name, ()), sys.executable, "-m", program, *full],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**ENVIRONMENT, **self.environments.get(name, {})},
            )
        node = Node(name, data_dir, list(arguments), process)
        self.nodes.append(node)
        return node

    def restart(self, node: Node, *arguments: str) -> Node:
        """Start a node again on its data directory, as before or with other arguments."""
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
            *settings(LOOPBACK),
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

    def attack(self, attack: Attack) -> Node:
        """Start a malicious volunteer, named after what it does."""
        arguments = ("join", self.invite, "--model", str(SMALL), *settings(QUICK))
        return self.start(str(attack), str(attack), *arguments, program="swarm.evil")


def write_prompts(path: Path, prompts: Mapping[str, str]) -> Path:
    """A prompt file: prompt to answer."""
    lines = (json.dumps({"prompt": p, "answer": a}) for p, a in prompts.items())
    path.write_text("\n".join(lines) + "\n")
    return path


def sums(first: Sequence[int], second: Sequence[int]) -> dict[str, str]:
    """Prompts of one sum each, with their answers."""
    return {f"{a}+{b}=": str(a + b) for a in first for b in second}


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
    condition: Callable[[], bool],
    what: str,
    nodes: Sequence[Node] = (),
    timeout_s: float = PATIENCE_S,
) -> None:
    """Poll until a condition holds; fails with the nodes' logs when one ends or time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        dead = [n.name for n in nodes if not n.running]
        if dead or time.monotonic() > deadline:
            logs = "".join(f"\n--- {n.name}\n{n.log()[-3000:]}" for n in nodes)
            why = f"{dead} ended" if dead else f"not within {timeout_s} s"
            raise AssertionError(f"{what}: {why}{logs}")
        time.sleep(0.2)
