"""Messages between the node process and its learner: framed msgpack over a stream socket.

Owns: the frame (u32 little-endian length, then one msgpack map) for both ends, one blocking and one
asyncio. Does not know: which messages there are. Both ends are this program's own; the bounds guard
against a stream out of step, not against an enemy.
"""

import asyncio
import socket
import struct
from typing import Any

import msgpack

from swarm.errors import LearnerError

MAX_FRAME_BYTES = 1 << 30
"""Larger than any batch of groups: 2^27 tokens at 8 bytes each."""

_LENGTH = struct.Struct("<I")


def pack(message: dict[str, Any]) -> bytes:
    """A frame.

    Raises:
        LearnerError: too large.
    """
    body: bytes = msgpack.packb(message)
    if len(body) > MAX_FRAME_BYTES:
        raise LearnerError(f"a message of {len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message of a blocking socket; None at the end of the stream.

    Raises:
        LearnerError: no frame.
    """
    header = _receive_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    body = _receive_exactly(connection, _checked_length(header))
    return None if body is None else _unpack(body)


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message of a stream; None at its end, also in the middle of a message.

    Raises:
        LearnerError: no frame.
    """
    try:
        header = await reader.readexactly(_LENGTH.size)
        return _unpack(await reader.readexactly(_checked_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _receive_exactly(connection: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            received = connection.recv_into(view)
        except ConnectionError:
            return None
        if not received:
            return None
        view = view[received:]
    return data


def _checked_length(header: bytes | bytearray) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise LearnerError(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
    return length


def _unpack(body: bytes | bytearray) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise LearnerError(f"a frame that is not msgpack: {error!r}") from None
    if not isinstance(message, dict):
        raise LearnerError(f"a frame with a {type(message).__name__} instead of a map")
    return message
