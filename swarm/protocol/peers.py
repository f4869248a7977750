"""What this node remembers of each peer: counts, strikes, backoff, quarantine.

Owns: when a peer is asked again and when it is left alone for a while. Does not know: why a group
was rejected (`swarm.protocol.reasons` says which reasons are proven), the clock, the network.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from math import log2
from typing import Any

from swarm.protocol.reasons import PROVABLE_REASONS

# A strike counts half after ten minutes: a fault long mended is forgotten within the hour.
STRIKE_HALF_LIFE_S = 600.0
# Three strikes within some minutes: one could be a rare fault of a disk or of memory.
QUARANTINE_STRIKES = 2.5
# Quarantine ends when the strikes have decayed to this: after 16 minutes for three of them.
RELEASE_STRIKES = 1.0
# However long a flood was, quarantine ends within the hour (log2(32) half-lives).
MAX_STRIKES = 32.0
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 300.0
# An entry takes about 1 KB.
MAX_PEERS = 1024


@dataclass(slots=True)
class _Peer:
    seen_s: float
    fetched: int = 0
    fetched_bytes: int = 0
    accepted: int = 0
    used: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    fetch_failures: int = 0
    failures_in_a_row: int = 0
    retry_s: float = float("-inf")
    strikes: float = 0.0
    strikes_s: float = 0.0
    quarantined_until_s: float = float("-inf")

    def strikes_at(self, now_s: float) -> float:
        elapsed_s = max(0.0, now_s - self.strikes_s)
        return float(self.strikes * 0.5 ** (elapsed_s / STRIKE_HALF_LIFE_S))


class PeerTable:
    """Bounded table of peers. All times are of one clock of the caller, in seconds."""

    def __init__(self) -> None:
        # The least recently seen is the first.
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def seen(self, peer_id: str, now_s: float) -> None:
        """It sent a heartbeat or an announcement."""
        self._entry(peer_id, now_s)

    def fetched(self, peer_id: str, size_bytes: int, now_s: float) -> None:
        """A blob came from it whole; earlier failures no longer delay the next fetch."""
        peer = self._entry(peer_id, now_s)
        peer.fetched += 1
        peer.fetched_bytes += size_bytes
        peer.failures_in_a_row = 0
        peer.retry_s = float("-inf")

    def fetch_failed(self, peer_id: str, now_s: float) -> None:
        """A fetch broke off, timed out or gave other bytes: wait twice as long each time."""
        peer = self._entry(peer_id, now_s)
        peer.fetch_failures += 1
        # Capped where it no longer matters, far below where 2.0 ** n would overflow.
        peer.failures_in_a_row = min(peer.failures_in_a_row + 1, 64)
        delay_s = FIRST_BACKOFF_S * 2.0 ** (peer.failures_in_a_row - 1)
        peer.retry_s = now_s + min(delay_s, MAX_BACKOFF_S)

    def accepted(self, peer_id: str, now_s: float) -> None:
        """A group of it passed all checks."""
        self._entry(peer_id, now_s).accepted += 1

    def used(self, peer_id: str, now_s: float) -> None:
        """A group of it went into a training batch."""
        self._entry(peer_id, now_s).used += 1

    def rejected(self, peer_id: str, reason: str, now_s: float) -> None:
        """Something that it announced was rejected; only a provable reason is a strike.

        Args:
            peer_id: the announcer.
            reason: a `Reason`, e.g. `RemoteProtocolError.reason`.
            now_s: the time.
        """
        peer = self._entry(peer_id, now_s)
        peer.rejected[reason] += 1
        if reason not in PROVABLE_REASONS:
            return
        peer.strikes = min(peer.strikes_at(now_s) + 1.0, MAX_STRIKES)
        peer.strikes_s = now_s
        if peer.strikes >= QUARANTINE_STRIKES:
            half_lives = log2(peer.strikes / RELEASE_STRIKES)
            peer.quarantined_until_s = now_s + half_lives * STRIKE_HALF_LIFE_S

    def quarantined(self, peer_id: str, now_s: float) -> bool:
        """Whether nothing of this peer is to be fetched or read now."""
        peer = self._peers.get(peer_id)
        return peer is not None and now_s < peer.quarantined_until_s

    def may_fetch(self, peer_id: str, now_s: float) -> bool:
        """Whether it is neither in quarantine nor in backoff after failed fetches."""
        peer = self._peers.get(peer_id)
        return peer is None or now_s >= max(peer.quarantined_until_s, peer.retry_s)

    def strikes(self, peer_id: str, now_s: float) -> float:
        """What is left of its strikes."""
        peer = self._peers.get(peer_id)
        return 0.0 if peer is None else peer.strikes_at(now_s)

    def view(self, now_s: float) -> list[dict[str, Any]]:
        """All peers for `status`, the most recently seen first; plain values only."""
        return [
            {
                "peer_id": peer_id,
                "seen_ago_s": max(0.0, now_s - peer.seen_s),
                "fetched": peer.fetched,
                "fetched_bytes": peer.fetched_bytes,
                "accepted": peer.accepted,
                "used": peer.used,
                "rejected": {str(reason): count for reason, count in peer.rejected.items()},
                "fetch_failures": peer.fetch_failures,
                "retry_in_s": max(0.0, peer.retry_s - now_s),
                "strikes": round(peer.strikes_at(now_s), 3),
                "quarantined": now_s < peer.quarantined_until_s,
                "quarantine_left_s": max(0.0, peer.quarantined_until_s - now_s),
            }
            for peer_id, peer in reversed(self._peers.items())
        ]

    def _entry(self, peer_id: str, now_s: float) -> _Peer:
        peer = self._peers.get(peer_id)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self._forget_one(now_s)
            peer = self._peers[peer_id] = _Peer(seen_s=now_s)
        peer.seen_s = now_s
        self._peers.move_to_end(peer_id)
        return peer

    def _forget_one(self, now_s: float) -> None:
        """Drop the least recently seen, those in quarantine last: identities are free, and a
        flood of new ones must not set a known offender at liberty."""
        oldest = next(iter(self._peers))
        victim = next(
            (key for key, peer in self._peers.items() if now_s >= peer.quarantined_until_s), oldest
        )
        del self._peers[victim]
