"""Mends for six faults of hivemind 1.1.12, five of which any peer could use against all others.

Owns: the replaced functions and the hashes of the sources that they replace, so that a test tells
when either changes. Does not know: who is a member, what a record says.

1. `TimedStorage.store`: a rejected older value still shortened the life of the newer one, so that
   replaying an old record deleted the current one.
2. `MSGPackSerializer._decode_ext_types`: nested extensions recursed through C without limit; about
   1 KB of them in a dictionary store killed the process (SIGSEGV) before any validator ran. And the
   decoder took any type for a dictionary's size, keys and expiries, which raised later in other
   peers' searches.
3. `ControlClient._handle_persistent_request`: a reply above the message limit raised inside the
   error path, so that the caller waited for ever.
4. `DHTProtocol._validate_dictionary`: one bad entry discarded all the good ones beside it.
5. `DHTProtocol.call_store`: what a newcomer should hold is handed over in one message; above the
   limit the store failed, which dropped the newcomer from the routing table, at every contact.
6. `PeerID.__init__`: every id that comes in any message was written out in base58 at once, 50 us of
   Python each; in a swarm of 16 that was the largest part of the DHT's work.
"""

import dataclasses
import functools
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import base58
import msgpack

from swarm.net.hivemind_lean import (
    ControlClient,
    DHTProtocol,
    DictionaryDHTValue,
    HeapEntry,
    MSGPackSerializer,
    PeerID,
    TimedStorage,
    ValueWithExpiration,
    dht_pb2,
    p2pd_pb2,
)

DICTIONARY_EXT_CODE = 0x50
"""The only msgpack extension of the DHT's wire format: hivemind's DictionaryDHTValue."""

# A key holds 512 KiB of records at most, of more than 100 bytes each.
_MAX_DICTIONARY_ENTRIES = 8192
# Room for the envelope around a payload in one message to the daemon.
_ENVELOPE_BYTES = 1024
_MAX_ERROR_BYTES = 500
# One message holds 4 MiB; the estimate of a dictionary's size below is rough.
_MAX_STORE_BYTES = 1 << 20
_ENTRY_OVERHEAD_BYTES = 96
_CACHED_PEERS = 4096


def _store(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """Replaces TimedStorage.store: nothing changes unless the new value is accepted."""
    if not self.frozen and not expiration_time >= time.time():  # so written, NaN is refused too
        return False
    current = self.data.get(key)
    if current is not None and not current.expiration_time < expiration_time:
        return False
    entry = HeapEntry(expiration_time, key)
    self.key_to_heap[key] = entry
    heapq.heappush(self.expiration_heap, entry)
    self.data[key] = ValueWithExpiration(value, expiration_time)
    self._remove_outdated()
    return True


def _decode_ext_types(cls: Any, type_code: int, data: bytes) -> Any:
    """Replaces MSGPackSerializer._decode_ext_types: one extension, one level, checked types.

    An entry that is not [bytes, bytes, float] is kept under the empty subkey, which the record
    validator refuses and counts.
    """
    if type_code != DICTIONARY_EXT_CODE:
        raise ValueError(f"msgpack extension {type_code:#x} is not part of the DHT's format")
    _, _, items = msgpack.unpackb(  # without a hook: an extension inside stays inert
        data, raw=False, max_array_len=_MAX_DICTIONARY_ENTRIES, max_map_len=0
    )
    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for subkey, value, expires in items:
            if type(subkey) is bytes and type(value) is bytes and type(expires) is float:
                dictionary.store(subkey, value, expires)
            else:
                dictionary.store(b"", b"", 0.0)
    return dictionary


async def _handle_persistent_request(self: Any, call_id: Any, request: Any) -> None:
    """Replaces ControlClient._handle_persistent_request: every call is answered."""
    handler = self.unary_handlers.get(request.proto)
    try:
        if handler is None:
            raise LookupError(f"no handler for {request.proto}")
        reply = p2pd_pb2.CallUnaryResponse(
            response=await handler(request.data, PeerID(request.peer))
        )
    except Exception as error:  # noqa: BLE001  the caller, a peer, gets it as text, as in the original
        reply = p2pd_pb2.CallUnaryResponse(error=repr(error).encode()[:_MAX_ERROR_BYTES])
    finally:
        self._handler_tasks.pop(call_id, None)
    if reply.ByteSize() > self.persistent_conn_max_msg_size - _ENVELOPE_BYTES:
        reply = p2pd_pb2.CallUnaryResponse(error=b"response size exceeds message size limit")
    await self._pending_messages.put(
        p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=reply)
    )


def _validate_dictionary(self: Any, key_bytes: bytes, dictionary: Any) -> bool:
    """Replaces DHTProtocol._validate_dictionary: bad entries are taken out, the rest counts."""
    if self.record_validator is None:
        return True
    with dictionary.freeze():
        for subkey, (value, expires) in list(dictionary.items()):
            subkey_bytes = self.serializer.dumps(subkey)
            if not self._validate_record(key_bytes, subkey_bytes, value, expires):
                del dictionary[subkey]
    return bool(dictionary.data)


async def _call_store(
    self: Any,
    peer: Any,
    keys: Sequence[Any],
    values: Sequence[Any],
    expiration_time: Any,
    subkeys: Sequence[Any] | None = None,
    in_cache: Any = None,
) -> list[bool] | None:
    """Replaces DHTProtocol.call_store: the same, in messages that fit."""
    stored: list[bool] = []
    for part in _parts(values):
        some = await _ORIGINAL_CALL_STORE(
            self,
            peer,
            keys[part],
            values[part],
            expiration_time if isinstance(expiration_time, float) else expiration_time[part],
            subkeys if subkeys is None else subkeys[part],
            in_cache[part] if isinstance(in_cache, Sequence) else in_cache,
        )
        if some is None:
            return None
        stored.extend(some)
    return stored


def _parts(values: Sequence[Any]) -> Iterator[slice]:
    """Cut `values` into slices whose records fit into one message each."""
    start = size = 0
    for index, value in enumerate(values):
        if isinstance(value, DictionaryDHTValue):
            own = sum(len(entry) + _ENTRY_OVERHEAD_BYTES for _, (entry, _) in value.items())
        else:
            own = len(value) + _ENTRY_OVERHEAD_BYTES
        if size and size + own > _MAX_STORE_BYTES:
            yield slice(start, index)
            start, size = index, 0
        size += own
    yield slice(start, len(values))


def _peer_id_init(self: Any, peer_id_bytes: bytes) -> None:
    """Replaces PeerID.__init__: the same ids are seen again and again."""
    self._bytes = peer_id_bytes
    self._b58_str = _base58_of(bytes(peer_id_bytes))


@functools.lru_cache(maxsize=_CACHED_PEERS)
def _base58_of(peer_id_bytes: bytes) -> str:
    return base58.b58encode(peer_id_bytes).decode()


_ORIGINAL_CALL_STORE: Callable[..., Any] = DHTProtocol.call_store


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """One replaced function of hivemind."""

    owner: Any
    attribute: str
    replacement: Any
    source_sha256: str
    """Hex sha256 of the source text that the replacement was written against."""


PATCHES = (
    Patch(
        TimedStorage,
        "store",
        _store,
        "312d87832aaef6ca69bc769cf1be9500e3cd17fd736000ac43e7e1acdcfb805d",
    ),
    Patch(
        MSGPackSerializer,
        "_decode_ext_types",
        classmethod(_decode_ext_types),
        "0f563675ee1f459aee2e24c79d3c221425297534ce758d83e1776d35f9b3e6e7",
    ),
    Patch(
        ControlClient,
        "_handle_persistent_request",
        _handle_persistent_request,
        "9c958fd0b80cf3d65119d530d91a914dd9182f49455785e3ff9039c7506981d5",
    ),
    Patch(
        DHTProtocol,
        "_validate_dictionary",
        _validate_dictionary,
        "64e1927db3e373fb7afe77f6b8f44d52438e977ea77758d38f4e2b4ae88833cc",
    ),
    Patch(
        DHTProtocol,
        "call_store",
        _call_store,
        "61fc01b360f06a4beb778d8d270ea53aeed03d51d2de511430c3ceffe50f0091",
    ),
    Patch(
        PeerID,
        "__init__",
        _peer_id_init,
        "ee2d8caf5ba119a291f6b71cb31230354d05b19c502918584e017c9a04d708b0",
    ),
)


def apply() -> None:
    """Put the replacements in place, for the whole process; repeating it changes nothing."""
    for patch in PATCHES:
        setattr(patch.owner, patch.attribute, patch.replacement)
    # Calls may arrive before DHTProtocol.create() has set it; until then this node is no member.
    DHTProtocol.node_info = dht_pb2.NodeInfo()
