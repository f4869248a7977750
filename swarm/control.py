"""The control socket: how `swarm-node status` and others talk to the running node.

Owns: one JSON object a line in, one out, over a Unix socket with mode 0600.
Does not know: what the commands do; the node registers them.
"""

import asyncio
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from swarm.errors import IdentityError, NotRunningError, SwarmError, of_os_error
from swarm.paths import parse_json

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 8 << 20
"""A status of a thousand members is well below."""

Handler = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class ControlServer:
    """Serves commands on a Unix socket.

    Args:
        path: of the socket; a leftover of a killed node is replaced (the data directory's lock
            makes sure that no other node lives).
        handlers: command name to coroutine; its result is sent back as `{"ok": true, ...}`.
    """

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._path = path
        self._handlers = handlers
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        old_mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, str(self._path), limit=MAX_LINE_BYTES
            )
        finally:
            os.umask(old_mask)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(10):
                line = await reader.readline()
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            async with asyncio.timeout(10):
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError) as error:
            log.debug("control connection ended: %r", error)
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = parse_json(line)
            command = request["command"]
            handler = self._handlers[command]
        except (ValueError, TypeError, KeyError):
            return {
                "ok": False,
                "error": f'expected {{"command": one of {", ".join(self._handlers)}}}',
            }
        try:
            return {"ok": True, **await handler(request)}
        except SwarmError as error:
            failure = error
        except OSError as error:  # of the disk, where it is the node that writes
            log.error("%s failed: %s", command, error)
            failure = of_os_error(error) or SwarmError(str(error))
        return {"ok": False, "error": str(failure), "exit_code": int(failure.exit_code)}


def control_request(
    path: Path, command: str, timeout_s: float = 5.0, **arguments: Any
) -> dict[str, Any]:
    """Ask the running node; blocking.

    Returns:
        The answer without its `ok` field.

    Raises:
        NotRunningError: nothing listens at the socket.
        SwarmError: the node answered with an error.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline(MAX_LINE_BYTES)
        except PermissionError:
            raise IdentityError(f"{path}: the node there belongs to another user") from None
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            raise NotRunningError(
                "no node is running on this data directory; start one with `swarm-node join`"
            ) from None
        except TimeoutError:
            raise NotRunningError(
                f"the node listens at {path}, but has not answered within {timeout_s:g} s: it is "
                "busy or frozen; try again, or end it by `kill -9` and the pid in the file `lock` "
                "of the data directory: the next start goes on from the last checkpoint"
            ) from None
        except OSError as error:  # too long a path among them: no node can listen there either
            raise NotRunningError(f"the node does not answer at {path}: {error}") from None
    if not line:
        raise NotRunningError(f"the node closed {path} without an answer; it may be stopping")
    try:
        answer: dict[str, Any] = parse_json(line)
    except ValueError:
        raise NotRunningError(
            f"the node broke its answer off at {path}; it may be stopping"
        ) from None
    if not answer.pop("ok"):
        failure = SwarmError(answer.get("error", "unknown error"))
        failure.exit_code = answer.get("exit_code", failure.exit_code)
        raise failure
    return answer
