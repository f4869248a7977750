"""Who may take part: the amendments that make and change a roster, and the list of bans.

Owns: the two actions, their bounds, what a series of them comes to. Does not know: signatures and
the chain (`swarm.protocol.charter`), nor how anybody is kept out.

A swarm without a roster is open. The first roster amendment closes it to all but those that it
adds, and the organizers. The list of bans is advice: a member follows it unless its owner says
otherwise.
"""

from collections.abc import Iterable
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from swarm.protocol.canonical import CanonicalModel, PeerId

# Added and removed together: what an amendment of 4096 bytes has room for.
MAX_PEERS_PER_AMENDMENT = 60


class _PeerChange(CanonicalModel):
    """Peers put on a list and taken off it; each list rising, nobody on both."""

    add: Annotated[tuple[PeerId, ...], Field(max_length=MAX_PEERS_PER_AMENDMENT)] = ()
    remove: Annotated[tuple[PeerId, ...], Field(max_length=MAX_PEERS_PER_AMENDMENT)] = ()

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        for peers in (self.add, self.remove):
            if list(peers) != sorted(set(peers)):
                raise ValueError("peer ids must rise, each once")
        if set(self.add) & set(self.remove):
            raise ValueError("a peer is both added and removed")
        if len(self.add) + len(self.remove) > MAX_PEERS_PER_AMENDMENT:
            raise ValueError(f"more than {MAX_PEERS_PER_AMENDMENT} peers in one amendment")
        return self


class RosterChange(_PeerChange):
    """Members of the swarm; the first such amendment ends its being open to all."""

    kind: Literal["roster"] = "roster"


class BanChange(_PeerChange):
    """Peers that members are advised to have nothing to do with."""

    kind: Literal["ban_list"] = "ban_list"


ChangeT = TypeVar("ChangeT", RosterChange, BanChange)


def after(changes: Iterable[RosterChange | BanChange]) -> frozenset[str]:
    """Who is on a list after a series of changes."""
    peers: set[str] = set()
    for change in changes:
        peers |= set(change.add)
        peers -= set(change.remove)
    return frozenset(peers)


def changes_to(
    kind: type[ChangeT], add: Iterable[str] = (), remove: Iterable[str] = ()
) -> list[ChangeT]:
    """The amendments' actions that a change of any size takes; at least one.

    Raises:
        ValueError: a peer is both added and removed, or an id is none.
    """
    entries = [(peer, True) for peer in sorted(set(add))]
    entries += [(peer, False) for peer in sorted(set(remove))]
    if len({peer for peer, _ in entries}) != len(entries):
        raise ValueError("a peer is both added and removed")
    parts = [
        entries[start : start + MAX_PEERS_PER_AMENDMENT]
        for start in range(0, len(entries), MAX_PEERS_PER_AMENDMENT)
    ] or [[]]
    return [
        kind(
            add=tuple(peer for peer, added in part if added),
            remove=tuple(peer for peer, added in part if not added),
        )
        for part in parts
    ]
