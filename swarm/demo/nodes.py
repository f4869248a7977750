"""The nodes of a swarm on this machine, real ones in processes of their own.

Owns: starting organizer and volunteers through the command line, asking them for their status,
ending them. Does not know: how a node works; it uses what any user uses.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.control import control_request
from swarm.demo.task import LOCAL, DemoOptions, Task
from swarm.errors import NotRunningError, SwarmError, UsageError
from swarm.evil.attacks import Attack
from swarm.paths import DataDir

SHIPPED = Path(__file__).parent.parent / "models"

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1

MAX_NODES = 64
"""Each has a learner, a daemon and a worker of its own."""


@dataclass(frozen=True, slots=True)
class Volunteer:
    """One node of the demo: a name, a model, a mode; `attack` where it is malicious."""

    name: str
    model: Path
    mode: str
    attack: Attack | None = None


@dataclass(slots=True)
class Running:
    """A volunteer's process and what it said last."""

    volunteer: Volunteer
    process: subprocess.Popen[bytes]
    data_dir: DataDir
    status: dict[str, Any] = field(default_factory=dict)
    quarantined_s: dict[str, float] = field(default_factory=dict)
    """Peers that it was seen to have in quarantine, and when first (monotonic)."""
    published_s: float | None = None
    """When it was first seen to have made a group."""

    @property
    def training(self) -> dict[str, Any]:
        return dict(self.status.get("training", {}))

    @property
    def peer_id(self) -> str:
        return str(self.status.get("node", {}).get("peer_id", ""))

    @property
    def peers(self) -> dict[str, dict[str, Any]]:
        """What it knows of its peers, by id."""
        return {row["peer_id"]: row for row in self.status.get("peers", [])}

    @property
    def doing(self) -> str:
        return str(self.status.get("activity", {}).get("doing", "starting"))

    def poll(self) -> None:
        """Read the node's status.

        Raises:
            SwarmError: the process ended; the message ends with its last log lines.
        """
        if self.process.poll() is not None:
            raise SwarmError(
                f"{self.volunteer.name} ended with code {self.process.returncode}:\n"
                + tail(console_log(self.data_dir))
            )
        with contextlib.suppress(NotRunningError):
            self.status = control_request(self.data_dir.control_socket, "status", timeout_s=5.0)
        now_s = time.monotonic()
        if self.published_s is None and self.training.get("groups_made"):
            self.published_s = now_s
        for peer_id, row in self.peers.items():
            if row["quarantined"]:
                self.quarantined_s.setdefault(peer_id, now_s)


def volunteers(options: DemoOptions) -> list[Volunteer]:
    """The nodes: small full, large full, large LoRA, and again, or one for each given model.

    Malicious ones come last, with the first one's model.
    """
    if not 1 <= options.nodes <= MAX_NODES:
        raise UsageError(f"--nodes {options.nodes}: 1 to {MAX_NODES}")
    if not 0 <= options.evil <= MAX_NODES:
        raise UsageError(f"--evil {options.evil}: 0 to {MAX_NODES}")
    kinds: Sequence[tuple[str, Path, str]] = [
        ("small", SHIPPED / "arith-small", "full"),
        ("large", SHIPPED / "arith-large", "full"),
        ("lora", SHIPPED / "arith-large", "lora"),
    ]
    if options.models:
        kinds = [_kind(model) for model in options.models]
    chosen = []
    for index in range(options.nodes):
        name, model, mode = kinds[index % len(kinds)]
        round_number = index // len(kinds)
        chosen.append(Volunteer(f"{name}{round_number + 1 if round_number else ''}", model, mode))
    for index in range(options.evil):
        name = f"evil{index + 1 if index else ''}"
        chosen.append(Volunteer(name, chosen[0].model, chosen[0].mode, options.attack))
    return chosen


def _kind(model: Path) -> tuple[str, Path, str]:
    """Name, folder and mode of `FOLDER` or `FOLDER:lora`."""
    folder, _, mode = str(model).rpartition(":")
    adapter = bool(folder) and mode == "lora"
    path = Path(folder) if adapter else model
    if not (path / "config.json").is_file():
        raise UsageError(f"--model {model}: no model folder (it has no config.json)")
    return path.name + "-lora" * adapter, path.absolute(), "lora" if adapter else "full"


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of children that are all gone when the block ends, however it ends."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        yield children
    finally:
        try:
            stop_all(children)
        finally:
            for child in children:
                child.kill()  # after a second Ctrl-C


def stop_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all children to stop, and kill those that have not after 30 s."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 30.0
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, so that no child starts that nobody knows of."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            raise KeyboardInterrupt


def _end_with_the_demo() -> None:
    """In a new child: have it stopped when the demo dies without a chance to stop it; only
    Linux can tell it."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def spawn(
    arguments: Sequence[str],
    log_path: Path,
    scratch: Path,
    children: list[subprocess.Popen[bytes]],
    stdout: int | None = None,
    program: str = "swarm.cli",
) -> subprocess.Popen[bytes]:
    """Start `swarm-node ARGUMENTS`; a Ctrl-C at the terminal reaches only this process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SWARM_")}
    environment |= {"XDG_RUNTIME_DIR": str(scratch), "OMP_NUM_THREADS": "1"}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log, uninterrupted():
        child = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_the_demo,
        )
        children.append(child)
    return child


def node_data_dir(out: Path, name: str) -> DataDir:
    """The data directory of one node of the demo."""
    return DataDir(out / name)


def start_organizer(
    out: Path,
    task: Task,
    first: Volunteer,
    scratch: Path,
    children: list[subprocess.Popen[bytes]],
) -> str:
    """Seed the swarm; returns its invite."""
    data_dir = node_data_dir(out, "organizer")
    child = spawn(
        [
            "seed",
            *task.prompts,
            "--tokenizer",
            str(first.model),
            "--swarm-name",
            task.name,
            *[part for flag, value in task.swarm_flags.items() for part in (flag, value)],
            "--data-dir",
            str(data_dir.root),
            "--name",
            "organizer",
            *as_flags(LOCAL),
        ],
        console_log(data_dir),
        scratch,
        children,
        stdout=subprocess.PIPE,
    )
    if child.stdout is None:
        raise SwarmError("the organizer's output is not connected")
    invite = child.stdout.readline().decode().strip()
    if not invite:
        raise SwarmError("the organizer did not start:\n" + tail(console_log(data_dir)))
    return invite


def start_volunteer(
    out: Path,
    task: Task,
    volunteer: Volunteer,
    invite: str,
    overrides: Mapping[str, str],
    scratch: Path,
    children: list[subprocess.Popen[bytes]],
) -> Running:
    """`swarm-node join` for one volunteer, or what does the same with malice."""
    attack = [str(volunteer.attack)] if volunteer.attack else []
    data_dir = node_data_dir(out, volunteer.name)
    settings = {**LOCAL, "model.mode": volunteer.mode, **task.settings, **overrides}
    if volunteer.mode == "lora":
        settings |= task.lora_settings
    process = spawn(
        [
            *attack,
            "join",
            invite,
            "--model",
            str(volunteer.model),
            "--name",
            volunteer.name,
            "--data-dir",
            str(data_dir.root),
            *as_flags(settings),
        ],
        console_log(data_dir),
        scratch,
        children,
        program="swarm.evil" if attack else "swarm.cli",
    )
    return Running(volunteer, process, data_dir)


def as_flags(settings: Mapping[str, str]) -> list[str]:
    """`--set section.key=value` for each."""
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def console_log(data_dir: DataDir) -> Path:
    """What a node printed, its last words before it had a log among them."""
    return data_dir.log_path.with_name("console.log")


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({path}: {error})"
