"""Rows of a node's processes: CPU while idle, memory, how soon it is in a swarm.

Owns: starting `swarm-node` as a user does, and a bare hivemind node beside it.
Does not know: how rows are shown.

The learner, which holds torch and the model, is no part of it: the rows are of the node process
and its p2pd.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import ROOT, NotMeasuredError, Row, Timing, Worker, group_of
from swarm.control import control_request
from swarm.errors import NotRunningError
from swarm.paths import DataDir
from swarm.tasks import arithmetic_prompts

SMALL = ROOT / "swarm" / "models" / "arith-small"
LARGE_VOCABULARY = 151_644
STOP = "<|end|>"
PATIENCE_S = 120.0
LOOPBACK = ("--set", "network.host=127.0.0.1", "--set", "network.use_relay=false")


class Running:
    """A `swarm-node` process with a data directory of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.data_dir = DataDir(folder)
        folder.mkdir()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SWARM_")}
        command = [sys.executable, "-m", "swarm.cli", *arguments, "--data-dir", str(folder)]
        self._words = " ".join(command[3:5])
        self.started_s = time.perf_counter()
        with (folder / "console.log").open("wb") as log:
            self._popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.process = psutil.Process(self._popen.pid)

    def first_line(self) -> str:
        """What it prints first."""
        return self._popen.stdout.readline().strip() if self._popen.stdout else ""

    def seconds_until(self, condition: Callable[[dict[str, Any]], bool]) -> float:
        """From its start until its status says so."""
        while time.perf_counter() - self.started_s < PATIENCE_S:
            try:
                if condition(control_request(self.data_dir.control_socket, "status")):
                    return time.perf_counter() - self.started_s
            except NotRunningError:
                if self._popen.poll() is not None:
                    break
            time.sleep(0.02)
        raise NotMeasuredError(f"a node did not come up: {self._words}")

    def end(self) -> None:
        """Stop it and remove what it leaves."""
        self._popen.terminate()
        try:
            self._popen.wait(60)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        shutil.rmtree(self.data_dir.runtime_dir, ignore_errors=True)


def _own(process: psutil.Process) -> list[psutil.Process]:
    """The node process and its p2pd, without learner and reward workers."""
    return [p for p in group_of(process) if p.pid == process.pid or p.name() == "p2pd"]


def _memory_mb(processes: list[psutil.Process]) -> float:
    return float(sum(process.memory_info().rss for process in processes)) / 1e6


def _cpu_percent(processes: list[psutil.Process], seconds: float) -> float:
    """Of one core."""

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before, started = used(), time.monotonic()
    time.sleep(seconds)
    return 100 * (used() - before) / (time.monotonic() - started)


def rows(quick: bool) -> list[Row]:
    """Idle CPU, memory with two tokenizers, start to joined, each against bare hivemind."""
    idle_s, starts = (1.0, 1) if quick else (20.0, 5)
    with _bare_hivemind() as bare:
        with tempfile.TemporaryDirectory(prefix="sb", dir="/tmp") as folder:
            small = _small_tokenizer(Path(folder), bare, idle_s, starts)
        with tempfile.TemporaryDirectory(prefix="sb", dir="/tmp") as folder:
            large = _large_tokenizer(Path(folder), bare)
    return [*small, large]


@contextmanager
def _seeded(folder: Path, tokenizer: Path) -> Iterator[tuple[Running, str]]:
    prompts = folder / "prompts.jsonl"
    sets = arithmetic_prompts(0, train=200, held_out=20, out_of_distribution=20)
    prompts.write_text("".join(json.dumps(record) + "\n" for record in sets.train))
    seed = ("seed", str(prompts), "--tokenizer", str(tokenizer), "--group-size", "4")
    limits = ("--max-prompt-tokens", "32", "--max-completion-tokens", "10")
    node = Running(folder / "organizer", *seed, *limits, *LOOPBACK)
    try:
        invite = node.first_line()
        if not invite.startswith("swarm1"):
            raise NotMeasuredError("no invite of the organizer")
        yield node, invite
    finally:
        node.end()


def _joined(status: dict[str, Any]) -> bool:
    return "name" in status["swarm"] and status["network"]["connected"] > 0


def _small_tokenizer(
    folder: Path, bare: list[psutil.Process], idle_s: float, starts: int
) -> list[Row]:
    with _seeded(folder, SMALL) as (organizer, invite):
        joined = []
        for number in range(starts):
            join = ("join", invite, "--model", str(SMALL), "--set", "model.device=cpu")
            node = Running(folder / f"volunteer{number}", *join, *LOOPBACK)
            try:
                joined.append(node.seconds_until(_joined))
                volunteer_mb = _memory_mb(_own(node.process))
            finally:
                node.end()
        time.sleep(min(idle_s, 5.0))
        processes = _own(organizer.process)
        memory_mb, bare_mb = _memory_mb(processes), _memory_mb(bare)
        cpu, bare_cpu = _cpu_percent(processes, idle_s), _cpu_percent(bare, idle_s)
    took = Timing(tuple(joined))
    return [
        Row(
            what="idle CPU of a node, of one core",
            unit="%",
            ours=cpu,
            peer=bare_cpu,
            peer_name="bare hivemind.DHT",
            aim="< 1 %",
            met=cpu < 1.0,
            how=f"CPU seconds of node process and p2pd in {idle_s:.0f} s, an organizer that waits",
        ),
        Row(
            what="memory of a node with its p2pd, 20-token tokenizer",
            unit="MB",
            ours=memory_mb,
            peer=bare_mb,
            peer_name="bare hivemind.DHT",
            ratio=memory_mb / bare_mb,
            ratio_of="ours / peer",
            aim="< 150 MB",
            met=memory_mb < 150,
            cause="p2pd takes 60 MB; Python, numpy, uvloop, cryptography, pydantic the rest.",
            how="resident, pages shared by several processes counted in each; an organizer",
            details={"volunteer_without_learner_mb": round(volunteer_mb)},
        ),
        Row(
            what="start of `swarm-node join` to joined",
            unit="s",
            ours=took.median,
            aim="< 2 s",
            met=took.median < 2.0,
            cause="Imports take 0.7 s of CPU. Tried: looking for the first connection each 0.1 s "
            "in place of 0.5 s.",
            how=f"until its status has the terms and a connection; median of {starts} starts",
            details=took.summary(),
        ),
    ]


def _large_tokenizer(folder: Path, bare: list[psutil.Process]) -> Row:
    what = "memory of a node with its p2pd, 151k-token tokenizer"
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    _write_large_tokenizer(tokenizer)
    with _seeded(folder, tokenizer) as (organizer, _):
        organizer.seconds_until(lambda status: bool(status))
        memory_mb, bare_mb = _memory_mb(_own(organizer.process)), _memory_mb(bare)
    return Row(
        what=what,
        unit="MB",
        ours=memory_mb,
        peer=bare_mb,
        peer_name="bare hivemind.DHT, without a tokenizer",
        ratio=memory_mb / bare_mb,
        ratio_of="ours / peer",
        aim="< 250 MB",
        met=memory_mb < 250,
        cause="Tried: giving back what reading the tokenizer freed, 110 MB.",
        how="as above; a byte-level BPE made up to the size of Qwen's",
    )


def _write_large_tokenizer(folder: Path) -> None:
    """As many tokens and merges as Qwen's has: single bytes, pairs of them, pairs and a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in alphabet for b in alphabet]
    merges += [(a + b, c) for c in alphabet for a, b in merges[: 1 << 16]]
    merges = merges[: LARGE_VOCABULARY - len(alphabet) - 1]
    tokens = [*alphabet, *(a + b for a, b in merges)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([STOP])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": STOP}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@contextmanager
def _bare_hivemind() -> Iterator[list[psutil.Process]]:
    """What its own quick start gives: `hivemind.DHT(start=True)`."""
    script = ROOT / "benchmarks" / "peers" / "bare_hivemind.py"
    with Worker([sys.executable, str(script)]) as worker:
        pid = worker.call(op="start")["pid"]
        time.sleep(1.0)
        yield group_of(psutil.Process(pid))
