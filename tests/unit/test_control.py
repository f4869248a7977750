"""The control socket: for its owner alone, and unmoved by what is no command."""

import asyncio
import errno
import json
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from swarm.control import ControlServer, control_request
from swarm.errors import ExitCode, NotRunningError, SwarmError, UsageError
from swarm.paths import DataDir


async def double(request: Mapping[str, Any]) -> dict[str, Any]:
    if "number" not in request:
        raise UsageError("give a number")
    return {"answer": 2 * request["number"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def test_nobody_else_may_even_look(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path / "data")
    data_dir.create()
    assert stat.S_IMODE(data_dir.runtime_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(data_dir.root.stat().st_mode) == 0o700
    data_dir.runtime_dir.rmdir()


async def test_a_disk_that_fails_the_node_is_named(path: Path) -> None:
    async def write(request: Mapping[str, Any]) -> dict[str, Any]:
        raise OSError(request["errno"], os.strerror(request["errno"]), request["file"])

    server = ControlServer(path, {"write": write})
    await server.start()
    try:
        for number, file, code in (
            (errno.ENOSPC, "/full", ExitCode.TRY_AGAIN),
            (errno.EACCES, "/closed", ExitCode.PERMISSION),
            (errno.EIO, None, ExitCode.ERROR),
        ):
            with pytest.raises(SwarmError, match=os.strerror(number)) as caught:
                await asyncio.to_thread(control_request, path, "write", errno=number, file=file)
            assert caught.value.exit_code == code
            assert (file or "") in str(caught.value)
    finally:
        await server.stop()


def test_a_frozen_node_is_told_from_one_that_does_not_run(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as frozen:
        frozen.bind(str(path))
        frozen.listen()
        with pytest.raises(
            NotRunningError, match=r"within 0\.2 s: it is busy or frozen; .*kill -9"
        ):
            control_request(path, "status", timeout_s=0.2)


async def test_the_socket_is_its_owners(path: Path) -> None:
    server = ControlServer(path, {"double": double})
    await server.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600  # noqa: ASYNC240 - one look
        await asyncio.to_thread(commands, path)
    finally:
        await server.stop()
    with pytest.raises(NotRunningError):
        control_request(path, "double", number=2)


def commands(path: Path) -> None:
    assert control_request(path, "double", number=4) == {"answer": 8}
    with pytest.raises(SwarmError, match="give a number") as caught:
        control_request(path, "double")
    assert caught.value.exit_code == ExitCode.USAGE
    with pytest.raises(SwarmError, match="double"):
        control_request(path, "dance")
    for line in (b"\n", b"[]\n", b"\xff\n", b'{"command": []}\n', b'{"command": 5}\n'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10.0)
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as stream:
                assert json.loads(stream.readline())["ok"] is False, line
    assert control_request(path, "double", number=1) == {"answer": 2}
