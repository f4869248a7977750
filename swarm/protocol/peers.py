"""What this node remembers of each peer: counts, strikes, backoff, quarantine, a verdict.

Owns: when a peer is asked again, when it is left alone for a while, and what it is told about its
groups. Does not know: why a group was rejected (`swarm.protocol.reasons` says which reasons are
proven), the clock, the network.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from math import ceil, log2
from typing import Any

from swarm.protocol.reasons import PROVABLE_REASONS, Reason
from swarm.protocol.receipts import DRIFT, OK, Receipt

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
# What a verdict rests on counts half after five minutes.
VERDICT_HALF_LIFE_S = 300.0
# They say how much this node can take, not what is wrong with a group.
_NO_VERDICT = frozenset({Reason.NO_ROOM, Reason.DUPLICATE, Reason.AGE})
# A tenth of a group, decayed, says nothing any more.
_LEAST_COUNT = 0.1
# At least so many samples with a positive advantage make a verdict about divergence.
_MIN_DRIFT_SAMPLES = 4.0


@dataclass(slots=True)
class _Peer:
    seen_s: float
    fetched: int = 0
    fetched_bytes: int = 0
    accepted: int = 0
    kept: int = 0
    drifted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    fetch_failures: int = 0
    failures_in_a_row: int = 0
    retry_s: float = float("-inf")
    strikes: float = 0.0
    strikes_s: float = 0.0
    quarantined_until_s: float = float("-inf")
    # What became of its groups lately, by reason, "" for accepted ones, and of their samples.
    outcomes: dict[str, float] = field(default_factory=dict)
    kept_samples: float = 0.0
    drifted_samples: float = 0.0
    outcomes_s: float = 0.0

    def count(self, outcome: str, now_s: float) -> None:
        self.decay(now_s)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0.0) + 1.0

    def decay(self, now_s: float) -> None:
        """Let the outcomes count less by the time since they were last looked at."""
        factor = 0.5 ** (max(0.0, now_s - self.outcomes_s) / VERDICT_HALF_LIFE_S)
        self.outcomes_s = now_s
        self.kept_samples *= factor
        self.drifted_samples *= factor
        self.outcomes = {
            outcome: count * factor
            for outcome, count in self.outcomes.items()
            if count * factor >= _LEAST_COUNT
        }

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
        peer = self._entry(peer_id, now_s)
        peer.accepted += 1
        peer.count("", now_s)

    def trained(self, peer_id: str, kept: int, drifted: int, now_s: float) -> None:
        """Samples of it went through a training step.

        Args:
            kept: into the loss.
            drifted: dropped by the filter for their divergence alone.
        """
        peer = self._entry(peer_id, now_s)
        peer.kept += kept
        peer.drifted += drifted
        peer.decay(now_s)
        peer.kept_samples += kept
        peer.drifted_samples += drifted

    def rejected(self, peer_id: str, reason: str, now_s: float) -> None:
        """Something that it announced was rejected; only a provable reason is a strike.

        Args:
            peer_id: the announcer.
            reason: a `Reason`, e.g. `RemoteProtocolError.reason`.
            now_s: the time.
        """
        peer = self._entry(peer_id, now_s)
        peer.rejected[reason] += 1
        if reason not in _NO_VERDICT:
            peer.count(str(reason), now_s)
        if reason not in PROVABLE_REASONS:
            return
        peer.strikes = min(peer.strikes_at(now_s) + 1.0, MAX_STRIKES)
        peer.strikes_s = now_s
        if peer.strikes >= QUARANTINE_STRIKES:
            half_lives = log2(peer.strikes / RELEASE_STRIKES)
            peer.quarantined_until_s = now_s + half_lives * STRIKE_HALF_LIFE_S

    def pardon(self, peer_id: str) -> None:
        """Forget strikes, quarantine and backoff: the owner of this node says so."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.strikes = 0.0
            peer.quarantined_until_s = peer.retry_s = float("-inf")
            peer.failures_in_a_row = 0

    def receipt(self, peer_id: str, now_s: float) -> Receipt | None:
        """What to tell a peer about its groups of the last minutes; None: there were none."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return None
        peer.decay(now_s)
        quarantine_s = max(0.0, peer.quarantined_until_s - now_s)
        judged = sum(peer.outcomes.values())
        if not peer.outcomes and not quarantine_s:
            return None
        return Receipt(
            verdict=_verdict(peer, in_quarantine=quarantine_s > 0),
            judged=ceil(judged),
            taken=ceil(peer.outcomes.get("", 0.0)),
            quarantine_s=ceil(quarantine_s),
        )

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
        return [_row(peer_id, peer, now_s) for peer_id, peer in reversed(self._peers.items())]

    def unknown(self, peer_id: str) -> dict[str, Any]:
        """The row of a peer that nothing is known of."""
        return {**_row(peer_id, _Peer(seen_s=0.0), 0.0), "seen_ago_s": None}

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


def _row(peer_id: str, peer: _Peer, now_s: float) -> dict[str, Any]:
    return {
        "peer_id": peer_id,
        "seen_ago_s": max(0.0, now_s - peer.seen_s),
        "fetched": peer.fetched,
        "fetched_bytes": peer.fetched_bytes,
        "accepted": peer.accepted,
        "samples_trained": peer.kept,
        "samples_drifted": peer.drifted,
        "rejected": {str(reason): count for reason, count in peer.rejected.items()},
        "fetch_failures": peer.fetch_failures,
        "retry_in_s": max(0.0, peer.retry_s - now_s),
        "strikes": round(peer.strikes_at(now_s), 3),
        "quarantined": now_s < peer.quarantined_until_s,
        "quarantine_left_s": max(0.0, peer.quarantined_until_s - now_s),
    }


def _verdict(peer: _Peer, *, in_quarantine: bool) -> str:
    """The reason that most of its groups were rejected for, divergence, or "ok"."""
    rejected = {reason: count for reason, count in peer.outcomes.items() if reason}
    if in_quarantine:
        proven = [reason for reason in rejected if reason in PROVABLE_REASONS]
        proven = proven or [reason for reason in peer.rejected if reason in PROVABLE_REASONS]
        return str(max(proven, key=lambda reason: rejected.get(reason, 0.0)))
    if sum(rejected.values()) > peer.outcomes.get("", 0.0):
        return max(rejected, key=lambda reason: rejected[reason])
    looked_at = peer.kept_samples + peer.drifted_samples
    if looked_at >= _MIN_DRIFT_SAMPLES and peer.drifted_samples > peer.kept_samples:
        return DRIFT
    return OK
