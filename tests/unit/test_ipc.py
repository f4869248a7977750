"""Frames between the node and its learner."""

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from swarm.errors import LearnerError
from swarm.learner import ipc

MESSAGES: list[dict[str, Any]] = [
    {},
    {"op": "train", "groups": [{"ids": b"\x00\xff" * 40_000, "own": True}], "x": 1.5, "n": None},
]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


async def _read(data: bytes) -> dict[str, Any] | None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return await ipc.read(reader)


def _receive(ends: tuple[socket.socket, socket.socket], data: bytes) -> dict[str, Any] | None:
    ends[0].sendall(data)
    ends[0].close()
    return ipc.receive(ends[1])


def test_frame_is_a_length_and_a_map() -> None:
    assert ipc.pack({"a": 1}) == bytes.fromhex("04000000 81a16101")


@pytest.mark.parametrize("message", MESSAGES)
async def test_both_ends_read_what_was_packed(
    ends: tuple[socket.socket, socket.socket], message: dict[str, Any]
) -> None:
    assert await _read(ipc.pack(message)) == message
    assert _receive(ends, ipc.pack(message)) == message


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 7])
async def test_end_of_the_stream(ends: tuple[socket.socket, socket.socket], cut: int) -> None:
    data = ipc.pack({"a": 1})[:cut]
    assert await _read(data) is None
    assert _receive(ends, data) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", ipc.MAX_FRAME_BYTES + 1), "limit"),
        (struct.pack("<I", 1) + b"\xc1", "not msgpack"),
        (struct.pack("<I", 2) + b"\x01\x01", "not msgpack"),
        (struct.pack("<I", 1) + msgpack.packb(1), "int instead of a map"),
    ],
)
async def test_what_is_no_frame(
    ends: tuple[socket.socket, socket.socket], data: bytes, message: str
) -> None:
    with pytest.raises(LearnerError, match=message):
        await _read(data)
    with pytest.raises(LearnerError, match=message):
        _receive(ends, data)


def test_frame_too_large_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 10)
    ipc.pack({"a": b"12345"})
    with pytest.raises(LearnerError, match="limit is 10"):
        ipc.pack({"a": b"123456"})
