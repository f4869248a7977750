"""Whom this node deals with: the swarm's roster, the organizers' bans, the owner's own word.

Owns: that decision, and the owner's bans on disk. Does not know: how anybody is kept out.

The owner's word comes first, then the roster, then the organizers' bans, which are advice: they
hold unless the owner turned them off, or unbanned the peer.
"""

from pathlib import Path
from typing import Any

from swarm.errors import DataError, RemoteProtocolError, UsageError
from swarm.paths import parse_json, write_json
from swarm.protocol.charter import Charter
from swarm.protocol.identity import public_key_of
from swarm.protocol.reasons import Reason

MAX_BANS = 10_000


class Admission:
    """Who is let in.

    Args:
        path: file of the owner's bans and exceptions; absent as long as there are none.
        follow_bans: whether the organizers' bans hold.

    Raises:
        DataError: the file is damaged.
    """

    def __init__(self, path: Path, *, follow_bans: bool) -> None:
        self._path = path
        self._follow_bans = follow_bans
        self._charter: Charter | None = None
        self._banned, self._allowed = _load(path)

    def obey(self, charter: Charter) -> None:
        """Go by these terms from now on."""
        self._charter = charter

    def refusal(self, peer_id: str) -> Reason | None:
        """Why nothing is to be had of a peer: banned or not a member; None: it is let in."""
        if peer_id in self._banned:
            return Reason.BANNED
        if self._charter is None:
            return None
        if not self._charter.is_member(peer_id):
            return Reason.NOT_MEMBER
        if peer_id in self.advised:
            return Reason.BANNED
        return None

    @property
    def advised(self) -> frozenset[str]:
        """Whom the organizers' bans keep out here."""
        if self._charter is None or not self._follow_bans:
            return frozenset()
        return self._charter.banned - self._allowed

    def ban(self, peer_id: str) -> None:
        """Keep a peer out, whatever others say; kept across restarts.

        Raises:
            UsageError: this is no peer id, or there are too many bans.
        """
        _check(peer_id)
        if len(self._banned) >= MAX_BANS:
            raise UsageError(f"{MAX_BANS} peers are banned; unban some first")
        self._banned.add(peer_id)
        self._allowed.discard(peer_id)
        self._save()

    def unban(self, peer_id: str) -> None:
        """Let a peer in again, also where the organizers advise against it.

        Raises:
            UsageError: this is no peer id.
        """
        _check(peer_id)
        self._banned.discard(peer_id)
        if self._charter is not None and peer_id in self._charter.banned:
            self._allowed.add(peer_id)
        self._save()

    def view(self) -> dict[str, Any]:
        """For `status` and `peers`; plain values."""
        charter = self._charter
        return {
            "open": charter is None or charter.members is None,
            "members": None if charter is None or charter.members is None else len(charter.members),
            "banned_here": sorted(self._banned),
            "banned_by_organizers": sorted(charter.banned) if charter is not None else [],
            "follows_bans": self._follow_bans,
            "allowed_here": sorted(self._allowed),
        }

    def _save(self) -> None:
        write_json(self._path, {"banned": sorted(self._banned), "allowed": sorted(self._allowed)})


def _check(peer_id: str) -> None:
    try:
        public_key_of(peer_id)
    except RemoteProtocolError as error:
        raise UsageError(f"{peer_id!r:.80}: {error.detail}; a peer id is like 12D3Koo...") from None


def _load(path: Path) -> tuple[set[str], set[str]]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
        lists = [value["banned"], value["allowed"]]
        if not all(isinstance(peer, str) for peers in lists for peer in peers):
            raise ValueError("peer ids are texts")
    except FileNotFoundError:
        return set(), set()
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: no list of bans: {error!r}; mend it, or delete it to ban nobody"
        ) from None
    return set(lists[0]), set(lists[1])
