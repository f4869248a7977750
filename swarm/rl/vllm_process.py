"""The learner's side of the vLLM process: starting it, calling it, noticing its death.

Owns: the child (swarm/rl/vllm_child.py under the interpreter that has vLLM), its environment, its
log. Does not know: what the operations do.

The child ends by itself when this process dies, however it dies.
"""

import logging
import os
import select
import socket
import subprocess
import sys
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

DEATH_CHECK_S = 1.0
"""How often a wait for an answer looks whether the child lives: a process that it forked may hold
its socket open."""

INSTALL = (
    "install it with pip install 'swarm-node[vllm]', or let engine.python name the interpreter of "
    "an environment that has it"
)


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
        except (FileNotFoundError, PermissionError) as error:
            self._socket.close()
            if error.filename != self._python:
                raise LearnerError(f"vLLM cannot be started: {error}") from error
            raise ConfigError(
                f"engine.python = {python!r}: {error.strerror}; name a Python interpreter of an "
                "environment that has vLLM"
            ) from None
        except OSError as error:
            self._socket.close()
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
            ConfigError: its interpreter has no vLLM.
            VllmFailedError: it died, or the operation failed; it is gone then.
        """
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

    def _answer(self) -> dict[str, Any] | None:
        """The next message; None when the child is gone without one."""
        while not select.select([self._socket], [], [], DEATH_CHECK_S)[0]:
            if not self.alive:
                return None
        return ipc.receive(self._socket)
