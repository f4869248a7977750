"""How published groups become known: notices at once, DHT records every few seconds.

Owns: both directions of announcements. Does not know: what happens to announced groups.

A notice reaches the members that are up now and need fresh groups; the DHT is for those who missed
it. So the DHT gets only the newest groups, in a bounded number of records that replace each other,
however fast a node samples.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from swarm.errors import RemoteProtocolError
from swarm.net.exchange import Exchange, ExchangeError
from swarm.net.overlay import Overlay
from swarm.protocol.records import (
    ANNOUNCEMENT_TTL_S,
    MAX_GROUPS_PER_ANNOUNCEMENT,
    PROTOCOL_VERSIONS,
    Announcement,
    GroupRef,
    announcement_key,
    bucket_of,
    shard_of,
)

log = logging.getLogger(__name__)

DHT_PERIOD_S = 5.0
"""Time between two rounds of storing and reading announcement records."""

DHT_RECORDS = 4
"""Announcement records of one node in one bucket: the newest groups, the rest is only noticed."""

MAX_NOTIFIED = 16
"""Members that get a notice at once; more are chosen at random, the others read the DHT."""

MAX_UNDER_WAY = 4
"""Notices on their way to one member; it finds further groups in the DHT."""

MAX_SHARDS_READ = 4
"""Shards of announcements that are read in a round, chosen at random: what a node reads stays
bounded in a swarm of any size, and it needs groups of some members, not of all."""

MAX_BAD_RECORDS = 4096
"""Records remembered as no announcements."""


class Announcer:
    """Tells members of this node's groups and hands their announcements on.

    Args:
        recipients: members that want notices now.
        offer: called with (publisher, announcement) for all that arrives.
        reject: called with (publisher, why) for what is no announcement.
    """

    def __init__(
        self,
        overlay: Overlay,
        exchange: Exchange,
        swarm_id: bytes,
        shards: int,
        *,
        recipients: Callable[[], list[str]],
        offer: Callable[[str, Announcement], None],
        reject: Callable[[str, RemoteProtocolError], None],
    ) -> None:
        self._overlay = overlay
        self._exchange = exchange
        self._swarm_id = swarm_id
        self._shards = shards
        self._recipients = recipients
        self._offer = offer
        self._reject = reject
        self._recent: deque[GroupRef] = deque(maxlen=DHT_RECORDS * MAX_GROUPS_PER_ANNOUNCEMENT)
        self._policy_step = 0
        self._fresh = False
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue(maxsize=64)
        self._under_way: Counter[str] = Counter()
        self._random = random.Random()
        self._bad_records: OrderedDict[bytes, None] = OrderedDict()
        self.notices_sent = 0
        self.notices_failed = 0

    def publish(self, refs: Sequence[GroupRef], policy_step: int) -> None:
        """Announce stored groups; returns at once."""
        self._recent.extend(refs)
        self._policy_step = policy_step
        self._fresh = True
        for start in range(0, len(refs), MAX_GROUPS_PER_ANNOUNCEMENT):
            body = self._announcement(refs[start : start + MAX_GROUPS_PER_ANNOUNCEMENT]).pack()
            if self._outbox.full():
                self._outbox.get_nowait()
                self.notices_failed += 1
            self._outbox.put_nowait(body)

    def receive(self, publisher: str, body: bytes) -> None:
        """A notice arrived over a stream that authenticated its publisher."""
        try:
            announcement = Announcement.unpack(body)
        except RemoteProtocolError as error:
            self._reject(publisher, error)
        else:
            self._offer(publisher, announcement)

    def _receive_record(self, publisher: str, body: bytes) -> None:
        """The same record is read again and again: a bad one counts once, a good one each time,
        since its groups may have been forgotten or not fetched."""
        digest = hashlib.sha256(publisher.encode() + body).digest()
        if digest in self._bad_records:
            return
        try:
            announcement = Announcement.unpack(body)
        except RemoteProtocolError as error:
            self._bad_records[digest] = None
            if len(self._bad_records) > MAX_BAD_RECORDS:
                self._bad_records.popitem(last=False)
            self._reject(publisher, error)
        else:
            self._offer(publisher, announcement)

    async def run(self) -> None:
        """Send and read until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_notices())
            tasks.create_task(self._use_dht())

    def _announcement(self, refs: Sequence[GroupRef]) -> Announcement:
        return Announcement(
            versions=PROTOCOL_VERSIONS,
            groups=tuple(refs),
            policy_step=self._policy_step,
            created_ms=int(time.time() * 1000),
        )

    async def _send_notices(self) -> None:
        """Nobody waits for a member that is slow to take its own."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                body = await self._outbox.get()
                peers = self._recipients()
                if len(peers) > MAX_NOTIFIED:
                    peers = self._random.sample(peers, MAX_NOTIFIED)
                for peer in peers:
                    if self._under_way[peer] < MAX_UNDER_WAY:
                        self._under_way[peer] += 1
                        tasks.create_task(self._notify(peer, body))
                    else:
                        self.notices_failed += 1

    async def _notify(self, peer: str, body: bytes) -> None:
        try:
            await self._exchange.notify(peer, body)
        except (ExchangeError, RemoteProtocolError) as error:
            self.notices_failed += 1
            log.debug("notice not delivered: %s", error)
        else:
            self.notices_sent += 1
        finally:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]

    async def _use_dht(self) -> None:
        while True:
            if self._fresh:
                self._fresh = False
                await self._store_recent()
            await self._read()
            await asyncio.sleep(DHT_PERIOD_S)

    async def _store_recent(self) -> None:
        bucket = bucket_of(time.time())
        key = announcement_key(
            self._swarm_id, bucket, shard_of(self._overlay.peer_id, self._shards)
        )
        recent = list(self._recent)
        for slot in range(DHT_RECORDS):
            refs = recent[slot * MAX_GROUPS_PER_ANNOUNCEMENT :][:MAX_GROUPS_PER_ANNOUNCEMENT]
            if refs:
                body = self._announcement(refs).pack()
                await self._overlay.put(key, body, ttl_s=ANNOUNCEMENT_TTL_S, suffix=bytes([slot]))

    async def _read(self) -> None:
        bucket = bucket_of(time.time())
        for key in (
            announcement_key(self._swarm_id, when, shard)
            for shard in self._random.sample(
                range(self._shards), min(self._shards, MAX_SHARDS_READ)
            )
            for when in (bucket - 1, bucket)
        ):
            for (publisher, _), body in (await self._overlay.get(key)).items():
                if publisher != self._overlay.peer_id:
                    self._receive_record(publisher, body)
