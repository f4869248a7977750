"""Real overlays on loopback for tests; whatever a test leaves running is killed and reported."""

import asyncio
import gc
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from swarm.net.overlay import Overlay
from swarm.protocol.identity import Identity


class Nest:
    """Makes overlays, each with a folder of its own under one temporary folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.overlays: list[Overlay] = []

    def make(
        self,
        bootstrap: Sequence[str] = (),
        *,
        like: Overlay | None = None,
        **options: Any,
    ) -> Overlay:
        """An overlay that is not started yet; `like`: with that one's identity and port."""
        folder = self.root / str(len(self.overlays))
        folder.mkdir()
        if like is not None:
            key_path = self.root / str(self.overlays.index(like)) / "key"
            options.setdefault("last_port", like.port)
        else:
            key_path = folder / "key"
        overlay = Overlay(
            Identity.load_or_create(key_path),
            key_path,
            host=options.pop("host", "127.0.0.1"),
            port=options.pop("port", 0),
            runtime_dir=options.pop("runtime_dir", folder / "run"),
            bootstrap=bootstrap,
            **options,
        )
        self.overlays.append(overlay)
        return overlay

    async def start(self, bootstrap: Sequence[str] = (), **options: Any) -> Overlay:
        """A started overlay that has joined its bootstrap, if any."""
        overlay = self.make(bootstrap, **options)
        await overlay.start()
        if bootstrap:
            await until(lambda: "connected" in overlay.dial_results.values())
        return overlay

    async def swarm(self, size: int) -> list[Overlay]:
        """Overlays that all joined through the first one and know each other."""
        first = await self.start()
        addresses = await first.addresses()
        members = [first, *[await self.start(addresses) for _ in range(size - 1)]]
        await until(lambda: all(len(member._members()) == size - 1 for member in members))
        return members


@asynccontextmanager
async def nest() -> AsyncIterator[Nest]:
    """A nest that is empty again at the end: no process, no socket, no task is left."""
    before = asyncio.all_tasks()
    with tempfile.TemporaryDirectory(prefix="sn", dir="/tmp") as folder:
        made = Nest(Path(folder))
        try:
            yield made
        finally:
            for overlay in made.overlays:
                await overlay.stop()
            left = daemons()
            for process in left:
                process.kill()
            sockets = list(made.root.rglob("*.sock"))
        assert not left, f"p2pd left behind: {left}"
        assert not sockets, f"sockets left behind: {sockets}"
    await asyncio.sleep(0.05)
    gc.collect()  # an unclosed transport warns here, in the test that left it
    tasks = asyncio.all_tasks() - before
    assert not tasks, f"tasks left behind: {tasks}"


def daemons() -> list[psutil.Process]:
    """The p2pd processes that this process has started and that still run."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.name() == "p2pd" and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Wait for a condition, or fail."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.02)


def daemon_pid(overlay: Overlay) -> int:
    """The process id of an overlay's p2pd."""
    assert overlay._daemon is not None
    return overlay._daemon.pid


def kill_daemon(overlay: Overlay, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to an overlay's p2pd; once it is back, all of the daemon's threads obey it."""
    pid = daemon_pid(overlay)
    os.kill(pid, number)
    obeyed = {
        signal.SIGKILL: lambda states: not states,
        signal.SIGSTOP: lambda states: set(states) == {"T"},
        signal.SIGCONT: lambda states: "T" not in states,
    }[number]
    deadline = time.monotonic() + 5.0
    while not obeyed(_thread_states(pid)):
        assert time.monotonic() < deadline, f"signal {number} has no effect"
        time.sleep(0.001)


def _thread_states(pid: int) -> list[str]:
    """A letter for each thread, as in proc(5); none of a process that has ended."""
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return [state for state in states if state not in "ZX"]
