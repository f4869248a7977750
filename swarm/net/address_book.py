"""The addresses that this node may dial: which are due, and what came of each.

Owns: parsing addresses, retry times, results in words. Does no I/O. Does not know: how to dial.
"""

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarm.net.hivemind_lean import Multiaddr, PeerID

CONNECTED = "connected"
"""The result of an address behind which a member answers."""
OWN_ADDRESS = "this node itself"
MAX_REMEMBERED = 256
"""Addresses beside the pinned ones."""
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 60.0


@dataclass(slots=True)
class Entry:
    """One address; `pinned` ones were given by the user and are never dropped."""

    address: str
    peer: str
    transport: str
    """The address without /p2p/..."""
    pinned: bool
    next_try_s: float
    failures: int = 0


class AddressBook:
    """Addresses of members, with the result of the last dial of each.

    Args:
        own_peer_id: addresses of this peer are left out.
        clock: seconds, monotonic.
    """

    def __init__(self, own_peer_id: str, clock: Callable[[], float]) -> None:
        self.results: dict[str, str] = {}
        """Address -> what came of dialling it last, in words."""
        self._own_peer_id = own_peer_id
        self._clock = clock
        self._entries: dict[str, Entry] = {}

    def add(self, address: str, *, pinned: bool = False) -> Entry | str:
        """Take an address in; its entry, or why there is none."""
        entry = self._entries.get(address)
        if entry is not None:
            entry.pinned |= pinned
            return entry
        try:
            transport, peer = parse_address(address)
        except ValueError as error:
            reason = f"not an address: {error}"
            if pinned:
                self.results[address] = reason
            return reason
        if peer == self._own_peer_id:
            return OWN_ADDRESS
        if not pinned:
            self._make_room()
        entry = Entry(address, peer, transport, pinned, next_try_s=self._clock())
        self._entries[address] = entry
        return entry

    def pinned(self) -> list[str]:
        """The addresses that the user gave."""
        return [entry.address for entry in self._entries.values() if entry.pinned]

    def due(self, reached: Collection[str], *, all_of_them: bool) -> list[Entry]:
        """Entries to try now: of peers not in `reached`; the pinned ones, or all."""
        now_s = self._clock()
        return [
            entry
            for entry in self._entries.values()
            if entry.next_try_s <= now_s
            and entry.peer not in reached
            and (entry.pinned or all_of_them)
        ]

    def retry_now(self) -> None:
        """Make every address due."""
        for entry in self._entries.values():
            entry.next_try_s = self._clock()

    def record(self, entry: Entry, result: str) -> bool:
        """Note a dial's result and when to try again; whether it differs from the last one."""
        entry.failures = 0 if result == CONNECTED else entry.failures + 1
        wait_s = min(FIRST_RETRY_S * 2 ** max(0, entry.failures - 1), MAX_RETRY_S)
        entry.next_try_s = self._clock() + wait_s * random.uniform(0.75, 1.25)
        changed = self.results.get(entry.address) != result
        self.results[entry.address] = result
        return changed

    def _make_room(self) -> None:
        """Drop the remembered address that failed most often, when there are too many."""
        remembered = [entry for entry in self._entries.values() if not entry.pinned]
        if len(remembered) >= MAX_REMEMBERED:
            worst = max(remembered, key=lambda entry: entry.failures)
            del self._entries[worst.address]
            self.results.pop(worst.address, None)


def parse_address(address: str) -> tuple[str, str]:
    """Cut a full address into the part before /p2p/ and the peer id.

    Raises:
        ValueError: it is not a multiaddr that ends in /p2p/<peer id>.
    """
    transport, _, peer = address.rpartition("/p2p/")
    if not transport:
        raise ValueError("it does not end in /p2p/<peer id>")
    try:
        Multiaddr(transport)
        PeerID.from_base58(Multiaddr(f"/p2p/{peer}")["p2p"])
    except Exception as error:  # noqa: BLE001  multiaddr lets through whatever its codecs raise
        raise ValueError(str(error)[:200]) from None
    return transport, peer
