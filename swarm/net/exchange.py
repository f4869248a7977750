"""Payloads between two peers over one libp2p stream: charter, blobs by hash, notices.

Owns: frames, sizes, time limits. Does not know: what a charter, a blob or a notice says, which of
them to ask for, nor why a peer is turned away.

One stream is one request, one reply, the payloads, then the reader's last byte (docs/PROTOCOL.md,
"Streams"). Each side bounds what the other can cost it: a chunk that does not come or go in time,
or a stream that is slow on the whole, ends, and nothing is allocated by a peer's number before it
is checked.
"""

import asyncio
import hashlib
import io
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from swarm.errors import RemoteProtocolError, SwarmError
from swarm.net.daemon import NetworkError, RefusedByDaemonError
from swarm.net.overlay import Overlay
from swarm.net.serving_limits import (
    CHUNK_BYTES,
    CHUNK_TIMEOUT_S,
    Pace,
    Place,
    StreamLimits,
    UploadLimit,
)
from swarm.protocol.charter import MAX_CHARTER_BYTES
from swarm.protocol.reasons import Reason
from swarm.protocol.receipts import Receipt
from swarm.protocol.records import PROTOCOL_VERSIONS

MAX_FRAME_BYTES = 64 * 1024
MAX_NOTICE_BYTES = 4096
MAX_BLOBS_PER_REQUEST = 16
BLOCK_BYTES = 4 * CHUNK_BYTES
"""Read of a file at once, in a thread: a hop to one costs as much as writing a chunk does."""

OPEN_TIMEOUT_S = 10.0
FRAME_TIMEOUT_S = 10.0
ACK_TIMEOUT_S = 30.0
DOORSTEP_TIMEOUT_S = 5.0
"""For one who is turned away to read why."""

PROTOCOL_PREFIX = "/swarm-node/exchange/"
_ACK = b"\x06"
_HASH_BYTES = 32
_MAX_DETAIL_CHARS = 200

logger = logging.getLogger(__name__)

Blob = bytes | Path | None


class Status(StrEnum):
    """How a request ended; the first four travel in a reply."""

    OK = "ok"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    BUSY = "busy"
    INCOMPATIBLE = "incompatible"
    """The peer speaks no version of the exchange that this node speaks."""
    UNREACHABLE = "unreachable"
    """No connection, or it broke or stalled."""


_REPLY_STATUS = (Status.OK, Status.NOT_FOUND, Status.REFUSED, Status.BUSY)
_REFUSALS = (Reason.NOT_MEMBER, Reason.BANNED)


class ExchangeError(SwarmError):
    """A request got no payload, and no bytes were wrong: a later one may succeed.

    Args:
        status: why.
        detail: in words, partly a peer's.
        reason: of those in `swarm.protocol.reasons`, where the peer named one.
    """

    def __init__(self, status: Status, detail: str, reason: Reason | None = None) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.reason = reason


class Exchange:
    """Serves this node's payloads to peers and fetches theirs.

    Args:
        overlay: started before `start`.
        swarm_id: requests for another swarm are refused.
        charter: what is served as charter; None while there is none.
        blob: bytes or file of a content hash, or None.
        on_notice: called with the sender's peer id and the notice's body.
        on_sent: called with a peer and the size of a blob that was sent to it whole.
        max_streams: payloads sent at once; more are answered "busy".
        upload_bytes_per_s: of all streams together; None: no limit.
        refusal: why nothing that a peer sends is read; None: it is served.
        receipt: what a peer is told about its groups, with every reply.
        on_receipt: called with a peer's id and the receipt in its reply, None where there is none.
        on_refused: called with the id of a peer that was turned away.
        on_malformed: called with the id of a peer whose request broke the protocol, and how.
    """

    def __init__(
        self,
        overlay: Overlay,
        swarm_id: bytes,
        *,
        charter: Callable[[], bytes | None],
        blob: Callable[[bytes], Blob],
        on_notice: Callable[[str, bytes], None],
        max_streams: int = 16,
        upload_bytes_per_s: float | None = None,
        on_sent: Callable[[str, int], None] = lambda _peer, _size: None,
        refusal: Callable[[str], Reason | None] = lambda _: None,
        receipt: Callable[[str], Receipt | None] = lambda _: None,
        on_receipt: Callable[[str, Receipt | None], None] = lambda _peer, _receipt: None,
        on_refused: Callable[[str], None] = lambda _: None,
        on_malformed: Callable[[str, RemoteProtocolError], None] = lambda _peer, _error: None,
    ) -> None:
        self.served: Counter[str] = Counter()
        """Requests answered, by "<operation> <status>"."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self._overlay = overlay
        self._swarm_id = swarm_id
        self._charter = charter
        self._blob = blob
        self._on_notice = on_notice
        self._on_sent = on_sent
        self._limit = UploadLimit(upload_bytes_per_s)
        self._max_sending = self._limit.streams(max_streams)
        self._sending = 0
        self._streams = StreamLimits(max_streams)
        self._refusal = refusal
        self._receipt = receipt
        self._on_receipt = on_receipt
        self._on_refused = on_refused
        self._on_malformed = on_malformed

    async def start(self) -> None:
        """Serve from now on; the overlay ends it with its own stop."""
        for version in PROTOCOL_VERSIONS:
            await self._overlay.serve(f"{PROTOCOL_PREFIX}{version}", self._serve)

    # -- asking ----------------------------------------------------------------------------------

    async def fetch_charter(self, peer: str) -> bytes:
        """The charter that a peer serves; the caller checks it against the swarm's id.

        Raises:
            ExchangeError: unreachable, busy, not found, refused or incompatible.
            RemoteProtocolError: the peer broke the protocol.
        """
        async with self._request(peer, {"op": "charter"}) as (reader, sizes):
            if len(sizes) != 1 or sizes[0] is None or sizes[0] > MAX_CHARTER_BYTES:
                raise RemoteProtocolError(
                    Reason.SIZE, f"charter of {sizes} bytes; at most {MAX_CHARTER_BYTES} is right"
                )
            return await self._read_payload(reader, sizes[0], Pace(CHUNK_TIMEOUT_S))

    async def fetch_blob(
        self, peer: str, digest: bytes, max_bytes: int, size: int | None = None
    ) -> bytes:
        """The blob with this sha256.

        Args:
            max_bytes: this node's own limit.
            size: what it must have; None: any within the limit.

        Raises:
            ExchangeError: as above; not found; above `max_bytes`.
            RemoteProtocolError: another size than `size`, another hash, a broken frame.
        """
        async with self._request(peer, {"op": "blobs", "hashes": [digest]}) as (reader, sizes):
            (found,) = _checked_sizes(sizes, [size])
            if found is None:
                raise ExchangeError(Status.NOT_FOUND, f"no blob {digest.hex()} there")
            if found > max_bytes:
                raise ExchangeError(
                    Status.REFUSED,
                    f"blob {digest.hex()} has {found} bytes, this node's limit is {max_bytes}",
                )
            return await self._read_blob(reader, digest, found, Pace(CHUNK_TIMEOUT_S))

    async def fetch_blobs(
        self, peer: str, wanted: Sequence[tuple[bytes, int]]
    ) -> list[bytes | None]:
        """Several blobs in one stream, in order; None for one that the peer does not have.

        Args:
            wanted: (sha256, size in bytes) of each, at most `MAX_BLOBS_PER_REQUEST`.

        Raises:
            ExchangeError: as above.
            RemoteProtocolError: as above.
        """
        if not 0 < len(wanted) <= MAX_BLOBS_PER_REQUEST:
            raise ValueError(f"1 to {MAX_BLOBS_PER_REQUEST} blobs in a request, not {len(wanted)}")
        hashes = [digest for digest, _ in wanted]
        async with self._request(peer, {"op": "blobs", "hashes": hashes}) as (reader, sizes):
            found = _checked_sizes(sizes, [size for _, size in wanted])
            pace = Pace(CHUNK_TIMEOUT_S)
            return [
                None if size is None else await self._read_blob(reader, digest, size, pace)
                for digest, size in zip(hashes, found, strict=True)
            ]

    async def notify(self, peer: str, body: bytes) -> None:
        """Hand a peer a notice; returns when the peer has taken it.

        Raises:
            ExchangeError: as above.
            RemoteProtocolError: as above.
        """
        if len(body) > MAX_NOTICE_BYTES:
            raise ValueError(f"a notice has at most {MAX_NOTICE_BYTES} bytes, not {len(body)}")
        async with self._request(peer, {"op": "notice", "body": body}):
            pass

    @asynccontextmanager
    async def _request(
        self, peer: str, request: Mapping[str, Any]
    ) -> AsyncIterator[tuple[asyncio.StreamReader, list[int | None]]]:
        """Send a request and read its reply; the payloads are read inside the context."""
        protocols = [f"{PROTOCOL_PREFIX}{v}" for v in sorted(PROTOCOL_VERSIONS, reverse=True)]
        with _network_faults(peer):
            _, reader, writer = await self._overlay.open_stream(peer, protocols, OPEN_TIMEOUT_S)
            try:
                writer.write(_frame({**request, "swarm": self._swarm_id}))
                async with asyncio.timeout(FRAME_TIMEOUT_S):
                    await writer.drain()
                reply = await _read_frame(reader)
                self._read_receipt(peer, reply)
                yield reader, _check_reply(reply)
                with suppress(OSError):  # all is here; only the peer's own bookkeeping misses it
                    writer.write(_ACK)
                    async with asyncio.timeout(FRAME_TIMEOUT_S):
                        await writer.drain()
            finally:
                writer.close()

    def _read_receipt(self, peer: str, reply: Mapping[str, Any]) -> None:
        reason = _reason_of(reply)
        receipt = Receipt(str(reason), 0, 0) if reason else Receipt.from_map(reply.get("receipt"))
        self._on_receipt(peer, receipt)

    async def _read_blob(
        self, reader: asyncio.StreamReader, digest: bytes, size: int, pace: Pace
    ) -> bytes:
        payload = await self._read_payload(reader, size, pace)
        if hashlib.sha256(payload).digest() != digest:
            raise RemoteProtocolError(Reason.HASH, f"{size} bytes that are not {digest.hex()}")
        return payload

    async def _read_payload(self, reader: asyncio.StreamReader, size: int, pace: Pace) -> bytes:
        """Memory grows with what has arrived, not with what was promised."""
        chunks: list[bytes] = []
        left = size
        while left:
            wanted = min(CHUNK_BYTES, left)
            async with pace.chunk(wanted):
                chunks.append(await reader.readexactly(wanted))
            left -= wanted
        self.bytes_received += size
        return b"".join(chunks)

    # -- serving ---------------------------------------------------------------------------------

    async def _serve(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One incoming stream, from its request to the reader's last byte."""
        reason = self._refusal(peer)
        try:
            if reason is not None:
                await self._turn_away(peer, reason, reader, writer)
                return
            with self._streams.place(peer) as place:
                if place is Place.DROPPED:
                    self.served["dropped"] += 1
                    return
                if place is Place.BUSY:
                    await self._reply(writer, peer, "any", Status.BUSY, detail="too many streams")
                else:
                    await self._answer(peer, reader, writer)
                await _read_to_end(reader, ACK_TIMEOUT_S)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.served["broken off"] += 1
            logger.debug("stream of %s broken off: %r", peer, error)

    async def _turn_away(
        self, peer: str, reason: Reason, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Say why, and read nothing of what the peer has to say."""
        with self._streams.doorstep(peer) as told:
            if not told:
                self.served["dropped"] += 1
                return
            self._on_refused(peer)
            detail = f"{peer} is {'not on the roster' if reason is Reason.NOT_MEMBER else 'banned'}"
            await self._reply(writer, peer, "any", Status.REFUSED, detail=detail, reason=reason)
            await _read_to_end(reader, DOORSTEP_TIMEOUT_S)

    async def _answer(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        operation = "unknown"
        try:
            request = await _read_frame(reader)
            if request.get("swarm") != self._swarm_id:
                await self._reply(writer, peer, operation, Status.REFUSED, detail="another swarm")
                return
            match request.get("op"):
                case "notice":
                    operation = "notice"
                    self._on_notice(peer, _notice_body(request))
                    await self._reply(writer, peer, operation, Status.OK)
                case "charter":
                    operation = "charter"
                    await self._send(writer, peer, operation, [self._charter()])
                case "blobs":
                    operation = "blobs"
                    hashes = _hashes(request)
                    await self._send(
                        writer, peer, operation, [self._blob(digest) for digest in hashes]
                    )
                case other:
                    detail = f"no operation {_word(other)}"
                    await self._reply(writer, peer, operation, Status.REFUSED, detail=detail)
        except RemoteProtocolError as error:
            logger.info("request of %s refused: %.200r", peer, str(error))
            self._on_malformed(peer, error)
            await self._reply(writer, peer, operation, Status.REFUSED, detail=str(error))

    async def _send(
        self, writer: asyncio.StreamWriter, peer: str, operation: str, blobs: Sequence[Blob]
    ) -> None:
        """Reply with the sizes, then send what is there."""
        if self._sending >= self._max_sending:
            await self._reply(writer, peer, operation, Status.BUSY, detail="too many uploads")
            return
        if operation == "charter" and blobs[0] is None:
            await self._reply(writer, peer, operation, Status.NOT_FOUND, detail="no charter yet")
            return
        self._sending += 1
        try:
            with ExitStack() as stack:
                sources = await _open_sources(blobs, stack)
                sizes = [None if source is None else source[1] for source in sources]
                await self._reply(writer, peer, operation, Status.OK, sizes=sizes)
                pace = Pace(CHUNK_TIMEOUT_S)
                for source in sources:
                    if source is not None:
                        await self._send_payload(writer, *source, pace)
                        if operation == "blobs":
                            self._on_sent(peer, source[1])
        finally:
            self._sending -= 1

    async def _send_payload(
        self, writer: asyncio.StreamWriter, source: BinaryIO, size: int, pace: Pace
    ) -> None:
        left = size
        while left:
            block = await _read_block(source, min(BLOCK_BYTES, left))
            if not block:
                raise OSError(f"a blob ends {left} bytes before its size of {size}")
            for start in range(0, len(block), CHUNK_BYTES):
                chunk = block[start : start + CHUNK_BYTES]
                await asyncio.sleep(self._limit.reserve(len(chunk)))
                writer.write(chunk)
                async with pace.chunk(len(chunk)):
                    await writer.drain()
                self.bytes_sent += len(chunk)
            left -= len(block)

    async def _reply(
        self,
        writer: asyncio.StreamWriter,
        peer: str,
        operation: str,
        status: Status,
        *,
        sizes: Sequence[int | None] = (),
        detail: str = "",
        reason: Reason | None = None,
    ) -> None:
        self.served[f"{operation} {status}"] += 1
        reply: dict[str, Any] = {
            "status": str(status),
            "sizes": list(sizes),
            "detail": detail[:_MAX_DETAIL_CHARS],
        }
        receipt = self._receipt(peer)
        if reason is not None:
            reply["reason"] = str(reason)
        elif receipt is not None:
            reply["receipt"] = receipt.to_map()
        writer.write(_frame(reply))
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            await writer.drain()


def _frame(fields: Mapping[str, Any]) -> bytes:
    body: bytes = msgpack.packb(fields)
    return len(body).to_bytes(4, "little") + body


async def _read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises RemoteProtocolError for anything but a map with text keys; TimeoutError when late."""
    async with asyncio.timeout(FRAME_TIMEOUT_S):
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > MAX_FRAME_BYTES:
            raise RemoteProtocolError(
                Reason.MALFORMED, f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} is right"
            )
        body = await reader.readexactly(size)
    try:
        fields = msgpack.unpackb(body, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(Reason.MALFORMED, f"a frame is no MessagePack: {error}") from None
    if not isinstance(fields, dict):
        raise RemoteProtocolError(Reason.MALFORMED, "a frame is no map")
    return fields


def _word(value: Any) -> str:
    """A value that should be a short text, for a message; others by their type alone.

    What is nested deeper than the interpreter's stack has no text at all.
    """
    return repr(value[:40]) if isinstance(value, str) else f"of type {type(value).__name__}"


def _check_reply(reply: Mapping[str, Any]) -> list[int | None]:
    """The sizes of the payloads that follow.

    Raises:
        ExchangeError: the peer has no payload for this request.
        RemoteProtocolError: the reply is malformed.
    """
    status, sizes, detail = reply.get("status"), reply.get("sizes", []), reply.get("detail", "")
    if status not in _REPLY_STATUS or not isinstance(sizes, list) or not isinstance(detail, str):
        raise RemoteProtocolError(Reason.MALFORMED, f"a reply with status {_word(status)}")
    if status != Status.OK:
        raise ExchangeError(Status(status), f"{detail[:_MAX_DETAIL_CHARS]!r}", _reason_of(reply))
    if len(sizes) > MAX_BLOBS_PER_REQUEST or not all(
        size is None or (type(size) is int and size >= 0) for size in sizes
    ):
        raise RemoteProtocolError(Reason.MALFORMED, "a reply with sizes that are no sizes")
    return sizes


def _reason_of(reply: Mapping[str, Any]) -> Reason | None:
    """The reason for which a peer turned this node away; None for one not known here."""
    reason = reply.get("reason")
    return Reason(reason) if isinstance(reason, str) and reason in _REFUSALS else None


async def _read_to_end(reader: asyncio.StreamReader, timeout_s: float) -> None:
    """A stream that is closed with bytes unread is reset, and the reply lost with it."""
    async with asyncio.timeout(timeout_s):
        while await reader.read(CHUNK_BYTES):
            pass


def _checked_sizes(
    sizes: Sequence[int | None], wanted: Sequence[int | None]
) -> Sequence[int | None]:
    """The sizes of a reply, one for each wanted blob; a wanted None means any size."""
    if len(sizes) != len(wanted):
        raise RemoteProtocolError(
            Reason.MALFORMED, f"{len(sizes)} sizes for {len(wanted)} blobs asked for"
        )
    for size, right in zip(sizes, wanted, strict=True):
        if size is not None and right is not None and size != right:
            raise RemoteProtocolError(Reason.SIZE, f"a blob of {size} bytes; {right} is right")
    return sizes


def _notice_body(request: Mapping[str, Any]) -> bytes:
    body = request.get("body")
    if not isinstance(body, bytes) or len(body) > MAX_NOTICE_BYTES:
        raise RemoteProtocolError(
            Reason.MALFORMED, f"a notice's body is at most {MAX_NOTICE_BYTES} bytes"
        )
    return body


def _hashes(request: Mapping[str, Any]) -> list[bytes]:
    hashes = request.get("hashes")
    if (
        not isinstance(hashes, list)
        or not 0 < len(hashes) <= MAX_BLOBS_PER_REQUEST
        or not all(isinstance(digest, bytes) and len(digest) == _HASH_BYTES for digest in hashes)
    ):
        raise RemoteProtocolError(
            Reason.MALFORMED, f"'hashes' is a list of 1 to {MAX_BLOBS_PER_REQUEST} sha256"
        )
    return hashes


async def _open_sources(
    blobs: Sequence[Blob], stack: ExitStack
) -> list[tuple[BinaryIO, int] | None]:
    """Something to read from for each, and its size; a file that is gone by now is not there."""

    def open_all() -> list[tuple[BinaryIO, int] | None]:
        return [_open_source(blob, stack) for blob in blobs]

    if any(isinstance(blob, Path) for blob in blobs):
        return await asyncio.to_thread(open_all)
    return open_all()


def _open_source(blob: Blob, stack: ExitStack) -> tuple[BinaryIO, int] | None:
    if blob is None:
        return None
    if isinstance(blob, bytes):
        return io.BytesIO(blob), len(blob)
    try:
        file = stack.enter_context(blob.open("rb"))
    except FileNotFoundError:
        return None
    return file, os.fstat(file.fileno()).st_size


async def _read_block(source: BinaryIO, size: int) -> bytes:
    """What is in memory needs no thread."""
    if isinstance(source, io.BytesIO):
        return source.read(size)
    return await asyncio.to_thread(source.read, size)


@contextmanager
def _network_faults(peer: str) -> Iterator[None]:
    """Map what the layers below raise to ExchangeError."""
    try:
        yield
    except RefusedByDaemonError as error:
        text = str(error)
        if "protocols not supported" in text:
            raise ExchangeError(
                Status.INCOMPATIBLE,
                f"{peer} speaks none of the exchange's versions {PROTOCOL_VERSIONS}",
            ) from None
        raise ExchangeError(Status.UNREACHABLE, f"{peer}: {text[:_MAX_DETAIL_CHARS]}") from None
    except NetworkError as error:
        raise ExchangeError(Status.UNREACHABLE, f"{peer}: {error}") from None
    except TimeoutError:
        raise ExchangeError(Status.UNREACHABLE, f"{peer} is silent or too slow") from None
    except (OSError, asyncio.IncompleteReadError):
        raise ExchangeError(Status.UNREACHABLE, f"{peer} broke the stream off") from None
