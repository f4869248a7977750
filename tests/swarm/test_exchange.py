"""The exchange over real libp2p streams on loopback: payloads, limits, stalls, bad peers."""

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from overlay_fixture import Nest, kill_daemon, nest, until

from swarm.errors import RemoteProtocolError
from swarm.net import exchange as exchange_module
from swarm.net.daemon import RefusedByDaemonError
from swarm.net.exchange import (
    MAX_BLOBS_PER_REQUEST,
    MAX_NOTICE_BYTES,
    Exchange,
    ExchangeError,
    Status,
)
from swarm.net.overlay import Overlay
from swarm.net.serving_limits import CHUNK_BYTES, MAX_STREAMS_PER_PEER
from swarm.protocol.identity import Identity
from swarm.protocol.reasons import Reason
from swarm.protocol.receipts import Receipt

SWARM = b"s" * 32
PROTOCOL = "/swarm-node/exchange/1"
QUICK_S = 8.0
"""Below each timeout that a test does not set itself; far above what a busy machine needs."""


DEEP = b"\x91" * 1020 + b"\x90"


class Library:
    """What one node of a test serves, and what it was told."""

    def __init__(self) -> None:
        self.charter: bytes | None = b"the charter"
        self.blobs: dict[bytes, bytes | Path] = {}
        self.notices: list[tuple[str, bytes]] = []

    def add(self, blob: bytes, path: Path | None = None) -> bytes:
        digest = hashlib.sha256(blob).digest()
        if path is not None:
            path.write_bytes(blob)
        self.blobs[digest] = blob if path is None else path
        return digest

    def exchange(self, overlay: Overlay, swarm_id: bytes = SWARM, **options: Any) -> Exchange:
        return Exchange(
            overlay,
            swarm_id,
            charter=lambda: self.charter,
            blob=self.blobs.get,
            on_notice=lambda peer, body: self.notices.append((peer, body)),
            **options,
        )


async def serving(
    nests: Nest, library: Library, **options: Any
) -> tuple[Overlay, Exchange, Overlay, Exchange]:
    """A server with its exchange, and a reader with its own."""
    server, reader = await nests.swarm(2)
    serves = library.exchange(server, **options)
    await serves.start()
    return server, serves, reader, Library().exchange(reader)


def frame(value: Any) -> bytes:
    body = value if isinstance(value, bytes) else msgpack.packb(value)
    return len(body).to_bytes(4, "little") + body


async def read_reply(reader: asyncio.StreamReader) -> Any:
    async with asyncio.timeout(10):
        size = int.from_bytes(await reader.readexactly(4), "little")
        return msgpack.unpackb(await reader.readexactly(size))


async def fails(awaitable: Any, status: Status) -> str:
    """The detail of the ExchangeError that must come."""
    with pytest.raises(ExchangeError) as caught:
        await awaitable
    assert caught.value.status == status
    return caught.value.detail


async def breaks_protocol(awaitable: Any, reason: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        await awaitable
    assert caught.value.reason == reason


BAD_REQUESTS = [
    (frame({"op": "dance", "swarm": SWARM}), "no operation"),
    (frame({"op": ["charter"], "swarm": SWARM}), "no operation"),
    # Nested so deep that Python cannot make a text of it.
    (frame(b"\x82\xa5swarm\xc4\x20" + SWARM + b"\xa2op" + DEEP), "no operation"),
    (frame(b"\x82\xa2op\xa7charter\xa5swarm" + DEEP), "another swarm"),
    (frame({"op": "charter"}), "another swarm"),
    (frame({"op": "charter", "swarm": "text"}), "another swarm"),
    (frame({"op": "blobs", "swarm": SWARM}), "'hashes'"),
    (frame({"op": "blobs", "swarm": SWARM, "hashes": []}), "'hashes'"),
    (frame({"op": "blobs", "swarm": SWARM, "hashes": [b"short"]}), "'hashes'"),
    (frame({"op": "blobs", "swarm": SWARM, "hashes": [b"h" * 32] * 17}), "'hashes'"),
    (frame({"op": "notice", "swarm": SWARM}), "notice"),
    (frame({"op": "notice", "swarm": SWARM, "body": b"x" * 4097}), "4096"),
    (frame([1, 2]), "no map"),
    (frame(b"\xc1"), "MessagePack"),
    (frame(b"\x81\x81\x00\x00\x00"), "MessagePack"),
    (frame(b"\x91" * 5000), "MessagePack"),
    (frame(b""), "MessagePack"),
    ((65537).to_bytes(4, "little"), "65536"),
    (b"\xff\xff\xff\xff", "65536"),
]

BAD_REPLIES = [
    (b"\xff\xff\xff\xff", "malformed"),
    (frame(b"\xc1"), "malformed"),
    (frame([]), "malformed"),
    (frame({}), "malformed"),
    (frame({"status": "weird"}), "malformed"),
    (frame({"status": ["ok"]}), "malformed"),
    (frame(b"\x81\xa6status" + DEEP), "malformed"),
    (frame(b"\x82\xa6status\xa2ok\xa5sizes" + DEEP), "malformed"),
    (frame({"status": "ok", "sizes": [4] * 60_000}), "malformed"),
    (frame({"status": "incompatible"}), "malformed"),
    (frame({"status": "ok", "sizes": 4}), "malformed"),
    (frame({"status": "ok", "sizes": []}), "malformed"),
    (frame({"status": "ok", "sizes": [4, 4]}), "malformed"),
    (frame({"status": "ok", "sizes": [-1]}), "malformed"),
    (frame({"status": "ok", "sizes": [True]}), "malformed"),
    (frame({"status": "ok", "sizes": [4.0]}), "malformed"),
    (frame({"status": "busy", "detail": 7}), "malformed"),
    (frame({"status": "ok", "sizes": [2**62]}), "size"),
    (frame({"status": "ok", "sizes": [5]}) + b"12345", "size"),
    (frame({"status": "ok", "sizes": [4]}) + b"evil", "hash"),
]


class Evil:
    """A peer that answers any request with the same bytes."""

    def __init__(self, overlay: Overlay) -> None:
        self.peer_id = overlay.peer_id
        self.answer = b""
        self.waits = False

    async def serve(self, _peer: str, reader: Any, writer: Any) -> None:
        # All of it: what is closed with bytes unread is reset, and the answer may be lost with it.
        await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))
        writer.write(self.answer)
        await writer.drain()
        if self.waits:
            await reader.read()


class TestPayloads:
    async def test_charter_blobs_and_notices_arrive(self, tmp_path: Path) -> None:
        library = Library()
        large = bytes(range(256)) * 8192 + b"odd"  # 2 MiB and 3 bytes: nine chunks
        small, empty = library.add(b"small"), library.add(b"")
        filed = library.add(large, tmp_path / "large")
        gone = library.add(b"deleted", tmp_path / "gone")
        (tmp_path / "gone").unlink()
        async with nest() as nests:
            server, serves, reader, asks = await serving(nests, library)
            assert await asks.fetch_charter(server.peer_id) == b"the charter"
            assert await asks.fetch_blob(server.peer_id, filed, max_bytes=len(large)) == large
            wanted = [
                (small, 5),
                (b"?" * 32, 7),
                (filed, len(large)),
                (empty, 0),
                (gone, 7),
                (small, 5),
            ]
            found = await asks.fetch_blobs(server.peer_id, wanted)
            assert found == [b"small", None, large, b"", None, b"small"]
            await asks.notify(server.peer_id, b"n" * MAX_NOTICE_BYTES)
            assert library.notices == [(reader.peer_id, b"n" * MAX_NOTICE_BYTES)]
            assert serves.served == {"charter ok": 1, "blobs ok": 2, "notice ok": 1}
            sent = 2 * len(large) + 10 + len(b"the charter")
            assert (serves.bytes_sent, asks.bytes_received) == (sent, sent)

    async def test_what_is_not_there(self) -> None:
        library = Library()
        library.charter = None
        async with nest() as nests:
            server, _, reader, asks = await serving(nests, library)
            await fails(asks.fetch_charter(server.peer_id), Status.NOT_FOUND)
            blob = asks.fetch_blob(server.peer_id, b"?" * 32, max_bytes=9)
            await fails(blob, Status.NOT_FOUND)
            elsewhere = Library().exchange(reader, swarm_id=b"x" * 32)
            detail = await fails(elsewhere.notify(server.peer_id, b""), Status.REFUSED)
            assert "another swarm" in detail
            assert library.notices == []
            nobody = Identity.generate().peer_id
            await fails(asks.fetch_charter(nobody), Status.UNREACHABLE)

    async def test_own_limits_hold_before_anything_is_read(self) -> None:
        library = Library()
        digest = library.add(b"x" * 1000)
        async with nest() as nests:
            server, _, _, asks = await serving(nests, library)
            blob = asks.fetch_blob(server.peer_id, digest, max_bytes=999)
            assert "limit is 999" in await fails(blob, Status.REFUSED)
            with pytest.raises(ValueError, match="at most 4096"):
                await asks.notify(server.peer_id, b"x" * (MAX_NOTICE_BYTES + 1))
            with pytest.raises(ValueError, match="1 to 16 blobs"):
                await asks.fetch_blobs(
                    server.peer_id, [(digest, 1000)] * (MAX_BLOBS_PER_REQUEST + 1)
                )
            assert asks.bytes_received == 0

    async def test_it_goes_on_after_the_network_daemon_died(self) -> None:
        library = Library()
        async with nest() as nests:
            server, _, reader, asks = await serving(nests, library)
            kill_daemon(server)
            await fails(asks.fetch_charter(server.peer_id), Status.UNREACHABLE)
            await until(lambda: server.restarts == 1)
            await until(lambda: reader.peer_id in server.connected())
            assert await asks.fetch_charter(server.peer_id) == b"the charter"


class TestVersions:
    async def test_the_highest_common_version_is_used(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with nest() as nests:
            server = await nests.start()
            library = Library()
            await library.exchange(server).start()
            newer = Library()
            newer.charter = b"by version 2"
            await server.serve("/swarm-node/exchange/2", newer.exchange(server)._serve)
            reader = await nests.start(await server.addresses())
            asks = Library().exchange(reader)
            assert await asks.fetch_charter(server.peer_id) == b"the charter"
            monkeypatch.setattr(exchange_module, "PROTOCOL_VERSIONS", (0, 1))
            assert await asks.fetch_charter(server.peer_id) == b"the charter"
            monkeypatch.setattr(exchange_module, "PROTOCOL_VERSIONS", (1, 2))
            assert await asks.fetch_charter(server.peer_id) == b"by version 2"
            monkeypatch.setattr(exchange_module, "PROTOCOL_VERSIONS", (3,))
            await fails(asks.fetch_charter(server.peer_id), Status.INCOMPATIBLE)
            with pytest.raises(RefusedByDaemonError):
                await reader.open_stream(server.peer_id, ["/swarm-node/exchange/4"], 5.0)


class TestBadClients:
    async def test_bad_requests_are_refused_in_words(self) -> None:
        library = Library()
        async with nest() as nests:
            server, serves, reader, asks = await serving(nests, library)
            for request, said in BAD_REQUESTS:
                _, answer, writer = await reader.open_stream(server.peer_id, [PROTOCOL], 5.0)
                writer.write(request)
                reply = await read_reply(answer)
                writer.close()
                assert reply["status"] == "refused", request
                assert said in reply["detail"]
                assert len(reply["detail"]) <= 200
            assert library.notices == []
            assert await asks.fetch_charter(server.peer_id) == b"the charter"
            await until(lambda: len(serves._streams) == 0, QUICK_S)

    async def test_who_is_not_let_in_is_told_why_and_not_read(self) -> None:
        refused: list[str] = []
        malformed: list[str] = []
        receipts: list[Receipt | None] = []
        library = Library()
        verdicts = {"stranger": Reason.NOT_MEMBER}
        async with nest() as nests:
            server, reader = await nests.swarm(2)
            serves = library.exchange(
                server,
                refusal=lambda _: verdicts.get("stranger"),
                on_refused=refused.append,
                on_malformed=lambda peer, error: malformed.append(f"{peer} {error.reason}"),
                receipt=lambda _: Receipt("age", 7, 3),
            )
            await serves.start()
            asks = Library().exchange(reader, on_receipt=lambda _, said: receipts.append(said))
            with pytest.raises(ExchangeError) as caught:
                await asks.fetch_charter(server.peer_id)
            assert (caught.value.status, caught.value.reason) == ("refused", "not_member")
            assert reader.peer_id in caught.value.detail
            await fails(asks.notify(server.peer_id, b"let me in"), Status.REFUSED)
            _, answer, writer = await reader.open_stream(server.peer_id, [PROTOCOL], 5.0)
            writer.write(b"\xff" * 64)  # no frame at all
            assert (await read_reply(answer))["reason"] == "not_member"
            writer.close()
            assert receipts == [Receipt("not_member", 0, 0)] * 2
            assert refused == [reader.peer_id] * 3
            assert (library.notices, malformed) == ([], [])

            verdicts.clear()
            await asks.notify(server.peer_id, b"and now")
            assert library.notices == [(reader.peer_id, b"and now")]
            assert receipts[2:] == [Receipt("age", 7, 3)]
            with pytest.raises(ExchangeError):
                await asks.fetch_blob(server.peer_id, b"h" * 32, 5)
            assert receipts[3:] == [Receipt("age", 7, 3)]
            _, answer, writer = await reader.open_stream(server.peer_id, [PROTOCOL], 5.0)
            writer.write(b"\xff" * 64)
            assert (await read_reply(answer))["status"] == "refused"
            writer.close()
            assert malformed == [f"{reader.peer_id} malformed"]

    async def test_more_uploads_than_slots_are_answered_busy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exchange_module, "CHUNK_TIMEOUT_S", 3.0)
        library = Library()
        huge = library.add(bytes(64 << 20))  # more than all buffers on the way hold
        async with nest() as nests:
            server, serves, reader, asks = await serving(nests, library, max_streams=2)
            streams = []
            for _ in range(2):
                _, answer, writer = await reader.open_stream(server.peer_id, [PROTOCOL], 5.0)
                writer.write(frame({"op": "blobs", "swarm": SWARM, "hashes": [huge]}))
                assert (await read_reply(answer))["sizes"] == [64 << 20]
                streams.append(writer)
            await fails(asks.fetch_charter(server.peer_id), Status.BUSY)
            await asks.notify(server.peer_id, b"small things go on")
            await until(lambda: serves._sending == 0)  # the stalled ones are broken off
            assert await asks.fetch_charter(server.peer_id) == b"the charter"
            for writer in streams:
                writer.close()
            await until(lambda: serves.served["broken off"] == 2)

    async def test_one_peer_gets_so_many_streams_and_loses_silent_ones(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exchange_module, "FRAME_TIMEOUT_S", 5.0)
        async with nest() as nests:
            server, serves, reader, asks = await serving(nests, Library())
            writers = []
            for _ in range(MAX_STREAMS_PER_PEER):
                _, _, writer = await reader.open_stream(server.peer_id, [PROTOCOL], 5.0)
                writers.append(writer)
            await until(lambda: serves._streams.of(reader.peer_id) == MAX_STREAMS_PER_PEER)
            for _ in range(5):
                await fails(asks.notify(server.peer_id, b""), Status.BUSY)
            other = await nests.start(await server.addresses())
            await Library().exchange(other).notify(server.peer_id, b"another peer is served")
            await until(lambda: len(serves._streams) == 0)
            await asks.notify(server.peer_id, b"")
            for writer in writers:
                writer.close()

    async def test_a_flood_of_streams_is_dropped(self) -> None:
        async with nest() as nests:
            server, serves, reader, _ = await serving(nests, Library())
            writers = []
            for _ in range(2 * MAX_STREAMS_PER_PEER + 3):
                _, _, writer = await reader.open_stream(server.peer_id, [PROTOCOL], 5.0)
                writers.append(writer)
            await until(lambda: serves.served["dropped"] == 3)
            assert serves._streams.of(reader.peer_id) == 2 * MAX_STREAMS_PER_PEER
            for writer in writers:
                writer.close()
            await until(lambda: len(serves._streams) == 0, QUICK_S)

    async def test_a_client_that_leaves_frees_its_slot(self) -> None:
        library = Library()
        huge = library.add(bytes(64 << 20))
        async with nest() as nests:
            server, serves, _, asks = await serving(nests, library, max_streams=1)
            fetching = asyncio.create_task(
                asks.fetch_blob(server.peer_id, huge, max_bytes=64 << 20)
            )
            await until(lambda: serves.bytes_sent > 0)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            await until(lambda: serves._sending == 0, QUICK_S)
            assert await asks.fetch_charter(server.peer_id) == b"the charter"

    async def test_a_fault_of_this_program_ends_one_stream_only(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        library = Library()
        async with nest() as nests:
            server, serves, _, asks = await serving(nests, library)
            serves._on_notice = lambda _peer, _body: 1 // 0
            await fails(asks.notify(server.peer_id, b""), Status.UNREACHABLE)
            assert "ZeroDivisionError" in caplog.text
            assert await asks.fetch_charter(server.peer_id) == b"the charter"


class TestBadServers:
    """The client against a peer that answers with whatever bytes the test says."""

    async def evil(self, nests: Nest) -> tuple[Evil, Exchange]:
        server, reader = await nests.swarm(2)
        evil = Evil(server)
        await server.serve(PROTOCOL, evil.serve)
        return evil, Library().exchange(reader)

    async def test_wrong_bytes(self) -> None:
        digest = hashlib.sha256(b"good").digest()
        async with nest() as nests:
            evil, asks = await self.evil(nests)
            for evil.answer, reason in BAD_REPLIES:
                await breaks_protocol(asks.fetch_blobs(evil.peer_id, [(digest, 4)]), reason)
            evil.answer = frame({"status": "ok", "sizes": [1 << 40]})
            await breaks_protocol(asks.fetch_charter(evil.peer_id), "size")
            evil.answer = frame({"status": "ok", "sizes": [4]}) + b"good"
            assert await asks.fetch_blobs(evil.peer_id, [(digest, 4)]) == [b"good"]

    async def test_silence_and_a_broken_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exchange_module, "FRAME_TIMEOUT_S", 0.5)
        monkeypatch.setattr(exchange_module, "CHUNK_TIMEOUT_S", 0.5)
        started_reply = frame({"status": "ok", "sizes": [8 << 20]}) + b"x" * 1000
        async with nest() as nests:
            evil, asks = await self.evil(nests)
            for evil.answer in (b"", b"\x10\x00\x00\x00half a fra", started_reply):
                for evil.waits in (True, False):
                    started = time.monotonic()
                    blob = asks.fetch_blob(evil.peer_id, b"h" * 32, max_bytes=8 << 20)
                    await fails(blob, Status.UNREACHABLE)
                    assert time.monotonic() - started < QUICK_S

    async def test_a_trickle_is_a_stall(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A byte now and then keeps no stream alive: the time is for a whole chunk."""
        monkeypatch.setattr(exchange_module, "CHUNK_TIMEOUT_S", 1.0)
        async with nest() as nests:
            evil, reader = await nests.swarm(2)

            async def serve(_peer: str, _requests: Any, writer: Any) -> None:
                writer.write(frame({"status": "ok", "sizes": [CHUNK_BYTES]}))
                while not writer.is_closing():
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.1)

            await evil.serve(PROTOCOL, serve)
            started = time.monotonic()
            asked = Library().exchange(reader).fetch_blob(evil.peer_id, b"h" * 32, CHUNK_BYTES)
            await fails(asked, Status.UNREACHABLE)
            assert time.monotonic() - started < QUICK_S

    async def test_payloads_each_just_in_time_are_a_stall(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sixteen payloads have no more patience than one."""
        monkeypatch.setattr(exchange_module, "CHUNK_TIMEOUT_S", 1.0)
        wanted = [(hashlib.sha256(bytes([n])).digest(), 1) for n in range(16)]
        async with nest() as nests:
            evil, reader = await nests.swarm(2)

            async def serve(_peer: str, _requests: Any, writer: Any) -> None:
                writer.write(frame({"status": "ok", "sizes": [1] * 16}))
                for number in range(16):
                    await asyncio.sleep(0.7)
                    writer.write(bytes([number]))
                    await writer.drain()

            await evil.serve(PROTOCOL, serve)
            started = time.monotonic()
            await fails(
                Library().exchange(reader).fetch_blobs(evil.peer_id, wanted), Status.UNREACHABLE
            )
            assert time.monotonic() - started < QUICK_S

    async def test_a_server_that_is_killed_in_the_middle(self) -> None:
        library = Library()
        huge = library.add(bytes(64 << 20))
        async with nest() as nests:
            server, serves, _, asks = await serving(nests, library)
            fetching = asyncio.create_task(
                asks.fetch_blob(server.peer_id, huge, max_bytes=64 << 20)
            )
            await until(lambda: serves.bytes_sent > 0)
            kill_daemon(server)
            await fails(fetching, Status.UNREACHABLE)
