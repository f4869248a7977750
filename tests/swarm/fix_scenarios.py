"""What a peer can do to hivemind; run by test_hivemind_fixes.py, each in a process of its own.

`python fix_scenarios.py SCENARIO mended|stock`; exit code 0: hivemind withstood it.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgpack

from swarm.net import hivemind_fixes
from swarm.net.daemon import MAX_MESSAGE_BYTES, Daemon, DaemonOptions, free_port
from swarm.net.hivemind_lean import (
    DHTID,
    DHTNode,
    DHTProtocol,
    DictionaryDHTValue,
    MSGPackSerializer,
    P2PHandlerError,
    PeerID,
    TimedStorage,
    ValueWithExpiration,
)

PATIENCE_S = 30.0 if "mended" in sys.argv else 3.0
"""What is not mended may never come."""


async def an_old_record_does_not_shorten_the_new_one() -> None:
    storage = TimedStorage()
    now = time.time()
    assert storage.store(b"key", b"new", now + 60)
    assert not storage.store(b"key", b"old", now + 0.2)
    await asyncio.sleep(0.3)
    assert storage.get(b"key") == ValueWithExpiration(b"new", now + 60)


async def a_record_that_ends_never_is_refused() -> None:
    storage = TimedStorage()
    assert not storage.store(b"key", b"value", float("nan"))
    assert storage.get(b"key") is None


async def nested_extensions_are_refused() -> None:
    """They reach the decoder before any validator runs, and each level costs C stack."""
    bomb = b"\xc0"
    for _ in range(400):
        bomb = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + bomb))
    assert len(bomb) < 2500
    for code in (0x50, 0x40):
        try:
            MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(code, bomb)))
        except ValueError:
            continue
        raise AssertionError("nested extensions were decoded")


async def a_dictionary_holds_only_what_its_types_allow() -> None:
    later = time.time() + 60
    entries = [
        [b"good", b"value", later],
        [["unhashable"], b"value", later],
        ["text", b"value", later],
        [b"no bytes", 7, later],
        [b"no float", b"value", "tomorrow"],
    ]
    raw = msgpack.packb(["no size", "no expiry", entries])
    decoded = MSGPackSerializer.loads(msgpack.packb(msgpack.ExtType(0x50, raw)))
    with decoded.freeze():
        kept = dict(decoded.items())
    assert kept.pop(b"") == ValueWithExpiration(b"", 0.0)  # stands for all that is malformed
    assert kept == {b"good": ValueWithExpiration(b"value", later)}
    assert decoded.maxsize == float("inf")


async def a_bad_entry_does_not_discard_the_others() -> None:
    class Validator:
        def validate(self, record: Any) -> bool:
            return bool(record.value != b"bad")

    protocol = DHTProtocol(_initialized_with_create=True)
    protocol.record_validator = Validator()
    dictionary = DictionaryDHTValue()
    for subkey, value in ((b"1", b"good"), (b"2", b"bad"), (b"3", b"good")):
        dictionary.store(subkey, value, time.time() + 60)
    assert protocol._validate_dictionary(b"key", dictionary)
    assert {subkey for subkey, _ in dictionary.items()} == {b"1", b"3"}
    only_bad = DictionaryDHTValue()
    only_bad.store(b"2", b"bad", time.time() + 60)
    assert not protocol._validate_dictionary(b"key", only_bad)


async def a_large_reply_is_answered() -> None:
    async with two_nodes() as (one, two):

        async def reply(_data: bytes, _peer: Any) -> bytes:
            return bytes(MAX_MESSAGE_BYTES + 1)

        await one.p2p._client.add_unary_handler("large", reply)
        call = two.p2p._client.call_unary_handler(one.peer_id, "large", b"")
        try:
            await asyncio.wait_for(call, PATIENCE_S)
        except P2PHandlerError as error:
            assert "exceeds message size limit" in str(error)  # noqa: PT017  no pytest here
        else:
            raise AssertionError("a reply above the limit came through")


async def a_large_store_is_cut_into_messages() -> None:
    async with two_nodes() as (one, two):
        later = time.time() + 60
        keys = [DHTID.generate() for _ in range(12)]
        values = []
        for _ in keys:
            dictionary = DictionaryDHTValue()
            for number in range(256):
                dictionary.store(number.to_bytes(32, "big"), bytes(2000), later)
            values.append(dictionary)
        stored = await two.protocol.call_store(one.peer_id, keys, values, [later] * len(keys))
        assert stored == [True] * len(keys)
        assert all(len(one.protocol.storage.get(key).value) == 256 for key in keys)
        async with asyncio.timeout(PATIENCE_S):
            while one.peer_id not in two.protocol.routing_table:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)


class two_nodes:  # noqa: N801  used as a context manager only
    """Two DHT nodes that are connected to each other."""

    async def __aenter__(self) -> tuple[Any, Any]:
        self._folder = tempfile.TemporaryDirectory(prefix="sn", dir="/tmp")
        self._daemons = []
        nodes = []
        for _ in range(2):
            options = DaemonOptions(
                runtime_dir=Path(self._folder.name),
                identity_path=None,
                host="127.0.0.1",
                port=free_port("127.0.0.1"),
                announce=(),
                use_relay=False,
                relays=(),
                client=False,
            )
            daemon = await Daemon.start(options)
            self._daemons.append(daemon)
            nodes.append(await DHTNode.create(p2p=daemon.p2p, wait_timeout=PATIENCE_S))
        (address,) = await self._daemons[0].addresses()
        await self._daemons[1].connect(self._daemons[0].peer_id, address, 5.0)
        await nodes[1].protocol.call_ping(PeerID.from_base58(self._daemons[0].peer_id))
        return nodes[0], nodes[1]

    async def __aexit__(self, *_: object) -> None:
        for daemon in self._daemons:
            await daemon.stop()
        self._folder.cleanup()


if __name__ == "__main__":
    if sys.argv[2] == "mended":
        hivemind_fixes.apply()
    asyncio.run(globals()[sys.argv[1]]())
