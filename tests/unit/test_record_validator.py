"""The record validator by itself, with a clock that the test moves."""

import math
from dataclasses import dataclass, replace

import msgpack
import pytest

from swarm.net import record_validator as validator_module
from swarm.net.record_validator import RecordValidator
from swarm.protocol.identity import Identity
from swarm.protocol.records import MAX_RECORD_TTL_S, record_subkey, sign_record

KEY = b"k" * 20
ME = Identity(b"1" * 32)
OTHER = Identity(b"2" * 32)


@dataclass(frozen=True)
class Record:
    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def validator(clock: Clock) -> RecordValidator:
    return RecordValidator(clock)


def record(
    clock: Clock,
    body: bytes = b"body",
    *,
    by: Identity = ME,
    key: bytes = KEY,
    suffix: bytes = b"",
    ttl_s: float = 60.0,
) -> Record:
    subkey = record_subkey(by.peer_id, suffix)
    expires_s = clock.now_s + ttl_s
    value = sign_record(by, key, subkey, expires_s, body)
    return Record(key, msgpack.packb(subkey), value, expires_s)


def test_a_signed_record_is_valid_and_its_body_comes_back(
    clock: Clock, validator: RecordValidator
) -> None:
    good = record(clock, b"\x81\xa1a\x01", suffix=b"s" * 32)
    assert validator.validate(good)
    assert validator.validate(good)
    assert msgpack.unpackb(validator.strip_value(good)) == b"\x81\xa1a\x01"
    assert not validator.refused
    assert len(validator) == 1


@pytest.mark.parametrize(
    ("subkey", "reason"),
    [
        (b"\xc0", "record_kind"),  # a plain value
        (b"", "record_kind"),
        (b"\xc4", "record_kind"),
        (b"\xc4\x00", "record_subkey"),
        (msgpack.packb(ME.peer_id), "record_kind"),  # text
        (b"\xc5\x00\x20" + ME.public_key, "record_kind"),  # bytes in a longer form
        (b"\xc4\x1f" + ME.public_key, "record_kind"),  # a length that is not the right one
        (b"\xc4\x1f" + ME.public_key[:-1], "record_subkey"),
        (b"\xc4\x41" + ME.public_key + b"s" * 33, "record_subkey"),
        (b"\xc4\x21" + ME.public_key + b"s", "record_signature"),
        (b"\xc4\x20" + OTHER.public_key, "record_signature"),
    ],
)
def test_other_subkeys_are_refused(
    clock: Clock, validator: RecordValidator, subkey: bytes, reason: str
) -> None:
    assert not validator.validate(replace(record(clock), subkey=subkey))
    assert validator.refused == {reason: 1}
    assert len(validator) == 0


def test_every_part_is_signed(clock: Clock, validator: RecordValidator) -> None:
    good = record(clock)
    for bad in (
        replace(good, key=b"K" * 20),
        replace(good, expiration_time=good.expiration_time + 1e-6),
        replace(good, value=b"B" + good.value[1:]),
        replace(good, value=good.value[:-1] + bytes([good.value[-1] ^ 1])),
    ):
        assert not validator.validate(bad)
    assert validator.refused == {"record_signature": 4}
    assert validator.validate(good)
    assert not validator.validate(replace(good, key=b"\0" + KEY))
    assert validator.refused["record_kind"] == 1


@pytest.mark.parametrize(
    ("ttl_s", "reason"),
    [
        (0.0, "record_expired"),
        (-1.0, "record_expired"),
        (-math.inf, "record_expired"),
        (MAX_RECORD_TTL_S + 11, "record_expiry"),
        (math.inf, "record_expiry"),
        (math.nan, "record_expiry"),
    ],
)
def test_expiry_has_bounds(
    clock: Clock, validator: RecordValidator, ttl_s: float, reason: str
) -> None:
    assert not validator.validate(record(clock, ttl_s=ttl_s))
    assert validator.refused == {reason: 1}


def test_size_has_bounds(clock: Clock, validator: RecordValidator) -> None:
    assert validator.validate(record(clock, b"x" * (2048 - 64)))
    assert not validator.validate(record(clock, b"x" * (2049 - 64), by=OTHER))
    assert not validator.validate(replace(record(clock, by=OTHER), value=b"x" * 64))
    assert validator.refused == {"record_size": 2}


def test_a_renewal_counts_once_and_may_not_come_too_often(
    clock: Clock, validator: RecordValidator
) -> None:
    assert validator.validate(record(clock))
    assert not validator.validate(record(clock, ttl_s=60.5))
    assert validator.refused == {"record_renewal": 1}
    for _ in range(100):
        clock.now_s += 1.0
        assert validator.validate(record(clock, b"x" * 100))
    assert len(validator) == 1
    assert len(validator._by_expiry) == 1
    assert validator.validate(record(clock, b"older, still in time", ttl_s=30))
    assert len(validator) == 1


def test_records_of_one_peer_under_one_key_are_bounded(
    clock: Clock, validator: RecordValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validator_module, "MAX_RECORDS_PER_PEER_AND_KEY", 3)
    monkeypatch.setattr(validator_module, "MAX_RECORDS_PER_PEER", 4)
    accepted = [validator.validate(record(clock, suffix=bytes([n]))) for n in range(5)]
    assert accepted == [True, True, True, False, False]
    assert validator.validate(record(clock, key=b"2" * 20))
    assert not validator.validate(record(clock, key=b"3" * 20))
    assert validator.validate(record(clock, by=OTHER))
    assert validator.refused == {"record_quota_peer_and_key": 2, "record_quota_peer": 1}
    clock.now_s += 61
    assert validator.validate(record(clock, suffix=b"again"))
    assert len(validator) == 1


def test_all_records_together_are_bounded(
    clock: Clock, validator: RecordValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validator_module, "MAX_RECORDS", 2)
    accepted = [validator.validate(record(clock, key=bytes([n]) * 20)) for n in range(3)]
    assert accepted == [True, True, False]
    assert validator.refused == {"record_quota_all": 1}


def test_the_bytes_under_a_key_are_bounded(
    clock: Clock, validator: RecordValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = record(clock, b"x" * 100)
    size = len(small.value) + 32
    monkeypatch.setattr(validator_module, "MAX_KEY_BYTES", 2 * size)
    assert validator.validate(small)
    assert validator.validate(record(clock, b"x" * 100, by=OTHER))
    third = Identity(b"3" * 32)
    assert not validator.validate(record(clock, b"x", by=third))
    clock.now_s += 5
    assert not validator.validate(record(clock, b"x" * 101))  # renewed, but larger
    assert validator.refused == {"record_quota_key": 2}
    assert validator.validate(record(clock, b"x" * 50))
    assert not validator.validate(record(clock, b"x", by=third))
    assert validator.validate(record(clock, b"x", by=third, key=b"2" * 20))


def test_nothing_is_left_of_expired_records(clock: Clock, validator: RecordValidator) -> None:
    for number in range(20):
        assert validator.validate(record(clock, suffix=bytes([number]), ttl_s=10 + number))
    clock.now_s += 100
    assert not validator.validate(record(clock, ttl_s=0))
    assert len(validator) == 0
    assert not validator._by_expiry
    assert not validator._count_by_peer
    assert not validator._count_by_peer_and_key
    assert not validator._bytes_by_key


def test_a_record_that_was_seen_is_not_verified_again(
    clock: Clock, validator: RecordValidator, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = record(clock)
    assert validator.validate(good)
    monkeypatch.setattr(validator_module, "verify_record", lambda *_: 1 // 0)
    assert validator.validate(good)
    with pytest.raises(ZeroDivisionError):
        validator.validate(record(clock, b"new", ttl_s=70))


def test_who_is_not_let_in_has_no_records_whatever_they_say(clock: Clock) -> None:
    outside = {OTHER.peer_id: "not_member"}
    validator = RecordValidator(clock, outside.get)
    theirs = record(clock, by=OTHER)
    assert validator.validate(record(clock))
    assert not validator.validate(theirs)
    assert not validator.validate(replace(theirs, value=b"not even signed"))
    assert validator.refused == {"not_member": 2}
    assert len(validator) == 1
    outside.clear()
    assert validator.validate(theirs)
    outside[OTHER.peer_id] = "banned"
    assert not validator.validate(theirs)  # one that was accepted before, too
    assert validator.refused == {"not_member": 2, "banned": 1}
