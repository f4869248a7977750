"""This node in the overlay network: its DHT node, its records, its connections.

Owns: starting, joining late, re-joining, stopping; signed records in and out; restarting the
network daemon when it dies. Does not know: what a record or a stream says, who belongs to a swarm.

Everything runs in the caller's event loop. It starts without knowing anybody and goes on trying the
addresses that it has; nothing here waits longer than its timeout.
"""

import asyncio
import logging
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from swarm.errors import ConfigError, SwarmError, UsageError
from swarm.net import dialing, hivemind_fixes
from swarm.net.address_book import CONNECTED, AddressBook, Entry
from swarm.net.daemon import Daemon, DaemonOptions, NetworkError, StreamHandler, free_port
from swarm.net.hivemind_lean import DHTID, DHTNode, Multiaddr, PeerID
from swarm.net.record_validator import MIN_RENEWAL_S, RecordValidator
from swarm.protocol.identity import PUBLIC_KEY_BYTES, Identity, peer_id_of
from swarm.protocol.records import (
    MAX_BODY_BYTES,
    MAX_RECORD_TTL_S,
    record_subkey,
    sign_record,
)

_REPLICAS = 5
_RPC_TIMEOUT_S = 3.0
# A search visits up to 20 nodes with 4 workers; a frozen one costs the RPC timeout.
_DHT_TIMEOUT_S = 15.0
_MAX_DIALS = 8
_JOIN_TICK_S = 0.5
_REFRESH_S = 30.0
# With fewer members connected, remembered addresses are tried too.
_FEW_MEMBERS = 4
_MAX_CLOCKS = 256
_PEERS_TICK_S = 1.0
_PEERS_TIMEOUT_S = 5.0
_MAX_SILENT_TICKS = 3
_FIRST_RESTART_S = 0.1
_MAX_RESTART_S = 30.0
_STABLE_S = 60.0
_PORT_ATTEMPTS = 5

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Overlay:
    """A node of the overlay network.

    Args:
        identity: signs this node's records.
        identity_path: its key file, which the network daemon reads.
        host: IPv4 address to listen on.
        port: TCP port to listen on; 0: a free one, then `port` says which.
        last_port: tried first where any free one will do; 0: none.
        announce: addresses to tell others, in place of the listening ones.
        runtime_dir: folder for sockets, short, this node's own.
        bootstrap: addresses of members, each ending in /p2p/<peer id>.
        use_relay: be reachable through other members, and map a port on the router.
        on_restart: called after the network daemon died and was started again.
        client: only ask: listen nowhere, store nothing for others, publish nothing.
        refusal: why no record of a peer is kept or believed; None: it may have some.
    """

    def __init__(
        self,
        identity: Identity,
        identity_path: Path,
        *,
        host: str,
        port: int,
        last_port: int = 0,
        announce: Sequence[str] = (),
        runtime_dir: Path,
        bootstrap: Sequence[str] = (),
        use_relay: bool = False,
        on_restart: Iterable[Callable[[], None]] = (),
        client: bool = False,
        refusal: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self.peer_id = identity.peer_id
        self.port = port
        self._last_port = last_port
        self.client = client
        self.on_restart = list(on_restart)
        self.clock_skews_s: dict[str, float] = {}
        """Peer -> how far its clock is ahead of this machine's, as of its last ping."""
        self.restarts = 0
        self.fault = ""
        """Why the network daemon is down now; empty while it runs."""
        self.dht_failures: Counter[str] = Counter()
        """DHT operations ("put", "get", "refresh") that failed or took too long."""
        self._identity = identity
        self._identity_path = identity_path
        self._host = host
        self._announce = tuple(announce)
        self._runtime_dir = runtime_dir
        self._use_relay = use_relay
        self._refusal = refusal
        self._validator = RecordValidator(refusal=refusal)
        self._node_id = DHTID.generate(source=PeerID.from_base58(self.peer_id).to_bytes())
        self._daemon: Daemon | None = None
        self._node: Any = None
        self._storage: Any = None
        self._up = asyncio.Event()
        self._handlers: dict[str, StreamHandler] = {}
        self._book = AddressBook(self.peer_id, time.monotonic)
        self._connected: list[str] = []
        self._addresses: list[str] = []
        self._last_expiry: dict[tuple[bytes, bytes], float] = {}
        self._loops: list[asyncio.Task[None]] = []
        self._operations: set[asyncio.Task[Any]] = set()
        for address in bootstrap:
            self._book.add(address, pinned=True)

    @property
    def dial_results(self) -> dict[str, str]:
        """Address -> what came of dialling it last, in words; "connected" when a member answers."""
        return self._book.results

    @property
    def records_rejected(self) -> Counter[str]:
        """Records that were refused, by reason."""
        return self._validator.refused

    @property
    def clock_skew_s(self) -> float | None:
        """How far the members' clocks are ahead of this machine's, in the median."""
        return statistics.median(self.clock_skews_s.values()) if self.clock_skews_s else None

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the network daemon and the DHT node, and begin to join in the background.

        Raises:
            TryAgainError: the port is in use.
            ConfigError: host, port, an announced address or the runtime folder is unusable.
            NetworkError: the network daemon did not start.
        """
        hivemind_fixes.apply()
        for address in self._announce:
            _check_announced(address)
        if self.port == 0 and not self.client:
            await self._open_on_free_port()
        else:
            await self._open()
        for name, loop in (
            ("supervisor", self._supervise()),
            ("joiner", self._join()),
            ("peers", self._watch_peers()),
        ):
            task = asyncio.create_task(loop, name=f"overlay {name}")
            task.add_done_callback(self._report_bug)
            self._loops.append(task)

    async def stop(self) -> None:
        """Leave: end the daemon and every task, within seconds also when the daemon hangs."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops = []
        await self._close()
        self._up.set()  # whoever waits for the node learns that there is none

    def _report_bug(self, task: asyncio.Task[None]) -> None:
        """The loops end only by `stop`, or by a bug of this program."""
        if not task.cancelled():
            self.fault = f"{task.get_name()} failed: {task.exception()!r}"
            logger.critical("%s", self.fault, exc_info=task.exception())

    async def _open_on_free_port(self) -> None:
        """Somebody may take the port between the choice and the daemon's listening."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            preferred = self._last_port if attempt == 1 else 0
            self.port = preferred or free_port(self._host)
            try:
                await self._open()
            except SwarmError:
                if attempt == _PORT_ATTEMPTS:
                    raise
            else:
                return

    async def _open(self) -> None:
        self._daemon = await Daemon.start(
            DaemonOptions(
                runtime_dir=self._runtime_dir,
                identity_path=self._identity_path,
                host=self._host,
                port=self.port,
                announce=self._announce,
                use_relay=self._use_relay,
                relays=tuple(self._book.pinned()),
                client=self.client,
            )
        )
        try:
            if self._daemon.peer_id != self.peer_id:
                raise ConfigError(
                    f"{self._identity_path} holds the key of {self._daemon.peer_id}, "
                    f"not of {self.peer_id}"
                )
            await self._open_node(self._daemon)
        except BaseException:
            await self._close()
            raise

    async def _open_node(self, daemon: Daemon) -> None:
        self._node = await DHTNode.create(
            p2p=daemon.p2p,
            node_id=self._node_id,
            num_replicas=_REPLICAS,
            wait_timeout=_RPC_TIMEOUT_S,
            client_mode=self.client,
            record_validator=self._validator,
            # A cache answers with old records; and what anybody puts into it hides the store.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            # It keeps an entry for every key ever asked for.
            reuse_get_requests=False,
            # A member that comes back is asked again within seconds.
            blacklist_time=5.0,
            backoff_rate=1.0,
        )
        protocol = self._node.protocol
        protocol.storage = self._storage if self._storage is not None else protocol.storage
        protocol.cache = self._storage = protocol.storage
        for name, handler in self._handlers.items():
            await daemon.serve(name, handler)
        self._addresses = await daemon.addresses()
        self.fault = ""
        self._up.set()

    async def _close(self) -> None:
        """End the daemon and what goes on through it; whole, also when the caller is cancelled."""
        closing = asyncio.create_task(self._close_now(), name="overlay close")
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close_now(self) -> None:
        node, daemon = self._node, self._daemon
        self._node = self._daemon = None
        self._up.clear()
        self._connected = []
        if node is not None:
            node.is_alive = False
        if daemon is not None:
            await daemon.stop()
        operations = list(self._operations)
        if operations:
            await asyncio.wait(operations, timeout=_RPC_TIMEOUT_S)
        for task in operations:
            task.cancel()
        await asyncio.gather(*operations, return_exceptions=True)

    async def _supervise(self) -> None:
        """Start the network daemon again whenever it ends."""
        delay_s = _FIRST_RESTART_S
        while True:
            started_s = time.monotonic()
            daemon = self._daemon
            code = await daemon.wait() if daemon is not None else None
            if time.monotonic() - started_s > _STABLE_S:
                delay_s = _FIRST_RESTART_S
            if daemon is not None:
                self.fault = f"the network daemon p2pd ended with code {code}"
                logger.error("%s; starting it again in %.1f s", self.fault, delay_s)
                await self._close()
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_RESTART_S)
            try:
                await self._open()
            except SwarmError as error:
                self.fault = str(error)
                logger.error("the network daemon cannot be started again: %s", error)
                continue
            self.restarts += 1
            logger.info("the network daemon runs again, port %d", self.port)
            self._book.retry_now()
            for callback in self.on_restart:
                callback()

    # -- members ---------------------------------------------------------------------------------

    def connected(self) -> list[str]:
        """The peers with an open connection, as of the last second."""
        return list(self._connected)

    async def addresses(self) -> list[str]:
        """The full addresses at which others reach this node now, loopback last."""
        if self._daemon is not None and not self.client:
            try:
                self._addresses = await self._daemon.addresses()
            except NetworkError as error:
                logger.info("addresses as of before: %s", error)
        ordered = sorted(self._addresses, key=lambda address: "/127." in address)
        return [f"{address}/p2p/{self.peer_id}" for address in ordered]

    def remember(self, addresses: Iterable[str]) -> None:
        """Have these dialled in the background whenever few members are known."""
        for address in addresses:
            self._book.add(address)

    async def dial(self, addresses: Iterable[str]) -> dict[str, str]:
        """Dial these now, and remember them; address -> result in words, as in `dial_results`."""
        entries = {address: self._book.add(address) for address in addresses}
        await self._dial_all([entry for entry in entries.values() if isinstance(entry, Entry)])
        return {
            address: self.dial_results[address] if isinstance(entry, Entry) else entry
            for address, entry in entries.items()
        }

    def _members(self) -> set[str]:
        """The routing table: members that answered lately."""
        if self._node is None:
            return set()
        return {str(peer) for peer in self._node.protocol.routing_table.peer_id_to_uid}

    async def _join(self) -> None:
        """Dial what is due; keep the routing table fresh."""
        next_refresh_s = time.monotonic() + _REFRESH_S
        while True:
            reached = self._members() & set(self._connected)
            due = self._book.due(reached, all_of_them=len(reached) < _FEW_MEMBERS)
            if self._node is not None and due:
                await self._dial_all(due[:_MAX_DIALS])
            elif self._node is not None and time.monotonic() >= next_refresh_s:
                next_refresh_s = time.monotonic() + _REFRESH_S
                await self._ping_some()
                await self._refresh()
            await asyncio.sleep(_JOIN_TICK_S)

    async def _refresh(self) -> None:
        """Ask for this node's neighbours; each one found enters the routing table."""
        if self._node is not None:
            await self._in_time("refresh", self._node.find_nearest_nodes([self._node_id]))

    async def _ping_some(self) -> None:
        """Peers may be connected and yet, after a lost message, not in the routing table: those
        first. Others tell whether the clocks still agree."""
        members = self._members()
        peers = random.sample(self._connected, len(self._connected))
        for peer in sorted(peers, key=members.__contains__)[:_MAX_DIALS]:
            try:
                await self._ping(peer)
            except NetworkError as error:
                logger.debug("%s is connected, but no member: %s", peer, error)
        # What those said that are gone is true no more; without any, it may be why they are.
        here = {peer: s for peer, s in self.clock_skews_s.items() if peer in self._connected}
        self.clock_skews_s = here or self.clock_skews_s

    async def _dial_all(self, entries: Sequence[Entry]) -> None:
        slots = asyncio.Semaphore(_MAX_DIALS)

        async def dial(entry: Entry) -> None:
            async with slots:
                await self._dial(entry)

        async with asyncio.TaskGroup() as tasks:
            for entry in entries:
                tasks.create_task(dial(entry))

    async def _dial(self, entry: Entry) -> None:
        """Dial one address, step by step, so that the result names the step that failed."""
        met = entry.peer in self._members()
        try:
            await dialing.probe_tcp(entry.transport)
            if entry.peer not in self._connected:
                if self._daemon is None:
                    raise NetworkError(self.fault or "not dialled: the overlay is not started")
                await dialing.connect(self._daemon, entry.peer, entry.transport)
                self._connected = sorted({*self._connected, entry.peer})
            await self._ping(entry.peer)
        except NetworkError as error:
            result = str(error)
        else:
            result = CONNECTED
        if self._book.record(entry, result):
            logger.info("%s: %s", entry.address, result)
        if result == CONNECTED and not met:
            await self._refresh()

    async def _ping(self, peer: str) -> None:
        if self._node is None:
            raise NetworkError(self.fault or "not pinged: the overlay is not started")
        try:
            skew_s = await dialing.ping(
                self._node.protocol, peer, client=self.client, timeout_s=_RPC_TIMEOUT_S
            )
        except dialing.ClockSkewError as error:
            self._note_clock(peer, error.skew_s)
            raise
        self._note_clock(peer, skew_s)

    def _note_clock(self, peer: str, skew_s: float) -> None:
        if not math.isfinite(skew_s):
            return
        if len(self.clock_skews_s) >= _MAX_CLOCKS:
            del self.clock_skews_s[next(iter(self.clock_skews_s))]
        self.clock_skews_s[peer] = skew_s

    async def _watch_peers(self) -> None:
        """Keep the list of connections; end a daemon that does not answer."""
        silent = 0
        while True:
            await asyncio.sleep(_PEERS_TICK_S)
            daemon = self._daemon
            if daemon is None:
                continue
            try:
                peers = await daemon.peers(_PEERS_TIMEOUT_S)
            except NetworkError as error:
                silent += 1
                if silent >= _MAX_SILENT_TICKS:
                    logger.error("the network daemon hangs and is killed: %s", error)
                    daemon.kill()
                    silent = 0
                continue
            silent = 0
            if daemon is self._daemon:
                self._connected = peers

    # -- records ---------------------------------------------------------------------------------

    async def put(self, key: str, body: bytes, ttl_s: float, suffix: bytes = b"") -> bool:
        """Sign a record and store it with the members nearest to its key.

        A later record of the same key and suffix replaces it.

        Returns:
            True when another member has accepted it; False when none did in time, as when this
            node is alone.
        """
        if self.client:
            raise UsageError("a client of the network publishes nothing")
        if len(body) > MAX_BODY_BYTES:
            raise ValueError(f"a record's body has at most {MAX_BODY_BYTES} bytes, not {len(body)}")
        if not 0 < ttl_s <= MAX_RECORD_TTL_S:
            raise ValueError(f"a record lives at most {MAX_RECORD_TTL_S} s, not {ttl_s}")
        key_id = DHTID.generate(source=key)
        subkey = record_subkey(self.peer_id, suffix)
        expires_s = self._next_expiry(key_id.to_bytes(), subkey, time.time() + ttl_s)
        value = sign_record(self._identity, key_id.to_bytes(), subkey, expires_s, body)
        if await self._running_node() is None:
            return False
        self._storage.store_subkey(key_id, subkey, value, expires_s)
        stored: list[str] = []
        await self._in_time("put", self._replicate(key_id, subkey, value, expires_s, stored))
        return bool(stored)

    async def get(self, key: str) -> dict[tuple[str, bytes], bytes]:
        """The records under a key, as the nearest members have them now, one's own included.

        A search that fails or takes too long finds nothing and is counted in `dht_failures`.

        Returns:
            (peer id of the signer, suffix) -> body; the signatures hold.
        """
        node = await self._running_node()
        if node is None:
            return {}
        key_id = DHTID.generate(source=key)
        # NaN: no expiry is "sufficient", so no single peer can end the search with a high one.
        search = node.get_many_by_id([key_id], sufficient_expiration_time=math.nan)
        found = (await self._in_time("get", search, cancel=True) or {}).get(key_id)
        if found is None or not isinstance(found.value, dict):
            return {}
        now_s = time.time()
        records = {
            (peer_id_of(subkey[:PUBLIC_KEY_BYTES]), subkey[PUBLIC_KEY_BYTES:]): entry.value
            for subkey, entry in found.value.items()
            if entry.expiration_time > now_s
        }
        # What this node held before a peer was turned away is no record of its any more.
        refused = {peer for peer, _ in records if self._refusal(peer) is not None}
        return {key: body for key, body in records.items() if key[0] not in refused}

    async def _running_node(self) -> Any:
        """hivemind's node, after a restart of the daemon if need be; None when there is none."""
        if self._node is None and self._loops:
            try:
                async with asyncio.timeout(_DHT_TIMEOUT_S):
                    await self._up.wait()
            except TimeoutError:
                logger.warning("no DHT: %s", self.fault)
        return self._node

    async def _replicate(
        self, key_id: Any, subkey: bytes, value: bytes, expires_s: float, stored: list[str]
    ) -> None:
        """Store with the nearest members until enough have it; who took it goes into `stored`."""
        node = await self._running_node()
        if node is None:
            return
        found = await node.find_nearest_nodes([key_id], exclude_self=True)
        candidates = list(found[key_id].values())

        async def store(peer: Any) -> None:
            answer = await node.protocol.call_store(
                peer, [key_id], [value], [expires_s], subkeys=[subkey]
            )
            if answer and answer[0]:
                stored.append(str(peer))

        while candidates and len(stored) < _REPLICAS:
            missing = _REPLICAS - len(stored)
            chosen, candidates = candidates[:missing], candidates[missing:]
            await asyncio.gather(*(store(peer) for peer in chosen))

    def _next_expiry(self, key: bytes, subkey: bytes, wanted_s: float) -> float:
        """Holders replace a record only by one that expires later, by at least `MIN_RENEWAL_S`."""
        now_s = time.time()
        for old in [name for name, expires_s in self._last_expiry.items() if expires_s < now_s]:
            del self._last_expiry[old]
        expires_s = max(wanted_s, self._last_expiry.get((key, subkey), 0.0) + MIN_RENEWAL_S)
        if expires_s > now_s + MAX_RECORD_TTL_S:
            # The clock was set back: what it said before is refused by all, this must not be.
            expires_s = wanted_s
        self._last_expiry[key, subkey] = expires_s
        return expires_s

    async def _in_time(
        self, what: str, operation: Coroutine[Any, Any, T], *, cancel: bool = False
    ) -> T | None:
        """The operation's result; None when it fails or takes too long, which is counted.

        Args:
            what: its name in log and counter.
            operation: of hivemind; whatever it raises comes of what peers sent.
            cancel: end it when it is late. Otherwise it is left to end by itself, as each of its
                steps has a timeout: a cancelled search for nodes leaves tasks behind.
        """
        task = asyncio.create_task(operation, name=f"overlay {what}")
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait({task}, timeout=_DHT_TIMEOUT_S)
        if not done:
            self.dht_failures[what] += 1
            logger.warning("DHT %s: not done after %.0f s", what, _DHT_TIMEOUT_S)
            if cancel:
                task.cancel()
            return None
        if task.cancelled():  # the overlay stops
            return None
        if (error := task.exception()) is not None:
            self.dht_failures[what] += 1
            logger.warning("DHT %s failed", what, exc_info=error)
            return None
        return task.result()

    # -- streams ---------------------------------------------------------------------------------

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Have incoming streams of a libp2p protocol handled, across restarts of the daemon."""
        self._handlers[protocol] = handler
        if self._daemon is not None:
            await self._daemon.serve(protocol, handler)

    async def open_stream(
        self, peer: str, protocols: Sequence[str], timeout_s: float
    ) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream in the first of `protocols` that the peer speaks; the caller closes it.

        Raises:
            RefusedByDaemonError: the peer cannot be reached or speaks none of them; says which.
            NetworkError: the network daemon is down or the peer silent.
        """
        if self._daemon is None:
            raise NetworkError(self.fault or "the overlay is not started")
        return await self._daemon.open_stream(peer, protocols, timeout_s)


def _check_announced(address: str) -> None:
    try:
        parsed = Multiaddr(address)
        without_port = any(name in parsed and parsed[name] == "0" for name in ("tcp", "udp"))
    except Exception as error:  # noqa: BLE001  multiaddr lets through whatever its codecs raise
        raise ConfigError(f"network.announce: {address!r} is no multiaddr: {error}") from None
    if without_port:
        raise ConfigError(f"network.announce: {address!r} must name its port, not 0")
