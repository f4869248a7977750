"""The node's side of the learner process: starting it, calling it, noticing its death.

Owns: the child process (swarm.rl.learner), its log file, and that a call ends with an answer or an
error. Does not know: what the operations do; torch.

The child ends by itself when this process dies, however it dies: its end of the socket closes.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, DataError, EngineDriftError, LearnerError
from swarm.learner import ipc
from swarm.learner.child_log import fate, last_lines, open_log

log = logging.getLogger(__name__)

STACKS_S = 0.5
"""For a child that hangs to write its stacks to the log before it is killed."""
EXIT_GRACE_S = 5.0
"""Time that the child has to end after its connection; then it is killed."""

_NAMED_ERRORS = {error.__name__: error for error in (ConfigError, DataError, EngineDriftError)}


@dataclass(slots=True)
class _Child:
    process: Process
    writer: asyncio.StreamWriter
    pending: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    end: asyncio.Task[None] | None = None
    """Reads the answers; done when the process is gone."""


class LearnerProcess:
    """One learner, started anew as often as needed.

    Args:
        log_path: file for the child's output.
        threads: CPU threads of its numerical libraries; 0: their default.
        module: what the child runs; it gets the number of its socket as its argument.

    Attributes:
        busy_with: the operation that is being answered, or "".
        starts: how often a child was started.
    """

    def __init__(
        self, log_path: Path, *, threads: int = 0, module: str = "swarm.rl.learner"
    ) -> None:
        self._log_path = log_path
        self._threads = threads
        self._module = module
        self._child: _Child | None = None
        self._last_end: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._last_id = 0
        self.busy_with = ""
        self.starts = 0

    @property
    def alive(self) -> bool:
        """Whether a child is running."""
        return self._child is not None and self._child.process.returncode is None

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return self._child.process.pid if self._child is not None and self.alive else None

    async def start(self) -> None:
        """Start a child, unless one is running; it imports its libraries meanwhile.

        Raises:
            LearnerError: no process can be started, or the log cannot be written.
        """
        async with self._turn:
            if self.alive:
                return
            await self._end_child()
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            if self._threads:
                environment["OMP_NUM_THREADS"] = str(self._threads)
            ours, theirs = socket.socketpair()
            try:
                with theirs, open_log(self._log_path) as output:
                    process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-P",  # a file in the current folder must not pass for a library
                        "-m",
                        self._module,
                        str(theirs.fileno()),
                        stdin=DEVNULL,
                        stdout=output,
                        stderr=STDOUT,
                        pass_fds=(theirs.fileno(),),
                        # Ctrl-C in the terminal is the node's to handle.
                        start_new_session=True,
                        env=environment,
                    )
                reader, writer = await asyncio.open_connection(sock=ours)
            except OSError as error:
                ours.close()
                raise LearnerError(f"the learner cannot be started: {error}") from error
            except BaseException:
                ours.close()  # which ends the child, if there is one
                raise
            child = self._child = _Child(process, writer)
            child.end = asyncio.create_task(self._read_answers(child, reader))
            self.starts += 1
            log.info("learner started, pid %d, log in %s", process.pid, self._log_path)

    async def call(self, op: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Have the child do something; calls take turns.

        A call that is cancelled goes on in the child, and its answer is dropped; the next call
        waits for it, within its own time.

        Raises:
            ConfigError, DataError: the child refused what a person gave; it goes on.
            EngineDriftError: it does not sample what it trains; it goes on.
            LearnerError: it refused otherwise, died, or did not answer in time. After a death, a
                timeout or a fault of its own no child is left: `start` makes a new one.
        """
        async with self._turn:
            child = self._child
            if child is None or not self.alive:
                raise LearnerError(f"{op}: no learner is running")
            self._last_id += 1
            number = self._last_id
            request = {"id": number, "op": op, "arguments": arguments}
            answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            child.pending[number] = answer
            self.busy_with = op
            try:
                async with asyncio.timeout(timeout_s):
                    child.writer.write(ipc.pack(request))
                    # A connection that breaks here makes `answer` fail, with the reason.
                    with contextlib.suppress(ConnectionError):
                        await child.writer.drain()
                    reply = await answer
            except TimeoutError:
                await self._dump_stacks(child)
                await self._end_child(kill=True)
                raise LearnerError(
                    f"{op}: no answer within {timeout_s:g} s; the learner was killed"
                ) from None
            finally:
                child.pending.pop(number, None)
                self.busy_with = ""
            if reply["ok"]:
                return reply
            kind, text = reply["kind"], reply["error"]
            if kind in _NAMED_ERRORS:
                raise _NAMED_ERRORS[kind](text)
            if kind == LearnerError.__name__:
                raise LearnerError(f"{op}: {text}")
            # A bug, or a machine in trouble (out of memory, a GPU in error): what the process holds
            # is in doubt.
            await self._end_child(kill=True)
            raise LearnerError(f"{op} failed with {kind}: {text}; see {self._log_path}")

    async def close(self) -> None:
        """End the child, in the middle of work too, and wait until it is gone."""
        await self._end_child()

    async def _end_child(self, *, kill: bool = False) -> None:
        child, self._child = self._child, None
        if child is not None:
            if kill and child.process.returncode is None:
                child.process.kill()
            child.writer.close()
            self._last_end = child.end
        # Also of a child whose end was waited for by a call that was cancelled meanwhile.
        if self._last_end is not None:
            await asyncio.shield(self._last_end)

    @staticmethod
    async def _dump_stacks(child: _Child) -> None:
        """Have a child that hangs write what it is doing to its log."""
        if child.process.returncode is None:
            child.process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(STACKS_S)

    async def _read_answers(self, child: _Child, reader: asyncio.StreamReader) -> None:
        """Hand answers to their calls until the stream ends; then see the process off."""
        process = child.process
        try:
            while (reply := await ipc.read(reader)) is not None:
                answer = child.pending.get(reply["id"])
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except LearnerError as error:
            log.error("learner, pid %d: %s", process.pid, error)
        finally:
            child.writer.close()
            try:
                async with asyncio.timeout(EXIT_GRACE_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
            finally:
                if process.returncode is None:
                    await process.wait()
            death = LearnerError(
                f"the learner (pid {process.pid}) {fate(process.returncode)}"
                f"{last_lines(self._log_path)}"
            )
            for answer in child.pending.values():
                if not answer.done():
                    answer.set_exception(death)
