"""Accepted groups that wait to be trained on, and the memory of those that were.

Owns: what a batch is made of (shares, order), how much of others' work is kept, that each group is
used once ever. Does not know: whether a group is valid (`swarm.protocol.verify`), the clock, disk,
how groups are fetched.

A batch of B groups, with n live members, this one included, and a share of s = ceil(B / n):
at least s own groups where there are so many, at most s of any other publisher, in turn, each
one's newest first; own groups, oldest first, fill the rest. Where that does not make B groups there
is no batch yet and the node samples: so no peer gets more than its share of a batch by sampling
faster than others or by flooding, and nobody trains on others' work alone. Where the node's owner
caps a peer's part of a batch lower than s, its own groups fill what that leaves.
"""

import hashlib
import struct
from collections import OrderedDict
from dataclasses import dataclass
from math import ceil

import msgpack
import numpy as np
from numpy.typing import NDArray

from swarm.errors import DataError
from swarm.protocol.copies import SeenCompletions
from swarm.protocol.reasons import Reason
from swarm.protocol.records import GroupRef
from swarm.protocol.rollout import RolloutGroup

# Groups remembered as used; an entry has 32 bytes in a checkpoint and some 250 in
# memory. Announcements live for minutes, so only a publisher that repeats itself days later gets
# past it.
MAX_SEEN_GROUPS = 16_384
# Groups that were turned down; a memory of its own, so that nobody who announces much that is wrong
# makes this node forget what it has used.
MAX_DISMISSED = 8192
# Publishers whose turn is remembered.
_MAX_TURNS = 1024
_DIGEST_BYTES = 16
_NO_PLACE = bytes(_DIGEST_BYTES)
_SEEN_FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class PooledGroup:
    """An accepted group with what this node found out about it.

    Attributes:
        hash: 32 bytes, of the blob.
        publisher: peer id.
        own: whether this node sampled it.
        group: the completions.
        rewards: float32 (G,), computed by this node.
        prompt_token_ids: int32 (P,), the rendered prompt.
        arrived_s: local time at which it came; the publisher's clock has no say.
    """

    hash: bytes
    publisher: str
    own: bool
    group: RolloutGroup
    rewards: NDArray[np.float32]
    prompt_token_ids: NDArray[np.int32]
    arrived_s: float


class SeenGroups:
    """Groups not to be taken again, by content and by (publisher, epoch, prompt); bounded."""

    def __init__(self) -> None:
        # Both are digests of 16 bytes; the oldest entry is the first.
        self._place_of: OrderedDict[bytes, bytes] = OrderedDict()
        self._places: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._place_of)

    def add(self, group_hash: bytes, place: bytes) -> bool:
        """Remember a group; False: its content or its place is known already."""
        digest = group_hash[:_DIGEST_BYTES]
        if digest in self._place_of or place in self._places:
            return False
        self._place_of[digest] = place
        if place != _NO_PLACE:
            self._places.add(place)
        if len(self._place_of) > MAX_SEEN_GROUPS:
            _, forgotten = self._place_of.popitem(last=False)
            self._places.discard(forgotten)
        return True

    def holds(self, group_hash: bytes, place: bytes) -> bool:
        """Whether `add` would return False."""
        return group_hash[:_DIGEST_BYTES] in self._place_of or place in self._places

    def to_bytes(self, leave_out: set[bytes]) -> bytes:
        """All entries, oldest first, but those with a hash in `leave_out`."""
        left_out = {group_hash[:_DIGEST_BYTES] for group_hash in leave_out}
        entries = [entry for entry in self._place_of.items() if entry[0] not in left_out]
        digests = b"".join(digest for digest, _ in entries)
        places = b"".join(place for _, place in entries)
        packed: bytes = msgpack.packb([_SEEN_FORMAT, digests, places])
        return packed

    def load(self, data: bytes) -> None:
        """Add the entries of `to_bytes`.

        Raises:
            DataError: `data` is something else.
        """
        try:
            match msgpack.unpackb(data):
                case [int(version), bytes(digests), bytes(places)] if (
                    version == _SEEN_FORMAT
                    and len(digests) == len(places)
                    and len(digests) % _DIGEST_BYTES == 0
                ):
                    pass
                case _:
                    raise ValueError("not [1, digests, places]")
        except (ValueError, TypeError) as error:
            raise DataError(f"checkpoint: the list of groups already used: {error}") from None
        for start in range(0, len(digests), _DIGEST_BYTES):
            end = start + _DIGEST_BYTES
            self.add(digests[start:end], places[start:end])


class Pool:
    """The waiting groups of one node.

    Args:
        batch_groups: B, groups in a batch. Of others' groups two batches are kept.
        max_peer_share: part of a batch, above 0 and up to 1, that one peer may have at most; it
            may always have one group.
    """

    def __init__(self, batch_groups: int, max_peer_share: float = 1.0) -> None:
        if batch_groups < 1:
            raise ValueError(f"batch_groups must be at least 1, not {batch_groups}")
        self._most_of_a_peer = ceil(batch_groups * max_peer_share)
        self._batch_groups = batch_groups
        self._capacity = 2 * batch_groups
        self._own: dict[bytes, PooledGroup] = {}
        self._foreign: dict[str, dict[bytes, PooledGroup]] = {}
        self._seen = SeenGroups()
        self._completions = SeenCompletions()
        self._dismissed: OrderedDict[bytes, None] = OrderedDict()
        # Publisher -> number of the batch that last held a group of it; the longest ago is first.
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._batches = 0
        self.evicted = 0

    def pooled(self) -> list[PooledGroup]:
        """All waiting groups: own ones, then others', each oldest first."""
        foreign = [group for groups in self._foreign.values() for group in groups.values()]
        return sorted(self._own.values(), key=_by_arrival) + sorted(foreign, key=_by_arrival)

    def room(self) -> int:
        """How many groups of others fit without eviction."""
        return self._capacity - sum(len(groups) for groups in self._foreign.values())

    def lacks(self, publisher: str, live_peers: int) -> int:
        """How many more groups of a publisher two batches could use: more would only grow old."""
        held = len(self._foreign.get(publisher, ()))
        return max(0, 2 * self._cap(live_peers) - held)

    def wants(self, ref: GroupRef, publisher: str, coming: int = 0) -> Reason | None:
        """Why an announced group of another node is not worth fetching now; None: it is.

        Args:
            ref: the announced group.
            publisher: who announced it.
            coming: groups that are being fetched, and take room as soon as they are here.

        In a full pool there is room only for a publisher that has at least two groups fewer in it
        than another one: it takes the place of that one's oldest. So a flood of announcements
        neither keeps others out nor makes this node fetch more than it uses.
        """
        if self._seen.holds(ref.hash, _place(publisher, ref.epoch, ref.prompt_id)):
            return Reason.DUPLICATE
        if ref.hash in self._dismissed:
            return Reason.DUPLICATE
        if self.room() > coming:
            return None
        if not self._foreign:
            return Reason.NO_ROOM
        most = max(len(groups) for groups in self._foreign.values())
        return None if len(self._foreign.get(publisher, ())) + 1 < most else Reason.NO_ROOM

    def add(self, pooled: PooledGroup) -> bool:
        """Take a group in; False: this content, or this publisher's group for this epoch and
        prompt, was taken before, or another one published its completions.

        When others' groups exceed two batches, the oldest group goes of the publisher that has
        most of them; `evicted` counts.
        """
        group = pooled.group
        place = _place(pooled.publisher, group.epoch, group.prompt_id)
        if not pooled.own and self.is_copy(group):
            return False
        if not self._seen.add(pooled.hash, place):
            return False
        self._completions.add(group)
        if pooled.own:
            self._own[pooled.hash] = pooled
            return True
        self._foreign.setdefault(pooled.publisher, {})[pooled.hash] = pooled
        if self.room() < 0:
            self._evict()
        return True

    def is_copy(self, group: RolloutGroup) -> bool:
        """Whether another peer, or this node, published a completion of it before.

        That is no proof against its publisher: who was first is this node's own view.
        """
        return self._completions.original(group) is not None

    def dismiss(self, group_hash: bytes) -> bool:
        """Do not want a group again that was turned down; its place stays free.

        Returns:
            False: it was turned down before.
        """
        if group_hash in self._dismissed:
            return False
        self._dismissed[group_hash] = None
        if len(self._dismissed) > MAX_DISMISSED:
            self._dismissed.popitem(last=False)
        return True

    def publishers(self) -> list[str]:
        """Whose groups wait, this node not included."""
        return list(self._foreign)

    def drop(self, publisher: str) -> int:
        """Forget a peer's waiting groups, as when it is banned; returns how many."""
        return len(self._foreign.pop(publisher, {}))

    def own_missing(self, live_peers: int) -> int:
        """How many more own groups make a batch with the full share of own ones possible now."""
        share = self._share(live_peers)
        places = self._batch_groups - share
        drawn = self._draw(places, self._cap(live_peers)) if live_peers > 1 else []
        return max(0, self._batch_groups - len(drawn) - len(self._own))

    def compose(self, live_peers: int) -> list[PooledGroup] | None:
        """Take out the groups of one batch.

        Args:
            live_peers: live members that sample, this node included; 1: it is alone and trains on
                its own groups only.

        Returns:
            Exactly `batch_groups` groups, own ones first; None: not enough yet.

        Raises:
            ValueError: `live_peers` is below 1.
        """
        share = self._share(live_peers)
        own = sorted(self._own.values(), key=_by_arrival)
        places = self._batch_groups - min(share, len(own))
        foreign = self._draw(places, self._cap(live_peers)) if live_peers > 1 else []
        rest = self._batch_groups - len(foreign)
        if len(own) < rest:
            return None
        self._batches += 1
        for group in own[:rest]:
            del self._own[group.hash]
        for group in foreign:
            self._remove(group)
            self._turns[group.publisher] = self._batches
            self._turns.move_to_end(group.publisher)
        while len(self._turns) > _MAX_TURNS:
            self._turns.popitem(last=False)
        return own[:rest] + foreign

    def expire(self, now_s: float, max_age_s: float) -> int:
        """Drop others' groups that arrived more than `max_age_s` ago; returns how many.

        Own groups stay: a node that samples slowly would else never fill a batch.
        """
        old = [
            group
            for groups in self._foreign.values()
            for group in groups.values()
            if now_s - group.arrived_s > max_age_s
        ]
        for group in old:
            self._remove(group)
        return len(old)

    def export_seen(self) -> bytes:
        """For the checkpoint: the groups used, expired or evicted. Those that still wait are not
        among them, so that they can be taken in again after a restart."""
        return self._seen.to_bytes(leave_out={group.hash for group in self.pooled()})

    def import_seen(self, data: bytes) -> None:
        """Restore `export_seen`.

        Raises:
            DataError: `data` is something else.
        """
        self._seen.load(data)

    def _share(self, live_peers: int) -> int:
        if live_peers < 1:
            raise ValueError(f"live_peers counts this node too and is at least 1: {live_peers}")
        return -(-self._batch_groups // live_peers)

    def _cap(self, live_peers: int) -> int:
        """How many groups of a batch one peer may have."""
        return max(1, min(self._share(live_peers), self._most_of_a_peer))

    def _draw(self, places: int, share: int) -> list[PooledGroup]:
        """Up to `places` groups of others in rounds, in each round one of every publisher."""
        queues = {
            publisher: sorted(groups.values(), key=_by_arrival, reverse=True)
            for publisher, groups in self._foreign.items()
        }

        def turn(publisher: str) -> tuple[int, float, bytes]:
            newest = queues[publisher][0]
            return self._turns.get(publisher, 0), -newest.arrived_s, newest.hash

        order = sorted(queues, key=turn)
        rounds = (
            queues[publisher][index]
            for index in range(share)
            for publisher in order
            if index < len(queues[publisher])
        )
        return [group for group, _ in zip(rounds, range(places), strict=False)]

    def _evict(self) -> None:
        most = max(len(groups) for groups in self._foreign.values())
        self._remove(
            min(
                (
                    group
                    for groups in self._foreign.values()
                    if len(groups) == most
                    for group in groups.values()
                ),
                key=_by_arrival,
            )
        )
        self.evicted += 1

    def _remove(self, group: PooledGroup) -> None:
        groups = self._foreign[group.publisher]
        del groups[group.hash]
        if not groups:
            del self._foreign[group.publisher]


def _by_arrival(group: PooledGroup) -> tuple[float, bytes]:
    return group.arrived_s, group.hash


def _place(publisher: str, epoch: int, prompt_id: int) -> bytes:
    """Digest of what a publisher has one group for."""
    message = publisher.encode() + struct.pack("<QI", epoch, prompt_id)
    return hashlib.sha256(message).digest()[:_DIGEST_BYTES]
