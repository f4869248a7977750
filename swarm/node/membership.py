"""The swarm as this node sees it: its charter, who is alive, and the node's own heartbeat.

Owns: fetching and extending the charter, fetching prompt sets, heartbeats both ways.
Does not know: rollouts, models, training.
"""

import asyncio
import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from swarm.errors import (
    DataError,
    IdentityError,
    RemoteProtocolError,
    SwarmError,
    UnreachableError,
)
from swarm.ledger import Ledger
from swarm.net.exchange import Exchange, ExchangeError
from swarm.net.overlay import Overlay
from swarm.node.admission import Admission
from swarm.paths import SwarmDir, write_atomic
from swarm.protocol.charter import Charter
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.reasons import Reason
from swarm.protocol.records import (
    HEARTBEAT_TTL_S,
    Heartbeat,
    heartbeat_key,
    shard_of,
)
from swarm.protocol.tallies import (
    MAX_TALLIES,
    TALLIES_SUFFIX,
    Tally,
    pack_tallies,
    tag_of,
    unpack_tallies,
)
from swarm.stored import load_charter

log = logging.getLogger(__name__)

T = TypeVar("T")

CHARTER_TIMEOUT_S = 60.0
"""For one member to serve its charter, a few KB as a rule; a stream alone may take far longer."""

CHARTER_RETRY_S = 60.0
"""Until a member that says that it knows more amendments, but serves none, is asked again."""

CHARTER_BUSY_S = 5.0
"""Until one that had no charter to give just then is asked again."""

MAX_CHARTERS_AT_ONCE = 4
"""Members asked together for their amendments, so that none that stalls keeps others' away."""

TALLIES_PERIOD_S = 15.0
"""Between two records of tallies; they live as long as a heartbeat."""
KNOCK_RETRY_S = 30.0
"""Until the next peer that is not on the roster is asked whether it knows a newer one."""

MAX_MEMBERS = 1024
"""Members that are looked at; of more, those that were here first."""

FIRST_SECONDS = 20.0
"""For so long after the start heartbeats go out and are read once a second."""


@dataclass(slots=True)
class Member:
    """A peer by its last heartbeat; `changed_s` is when this node saw that heartbeat first."""

    peer_id: str
    heartbeat: Heartbeat
    changed_s: float


class Membership:
    """Keeps charter and member list current.

    Args:
        describe: makes this node's heartbeat.
        ledger: says what this node took of others, and is told what they took of it.
        on_charter: called after the charter was extended and stored.
    """

    def __init__(
        self,
        overlay: Overlay,
        exchange: Exchange,
        swarm_dir: SwarmDir,
        admission: Admission,
        *,
        heartbeat_s: float,
        describe: Callable[[], Awaitable[Heartbeat]],
        ledger: Ledger,
        on_charter: Callable[[], Awaitable[None]],
    ) -> None:
        self._overlay = overlay
        self._exchange = exchange
        self._dir = swarm_dir
        self._admission = admission
        self._heartbeat_s = heartbeat_s
        self._describe = describe
        self._ledger = ledger
        self._tallies_sent_s = float("-inf")
        self._on_charter = on_charter
        self._charter: Charter | None = None
        self._beat_now = asyncio.Event()
        self._shards = 1
        self._updating: dict[str, asyncio.Task[None]] = {}
        # Member -> monotonic time before which its charter is not asked for again.
        self._next_charter_s: dict[str, float] = {}
        self._knocker: str | None = None
        self._next_knock_s = 0.0
        # Member that would not serve this node -> why.
        self._turned_away_by: dict[str, Reason] = {}
        self.members: dict[str, Member] = {}
        self.unreadable: dict[str, str] = {}

    @property
    def charter(self) -> Charter:
        """The present terms.

        Raises:
            SwarmError: none is known yet.
        """
        if self._charter is None:
            raise SwarmError("the swarm's manifest has not been fetched yet")
        return self._charter

    @property
    def charter_bytes(self) -> bytes | None:
        """What is served to newcomers; None before the first fetch."""
        return self._charter.to_bytes() if self._charter else None

    def adopt(self, charter: Charter) -> None:
        """Use and store these terms."""
        self._charter = charter
        self._shards = charter.manifest.record_shards
        self._admission.obey(charter)
        try:
            write_atomic(self._dir.charter_path, charter.to_bytes())
        except OSError as error:
            log.error("the swarm's terms are not kept: %s: %s", self._dir.charter_path, error)

    def samplers(self) -> list[str]:
        """Live members that say that they are sampling, this node not included."""
        return [
            m.peer_id
            for m in self.members.values()
            if m.heartbeat.sampling and self._admission.refusal(m.peer_id) is None
        ]

    @property
    def outside(self) -> str:
        """Why this node is kept out, and what to do about it; empty: it is not."""
        if self._charter is not None:
            off_roster = not self._charter.is_member(self._overlay.peer_id)
        else:
            off_roster = Reason.NOT_MEMBER in self._turned_away_by.values()
            if self._turned_away_by and not off_roster:
                return f"this node, {self._overlay.peer_id}, is banned from the swarm"
        return off_the_roster(self._overlay.peer_id) if off_roster else ""

    def knocked(self, peer: str) -> None:
        """A peer that is not on the roster was turned away; it may know a newer roster."""
        now_s = time.monotonic()
        if self._charter is not None and now_s >= self._next_knock_s:
            self._next_knock_s = now_s + KNOCK_RETRY_S
            self._knocker = peer

    def beat(self) -> None:
        """Send a heartbeat now: something that others schedule by has changed."""
        self._beat_now.set()

    # -- joining ---------------------------------------------------------------------------------

    async def join(self, swarm_id: bytes, *, fail_fast: bool) -> Charter:
        """Load the charter from disk or fetch it from any member, retrying with backoff.

        Raises:
            UnreachableError: with fail_fast, when no member answered; names each address's result.
            IdentityError: with fail_fast, when this node is not on the roster, or banned.
        """
        if self._dir.charter_path.exists():
            try:
                self.adopt(load_charter(self._dir, swarm_id))
            except DataError as error:
                log.error("%s; fetching it from a member", error)
            else:
                return self.charter

        async def ask(peer: str) -> Charter:
            async with asyncio.timeout(CHARTER_TIMEOUT_S):
                data = await self._exchange.fetch_charter(peer)
            return Charter.from_bytes(data, swarm_id)

        delay = 0.1  # the first connection is up within this or the next round
        failures: Counter[str] = Counter()
        said = ""
        while (charter := await self._first_answer("manifest", ask, failures)) is None:
            if self.outside and fail_fast:
                raise IdentityError(self.outside)
            if self.outside != said:
                said = self.outside
                log.warning("%s; trying on", said)
            if fail_fast and delay > 4.0:
                raise UnreachableError(f"no member of the swarm answers:\n{self.dial_report()}")
            if delay > 4.0 and not said:
                log.warning("still looking for a member:\n%s", self.dial_report())
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 15.0)
        self._turned_away_by.clear()
        self.adopt(charter)
        return charter

    async def _first_answer(
        self, what: str, ask: Callable[[str], Awaitable[T]], failures: Counter[str]
    ) -> T | None:
        """What the first connected member gives that has it; None when none does now.

        Args:
            what: for the log.
            ask: one member.
            failures: of each member so far; those with the fewest are asked first.
        """
        peers = self._overlay.connected()
        random.shuffle(peers)
        for peer in sorted(peers, key=failures.__getitem__):
            try:
                return await ask(peer)
            except (RemoteProtocolError, ExchangeError, TimeoutError) as error:
                failures[peer] += 1
                reason = error.reason if isinstance(error, ExchangeError) else None
                if reason is not None:
                    self._turned_away_by[peer] = reason
                log.info("no %s from %s: %s", what, peer, error or "too slow")
        return None

    def dial_report(self) -> str:
        """One line per known address with what came of dialling it."""
        results = self._overlay.dial_results
        if not results:
            return "  no address is known; check the invite"
        return "\n".join(f"  {address}: {result}" for address, result in results.items())

    def stored_set(self, ref: PromptSetRef) -> bytes | None:
        """A prompt set's bytes as they lie on disk; None where they are lost or damaged."""
        path = self._dir.prompt_set_path(ref.sha256)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == ref.sha256 else None

    async def prompt_set(self, ref: PromptSetRef, max_bytes: int) -> bytes:
        """A prompt set's bytes, from disk or from any member, checked by its hash."""
        path = self._dir.prompt_set_path(ref.sha256)
        if (stored := self.stored_set(ref)) is not None:
            return stored
        if path.exists():
            log.warning("%s is damaged; fetching it again", path)

        async def ask(peer: str) -> bytes:
            return await self._exchange.fetch_blob(
                peer, bytes.fromhex(ref.sha256), max_bytes=max_bytes, size=ref.size_bytes
            )

        delay = 0.5
        failures: Counter[str] = Counter()
        while (found := await self._first_answer("prompt set", ask, failures)) is None:
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 15.0)
        try:
            write_atomic(path, found)
        except OSError as error:
            log.error("a prompt set is not kept: %s: %s", path, error)
        return found

    async def _update_charter(self, peer: str) -> None:
        """Fetch a peer's amendments and extend the charter where they are valid and longer."""
        wait_s = CHARTER_RETRY_S
        try:
            async with asyncio.timeout(CHARTER_TIMEOUT_S):
                data = await self._exchange.fetch_charter(peer)
            theirs = Charter.from_bytes(data, self.charter.manifest.swarm_id)
            extended = self.charter.extended(theirs.amendments)
            if extended != self.charter:
                wait_s = 0.0
                await self.amend(extended)
        except (RemoteProtocolError, ExchangeError, TimeoutError) as error:
            log.warning("no amendments from %s: %s", peer, error or "too slow")
            if isinstance(error, ExchangeError):
                wait_s = CHARTER_BUSY_S
        finally:
            self._next_charter_s[peer] = time.monotonic() + wait_s

    async def amend(self, charter: Charter) -> None:
        """Adopt extended terms, tell the node, and let the others know by a heartbeat."""
        self.adopt(charter)
        log.info("the swarm's terms changed: %d amendments", len(charter.amendments))
        await self._on_charter()
        self.beat()

    # -- heartbeats ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send and read heartbeats until cancelled."""
        try:
            await self._beat()
        finally:
            for task in self._updating.values():
                task.cancel()
            await asyncio.gather(*self._updating.values(), return_exceptions=True)

    async def _beat(self) -> None:
        started = time.monotonic()
        while True:
            await self.send_heartbeat()
            await self.read_heartbeats()
            young = time.monotonic() - started < FIRST_SECONDS
            self._beat_now.clear()
            try:
                async with asyncio.timeout(
                    min(1.0, self._heartbeat_s) if young else self._heartbeat_s
                ):
                    await self._beat_now.wait()
            except TimeoutError:
                continue

    async def send_heartbeat(self) -> None:
        """Store this node's heartbeat in the DHT."""
        heartbeat = await self._describe()
        key = heartbeat_key(
            self.charter.manifest.swarm_id, shard_of(self._overlay.peer_id, self._shards)
        )
        await self._overlay.put(key, heartbeat.pack(), ttl_s=HEARTBEAT_TTL_S)
        await self._send_tallies(key)

    async def _send_tallies(self, key: str) -> None:
        """Tell the publishers of groups what became of them, now and then."""

        now = time.monotonic()
        if now - self._tallies_sent_s < TALLIES_PERIOD_S:
            return
        tallies = tuple(
            Tally(tag_of(peer_id), accepted, trained)
            for peer_id, accepted, trained in self._ledger.trades(MAX_TALLIES)
        )
        if tallies:
            self._tallies_sent_s = now
            await self._overlay.put(
                key, pack_tallies(tallies), ttl_s=HEARTBEAT_TTL_S, suffix=TALLIES_SUFFIX
            )

    async def read_heartbeats(self) -> None:
        """Read all members' heartbeats; forget those that expired; follow newer amendments."""
        now = time.time()
        found: dict[str, Member] = {}
        ahead: list[str] = []
        records = await read_swarm(self._overlay, self.charter)
        self.unreadable = records.unreadable
        mine = tag_of(self._overlay.peer_id)
        for peer_id, tallies in records.tallies.items():
            for tally in tallies:
                if tally.tag == mine and peer_id != self._overlay.peer_id:
                    self._ledger.reported(peer_id, tally.accepted, tally.trained)
        for peer_id, heartbeat in sorted(
            records.heartbeats.items(), key=lambda item: item[0] not in self.members
        ):
            if peer_id == self._overlay.peer_id or heartbeat.state == "left":
                continue
            if len(found) >= MAX_MEMBERS:
                break
            known = self.members.get(peer_id)
            changed = known.changed_s if known and known.heartbeat == heartbeat else now
            found[peer_id] = Member(peer_id, heartbeat, changed)
            if heartbeat.amendments > len(self.charter.amendments):
                ahead.append(peer_id)
        for peer_id in found.keys() - self.members.keys():
            log.info("member %s (%r) is here", peer_id, found[peer_id].heartbeat.name)
        for peer_id in self.members.keys() - found.keys():
            log.info("member %s is gone", peer_id)
        self.members = found
        addresses = [a for m in found.values() for a in m.heartbeat.addresses]
        if addresses:
            self._save_peers(addresses)
            self._overlay.remember(addresses)
        if self._knocker is not None:
            ahead.append(self._knocker)
            self._knocker = None
        self._follow(ahead)

    def _save_peers(self, addresses: list[str]) -> None:
        """For the next start; a full disk is no reason to stop this one."""
        try:
            self._dir.save_peers(addresses)
        except OSError as error:
            log.warning("members' addresses are not kept: %s", error)

    def _follow(self, ahead: list[str]) -> None:
        """Fetch the amendments of members that are ahead, beside the heartbeats.

        A member that promises more than it serves is left alone for a while.
        """
        for peer in [peer for peer, task in self._updating.items() if task.done()]:
            self._updating.pop(peer).result()  # what it raises is a bug; peers' faults are caught
        now_s = time.monotonic()
        self._next_charter_s = {p: s for p, s in self._next_charter_s.items() if s > now_s}
        due = [p for p in ahead if p not in self._next_charter_s and p not in self._updating]
        random.shuffle(due)
        for peer in due[: MAX_CHARTERS_AT_ONCE - len(self._updating)]:
            self._updating[peer] = asyncio.create_task(self._update_charter(peer))


def off_the_roster(peer_id: str) -> str:
    """What the owner of a node that is kept out is told."""
    return (
        "this swarm has a roster and this node is not on it: send this id to the swarm's "
        f"organizer: {peer_id}"
    )


@dataclass(slots=True)
class SwarmRecords:
    """What members say of themselves and of each other's groups, by peer id."""

    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    tallies: dict[str, tuple[Tally, ...]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Peers with a record that cannot be read, and the reason."""


async def read_swarm(overlay: Overlay, charter: Charter) -> SwarmRecords:
    """All heartbeats and tallies of a swarm now in the DHT."""
    manifest = charter.manifest
    found = SwarmRecords()
    keys = [heartbeat_key(manifest.swarm_id, shard) for shard in range(manifest.record_shards)]
    for shard in await asyncio.gather(*(overlay.get(key) for key in keys)):
        for (peer_id, suffix), body in shard.items():
            try:
                if not suffix:
                    found.heartbeats[peer_id] = Heartbeat.unpack(body)
                elif suffix == TALLIES_SUFFIX:
                    found.tallies[peer_id] = unpack_tallies(body)
            except RemoteProtocolError as error:
                found.unreadable[peer_id] = error.reason
                log.debug("record of %s: %.200r", peer_id, str(error))
    return found
