"""What members tell a publisher about its groups, so that a rejected one can learn why.

Owns: the receipt that travels in a reply, and what the receipts of all peers come to. Does not
know: how a verdict is reached (`swarm.protocol.peers`), how replies travel.

A receipt is a claim: it is shown to the node's owner, and no decision rests on it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

OK = "ok"
DRIFT = "drift"
"""Its samples diverge so far from the reader's policy that the filter drops most good ones."""

# After so long without a word from a peer its last one no longer counts.
MAX_AGE_S = 600.0
# One that turned this node away may let it in at any time, without a word.
MAX_REFUSAL_AGE_S = 60.0
MAX_PEERS = 1024
_VERDICT = re.compile(r"[a-z_]{1,32}")
_MAX_COUNT = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one peer did with another's groups lately.

    Attributes:
        verdict: "ok", "drift", or the reject reason (`swarm.protocol.reasons`) of most groups.
        judged: groups looked at lately.
        taken: of them, accepted.
        quarantine_s: for so long nothing more is fetched; 0: there is no quarantine.
    """

    verdict: str
    judged: int
    taken: int
    quarantine_s: int = 0

    def to_map(self) -> dict[str, Any]:
        """What stands in a reply under "receipt"."""
        return {"w": self.verdict, "n": self.judged, "k": self.taken, "q": self.quarantine_s}

    @classmethod
    def from_map(cls, value: object) -> "Receipt | None":
        """Read a reply's receipt; None where there is none that can be read."""
        if not isinstance(value, Mapping):
            return None
        verdict = value.get("w")
        if not isinstance(verdict, str) or not _VERDICT.fullmatch(verdict):
            return None
        counts = [
            count
            for count in (value.get(key) for key in ("n", "k", "q"))
            if type(count) is int and 0 <= count <= _MAX_COUNT
        ]
        if len(counts) != 3:
            return None
        return cls(verdict, *counts)


class Reception:
    """The last receipt of each peer. All times are of one clock of the caller, in seconds."""

    def __init__(self) -> None:
        self._receipts: dict[str, tuple[Receipt, float]] = {}

    def record(self, peer_id: str, receipt: Receipt | None, now_s: float) -> None:
        """Keep a peer's newest receipt, in place of its last one; None: it has nothing to say."""
        self._receipts.pop(peer_id, None)
        if receipt is None:
            return
        self._receipts[peer_id] = (receipt, now_s)
        if len(self._receipts) > MAX_PEERS:
            del self._receipts[next(iter(self._receipts))]

    def current(self, now_s: float) -> dict[str, Receipt]:
        """Peer -> receipt, those that are not too old."""
        return {
            peer: receipt
            for peer, (receipt, when_s) in self._receipts.items()
            if now_s - when_s <= (MAX_AGE_S if receipt.judged else MAX_REFUSAL_AGE_S)
        }

    def view(self, peers: Iterable[str], now_s: float) -> dict[str, Any]:
        """How many of these peers reject this node, and why, for `status`; plain values."""
        current = self.current(now_s)
        verdicts = Counter(current[peer].verdict for peer in peers if peer in current)
        reporting = verdicts.total()
        return {
            "reporting": reporting,
            "rejecting": reporting - verdicts[OK],
            "verdicts": dict(verdicts.most_common()),
        }


def complaint(view: Mapping[str, Any]) -> str:
    """The problem that a `Reception.view` amounts to: most peers reject; "": there is none."""
    rejecting, reporting = view["rejecting"], view["reporting"]
    if 2 * rejecting <= reporting:
        return ""
    why = ", ".join(verdict for verdict in view["verdicts"] if verdict != OK)
    return f"{rejecting} of {reporting} peers reject this node's groups: {why}"
