"""A member that lies in every message, for tests: real overlay, real streams, false contents."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack

from swarm.net.exchange import Exchange
from swarm.net.overlay import Overlay
from swarm.protocol.charter import Charter
from swarm.protocol.codec import blob_bytes
from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite
from swarm.protocol.records import (
    HEARTBEAT_TTL_S,
    PROTOCOL_VERSIONS,
    Announcement,
    GroupRef,
    Heartbeat,
    heartbeat_key,
    shard_of,
)

STREAM = "/swarm-node/exchange/1"
DEEP = b"\x91" * 1020 + b"\x90"
ANSWERS = [
    b"\x81\xa6status" + DEEP,
    b"\x82\xa6status\xa2ok\xa5sizes" + DEEP,
    b"",
    b"\xff\xff\xff\xff",
    msgpack.packb({"status": "\x1b]0;owned\x07"}),
    msgpack.packb({"status": "busy", "detail": "\x1b[2J" * 30}),
    msgpack.packb({"status": "ok", "sizes": [2**62]}),
    msgpack.packb({"status": "ok", "sizes": [4]}) + b"evil",
]


class Liar:
    """A member by hivemind's own means, with an exchange that answers nonsense."""

    def __init__(self, overlay: Overlay, charter: Charter) -> None:
        self.overlay = overlay
        self.charter = charter
        self.asked = 0

    async def answer(self, _peer: str, reader: Any, writer: Any) -> None:
        """Each stream gets the next of the wrong answers; every ninth gets none at all."""
        self.asked += 1
        size = int.from_bytes(await reader.readexactly(4), "little")
        await reader.readexactly(size)
        if self.asked % 9 == 8:
            await reader.read()
            return
        body = ANSWERS[self.asked % 9 % len(ANSWERS)]
        writer.write(len(body).to_bytes(4, "little") + body)
        await writer.drain()
        await reader.read()

    async def say(self, body: bytes) -> None:
        """Store a heartbeat record, whatever it holds."""
        shard = shard_of(self.overlay.peer_id, self.charter.manifest.record_shards)
        key = heartbeat_key(self.charter.swarm_id, shard)
        await self.overlay.put(key, body, ttl_s=HEARTBEAT_TTL_S)

    def heartbeat(self) -> bytes:
        stranger = Identity.generate().peer_id
        return Heartbeat(
            versions=(*PROTOCOL_VERSIONS, 65_535),
            addresses=tuple(
                f"/dns4/{host}/tcp/9/p2p/{stranger}" for host in ("a" * 64, "a..b", ".")
            ),
            name="\x1b]0;owned\x07[bold]\u202e",
            software="99999.0",
            model="\x1b[2J" * 9,
            parameters=2**53 - 1,
            mode="\x00",
            role="organizer",
            step=2**53 - 1,
            sampling=True,
            state="\x9b31m",
            accuracy=1.0,
            reward=-1e30,
            tokens_per_s=1e30,
            groups_made=2**53 - 1,
            groups_used=2**53 - 1,
            amendments=2**32 - 1,
            peers=2**32 - 1,
            started_s=2.0**40,
        ).pack()

    def announcement(self, number: int) -> bytes:
        """Groups that could be: this node's, of the right counts; nobody has them."""
        refs = [
            GroupRef(bytes([number]) * 31 + bytes([i]), blob_bytes(4, 8), 2**64 - 1, i, 4, 8)
            for i in range(8)
        ]
        return Announcement(PROTOCOL_VERSIONS, tuple(refs), 2**64 - 1, 2**64 - 1).pack()


@asynccontextmanager
async def liar(invite: Invite) -> AsyncIterator[tuple[Liar, Exchange]]:
    with tempfile.TemporaryDirectory(prefix="sn", dir="/tmp") as folder:
        key = Path(folder) / "key"
        overlay = Overlay(
            Identity.load_or_create(key),
            key,
            host="127.0.0.1",
            port=0,
            runtime_dir=Path(folder),
            bootstrap=invite.addresses,
        )
        exchange = Exchange(
            overlay,
            invite.swarm_id,
            charter=lambda: None,
            blob=lambda _: None,
            on_notice=lambda _peer, _body: None,
        )
        try:
            await overlay.start()
            async with asyncio.timeout(60):
                while not overlay.connected():  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.1)
            data = await exchange.fetch_charter(overlay.connected()[0])
            made = Liar(overlay, Charter.from_bytes(data, invite.swarm_id))
            await overlay.serve(STREAM, made.answer)
            yield made, exchange
        finally:
            await overlay.stop()
