"""The overlay on real hivemind over loopback: joining, records, failures, restarts, stopping."""

import asyncio
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from overlay_fixture import daemon_pid, daemons, kill_daemon, nest, until

from swarm.errors import ConfigError, TryAgainError, UsageError
from swarm.net import dialing
from swarm.net import overlay as overlay_module
from swarm.net.daemon import Daemon, NetworkError
from swarm.net.hivemind_lean import DHTID, DictionaryDHTValue, PeerID, ValueWithExpiration
from swarm.net.overlay import Overlay
from swarm.protocol.identity import Identity
from swarm.protocol.records import record_subkey, sign_record

KEY = "test/key"


async def attack(evil: Overlay, victim: Overlay, value: Any, expires_s: float, **how: Any) -> Any:
    """Send one store request with hivemind's own means, past the overlay's checks."""
    key = DHTID.generate(source=how.pop("key", KEY))
    return await evil._node.protocol.call_store(
        PeerID.from_base58(victim.peer_id), [key], [value], [expires_s], **how
    )


def signed(overlay: Overlay, body: bytes, expires_s: float, suffix: bytes = b"") -> bytes:
    """The value of a record as `overlay` itself would sign it."""
    key = DHTID.generate(source=KEY).to_bytes()
    return sign_record(
        overlay._identity, key, record_subkey(overlay.peer_id, suffix), expires_s, body
    )


def hold(holder: Overlay, body: bytes) -> None:
    """Give one member a record of its own that no other member has."""
    expires_s = time.time() + 60
    holder._storage.store_subkey(
        DHTID.generate(source=KEY),
        record_subkey(holder.peer_id),
        signed(holder, body, expires_s),
        expires_s,
    )


def steal_port(port: int) -> socket.socket:
    """Take a port as soon as a dying process frees it; no event loop runs meanwhile."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.001)


class TestRecords:
    async def test_alone_a_record_has_not_left_the_node(self) -> None:
        async with nest() as nests:
            alone = await nests.start()
            assert not await alone.put(KEY, b"mine", ttl_s=30)
            assert await alone.get(KEY) == {(alone.peer_id, b""): b"mine"}
            assert alone.connected() == []

    async def test_members_read_each_others_newest_records(self) -> None:
        async with nest() as nests:
            one, two, three = await nests.swarm(3)
            assert await one.put(KEY, b"old", ttl_s=30)
            assert await one.put(KEY, b"new", ttl_s=30)
            assert await one.put(KEY, b"other", ttl_s=30, suffix=b"\x01")
            assert await two.put(KEY, b"two", ttl_s=30)
            assert await two.put("another key", b"elsewhere", ttl_s=30)
            expected = {
                (one.peer_id, b""): b"new",
                (one.peer_id, b"\x01"): b"other",
                (two.peer_id, b""): b"two",
            }
            for reader in (one, two, three):
                assert await reader.get(KEY) == expected
            assert await three.get("no such key") == {}

    async def test_after_the_clock_was_set_back_records_go_out_again(self) -> None:
        async with nest() as nests:
            writer, reader = await nests.swarm(2)
            ahead_s = time.time() + 86_400
            # As it was in force when the clock was a day fast; nobody took these records.
            writer._next_expiry(
                DHTID.generate(source=KEY).to_bytes(), record_subkey(writer.peer_id), ahead_s
            )
            assert await writer.put(KEY, b"now", ttl_s=60)
            assert await reader.get(KEY) == {(writer.peer_id, b""): b"now"}

    async def test_a_record_ends_with_its_time(self) -> None:
        async with nest() as nests:
            one, two = await nests.swarm(2)
            assert await one.put(KEY, b"short", ttl_s=3.0)
            assert await two.get(KEY) == {(one.peer_id, b""): b"short"}
            await asyncio.sleep(3.1)
            assert await two.get(KEY) == {}

    async def test_a_newcomer_is_told_what_was_stored_before(self) -> None:
        async with nest() as nests:
            one = await nests.start()
            await one.put(KEY, b"early", ttl_s=60)
            two = await nests.start(await one.addresses())
            assert await two.get(KEY) == {(one.peer_id, b""): b"early"}

    async def test_the_limits_of_a_record_are_checked_before_it_is_sent(self) -> None:
        async with nest() as nests:
            alone = await nests.start()
            with pytest.raises(ValueError, match="1000 bytes"):
                await alone.put(KEY, b"x" * 1001, ttl_s=30)
            with pytest.raises(ValueError, match="lives at most"):
                await alone.put(KEY, b"x", ttl_s=1e6)

    async def test_an_operation_that_takes_too_long_is_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with nest() as nests:
            one, two = await nests.swarm(2)
            assert await one.put(KEY, b"x", ttl_s=30)  # so it knows where to search
            monkeypatch.setattr(overlay_module, "_DHT_TIMEOUT_S", 0.5)
            kill_daemon(two, signal.SIGSTOP)
            try:
                assert await one.get("test/other") == {}
                assert not await one.put("test/other", b"x", ttl_s=30)
                assert one.dht_failures == {"get": 1, "put": 1}
            finally:
                kill_daemon(two, signal.SIGCONT)


class TestMalice:
    async def test_forged_records_are_refused_and_counted(self) -> None:
        async with nest() as nests:
            victim, evil = await nests.swarm(2)
            subkey = record_subkey(victim.peer_id)
            assert await victim.put(KEY, b"true", ttl_s=60)
            soon = time.time() + 100
            forged = signed(evil, b"false", soon)
            assert await attack(evil, victim, forged, soon, subkeys=[subkey]) == [False]
            assert await attack(evil, victim, b"plain value", soon) == [False]
            moved = signed(victim, b"true", soon)  # a true signature, but for another key
            assert await attack(evil, victim, moved, soon, subkeys=[subkey], key="x") == [False]
            far = time.time() + 10_000
            own = record_subkey(evil.peer_id)
            late = signed(evil, b"late", far)
            assert await attack(evil, victim, late, far, subkeys=[own]) == [False]
            long = signed(evil, b"x" * 3000, soon)
            assert await attack(evil, victim, long, soon, subkeys=[own]) == [False]
            assert await attack(evil, victim, forged, soon, subkeys=["text"]) == [False]
            assert victim.records_rejected == {
                "record_signature": 2,
                "record_kind": 2,
                "record_expiry": 1,
                "record_size": 1,
            }
            assert await victim.get(KEY) == {(victim.peer_id, b""): b"true"}

    async def test_replaying_an_old_record_does_not_shorten_the_new_one(self) -> None:
        async with nest() as nests:
            publisher, holder, evil = await nests.swarm(3)
            now = time.time()
            old = signed(publisher, b"old", now + 1.5)
            assert await publisher.put(KEY, b"new", ttl_s=60)
            subkey = record_subkey(publisher.peer_id)
            for _ in range(3):
                await attack(evil, holder, old, now + 1.5, subkeys=[subkey])
            await asyncio.sleep(1.6)
            entry = holder._storage.get(DHTID.generate(source=KEY))
            assert entry is not None
            assert entry.value.get(subkey) is not None
            assert await holder.get(KEY) == {(publisher.peer_id, b""): b"new"}

    async def test_what_a_peer_puts_into_the_cache_does_not_hide_the_records(self) -> None:
        async with nest() as nests:
            victim, evil, reader = await nests.swarm(3)
            hold(victim, b"true")
            late = time.time() + 500
            value = signed(evil, b"decoy", late)
            subkeys = [record_subkey(evil.peer_id)]
            assert await attack(evil, victim, value, late, subkeys=subkeys, in_cache=True) == [True]
            assert await reader.get(KEY) == {
                (victim.peer_id, b""): b"true",
                (evil.peer_id, b""): b"decoy",
            }

    async def test_one_peer_cannot_end_a_search_by_a_high_expiry(self) -> None:
        async with nest() as nests:
            reader, honest, evil = await nests.swarm(3)
            hold(honest, b"true")
            hold(evil, b"decoy")
            entry = evil._storage.get(DHTID.generate(source=KEY))
            answer = ValueWithExpiration(entry.value, float("inf"))
            evil._storage.get = lambda _key: answer
            find = reader._node.protocol.call_find

            async def find_evil_first(peer: Any, keys: Any) -> Any:
                await asyncio.sleep(0.3 * (str(peer) == honest.peer_id))
                return await find(peer, keys)

            reader._node.protocol.call_find = find_evil_first
            assert await reader.get(KEY) == {
                (honest.peer_id, b""): b"true",
                (evil.peer_id, b""): b"decoy",
            }

    async def test_a_dictionary_of_nonsense_does_not_end_a_search(self) -> None:
        """Sizes, keys and expiries of any type come from the peer that answers."""
        async with nest() as nests:
            reader, honest, evil = await nests.swarm(3)
            hold(honest, b"true")
            nonsense = DictionaryDHTValue("no size")
            nonsense.data = {
                ("a", "tuple"): (b"x", time.time() + 60),
                b"bytes": (b"x", float("nan")),
                None: (b"x", float("inf")),
            }
            nonsense.items = lambda: iter(nonsense.data.items())
            nonsense.latest_expiration_time = 1e300
            answer = type("Answer", (), {"value": nonsense, "expiration_time": 1e300})()
            evil._storage.get = lambda _key: answer
            assert await reader.get(KEY) == {(honest.peer_id, b""): b"true"}
            assert reader.dht_failures == {}


class TestJoining:
    async def test_starts_before_its_bootstrap_and_joins_when_that_comes(self) -> None:
        async with nest() as nests:
            first = await nests.start()
            (address,) = await first.addresses()
            await first.stop()
            late = nests.make([address])
            await late.start()
            await until(lambda: late.dial_results)
            assert late.dial_results == {
                address: f"TCP refused: nothing listens at 127.0.0.1:{first.port}"
            }
            again = await nests.start(like=first)
            assert again.peer_id == first.peer_id
            await until(lambda: late.dial_results[address] == "connected")
            assert late.connected() == [first.peer_id]
            assert await late.put(KEY, b"x", ttl_s=30)

    async def test_the_swarm_outlives_its_bootstrap_and_grows_through_another_member(self) -> None:
        async with nest() as nests:
            first, two, three = await nests.swarm(3)
            (dead,) = await first.addresses()
            kill_daemon(first)
            await first.stop()
            newcomer = await nests.start([dead, *await two.addresses()])
            assert await newcomer.put(KEY, b"new", ttl_s=30)
            assert await three.get(KEY) == {(newcomer.peer_id, b""): b"new"}
            assert newcomer.dial_results[dead].startswith("TCP refused")

    async def test_remembered_addresses_are_dialled_while_few_members_are_known(self) -> None:
        async with nest() as nests:
            first = await nests.start()
            other = await nests.start()
            addresses = await first.addresses()
            other.remember([*addresses, "nonsense"])
            await until(lambda: other.dial_results)
            assert other.connected() == [first.peer_id]
            assert other.dial_results == {addresses[0]: "connected"}
            assert other.clock_skew_s == pytest.approx(0.0, abs=1.0)

    async def test_a_client_reads_without_being_a_member(self) -> None:
        async with nest() as nests:
            one, two = await nests.swarm(2)
            await one.put(KEY, b"x", ttl_s=30)
            client = await nests.start(await two.addresses(), client=True)
            assert await client.get(KEY) == {(one.peer_id, b""): b"x"}
            assert await client.addresses() == []
            process = psutil.Process(daemon_pid(client))
            assert not [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
            assert client.peer_id not in one._members() | two._members()
            with pytest.raises(UsageError):
                await client.put(KEY, b"x", ttl_s=30)


class TestDialResults:
    """Each way in which an address fails has its own words."""

    @pytest.fixture
    def server(self) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            yield listening

    async def dial(self, dialer: Overlay, port: int, peer: str | None = None) -> str:
        peer = peer or Identity.generate().peer_id
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"
        result = await dialer.dial([address])
        assert dialer.dial_results[address] == result[address]
        return result[address]

    async def test_wrong_peer_and_own_address_and_no_address(self) -> None:
        async with nest() as nests:
            dialer = await nests.start()
            other = await nests.start()
            assert (await self.dial(dialer, other.port)).startswith("wrong peer id")
            (own,) = await dialer.addresses()
            unusable = ["/ip4/127.0.0.1/tcp/1", "/ip4/300.0.0.1/tcp/1/p2p/" + other.peer_id, "x"]
            results = await dialer.dial([own, *unusable])
            assert results.pop(own) == "this node itself"
            assert all(results[address].startswith("not an address") for address in unusable)

    async def test_another_kind_of_server(self, server: socket.socket) -> None:
        async with nest() as nests:
            dialer = await nests.start()
            dialling = asyncio.create_task(self.dial(dialer, server.getsockname()[1]))
            for _ in range(2):  # the probe, then libp2p
                connection, _ = await asyncio.to_thread(server.accept)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.close()
            assert (await dialling).startswith("no libp2p node")

    async def test_a_server_that_says_nothing(
        self, server: socket.socket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dialing, "CONNECT_TIMEOUT_S", 1.0)
        async with nest() as nests:
            dialer = await nests.start()
            result = await self.dial(dialer, server.getsockname()[1])
            assert result.startswith("libp2p timed out")

    async def test_a_host_that_drops_packets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dialing, "TCP_TIMEOUT_S", 0.3)
        async with nest() as nests:
            dialer = await nests.start()
            with socket.socket() as full:  # the kernel drops what a full backlog cannot hold
                full.bind(("127.0.0.1", 0))
                full.listen(0)
                port = full.getsockname()[1]
                waiting = [socket.socket() for _ in range(4)]
                for one in waiting:
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.1", port))
                result = await self.dial(dialer, port)
                for one in waiting:
                    one.close()
            assert result.startswith("TCP timed out")

    async def test_an_unknown_host_name(self) -> None:
        async with nest() as nests:
            dialer = await nests.start()
            address = f"/dns4/nowhere.invalid/tcp/1/p2p/{Identity.generate().peer_id}"
            result = (await dialer.dial([address]))[address]
            assert result.startswith("TCP failed: nowhere.invalid:1")

    @pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..b", "."])
    async def test_what_is_no_hosts_name_does_not_end_the_dialling(self, host: str) -> None:
        async with nest() as nests:
            stranger = Identity.generate().peer_id
            node = await nests.start()
            node.remember([f"/dns4/{host}/tcp/9/p2p/{stranger}"])
            await until(lambda: bool(node.dial_results))
            assert "no host's name" in next(iter(node.dial_results.values()))
            assert node.fault == ""
            other = await nests.start()
            node.remember(await other.addresses())
            await until(lambda: other.peer_id in node.connected())

    async def test_a_wrong_clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with nest() as nests:
            dialer = await nests.start()
            other = await nests.start()
            monkeypatch.setattr("hivemind.dht.protocol.get_dht_time", lambda: time.time() + 5.0)
            result = await self.dial(dialer, other.port, other.peer_id)
            found = re.match(r"clock skew: the peer's clock is (\d\.\d) s ahead", result)
            assert found is not None, result
            assert float(found[1]) == pytest.approx(5.0, abs=1.0)  # half of the way there and back

    async def test_a_libp2p_node_without_the_dht(self) -> None:
        async with nest() as nests:
            dialer = await nests.start()
            other = await nests.start()
            await other._node.protocol.shutdown()  # takes the DHT's handlers away
            result = await self.dial(dialer, other.port, other.peer_id)
            assert result.startswith("DHT ping failed")


class TestDaemon:
    async def test_a_killed_daemon_is_replaced(self) -> None:
        async with nest() as nests:
            told: list[str] = []
            first = await nests.start(on_restart=[lambda: told.append("restart")])
            two = await nests.start(await first.addresses())

            async def echo(peer: str, reader: Any, writer: Any) -> None:
                writer.write(peer.encode() + await reader.readexactly(1))
                await writer.drain()

            await first.serve("/test/echo", echo)
            assert await two.put(KEY, b"before", ttl_s=60)
            addresses, pid = await first.addresses(), daemon_pid(first)
            kill_daemon(first)
            await until(lambda: first._node is None)
            expected = {(two.peer_id, b""): b"before"}
            assert await first.get(KEY) == expected  # waits for the new one
            assert first.restarts == 1
            assert told == ["restart"]
            assert first.fault == ""
            assert daemon_pid(first) != pid
            assert await first.addresses() == addresses
            assert first._storage.get(DHTID.generate(source=KEY)) is not None
            await until(lambda: two.peer_id in first.connected())
            _, reader, writer = await two.open_stream(first.peer_id, ["/test/echo"], 5.0)
            writer.write(b"!")
            assert await reader.read() == two.peer_id.encode() + b"!"
            writer.close()
            await until(lambda: two.peer_id in first._members())
            assert await first.put(KEY, b"after", ttl_s=60)
            assert (await two.get(KEY))[first.peer_id, b""] == b"after"

    async def test_a_hanging_daemon_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(overlay_module, "_PEERS_TICK_S", 0.1)
        monkeypatch.setattr(overlay_module, "_PEERS_TIMEOUT_S", 0.3)
        async with nest() as nests:
            alone = await nests.start()
            hanging = psutil.Process(daemon_pid(alone))
            kill_daemon(alone, signal.SIGSTOP)
            # On a busy machine the next one may be late too, and be replaced as well.
            await until(lambda: alone.restarts > 0 and alone.fault == "")
            assert not hanging.is_running()

    async def test_while_the_port_is_taken_the_restart_is_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(overlay_module, "_DHT_TIMEOUT_S", 0.5)
        async with nest() as nests:
            alone = await nests.start()
            kill_daemon(alone)
            with steal_port(alone.port):
                await until(lambda: f"port {alone.port}" in alone.fault)
                with pytest.raises(NetworkError, match="in use"):
                    await alone.open_stream(alone.peer_id, ["/x"], 1.0)
                assert not await alone.put(KEY, b"x", ttl_s=30)
                assert len(await alone.addresses()) == 1
            await until(lambda: alone.restarts == 1)
            assert alone.fault == ""

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    async def test_stop_is_quick_whatever_the_daemon_does(self, number: signal.Signals) -> None:
        async with nest() as nests:
            one, two = await nests.swarm(2)
            kill_daemon(two, number)
            started = time.monotonic()
            putting = asyncio.create_task(two.put(KEY, b"x", ttl_s=30))
            getting = asyncio.create_task(two.get(KEY))
            await asyncio.sleep(0)
            await two.stop()
            assert time.monotonic() - started < 12.0  # 5 s are two timeouts of its own
            assert not await putting
            assert await getting in ({}, {(two.peer_id, b""): b"x"})
            await two.stop()
            await one.stop()

    async def test_a_stop_while_a_dead_daemon_is_seen_off_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        close, closing = Daemon._close_p2p, asyncio.Event()

        async def close_slowly(daemon: Daemon) -> None:
            closing.set()
            await asyncio.sleep(0.2)
            await close(daemon)

        monkeypatch.setattr(Daemon, "_close_p2p", close_slowly)
        async with nest() as nests:  # which finds its sockets and tasks
            alone = await nests.start()
            kill_daemon(alone)
            await closing.wait()
            await alone.stop()


class TestStart:
    async def test_a_port_in_use_is_named(self) -> None:
        async with nest() as nests:
            first = await nests.start()
            with socket.create_server(("127.0.0.1", 0)) as other:
                for port in (first.port, other.getsockname()[1]):
                    with pytest.raises(TryAgainError, match=f"port {port} "):
                        await nests.start(port=port)

    async def test_the_last_port_is_had_again_or_another_one(self) -> None:
        async with nest() as nests:
            first = await nests.start()
            await first.stop()
            again = await nests.start(last_port=first.port)
            assert again.port == first.port
            other = await nests.start(last_port=first.port)  # somebody has taken it
            assert other.port not in (0, first.port)

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"host": "203.0.113.1"}, "cannot listen on 203.0.113.1"),
            ({"announce": ["/ip4/127.0.0.1/tcp/0"]}, "must name its port"),
            ({"announce": ["somewhere"]}, "is no multiaddr"),
            ({"runtime_dir": Path("/tmp") / ("x" * 100)}, "shorter runtime folder"),
        ],
    )
    async def test_unusable_options_are_named(self, options: dict[str, Any], named: str) -> None:
        async with nest() as nests:
            with pytest.raises(ConfigError, match=named):
                await nests.start(**options)
            assert not daemons()

    async def test_a_key_file_of_another_identity(self) -> None:
        async with nest() as nests:
            overlay = nests.make()
            overlay.peer_id = Identity.generate().peer_id
            with pytest.raises(ConfigError, match="holds the key of"):
                await overlay.start()

    async def test_announced_addresses_replace_the_listening_one(self) -> None:
        async with nest() as nests:
            overlay = await nests.start(announce=["/ip4/127.0.0.9/tcp/999"])
            assert await overlay.addresses() == [f"/ip4/127.0.0.9/tcp/999/p2p/{overlay.peer_id}"]

    async def test_stale_sockets_are_removed_and_others_kept(self) -> None:
        async with nest() as nests:
            overlay = nests.make()
            folder = overlay._runtime_dir
            folder.mkdir()
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(str(folder / "p2pd-dead00.sock"))
            (folder / "control.sock").write_text("not ours")
            await overlay.start()
            assert not (folder / "p2pd-dead00.sock").exists()
            assert (folder / "control.sock").exists()
            (folder / "control.sock").unlink()

    async def test_with_help_for_nat_it_still_works_on_loopback(self) -> None:
        async with nest() as nests:
            one = await nests.start()
            two = await nests.start(await one.addresses(), use_relay=True)
            assert await two.put(KEY, b"x", ttl_s=30)

    async def test_a_cancelled_start_leaves_nothing(self) -> None:
        async with nest() as nests:
            overlay = nests.make()
            starting = asyncio.create_task(overlay.start())
            await until(daemons)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert not daemons()


def test_it_runs_on_uvloop() -> None:
    async def main() -> None:
        async with nest() as nests:
            one, two = await nests.swarm(2)
            assert await one.put(KEY, b"x", ttl_s=30)
            assert await two.get(KEY) == {(one.peer_id, b""): b"x"}
            kill_daemon(one)
            await until(lambda: one.restarts == 1)

    uvloop.run(main())


def test_the_daemon_dies_with_a_killed_node() -> None:
    program = (
        "import asyncio; from overlay_fixture import *\n"
        "async def main():\n"
        "    async with nest() as nests:\n"
        "        one = await nests.start()\n"
        "        print(daemon_pid(one), nests.root, flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    node = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert node.stdout is not None
        pid, folder = node.stdout.readline().split()
        p2pd = psutil.Process(int(pid))
        assert p2pd.name() == "p2pd"
        node.kill()
        deadline = time.monotonic() + 10
        while p2pd.is_running() and p2pd.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "p2pd outlives its node"
            time.sleep(0.05)
    finally:
        node.kill()
        node.communicate()
    shutil.rmtree(folder)
