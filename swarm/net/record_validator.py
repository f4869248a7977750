"""Which DHT records this node keeps and passes on: signed, short-lived, small and few.

Owns: the form of a subkey on the wire, the quotas, and the count of what was refused. Does not
know: the signature's form and the bodies (`swarm.protocol.records`), nor where records are stored.
"""

import hashlib
import heapq
import struct
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol

import msgpack

from swarm.errors import RemoteProtocolError
from swarm.protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, peer_id_of
from swarm.protocol.records import verify_record

MAX_RECORDS_PER_PEER_AND_KEY = 32
MAX_RECORDS_PER_PEER = 256
MAX_KEY_BYTES = 512 * 1024
"""Of a key's records together: they are read in one message of at most 4 MiB."""
MAX_RECORDS = 32_768
"""Live records that one node accepts, stored and read together: 64 MiB at 2 KiB each."""
MIN_RENEWAL_S = 1.0
"""A record replaces an earlier one of its key and subkey when it expires at least so much later.
Each renewal leaves a trace in every holder's expiration heap until it expires."""

DHT_ID_BYTES = 20

# Each record of a member is looked at again with every search.
_peer_id = lru_cache(maxsize=4096)(peer_id_of)

# msgpack bin 8, in which a subkey travels
_SUBKEY_HEAD = 0xC4


class RecordFault(StrEnum):
    """Refusals beyond those of `verify_record`; log field and metric label like these."""

    KIND = "record_kind"
    EXPIRED = "record_expired"
    RENEWAL = "record_renewal"
    QUOTA_PEER_AND_KEY = "record_quota_peer_and_key"
    QUOTA_PEER = "record_quota_peer"
    QUOTA_KEY = "record_quota_key"
    QUOTA_ALL = "record_quota_all"


class DhtRecord(Protocol):
    """The part of hivemind's DHTRecord that is read here.

    Attributes:
        key: 20-byte DHT id.
        subkey: msgpack; of a plain value, which has none, that of None.
        value: body and signature.
        expiration_time: Unix time in seconds.
    """

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


@dataclass(slots=True)
class _Live:
    """A record that was accepted and has not expired."""

    expires_s: float
    digest: bytes
    size_bytes: int


class RecordValidator:
    """Checks every record that arrives, by store or by search; hivemind calls it.

    A table of the live records bounds what one peer, and all together, can make this node keep. It
    also spares the check of a signature that was checked before.

    Args:
        clock: Unix time in seconds.
        refusal: why no record of a peer is kept or believed; None: it may have some.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        refusal: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._refusal = refusal
        self._clock = clock
        self._live: dict[tuple[bytes, bytes], _Live] = {}
        self._by_expiry: list[tuple[float, bytes, bytes]] = []  # one entry per live record
        self._count_by_peer: Counter[bytes] = Counter()
        self._count_by_peer_and_key: Counter[tuple[bytes, bytes]] = Counter()
        self._bytes_by_key: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Number of live records in the table."""
        return len(self._live)

    def validate(self, record: DhtRecord) -> bool:
        """Whether the record may be kept; a refusal is counted in `refused`."""
        now_s = self._clock()
        self._forget_expired(now_s)
        try:
            fault = self._check(record, now_s)
        except RemoteProtocolError as error:
            fault = error.reason
        if fault is not None:
            self.refused[str(fault)] += 1
        return fault is None

    def strip_value(self, record: DhtRecord) -> bytes:
        """The body of a valid record, wrapped so that hivemind's decoder returns it as bytes."""
        packed: bytes = msgpack.packb(record.value[:-SIGNATURE_BYTES])
        return packed

    def sign_value(self, record: DhtRecord) -> bytes:
        """Values arrive here signed already."""
        return record.value

    def _check(self, record: DhtRecord, now_s: float) -> str | None:
        key, value, expires_s = record.key, record.value, record.expiration_time
        if len(key) != DHT_ID_BYTES or len(record.subkey) < 2:
            return RecordFault.KIND
        head, size, subkey = record.subkey[0], record.subkey[1], record.subkey[2:]
        if head != _SUBKEY_HEAD or size != len(subkey):
            return RecordFault.KIND
        if len(subkey) >= PUBLIC_KEY_BYTES:
            refusal = self._refusal(_peer_id(subkey[:PUBLIC_KEY_BYTES]))
            if refusal is not None:
                return refusal
        if expires_s <= now_s:
            return RecordFault.EXPIRED
        live = self._live.get((key, subkey))
        digest = hashlib.sha256(struct.pack("<d", expires_s) + value).digest()
        if live is not None and live.digest == digest:
            return None
        if live is not None and live.expires_s < expires_s < live.expires_s + MIN_RENEWAL_S:
            return RecordFault.RENEWAL
        size_bytes = len(subkey) + len(value)
        quota = self._exceeded_quota(key, subkey[:PUBLIC_KEY_BYTES], live, size_bytes)
        if quota is not None:
            return quota
        verify_record(key, subkey, expires_s, value, now_s)
        if live is None:
            self._remember(key, subkey, _Live(expires_s, digest, size_bytes))
        elif live.expires_s < expires_s:
            self._bytes_by_key[key] += size_bytes - live.size_bytes
            self._live[key, subkey] = _Live(expires_s, digest, size_bytes)
        return None

    def _exceeded_quota(
        self, key: bytes, public_key: bytes, live: _Live | None, size_bytes: int
    ) -> RecordFault | None:
        """Asked before the signature is checked: a flood costs its sender more than this node."""
        more_bytes = size_bytes - (live.size_bytes if live is not None else 0)
        if more_bytes > 0 and self._bytes_by_key[key] + more_bytes > MAX_KEY_BYTES:
            return RecordFault.QUOTA_KEY
        if live is not None:
            return None
        if self._count_by_peer_and_key[public_key, key] >= MAX_RECORDS_PER_PEER_AND_KEY:
            return RecordFault.QUOTA_PEER_AND_KEY
        if self._count_by_peer[public_key] >= MAX_RECORDS_PER_PEER:
            return RecordFault.QUOTA_PEER
        if len(self._live) >= MAX_RECORDS:
            return RecordFault.QUOTA_ALL
        return None

    def _remember(self, key: bytes, subkey: bytes, live: _Live) -> None:
        public_key = subkey[:PUBLIC_KEY_BYTES]
        self._live[key, subkey] = live
        heapq.heappush(self._by_expiry, (live.expires_s, key, subkey))
        self._count_by_peer[public_key] += 1
        self._count_by_peer_and_key[public_key, key] += 1
        self._bytes_by_key[key] += live.size_bytes

    def _forget_expired(self, now_s: float) -> None:
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            _, key, subkey = heapq.heappop(self._by_expiry)
            live = self._live[key, subkey]
            if live.expires_s > now_s:  # renewed since
                heapq.heappush(self._by_expiry, (live.expires_s, key, subkey))
                continue
            del self._live[key, subkey]
            public_key = subkey[:PUBLIC_KEY_BYTES]
            _decrease(self._count_by_peer, public_key, 1)
            _decrease(self._count_by_peer_and_key, (public_key, key), 1)
            _decrease(self._bytes_by_key, key, live.size_bytes)


def _decrease(counter: Counter[Any], key: Hashable, by: int) -> None:
    """Subtract, without leaving a zero behind."""
    counter[key] -= by
    if not counter[key]:
        del counter[key]
