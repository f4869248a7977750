"""Any record survives packing; any bytes give a record or the one protocol error."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError
from swarm.protocol.identity import Identity
from swarm.protocol.reasons import Reason
from swarm.protocol.records import (
    MAX_BODY_BYTES,
    Announcement,
    GroupRef,
    Heartbeat,
    record_subkey,
    sign_record,
    verify_record,
)

ANNA = Identity(b"\x01" * 32)
COUNT = st.integers(0, 2**53 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=100)
VERSIONS = st.lists(st.integers(1, 65_535), max_size=7).map(lambda more: (1, *more))

HEARTBEATS = st.builds(
    Heartbeat,
    versions=VERSIONS,
    addresses=st.lists(st.text(max_size=250), max_size=12).map(tuple),
    name=TEXT,
    software=TEXT,
    model=TEXT,
    parameters=COUNT,
    mode=TEXT,
    step=COUNT,
    sampling=st.booleans(),
    state=TEXT,
    accuracy=st.none() | st.floats(0, 1),
    reward=st.none() | st.floats(-1e30, 1e30),
    tokens_per_s=st.floats(0, 1e30),
    groups_made=COUNT,
    groups_used=COUNT,
    amendments=U32,
    peers=U32,
    role=st.sampled_from(["volunteer", "organizer", "observer"]),
    started_s=st.floats(0, 2.0**40),
)
REFS = st.builds(
    GroupRef,
    hash=st.binary(min_size=32, max_size=32),
    size_bytes=st.integers(1, 2**32 - 1),
    epoch=U64,
    prompt_id=U32,
    n_completions=st.integers(1, 65_535),
    n_tokens=st.integers(1, 2**32 - 1),
)
ANNOUNCEMENTS = st.builds(
    Announcement,
    versions=VERSIONS,
    groups=st.lists(REFS, min_size=1, max_size=8).map(tuple),
    policy_step=U64,
    created_ms=U64,
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=4)
    ),
    max_leaves=8,
)


def unpacks_or_is_refused(body: bytes) -> None:
    for kind in (Heartbeat, Announcement):
        try:
            record: Any = kind.unpack(body)
        except RemoteProtocolError as error:
            reason = error.reason
        else:
            assert kind.unpack(record.pack()) == record
            continue
        assert reason in (Reason.MALFORMED, Reason.INCOMPATIBLE)


@given(HEARTBEATS)
def test_a_heartbeat_always_fits_and_comes_back(beat: Heartbeat) -> None:
    body = beat.pack()
    assert len(body) <= MAX_BODY_BYTES
    assert Heartbeat.unpack(body) == beat


@given(ANNOUNCEMENTS)
def test_an_announcement_always_fits_and_comes_back(news: Announcement) -> None:
    body = news.pack()
    assert len(body) <= MAX_BODY_BYTES
    assert Announcement.unpack(body) == news


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_record_or_the_one_error(body: bytes) -> None:
    unpacks_or_is_refused(body)


@settings(max_examples=300)
@given(st.sampled_from([HEARTBEATS, ANNOUNCEMENTS]).flatmap(lambda kind: kind), st.data())
def test_a_record_with_any_field_replaced_gives_a_record_or_the_one_error(
    record: Heartbeat | Announcement, data: st.DataObject
) -> None:
    values = msgpack.unpackb(record.pack())
    key = data.draw(st.sampled_from(sorted(values)))
    values[key] = data.draw(VALUES)
    unpacks_or_is_refused(msgpack.packb(values))


@given(st.sampled_from([HEARTBEATS, ANNOUNCEMENTS]).flatmap(lambda kind: kind), st.data())
def test_a_record_with_changed_bytes_gives_a_record_or_the_one_error(
    record: Heartbeat | Announcement, data: st.DataObject
) -> None:
    body = bytearray(record.pack())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    unpacks_or_is_refused(bytes(body))


@given(
    key=st.binary(max_size=40),
    suffix=st.binary(max_size=32),
    expires_s=st.floats(0, 2.0**40),
    body=st.binary(min_size=1, max_size=200),
)
def test_a_signed_record_always_verifies(
    key: bytes, suffix: bytes, expires_s: float, body: bytes
) -> None:
    subkey = record_subkey(ANNA.peer_id, suffix)
    value = sign_record(ANNA, key, subkey, expires_s, body)
    record = verify_record(key, subkey, expires_s, value, now_s=expires_s)
    assert (record.peer_id, record.suffix, record.body) == (ANNA.peer_id, suffix, body)


@given(
    st.binary(max_size=40),
    st.binary(max_size=80),
    st.floats(),
    st.binary(max_size=300) | st.binary(min_size=2000, max_size=2100),
)
def test_any_record_of_a_stranger_is_refused_by_the_one_error(
    key: bytes, subkey: bytes, expires_s: float, value: bytes
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        verify_record(key, subkey, expires_s, value, now_s=0.0)
    assert caught.value.reason.startswith("record_")
