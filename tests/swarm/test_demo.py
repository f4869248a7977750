"""`swarm-node demo` as a user runs it: a short one to its end, and interrupted ones."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from nodes import ENVIRONMENT, PATIENCE_S, command_line, wait_until

from swarm.demo.nodes import spawn


class Demo:
    """A running `swarm-node demo` and every process that it was seen to have."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out = folder / "out"
        self.stdout, self.stderr = folder / "stdout", folder / "stderr"
        with self.stdout.open("wb") as stdout, self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swarm.cli", "demo", "--out", str(self.out), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=ENVIRONMENT,
            )
        self.seen: set[psutil.Process] = set()

    def ended(self) -> bool:
        if self.process.poll() is None:
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))
        return self.process.poll() is not None

    def runs(self, word: str) -> bool:
        """Whether a process with this argument is there now."""
        assert not self.ended(), self.stderr.read_text()
        return any(word in command_line(process).split() for process in self.seen)

    def left(self) -> list[psutil.Process]:
        """Processes that are still there some seconds after the end; they are killed."""
        _, alive = psutil.wait_procs(self.seen, timeout=20.0)
        for process in alive:
            process.kill()
        return alive


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[Demo]:
    """Start one; whatever the test does, nothing of it is left."""
    running = Demo(folder, *arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.left()


def test_a_short_demo_ends_with_results_as_json(tmp_path: Path) -> None:
    with demo(tmp_path, "--nodes", "2", "--steps", "10", "--json") as running:
        wait_until(running.ended, "the demo ends", timeout_s=3 * PATIENCE_S)
        assert running.process.returncode == 0, running.stderr.read_text()
        assert len(running.seen) >= 8  # three nodes and p2pd, two learners
        assert running.left() == []
    results = json.loads(running.stdout.read_text())
    assert results["schema"] == "swarm-node/demo/1"
    assert (results["method"], results["interrupted"]) == ("ftis", False)
    assert [(node["name"], node["mode"]) for node in results["nodes"]] == [
        ("small", "full"),
        ("large", "full"),
    ]
    for node in results["nodes"]:
        assert node["steps"] >= 10
        assert node["foreign_samples_trained"] > 0
        assert node["groups_fetched"] > 0
        assert node["groups_made"] > 0
        assert node["groups_rejected"] == 0
        assert node["samples_filtered"] > 0
        assert 8 < node["bytes_per_token"] < 40  # 8 in the body; headers weigh on short completions
        assert 0 < node["accuracy_start"] < 1
        assert 0 < node["accuracy_end"] < 1
        assert node["accuracies"][-1]["step"] >= 10
    assert json.loads((running.out / "results.json").read_text()) == results
    assert (running.out / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("number", "stage"),
    [(signal.SIGINT, "swarm.rl.learner"), (signal.SIGTERM, "seed")],
    ids=["ctrl-c with a node", "terminated while it starts"],
)
def test_an_interrupted_demo_leaves_nothing(
    tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    with demo(tmp_path, "--nodes", "1") as running:
        wait_until(lambda: running.runs(stage), f"the demo runs {stage}")
        running.process.send_signal(number)
        wait_until(running.ended, "the demo ends")
        assert running.process.returncode == 130
        assert running.left() == []
    assert "Traceback" not in running.stderr.read_text()


def test_a_child_that_starts_as_ctrl_c_arrives_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "the child"

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    children: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        spawn([], tmp_path / "log", tmp_path, children)
    assert children == ["the child"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no child is told of a parent's death"
)
def test_a_demo_that_is_killed_takes_its_nodes_with_it(tmp_path: Path) -> None:
    with demo(tmp_path, "--nodes", "1", "--steps", "500") as running:
        wait_until(lambda: running.runs("join"), "the volunteer is started")
        running.process.kill()
        running.process.wait()
        assert running.left() == []
