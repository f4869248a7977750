"""The learner's side of the vLLM process: starting it, calling it, noticing its death.

Owns: the child (swarm/rl/vllm_child.py under the interpreter that has vLLM), its environment, its
log. Does not know: what the operations do.

The child ends by itself when this process dies, however it dies.
"""

import errno
import logging
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, LearnerError
from swarm.learner import ipc
from swarm.learner.child_log import fate, last_lines, open_log
from swarm.rl.vllm_child import NO_VLLM

log = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("vllm_child.py")

EXIT_GRACE_S = 5.0
"""Time that the child has to end after its connection; then it is killed."""

GREETING_S = 60.0
"""Time that an interpreter has to begin with the child's code; it takes a tenth of a second."""

DEATH_CHECK_S = 1.0
"""How often a wait for an answer looks whether the child lives: a process that it forked may hold
its socket open."""

INSTALL = (
    "install it with pip install 'swarm-node[vllm]', or let engine.python name the interpreter of "
    "an environment that has it"
)


_NO_PROGRAM = {errno.ENOENT, errno.EACCES, errno.ENOEXEC}


class VllmFailedError(LearnerError):
    """The vLLM process died, or failed in an operation and was ended."""


class VllmProcess:
    """One running child.

    Args:
        python: interpreter with vLLM; empty: this one.
        log_path: file for the child's output.
        environment: variables beside this process's own.

    Raises:
        ConfigError: there is no such interpreter.
        LearnerError: no process can be started, or the log cannot be written.
    """

    def __init__(self, python: str, log_path: Path, environment: Mapping[str, str]) -> None:
        self._log_path = log_path
        self._greeted = False
        self._python = str(Path(python).expanduser()) if python else sys.executable
        inherited = dict(os.environ)
        if python:  # another environment's libraries are none of it
            for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
                inherited.pop(name, None)
        self._socket, theirs = socket.socketpair()
        try:
            with theirs, open_log(log_path) as output:
                self._process = subprocess.Popen(
                    # -P: a file beside the script must not pass for a library.
                    [self._python, "-P", str(CHILD), str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=inherited | dict(environment),
                )
        except OSError as error:
            self._socket.close()
            if error.filename == self._python and error.errno in _NO_PROGRAM:
                raise self._no_interpreter(error.strerror) from None
            raise LearnerError(f"vLLM cannot be started: {error}") from error
        log.info("vLLM started, pid %d, log in %s", self._process.pid, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Have the child do something.

        Raises:
            ConfigError: its interpreter is no Python, or has no vLLM; the child is gone then.
            VllmFailedError: it died, or the operation failed; it is gone then.
        """
        if not self._greeted:
            self._await_greeting()
        try:
            self._socket.sendall(ipc.pack({"op": op, "arguments": arguments}))
            reply = self._answer()
        except OSError:
            reply = None
        if reply is None:
            self.close()
            if self._process.returncode == NO_VLLM:
                raise ConfigError(
                    f"{self._python}: vLLM cannot be imported; {INSTALL}"
                    f"{last_lines(self._log_path)}"
                )
            raise VllmFailedError(
                f"{op}: vLLM (pid {self.pid}) {fate(self._process.returncode)}"
                f"{last_lines(self._log_path)}"
            )
        if reply["ok"]:
            return reply
        self.close()
        raise VllmFailedError(
            f"{op}: vLLM failed with {reply['kind']}: {reply['error']}; see {self._log_path}"
        )

    def close(self) -> None:
        """End the child, in the middle of work too, and wait until it is gone."""
        self._socket.close()
        try:
            self._process.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _await_greeting(self) -> None:
        """See to it that the interpreter runs the child's code: an end before it is not vLLM's."""
        deadline = time.monotonic() + GREETING_S
        self._greeted = self._answer(deadline) is not None
        if self._greeted:
            return
        late = time.monotonic() >= deadline
        if late:
            self._process.kill()
        self.close()
        end = fate(self._process.returncode)
        if self._process.returncode < 0 and not late:  # any program may be killed
            raise VllmFailedError(f"vLLM (pid {self.pid}) {end} before it began")
        raise self._no_interpreter(
            (f"it did not begin within {GREETING_S:.0f} s" if late else f"it {end}")
            + f" in place of running {CHILD.name}{last_lines(self._log_path)}"
        )

    def _no_interpreter(self, problem: str | None) -> ConfigError:
        return ConfigError(
            f"engine.python = {self._python!r} must name the Python interpreter of an environment "
            f"that has vLLM: {problem}"
        )

    def _answer(self, deadline: float = math.inf) -> dict[str, Any] | None:
        """The next message; None when the child is gone, or the time over, without one."""
        while not select.select([self._socket], [], [], DEATH_CHECK_S)[0]:
            if not self.alive or time.monotonic() >= deadline:
                return None
        return ipc.receive(self._socket)
