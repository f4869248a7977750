"""What members tell each other through the DHT: heartbeats and announcements, signed.

Owns: the bodies' fields and bounds, the signature over a record, the keys under which records
stand. Does not know: the DHT, the clock, who is a member.

Bodies are msgpack maps with short string keys; unknown keys are ignored, so that a later version
can add fields. A body decodes to a value or raises RemoteProtocolError.
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgpack

from swarm.errors import RemoteProtocolError
from swarm.protocol.identity import (
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    public_key_of,
    verify_signature,
)
from swarm.protocol.reasons import Reason
from swarm.protocol.rollout import (
    MAX_COMPLETION_TOKENS,
    MAX_GROUP_SIZE,
    MAX_PROMPT_ID,
    RolloutGroup,
)

# What this software speaks, in records and on streams.
PROTOCOL_VERSIONS = (1,)

BUCKET_S = 60
HEARTBEAT_TTL_S = 60
# Slow nodes read back this far: the age limit of groups is a few of a node's own steps.
ANNOUNCEMENT_TTL_S = 300
# A record that would live longer is refused, so that nobody fills the DHT for good.
MAX_RECORD_TTL_S = 600
# How far apart two honest clocks may be.
CLOCK_SLACK_S = 10
MAX_BODY_BYTES = 1000
# Body and signature; leaves later versions room to grow.
MAX_RECORD_BYTES = 2048
MAX_SUFFIX_BYTES = 32
MAX_GROUPS_PER_ANNOUNCEMENT = 8

_RECORD_DOMAIN = b"swarm-node record 1\0"
_KEY_PREFIX = "swarm-node/1"
_HASH_BYTES = 32
_MAX_ADDRESSES = 8
_MAX_ADDRESS_BYTES = 200
# Of all addresses of a heartbeat, their length bytes included: what the other fields at their
# longest leave of MAX_BODY_BYTES.
_MAX_ADDRESSES_BYTES = 560
_MAX_U32 = 2**32 - 1
_MAX_U64 = 2**64 - 1
# Of counters that `status --json` repeats: what every reader of JSON holds exactly.
_MAX_COUNT = 2**53 - 1
_MAX_MAGNITUDE = 1e30

Role = Literal["volunteer", "organizer", "observer"]

# Takes a decoded value; returns what stands for it in the program or raises ValueError.
_Check = Callable[[Any], Any]
# Attribute -> key on the wire and check.
_Fields = Mapping[str, tuple[str, _Check]]


def common_version(versions: Iterable[int]) -> int | None:
    """The highest protocol version that both a peer and this software speak; None: none."""
    return max(set(versions) & set(PROTOCOL_VERSIONS), default=None)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a member says of itself every few seconds; all of it is a claim.

    Attributes:
        versions: protocol versions that it speaks, 1 to 8.
        addresses: multiaddresses that reach it; those that do not fit into 560 bytes are left out.
        name: for people; like all texts here cut to its limit in bytes.
        software: its version.
        model: what it trains.
        parameters: of the model.
        mode: "full" or "lora".
        step: optimizer steps taken.
        sampling: whether it samples now; only then it owns prompts.
        state: what it does now.
        accuracy: greedy, on the held-out prompts, in [0, 1]; None: not evaluated yet.
        reward: mean of its last batch; None: no batch yet.
        tokens_per_s: sampled, recently.
        groups_made: published since it started.
        groups_used: of others, trained on since it started.
        amendments: length of the chain that it knows; who knows fewer fetches its charter.
        peers: members that it is connected to.
        role: what it is in the swarm.
        started_s: Unix time.
    """

    versions: tuple[int, ...]
    addresses: tuple[str, ...]
    name: str
    software: str
    model: str
    parameters: int
    mode: str
    step: int
    sampling: bool
    state: str
    accuracy: float | None
    reward: float | None
    tokens_per_s: float
    groups_made: int
    groups_used: int
    amendments: int
    peers: int
    role: Role
    started_s: float

    def __post_init__(self) -> None:
        for attribute, limit in _TEXT_BYTES.items():
            object.__setattr__(self, attribute, _cut(getattr(self, attribute), limit))
        object.__setattr__(self, "addresses", _fitting(self.addresses))

    def pack(self) -> bytes:
        """The record's body, at most `MAX_BODY_BYTES`.

        Raises:
            ValueError: a number is out of its bounds.
        """
        return _pack(_to_map(self, _HEARTBEAT_FIELDS), Heartbeat.unpack)

    @classmethod
    def unpack(cls, body: bytes) -> "Heartbeat":
        """Decode and check a body.

        Raises:
            RemoteProtocolError: incompatible (it names no version that we speak), malformed.
        """
        return cls(**_unpack(body, _HEARTBEAT_FIELDS, "heartbeat"))


@dataclass(frozen=True, slots=True)
class GroupRef:
    """A group as announced: enough to judge whether to fetch it.

    Attributes:
        hash: 32 bytes, `swarm.protocol.codec.blob_hash`.
        size_bytes: of the blob.
        epoch: as in the group's header, and so are the rest.
        prompt_id: index over all prompt sets in order.
        n_completions: completions in it.
        n_tokens: their tokens together.
    """

    hash: bytes
    size_bytes: int
    epoch: int
    prompt_id: int
    n_completions: int
    n_tokens: int

    @classmethod
    def of(cls, group: RolloutGroup, group_hash: bytes, size_bytes: int) -> "GroupRef":
        """The reference of a group, whose blob has this hash and size."""
        return cls(
            hash=group_hash,
            size_bytes=size_bytes,
            epoch=group.epoch,
            prompt_id=group.prompt_id,
            n_completions=len(group.rollouts),
            n_tokens=group.n_tokens,
        )


@dataclass(frozen=True, slots=True)
class Announcement:
    """Groups that a member has to give: the body of a DHT record and of a notice.

    Attributes:
        versions: protocol versions that the publisher speaks.
        groups: 1 to 8.
        policy_step: optimizer steps of the policy that sampled them; a claim.
        created_ms: Unix time by the publisher's clock; a claim: age is judged by local arrival.
    """

    versions: tuple[int, ...]
    groups: tuple[GroupRef, ...]
    policy_step: int
    created_ms: int

    def pack(self) -> bytes:
        """The record's body, at most `MAX_BODY_BYTES`.

        Raises:
            ValueError: a number is out of its bounds, or there are no groups or too many.
        """
        values = _to_map(self, _ANNOUNCEMENT_FIELDS)
        values["g"] = [_to_map(ref, _GROUP_FIELDS) for ref in self.groups]
        return _pack(values, Announcement.unpack)

    @classmethod
    def unpack(cls, body: bytes) -> "Announcement":
        """Decode and check a body.

        Raises:
            RemoteProtocolError: incompatible (it names no version that we speak), malformed.
        """
        return cls(**_unpack(body, _ANNOUNCEMENT_FIELDS, "announcement"))


def heartbeat_key(swarm_id: bytes, shard: int) -> str:
    """The DHT key under which the members of a shard leave their heartbeats."""
    return f"{_KEY_PREFIX}/{swarm_id.hex()}/heartbeat/{shard}"


def announcement_key(swarm_id: bytes, bucket: int, shard: int) -> str:
    """The DHT key under which the members of a shard announce groups during a bucket of time."""
    return f"{_KEY_PREFIX}/{swarm_id.hex()}/groups/{bucket}/{shard}"


def bucket_of(time_s: float) -> int:
    """The bucket of `BUCKET_S` seconds in which a Unix time lies."""
    return int(time_s // BUCKET_S)


def shard_of(peer_id: str, shards: int) -> int:
    """The part of the keys that holds a member's records: by the head of its public key."""
    return int.from_bytes(public_key_of(peer_id)[:4], "big") % shards


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record whose signature holds.

    Attributes:
        peer_id: who signed it.
        suffix: what tells several records of one peer under one key apart.
        body: still to be decoded.
    """

    peer_id: str
    suffix: bytes
    body: bytes


def record_subkey(peer_id: str, suffix: bytes = b"") -> bytes:
    """The subkey under which a peer may store: its public key, then up to 32 bytes of its own."""
    if len(suffix) > MAX_SUFFIX_BYTES:
        raise ValueError(f"a suffix has at most {MAX_SUFFIX_BYTES} bytes, not {len(suffix)}")
    return public_key_of(peer_id) + suffix


def sign_record(
    identity: Identity, key: bytes, subkey: bytes, expires_s: float, body: bytes
) -> bytes:
    """The value to store: body, then the signature over key, subkey, expiry and body.

    Args:
        identity: the subkey must begin with its public key.
        key: the DHT's 20-byte id of the key.
        subkey: as `record_subkey` makes it.
        expires_s: Unix time at which the record ends.
        body: packed heartbeat or announcement.
    """
    return body + identity.sign(_signed_message(key, subkey, expires_s, body))


def verify_record(
    key: bytes, subkey: bytes, expires_s: float, value: bytes, now_s: float
) -> SignedRecord:
    """Check the frame and the signature of a record that came through the DHT.

    Raises:
        RemoteProtocolError: record_size, record_subkey, record_expiry, record_signature. None of
            them is held against the peer that the subkey names: anyone can store such a record.
    """
    if not SIGNATURE_BYTES < len(value) <= MAX_RECORD_BYTES:
        raise RemoteProtocolError(
            Reason.RECORD_SIZE,
            f"{len(value)} bytes; {SIGNATURE_BYTES + 1} to {MAX_RECORD_BYTES} are right",
        )
    if not PUBLIC_KEY_BYTES <= len(subkey) <= PUBLIC_KEY_BYTES + MAX_SUFFIX_BYTES:
        raise RemoteProtocolError(
            Reason.RECORD_SUBKEY,
            f"{len(subkey)} bytes; a public key and up to {MAX_SUFFIX_BYTES} more are right",
        )
    latest_s = now_s + MAX_RECORD_TTL_S + CLOCK_SLACK_S
    if not (math.isfinite(expires_s) and expires_s <= latest_s):
        raise RemoteProtocolError(
            Reason.RECORD_EXPIRY, f"ends at {expires_s}; {latest_s} is the latest"
        )
    public_key, suffix = subkey[:PUBLIC_KEY_BYTES], subkey[PUBLIC_KEY_BYTES:]
    body, signature = value[:-SIGNATURE_BYTES], value[-SIGNATURE_BYTES:]
    message = _signed_message(key, subkey, expires_s, body)
    if not verify_signature(public_key, message, signature):
        raise RemoteProtocolError(
            Reason.RECORD_SIGNATURE, f"not by {peer_id_of(public_key)}, whose subkey it has"
        )
    return SignedRecord(peer_id_of(public_key), suffix, body)


def _signed_message(key: bytes, subkey: bytes, expires_s: float, body: bytes) -> bytes:
    return b"".join(
        (
            _RECORD_DOMAIN,
            struct.pack("<I", len(key)),
            key,
            struct.pack("<I", len(subkey)),
            subkey,
            struct.pack("<d", expires_s),
            body,
        )
    )


def _cut(text: str, max_bytes: int) -> str:
    """The longest head of a text that has at most `max_bytes` in UTF-8."""
    return text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")


def _fitting(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses, from the first on, that a heartbeat has room for."""
    chosen: list[str] = []
    room = _MAX_ADDRESSES_BYTES
    for address in addresses:
        size = len(address.encode("utf-8", "replace"))
        needed = size + 2  # with msgpack's length bytes
        if size <= _MAX_ADDRESS_BYTES and needed <= room and len(chosen) < _MAX_ADDRESSES:
            chosen.append(address)
            room -= needed
    return tuple(chosen)


def _to_map(record: Any, table: _Fields) -> dict[str, Any]:
    return {key: getattr(record, attribute) for attribute, (key, _) in table.items()}


def _from_map(values: Any, table: _Fields) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError("not a map")
    attributes = {}
    for attribute, (key, check) in table.items():
        if key not in values:
            raise ValueError(f"{attribute} ({key!r}) is missing")
        try:
            attributes[attribute] = check(values[key])
        except ValueError as error:
            raise ValueError(f"{attribute} ({key!r}) must be {error}") from None
    return attributes


def _pack(values: dict[str, Any], unpack: Callable[[bytes], object]) -> bytes:
    """Encode; whatever would not decode is refused here already."""
    try:
        body: bytes = msgpack.packb(values)
        unpack(body)
    except (OverflowError, RemoteProtocolError) as error:
        raise ValueError(str(error)) from None
    return body


def _unpack(body: bytes, table: _Fields, what: str) -> dict[str, Any]:
    if len(body) > MAX_BODY_BYTES:
        raise RemoteProtocolError(
            Reason.MALFORMED, f"{what}: {len(body)} bytes, above {MAX_BODY_BYTES}"
        )
    try:
        # msgpack itself bounds every length by that of the body and the depth by its stack.
        values = msgpack.unpackb(body)
        versions = _from_map(values, {"versions": table["versions"]})["versions"]
        if common_version(versions) is None:
            raise RemoteProtocolError(
                Reason.INCOMPATIBLE,
                f"{what}: versions {versions}; this node speaks {PROTOCOL_VERSIONS}",
            )
        return _from_map(values, table)
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(Reason.MALFORMED, f"{what}: {error}") from None


def _integer(low: int, high: int) -> _Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"a whole number in [{low}, {high}]")
        return value

    return check


def _number(low: float, high: float) -> _Check:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise ValueError(f"a number in [{low:g}, {high:g}]")
        return float(value)

    return check


def _optional(inner: _Check) -> _Check:
    return lambda value: None if value is None else inner(value)


def _text(max_bytes: int) -> _Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value.encode()) > max_bytes:
            raise ValueError(f"a text of at most {max_bytes} bytes")
        return value

    return check


def _one_of(choices: Sequence[str]) -> _Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    return check


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _hash(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != _HASH_BYTES:
        raise ValueError(f"{_HASH_BYTES} bytes")
    return value


def _several(inner: _Check, low: int, high: int) -> _Check:
    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not low <= len(value) <= high:
            raise ValueError(f"a list of {low} to {high}")
        return tuple(inner(item) for item in value)

    return check


def _group_ref(value: Any) -> GroupRef:
    return GroupRef(**_from_map(value, _GROUP_FIELDS))


_VERSIONS = _several(_integer(1, 65_535), 1, 8)
_TEXT_BYTES = {"name": 64, "software": 24, "model": 80, "mode": 16, "state": 48}

_HEARTBEAT_FIELDS: _Fields = {
    "versions": ("v", _VERSIONS),
    "addresses": ("a", _several(_text(_MAX_ADDRESS_BYTES), 0, _MAX_ADDRESSES)),
    "name": ("n", _text(_TEXT_BYTES["name"])),
    "software": ("w", _text(_TEXT_BYTES["software"])),
    "model": ("m", _text(_TEXT_BYTES["model"])),
    "parameters": ("p", _integer(0, _MAX_COUNT)),
    "mode": ("o", _text(_TEXT_BYTES["mode"])),
    "step": ("s", _integer(0, _MAX_COUNT)),
    "sampling": ("g", _flag),
    "state": ("t", _text(_TEXT_BYTES["state"])),
    "accuracy": ("c", _optional(_number(0.0, 1.0))),
    "reward": ("r", _optional(_number(-_MAX_MAGNITUDE, _MAX_MAGNITUDE))),
    "tokens_per_s": ("k", _number(0.0, _MAX_MAGNITUDE)),
    "groups_made": ("d", _integer(0, _MAX_COUNT)),
    "groups_used": ("u", _integer(0, _MAX_COUNT)),
    "amendments": ("e", _integer(0, _MAX_U32)),
    "peers": ("q", _integer(0, _MAX_U32)),
    "role": ("l", _one_of(get_args(Role))),
    "started_s": ("b", _number(0.0, 2.0**40)),
}

_GROUP_FIELDS: _Fields = {
    "hash": ("h", _hash),
    "size_bytes": ("z", _integer(1, _MAX_U32)),
    "epoch": ("e", _integer(0, _MAX_U64)),
    "prompt_id": ("p", _integer(0, MAX_PROMPT_ID)),
    "n_completions": ("c", _integer(1, MAX_GROUP_SIZE)),
    "n_tokens": ("t", _integer(1, MAX_COMPLETION_TOKENS)),
}

_ANNOUNCEMENT_FIELDS: _Fields = {
    "versions": ("v", _VERSIONS),
    "groups": ("g", _several(_group_ref, 1, MAX_GROUPS_PER_ANNOUNCEMENT)),
    "policy_step": ("s", _integer(0, _MAX_U64)),
    "created_ms": ("t", _integer(0, _MAX_U64)),
}
