"""Heartbeats, announcements and their signatures: bounds, sizes, what a change breaks."""

import struct
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from swarm.errors import RemoteProtocolError
from swarm.protocol import records
from swarm.protocol.identity import Identity, verify_signature
from swarm.protocol.records import (
    Announcement,
    GroupRef,
    Heartbeat,
    announcement_key,
    bucket_of,
    common_version,
    heartbeat_key,
    record_subkey,
    shard_of,
    sign_record,
    verify_record,
)

ANNA = Identity(b"\x01" * 32)
MALLORY = Identity(b"\x03" * 32)
BEAT = Heartbeat(
    versions=(1,),
    addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{ANNA.peer_id}",),
    name="anna",
    software="0.1.0",
    model="tiny",
    parameters=120_000,
    mode="full",
    step=17,
    sampling=True,
    state="training",
    accuracy=0.5,
    reward=None,
    tokens_per_s=1234.5,
    groups_made=40,
    groups_used=80,
    amendments=0,
    peers=3,
    role="volunteer",
    started_s=1_700_000_000.0,
)
REF = GroupRef(
    hash=bytes(range(32)), size_bytes=792, epoch=2, prompt_id=5, n_completions=8, n_tokens=40
)
NEWS = Announcement(versions=(1,), groups=(REF, REF), policy_step=17, created_ms=1_700_000_000_123)

KEY = bytes(range(20))
SUBKEY = record_subkey(ANNA.peer_id, b"suffix")
NOW_S = 1_700_000_000.0
EXPIRES_S = NOW_S + 60


def changed(body: bytes, **values: Any) -> bytes:
    """A body with keys of its map replaced."""
    packed: bytes = msgpack.packb(msgpack.unpackb(body) | values)
    return packed


def reason(unpack: Any, body: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        unpack(body)
    return caught.value.reason


def test_what_was_packed_comes_back() -> None:
    assert Heartbeat.unpack(BEAT.pack()) == BEAT
    assert Announcement.unpack(NEWS.pack()) == NEWS


def test_the_fullest_bodies_fit() -> None:
    address = "/ip4/" + "x" * 80
    beat = Heartbeat(
        versions=(65_535,) * 7 + (1,),
        addresses=(address,) * 20,
        name="ä" * 500,
        software="x" * 500,
        model="x" * 500,
        parameters=2**53 - 1,
        mode="x" * 500,
        step=2**53 - 1,
        sampling=True,
        state="x" * 500,
        accuracy=1 / 3,
        reward=-1e30,
        tokens_per_s=1e30,
        groups_made=2**53 - 1,
        groups_used=2**53 - 1,
        amendments=2**32 - 1,
        peers=2**32 - 1,
        role="volunteer",
        started_s=2.0**40 - 0.5,
    )
    assert 900 < len(beat.pack()) <= 1000
    assert Heartbeat.unpack(beat.pack()) == beat
    ref = GroupRef(b"\xff" * 32, 2**32 - 1, 2**64 - 1, 2**32 - 1, 65_535, 2**32 - 1)
    news = Announcement((65_535,) * 7 + (1,), (ref,) * 8, 2**64 - 1, 2**64 - 1)
    assert 500 < len(news.pack()) <= 1000
    assert Announcement.unpack(news.pack()) == news


def test_texts_are_cut_at_a_character_and_addresses_that_do_not_fit_are_left_out() -> None:
    long, short = "/dns4/" + "x" * 190, "/ip4/203.0.113.7/tcp/1"
    beat = replace(BEAT, name="a" + "ä" * 40, addresses=(long, long, long, short, "x" * 201))
    assert beat.name == "a" + "ä" * 31
    assert beat.addresses == (long, long, short)
    assert replace(BEAT, name="\ud800").name == "?"
    many = replace(BEAT, addresses=(short,) * 20)
    assert many.addresses == (short,) * 8
    assert Heartbeat.unpack(many.pack()) == many


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("accuracy", 1.01),
        ("accuracy", float("nan")),
        ("reward", float("inf")),
        ("tokens_per_s", -1.0),
        ("step", -1),
        ("step", 2**70),
        ("versions", ()),
        ("role", "king"),
    ],
)
def test_a_heartbeat_that_others_would_refuse_is_not_packed(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"heartbeat|out of range"):
        replace(BEAT, **{field: value}).pack()


@pytest.mark.parametrize("count", [0, 9])
def test_an_announcement_has_1_to_8_groups(count: int) -> None:
    with pytest.raises(ValueError, match="groups"):
        replace(NEWS, groups=(REF,) * count).pack()


@pytest.mark.parametrize(
    "values",
    [
        {"a": "not a list"},
        {"a": ["x"] * 9},
        {"a": ["x" * 201]},
        {"a": [1]},
        {"n": "x" * 65},
        {"n": b"bytes"},
        {"n": None},
        {"p": 1.0},
        {"p": True},
        {"p": -1},
        {"s": 2**53},
        {"g": 1},
        {"c": -0.1},
        {"c": float("nan")},
        {"r": float("inf")},
        {"k": None},
        {"q": 2**32},
        {"l": "king"},
        {"l": ["volunteer"]},
        {"b": 2.0**41},
        {"v": []},
        {"v": [1] * 9},
        {"v": [0]},
        {"v": 1},
    ],
)
def test_a_heartbeat_out_of_bounds_is_malformed(values: dict[str, Any]) -> None:
    assert reason(Heartbeat.unpack, changed(BEAT.pack(), **values)) == "malformed"


@pytest.mark.parametrize(
    "values",
    [
        {"h": bytes(31)},
        {"h": "x" * 32},
        {"z": 0},
        {"z": 2**32},
        {"e": -1},
        {"p": 2**32},
        {"c": 0},
        {"c": 65_536},
        {"t": 0},
        {"t": 1.5},
    ],
)
def test_an_announced_group_out_of_bounds_is_malformed(values: dict[str, Any]) -> None:
    group = msgpack.unpackb(NEWS.pack())["g"][0]
    body = changed(NEWS.pack(), g=[group, group | values])
    assert reason(Announcement.unpack, body) == "malformed"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgpack.packb([1, 2]),
        msgpack.packb(7),
        msgpack.packb({"v": [1]}),
        BEAT.pack() + b"\0",
        BEAT.pack()[:-1],
        b"\x91" * 900,  # nested deeper than any stack
        b"\xdd\xff\xff\xff\xff",  # announces 2^32 - 1 elements
        b"\x81\xc7\x01\x05\x00\x01",  # an extension as a key
        b"\x81\xa1v\xd6\xff\x00\x00\x00\x00",  # a timestamp as a value
        b"\x81\xa1\xff\x00",  # a key that is no UTF-8
    ],
)
def test_bytes_that_are_no_map_of_the_right_form_are_malformed(body: bytes) -> None:
    assert reason(Heartbeat.unpack, body) == "malformed"
    assert reason(Announcement.unpack, body) == "malformed"


@pytest.mark.parametrize(("kind", "record"), [(Heartbeat, BEAT), (Announcement, NEWS)])
def test_a_missing_field_is_malformed_and_an_unknown_one_ignored(kind: Any, record: Any) -> None:
    body = record.pack()
    for key in msgpack.unpackb(body):
        without = {k: v for k, v in msgpack.unpackb(body).items() if k != key}
        assert reason(kind.unpack, msgpack.packb(without)) == "malformed"
    assert kind.unpack(changed(body, future=[1, {"x": None}])) == record


def test_a_body_above_1000_bytes_is_malformed() -> None:
    assert reason(Heartbeat.unpack, changed(BEAT.pack(), future="x" * 1000)) == "malformed"


def test_a_whole_number_is_read_where_a_float_is_due() -> None:
    beat = Heartbeat.unpack(changed(BEAT.pack(), c=1, b=5))
    assert (beat.accuracy, beat.started_s) == (1.0, 5.0)
    assert isinstance(beat.accuracy, float)


@pytest.mark.parametrize(("kind", "record"), [(Heartbeat, BEAT), (Announcement, NEWS)])
def test_a_newer_version_is_incompatible_whatever_else_it_holds(kind: Any, record: Any) -> None:
    body = changed(record.pack(), v=[2, 3], n=7, g="other")
    assert reason(kind.unpack, body) == "incompatible"
    assert kind.unpack(changed(record.pack(), v=[1, 9])).versions == (1, 9)


def test_the_highest_common_version_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PROTOCOL_VERSIONS", (1, 2, 4))
    assert common_version([2, 3]) == 2
    assert common_version((1, 2, 4, 5)) == 4
    assert common_version([3, 5]) is None


def test_keys_name_swarm_time_and_shard() -> None:
    swarm_id = b"\xab" * 32
    assert heartbeat_key(swarm_id, 3) == f"swarm-node/1/{'ab' * 32}/heartbeat/3"
    assert announcement_key(swarm_id, 28, 3) == f"swarm-node/1/{'ab' * 32}/groups/28/3"
    assert (bucket_of(59.9), bucket_of(60.0), bucket_of(1700.0)) == (0, 1, 28)


def test_a_shard_follows_from_the_head_of_the_public_key() -> None:
    head = int.from_bytes(ANNA.public_key[:4], "big")
    assert shard_of(ANNA.peer_id, 4) == head % 4
    assert shard_of(ANNA.peer_id, 7) == head % 7
    peers = [Identity(bytes([i]) * 32).peer_id for i in range(64)]
    assert {shard_of(peer, 4) for peer in peers} == {0, 1, 2, 3}


def test_a_signed_record_names_its_signer() -> None:
    value = sign_record(ANNA, KEY, SUBKEY, EXPIRES_S, b"body")
    record = verify_record(KEY, SUBKEY, EXPIRES_S, value, NOW_S)
    assert (record.peer_id, record.suffix, record.body) == (ANNA.peer_id, b"suffix", b"body")


def test_the_signed_message_is_the_one_of_the_protocol() -> None:
    value = sign_record(ANNA, KEY, SUBKEY, EXPIRES_S, b"body")
    message = b"swarm-node record 1\0" + struct.pack("<I", 20) + KEY
    message += struct.pack("<I", 38) + ANNA.public_key + b"suffix"
    message += struct.pack("<d", EXPIRES_S) + b"body"
    assert value[:-64] == b"body"
    assert verify_signature(ANNA.public_key, message, value[-64:])


@pytest.mark.parametrize(
    ("key", "subkey", "expires_s", "body"),
    [
        (KEY[::-1], SUBKEY, EXPIRES_S, b"body"),
        (KEY, SUBKEY + b"x", EXPIRES_S, b"body"),
        (KEY, record_subkey(MALLORY.peer_id, b"suffix"), EXPIRES_S, b"body"),
        (KEY, SUBKEY, EXPIRES_S + 1, b"body"),
        (KEY, SUBKEY, EXPIRES_S, b"Body"),
    ],
)
def test_nothing_signed_can_be_changed(
    key: bytes, subkey: bytes, expires_s: float, body: bytes
) -> None:
    signature = sign_record(ANNA, KEY, SUBKEY, EXPIRES_S, b"body")[-64:]
    with pytest.raises(RemoteProtocolError) as caught:
        verify_record(key, subkey, expires_s, body + signature, NOW_S)
    assert caught.value.reason == "record_signature"


@pytest.mark.parametrize(
    ("subkey", "expires_s", "body", "expected"),
    [
        (SUBKEY, EXPIRES_S, b"", "record_size"),
        (SUBKEY, EXPIRES_S, bytes(2048 - 63), "record_size"),
        (SUBKEY[:31], EXPIRES_S, b"body", "record_subkey"),
        (ANNA.public_key + bytes(33), EXPIRES_S, b"body", "record_subkey"),
        (SUBKEY, float("nan"), b"body", "record_expiry"),
        (SUBKEY, float("inf"), b"body", "record_expiry"),
        (SUBKEY, NOW_S + 611, b"body", "record_expiry"),
    ],
)
def test_a_record_outside_its_frame_is_refused(
    subkey: bytes, expires_s: float, body: bytes, expected: str
) -> None:
    value = sign_record(ANNA, KEY, subkey, expires_s, body)
    with pytest.raises(RemoteProtocolError) as caught:
        verify_record(KEY, subkey, expires_s, value, NOW_S)
    assert caught.value.reason == expected


def test_the_largest_and_longest_record_passes() -> None:
    subkey = record_subkey(ANNA.peer_id, bytes(32))
    value = sign_record(ANNA, KEY, subkey, NOW_S + 610, bytes(2048 - 64))
    assert len(verify_record(KEY, subkey, NOW_S + 610, value, NOW_S).body) == 1984


def test_a_suffix_has_at_most_32_bytes() -> None:
    with pytest.raises(ValueError, match="33"):
        record_subkey(ANNA.peer_id, bytes(33))
