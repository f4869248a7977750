"""What a member says it made of the others' groups: tallies, so that a publisher hears of its use.

Owns: the record's fields and bounds. Does not know: the DHT, the clock, who believes it.

A tally is a claim about another member's groups and decides nothing; it is shown. It stands in
the DHT beside the heartbeat, under the same key with the suffix `TALLIES_SUFFIX`, which readers
that do not know it skip.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import msgpack

from swarm.errors import RemoteProtocolError
from swarm.protocol.reasons import Reason
from swarm.protocol.records import MAX_BODY_BYTES, PROTOCOL_VERSIONS, common_version

TALLIES_SUFFIX = b"tallies"
MAX_TALLIES = 32
"""Of the publishers traded with last; at their longest they fit into a record's body."""

_TAG_BYTES = 8
_MAX_COUNT = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Tally:
    """For one publisher, since the member's ledger began.

    Attributes:
        tag: `tag_of` the publisher.
        accepted: groups of it that passed all checks.
        trained: samples of it that went into the loss.
    """

    tag: bytes
    accepted: int
    trained: int


def tag_of(peer_id: str) -> bytes:
    """The 8 bytes that stand for a publisher."""
    return hashlib.sha256(peer_id.encode()).digest()[:_TAG_BYTES]


def pack_tallies(tallies: tuple[Tally, ...]) -> bytes:
    """The record's body.

    Raises:
        ValueError: too many, or a number out of its bounds.
    """
    body: bytes = msgpack.packb(
        {"v": list(PROTOCOL_VERSIONS), "r": [[r.tag, r.accepted, r.trained] for r in tallies]}
    )
    try:
        unpack_tallies(body)
    except RemoteProtocolError as error:
        raise ValueError(str(error)) from None
    return body


def unpack_tallies(body: bytes) -> tuple[Tally, ...]:
    """Decode and check a body.

    Raises:
        RemoteProtocolError: incompatible (it names no version that we speak), malformed.
    """
    if len(body) > MAX_BODY_BYTES:
        raise RemoteProtocolError(Reason.MALFORMED, f"tallies: {len(body)} bytes")
    try:
        values = msgpack.unpackb(body)
        if not isinstance(values, dict):
            raise ValueError("not a map")
        versions, rows = values.get("v"), values.get("r")
        if not isinstance(versions, list) or not all(type(v) is int for v in versions):
            raise ValueError("versions must be whole numbers")
        if common_version(versions) is None:
            raise RemoteProtocolError(Reason.INCOMPATIBLE, f"tallies: versions {versions[:8]}")
        if not isinstance(rows, list) or len(rows) > MAX_TALLIES:
            raise ValueError(f"must be a list of at most {MAX_TALLIES}")
        return tuple(_tally(row) for row in rows)
    except (ValueError, TypeError, RecursionError) as error:
        raise RemoteProtocolError(Reason.MALFORMED, f"tallies: {error}") from None


def _tally(row: Any) -> Tally:
    if not isinstance(row, list) or len(row) != 3:
        raise ValueError("each must be [tag, accepted, trained]")
    tag, accepted, trained = row
    if not isinstance(tag, bytes) or len(tag) != _TAG_BYTES:
        raise ValueError(f"a tag must have {_TAG_BYTES} bytes")
    for count in (accepted, trained):
        if type(count) is not int or not 0 <= count <= _MAX_COUNT:
            raise ValueError(f"counts must be whole numbers in [0, {_MAX_COUNT}]")
    return Tally(tag, accepted, trained)
