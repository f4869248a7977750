"""Tallies: what travels, and what is refused."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.protocol.reasons import Reason
from swarm.protocol.records import MAX_BODY_BYTES
from swarm.protocol.tallies import (
    MAX_TALLIES,
    Tally,
    pack_tallies,
    tag_of,
    unpack_tallies,
)

BODY = bytes.fromhex("82a1769101a1729193c4089b012e7bb5a7534903cd0100")


def test_the_bytes() -> None:
    tallies = (Tally(tag_of("12D3KooWAda"), 3, 256),)
    assert pack_tallies(tallies).hex() == BODY.hex()
    assert unpack_tallies(BODY) == tallies


def test_the_longest_record_fits() -> None:
    tallies = (Tally(b"\xff" * 8, 2**53 - 1, 2**53 - 1),) * MAX_TALLIES
    body = pack_tallies(tallies)
    assert len(body) <= MAX_BODY_BYTES
    assert unpack_tallies(body) == tallies
    with pytest.raises(ValueError, match=str(MAX_TALLIES)):
        pack_tallies((*tallies, tallies[0]))


def test_unknown_keys_are_ignored() -> None:
    assert unpack_tallies(msgpack.packb({"v": [1, 2], "r": [], "later": 1})) == ()


@pytest.mark.parametrize(
    "values",
    [
        [],
        {"r": []},
        {"v": [1]},
        {"v": "1", "r": []},
        {"v": [1], "r": [[b"\0" * 8, 1]]},
        {"v": [1], "r": [[b"\0" * 7, 1, 1]]},
        {"v": [1], "r": [["\0" * 8, 1, 1]]},
        {"v": [1], "r": [[b"\0" * 8, -1, 1]]},
        {"v": [1], "r": [[b"\0" * 8, 1.0, 1]]},
        {"v": [1], "r": [[b"\0" * 8, True, 1]]},
        {"v": [1], "r": [[b"\0" * 8, 2**53, 1]]},
    ],
)
def test_malformed_ones(values: object) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_tallies(msgpack.packb(values))
    assert caught.value.reason == Reason.MALFORMED


def test_another_version() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_tallies(msgpack.packb({"v": [9], "r": []}))
    assert caught.value.reason == Reason.INCOMPATIBLE


@given(st.binary(max_size=200))
def test_bytes_decode_or_raise_the_one_error(body: bytes) -> None:
    try:
        unpack_tallies(body)
    except RemoteProtocolError:
        return
