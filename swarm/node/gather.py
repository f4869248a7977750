"""From an announcement to a group in the pool: choose, fetch, verify, reward.

Owns: the queue of announced groups and the download workers.
Does not know: how announcements arrive, what is trained.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from swarm.errors import RemoteProtocolError
from swarm.ledger import Ledger
from swarm.net.exchange import MAX_BLOBS_PER_REQUEST, Exchange, ExchangeError
from swarm.protocol.peers import PeerTable
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.reasons import Reason
from swarm.protocol.records import Announcement, GroupRef
from swarm.protocol.rollout import RolloutGroup

log = logging.getLogger(__name__)

MAX_QUEUED_PER_PEER = 64
"""Groups of one peer that wait to be fetched; older ones are forgotten first."""

MAX_QUEUES = 1024
"""Peers whose groups wait; the one that announced the longest ago is forgotten first."""
MAX_FETCH_BYTES = 32 << 20
"""Of one fetch, but for a single group that is larger; so much is in memory at once."""

MIN_FETCH_S = 30.0
"""For one fetch, where the age limit is shorter."""

Check = Callable[[GroupRef, str], None]
Verify = Callable[[bytes, GroupRef, str], RolloutGroup]
Score = Callable[[Sequence[RolloutGroup]], Awaitable[list[np.ndarray | None]]]


@dataclass(slots=True)
class GatherCounts:
    """What came from peers since the node's first start; sums of all peers."""

    announced: int = 0
    fetched: int = 0
    accepted: int = 0
    rejected: int = 0
    bytes: int = 0
    tokens: int = 0
    rejected_by_reason: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    """Groups that nothing is wrong with, but that were never fetched, by reason: no room, age."""


class Gatherer:
    """Downloads what the pool has room for, the newest first, round-robin over publishers.

    Args:
        live_peers: live members that sample, this node included.
        check: raises RemoteProtocolError for an announced group that is not worth fetching.
        verify: decodes a blob and checks it against reference and publisher.
        score: this node's own rewards for verified groups.
        prompt_ids: token ids of a prompt as this node renders it.
        keep: called with each accepted blob, to store it.
        ledger: is told what came.
    """

    def __init__(
        self,
        exchange: Exchange,
        pool: Pool,
        peers: PeerTable,
        *,
        streams: int,
        live_peers: Callable[[], int],
        check: Check,
        verify: Verify,
        score: Score,
        prompt_ids: Callable[[int], np.ndarray],
        keep: Callable[[bytes, bytes], bool],
        ledger: Ledger,
    ) -> None:
        self._exchange = exchange
        self._pool = pool
        self._peers = peers
        self._streams = streams
        self._live_peers = live_peers
        self._check = check
        self._verify = verify
        self._score = score
        self._prompt_ids = prompt_ids
        self._keep = keep
        self._ledger = ledger
        self._queues: OrderedDict[str, OrderedDict[bytes, tuple[GroupRef, float]]] = OrderedDict()
        self._busy: set[str] = set()
        self._coming = 0
        self._wake = asyncio.Event()
        self.counts = GatherCounts()

    def offer(self, publisher: str, announcement: Announcement) -> None:
        """Note groups that a peer announced; returns at once."""
        now = time.monotonic()
        self._peers.seen(publisher, now)
        if self._peers.quarantined(publisher, now):
            return
        queue = self._queues.get(publisher, OrderedDict())
        for ref in announcement.groups:
            if ref.hash in queue or self._pool.wants(ref, publisher) is Reason.DUPLICATE:
                continue
            self.counts.announced += 1
            queue[ref.hash] = (ref, now)
        while len(queue) > MAX_QUEUED_PER_PEER:
            queue.popitem(last=False)
            self._leave_out(Reason.NO_ROOM)
        if queue:
            self._queues[publisher] = queue
        while len(self._queues) > MAX_QUEUES:
            _, forgotten = self._queues.popitem(last=False)
            self._leave_out(Reason.NO_ROOM, len(forgotten))
        self._wake.set()

    def forget(self, publisher: str) -> None:
        """Fetch nothing of what a peer announced."""
        self._queues.pop(publisher, None)

    def wake(self) -> None:
        """The pool has room again."""
        self._wake.set()

    async def run(self, max_age_s: Callable[[], float]) -> None:
        """Fetch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            slots = asyncio.Semaphore(self._streams)
            while True:
                await slots.acquire()
                choice = self._choose(max_age_s())
                while choice is None:
                    self._wake.clear()
                    try:
                        async with asyncio.timeout(5.0):
                            await self._wake.wait()
                    except TimeoutError:
                        log.debug("nothing to fetch")
                    choice = self._choose(max_age_s())
                publisher, wanted = choice
                self._busy.add(publisher)
                self._coming += len(wanted)
                task = tasks.create_task(
                    self._fetch(publisher, wanted, max(MIN_FETCH_S, max_age_s()))
                )
                task.add_done_callback(partial(self._done, slots, len(wanted)))

    def _done(self, slots: asyncio.Semaphore, groups: int, _: asyncio.Task[None]) -> None:
        self._coming -= groups
        slots.release()
        self._wake.set()

    def _choose(self, max_age_s: float) -> tuple[str, list[tuple[GroupRef, float]]] | None:
        """The next publisher in turn that may be asked, and its newest groups that fit."""
        now = time.monotonic()
        for publisher in list(self._queues):
            if publisher in self._busy or not self._peers.may_fetch(publisher, now):
                continue
            queue = self._queues[publisher]
            wanted: list[tuple[GroupRef, float]] = []
            size = 0
            lacking = self._pool.lacks(publisher, self._live_peers())
            while queue and len(wanted) < min(lacking, MAX_BLOBS_PER_REQUEST):
                digest, (ref, announced_s) = queue.popitem(last=True)
                if now - announced_s > max_age_s:
                    self._leave_out(Reason.AGE, 1 + len(queue))
                    queue.clear()  # the rest is older
                    break
                verdict = self._pool.wants(ref, publisher, self._coming + len(wanted))
                too_much = bool(wanted) and size + ref.size_bytes > MAX_FETCH_BYTES
                if verdict is Reason.NO_ROOM or (verdict is None and too_much):
                    queue[digest] = (ref, announced_s)
                    break
                if verdict is None and self._passes(ref, publisher):
                    size += ref.size_bytes
                    wanted.append((ref, announced_s))
            if not queue:
                del self._queues[publisher]
            else:
                self._queues.move_to_end(publisher)
            if wanted:
                return publisher, wanted
        return None

    def _passes(self, ref: GroupRef, publisher: str) -> bool:
        """Check what is about to be fetched, and only that: who owns a prompt takes a hash for
        each member, and large swarms announce far more than a node uses."""
        try:
            self._check(ref, publisher)
        except RemoteProtocolError as error:
            self._pool.dismiss(ref.hash)
            self.reject(publisher, error)
            return False
        return True

    async def _fetch(
        self, publisher: str, wanted: list[tuple[GroupRef, float]], timeout_s: float
    ) -> None:
        """Fetch, check, reward and pool some groups.

        Args:
            timeout_s: for the bytes to come: what takes longer is too old when it is here, and
                would keep others from being fetched.
        """
        try:
            async with asyncio.timeout(timeout_s):
                blobs = await self._exchange.fetch_blobs(
                    publisher, [(ref.hash, ref.size_bytes) for ref, _ in wanted]
                )
        except (ExchangeError, TimeoutError) as error:
            self._peers.fetch_failed(publisher, time.monotonic())
            log.info("fetch from %s failed: %s", publisher, error or f"not in {timeout_s:.0f} s")
            return
        except RemoteProtocolError as error:
            # The rest of the stream is of no use: for the groups in it, this fetch has failed too.
            self._peers.fetch_failed(publisher, time.monotonic())
            self.reject(publisher, error)
            return
        finally:
            self._busy.discard(publisher)
            self._wake.set()
        if all(blob is None for blob in blobs):  # announced, and not to be had
            self._peers.fetch_failed(publisher, time.monotonic())
            return
        accepted: list[tuple[bytes, RolloutGroup, bytes, float]] = []
        for (ref, announced_s), blob in zip(wanted, blobs, strict=True):
            if blob is None:
                continue
            self.counts.fetched += 1
            self.counts.bytes += len(blob)
            self._peers.fetched(publisher, len(blob), time.monotonic())
            self._ledger.fetched(publisher, len(blob))
            try:
                group = self._verify(blob, ref, publisher)
                if self._pool.is_copy(group):
                    raise RemoteProtocolError(
                        Reason.DUPLICATE, "another peer published a completion of it before"
                    )
            except RemoteProtocolError as error:
                self._pool.dismiss(ref.hash)
                self.reject(publisher, error)
                continue
            self.counts.tokens += group.n_tokens
            accepted.append((ref.hash, group, blob, announced_s))
        if not accepted:
            return
        rewards = await self._score([group for _, group, _, _ in accepted])
        for (digest, group, blob, announced_s), reward in zip(accepted, rewards, strict=True):
            if reward is None:
                self._pool.dismiss(digest)
                continue
            pooled = PooledGroup(
                hash=digest,
                publisher=publisher,
                own=False,
                group=group,
                rewards=reward,
                prompt_token_ids=self._prompt_ids(group.prompt_id),
                arrived_s=announced_s,
            )
            if self._pool.add(pooled):
                self.counts.accepted += 1
                self._peers.accepted(publisher, time.monotonic())
                self._ledger.accepted(publisher, group.n_tokens)
                self._keep(digest, blob)
            else:
                self.reject(publisher, RemoteProtocolError(Reason.DUPLICATE, "taken before"))

    def _leave_out(self, reason: Reason, groups: int = 1) -> None:
        self.counts.left_out[reason] = self.counts.left_out.get(reason, 0) + groups

    def reject(self, publisher: str, error: RemoteProtocolError) -> None:
        """Count something of a peer that was turned down."""
        self.counts.rejected += 1
        by_reason = self.counts.rejected_by_reason
        by_reason[error.reason] = by_reason.get(error.reason, 0) + 1
        self._peers.rejected(publisher, error.reason, time.monotonic())
        self._ledger.rejected(publisher, error.reason)
        log.info("rejected a group of %s: %.300r", publisher, str(error))
