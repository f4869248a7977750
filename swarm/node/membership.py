"""The swarm as this node sees it: its charter, who is alive, and the node's own heartbeat.

Owns: fetching and extending the charter, fetching prompt sets, heartbeats both ways.
Does not know: rollouts, models, training.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarm.errors import RemoteProtocolError, SwarmError, UnreachableError
from swarm.ledger import Ledger
from swarm.net.exchange import Exchange, ExchangeError
from swarm.net.overlay import Overlay
from swarm.paths import SwarmDir, write_atomic
from swarm.protocol.manifest import Charter, PromptSetRef
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

log = logging.getLogger(__name__)

MAX_CHARTER_BYTES = 1 << 20
"""A manifest of a few KB and thousands of amendments."""

TALLIES_PERIOD_S = 15.0
"""Between two records of tallies; they live as long as a heartbeat."""

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
        *,
        heartbeat_s: float,
        describe: Callable[[], Awaitable[Heartbeat]],
        ledger: Ledger,
        on_charter: Callable[[], Awaitable[None]],
    ) -> None:
        self._overlay = overlay
        self._exchange = exchange
        self._dir = swarm_dir
        self._heartbeat_s = heartbeat_s
        self._describe = describe
        self._ledger = ledger
        self._tallies_sent_s = float("-inf")
        self._on_charter = on_charter
        self._charter: Charter | None = None
        self._beat_now = asyncio.Event()
        self._shards = 1
        self.members: dict[str, Member] = {}
        self.incompatible: set[str] = set()

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
        write_atomic(self._dir.charter_path, charter.to_bytes())

    def samplers(self) -> list[str]:
        """Live members that say that they are sampling, this node not included."""
        return [m.peer_id for m in self.members.values() if m.heartbeat.sampling]

    def beat(self) -> None:
        """Send a heartbeat now: something that others schedule by has changed."""
        self._beat_now.set()

    # -- joining ---------------------------------------------------------------------------------

    async def join(self, swarm_id: bytes, *, fail_fast: bool) -> Charter:
        """Load the charter from disk or fetch it from any member, retrying with backoff.

        Raises:
            UnreachableError: with fail_fast, when no member answered; names each address's result.
        """
        if self._dir.charter_path.exists():
            self.adopt(Charter.from_bytes(self._dir.charter_path.read_bytes(), swarm_id))
            return self.charter
        delay = 0.5
        while True:
            for peer in self._overlay.connected():
                try:
                    data = await self._exchange.fetch_charter(peer)
                    self.adopt(Charter.from_bytes(data, swarm_id))
                    return self.charter
                except (RemoteProtocolError, ExchangeError) as error:
                    log.info("no manifest from %s: %s", peer, error)
            if fail_fast and delay > 4.0:
                raise UnreachableError(f"no member of the swarm answers:\n{self.dial_report()}")
            if delay > 4.0:
                log.warning("still looking for a member:\n%s", self.dial_report())
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 15.0)

    def dial_report(self) -> str:
        """One line per known address with what came of dialling it."""
        results = self._overlay.dial_results
        if not results:
            return "  no address is known; check the invite"
        return "\n".join(f"  {address}: {result}" for address, result in results.items())

    async def prompt_set(self, ref: PromptSetRef, max_bytes: int) -> bytes:
        """A prompt set's bytes, from disk or from any member, checked by its hash."""
        path = self._dir.prompts_dir / f"{ref.sha256}.jsonl"
        if path.exists():
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == ref.sha256:
                return data
            log.warning("%s is damaged; fetching it again", path)
        delay = 0.5
        while True:
            for peer in self._overlay.connected():
                try:
                    data = await self._exchange.fetch_blob(
                        peer, bytes.fromhex(ref.sha256), max_bytes=max_bytes, size=ref.size_bytes
                    )
                    write_atomic(path, data)
                    return data
                except (RemoteProtocolError, ExchangeError) as error:
                    log.info("no prompt set from %s: %s", peer, error)
            await asyncio.sleep(delay)
            delay = min(delay * 1.5, 15.0)

    async def update_charter(self, peer: str) -> None:
        """Fetch a peer's amendments and extend the charter where they are valid and longer."""
        try:
            data = await self._exchange.fetch_charter(peer)
            theirs = Charter.from_bytes(data, self.charter.manifest.swarm_id)
            extended = self.charter.extended(theirs.amendments)
        except (RemoteProtocolError, ExchangeError) as error:
            log.warning("no amendments from %s: %s", peer, error)
            return
        if extended != self.charter:
            await self.amend(extended)

    async def amend(self, charter: Charter) -> None:
        """Adopt extended terms, tell the node, and let the others know by a heartbeat."""
        self.adopt(charter)
        log.info("the swarm's terms changed: %d amendments", len(charter.amendments))
        await self._on_charter()
        self.beat()

    # -- heartbeats ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send and read heartbeats until cancelled."""
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
        ahead: str | None = None
        records = await read_swarm(self._overlay, self.charter)
        self.incompatible = records.incompatible
        mine = tag_of(self._overlay.peer_id)
        for peer_id, tallies in records.tallies.items():
            for tally in tallies:
                if tally.tag == mine and peer_id != self._overlay.peer_id:
                    self._ledger.reported(peer_id, tally.accepted, tally.trained)
        for peer_id, heartbeat in records.heartbeats.items():
            if peer_id == self._overlay.peer_id or heartbeat.state == "left":
                continue
            known = self.members.get(peer_id)
            changed = known.changed_s if known and known.heartbeat == heartbeat else now
            found[peer_id] = Member(peer_id, heartbeat, changed)
            if heartbeat.amendments > len(self.charter.amendments):
                ahead = peer_id
        for peer_id in found.keys() - self.members.keys():
            log.info("member %s (%r) is here", peer_id, found[peer_id].heartbeat.name)
        for peer_id in self.members.keys() - found.keys():
            log.info("member %s is gone", peer_id)
        self.members = found
        addresses = [a for m in found.values() for a in m.heartbeat.addresses]
        if addresses:
            self._dir.save_peers(addresses)
            self._overlay.remember(addresses)
        if ahead is not None:
            await self.update_charter(ahead)


@dataclass(slots=True)
class SwarmRecords:
    """What members say of themselves and of each other's groups, by peer id."""

    heartbeats: dict[str, Heartbeat] = field(default_factory=dict)
    """Malformed ones are left out."""
    tallies: dict[str, tuple[Tally, ...]] = field(default_factory=dict)
    incompatible: set[str] = field(default_factory=set)
    """Peers that speak no version of the protocol that this node does."""


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
                if error.reason == Reason.INCOMPATIBLE:
                    found.incompatible.add(peer_id)
                log.debug("record of %s: %.200r", peer_id, str(error))
    return found
