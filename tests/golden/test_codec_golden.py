"""Frozen wire bytes of version 1: a change of them needs a new version of the protocol.

The hexadecimal texts were made once; the values are chosen so that every field differs.
"""

import numpy as np

from swarm.protocol.codec import CodecLimits, decode_group, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.records import (
    Announcement,
    GroupRef,
    Heartbeat,
    record_subkey,
    sign_record,
    verify_record,
)
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

ANNA = Identity(b"\x01" * 32)


def rollout(token_ids: list[int], logprobs: list[float], finish: Finish) -> Rollout:
    return Rollout(np.array(token_ids, np.int32), np.array(logprobs, np.float32), finish)


GROUP = RolloutGroup(
    swarm_id=bytes(range(0x20, 0x40)),
    publisher=ANNA.peer_id,
    epoch=0x0102030405060708,
    prompt_id=0x11121314,
    prompt_sha256=bytes(range(0x60, 0x80)),
    policy_step=0x2122232425262728,
    created_ms=0x3132333435363738,
    temperature=0.75,
    rollouts=(
        rollout([3, 70_000, 1], [-0.5, -1.5, -2.0], Finish.STOP),
        rollout([4, 5], [-0.25, 0.0], Finish.LENGTH),
    ),
    claimed_rewards=np.array([1.0, -0.125], np.float32),
)
BEAT = Heartbeat(
    versions=(1, 2),
    addresses=("/ip4/203.0.113.7/tcp/31337",),
    name="ännchen",
    software="0.1.0",
    model="tiny",
    parameters=123_456,
    mode="lora",
    step=17,
    sampling=True,
    state="training",
    accuracy=0.75,
    reward=None,
    tokens_per_s=1234.5,
    groups_made=40,
    groups_used=300,
    amendments=2,
    peers=3,
    role="volunteer",
    started_s=1_700_000_000.5,
)
NEWS = Announcement(
    versions=(1,),
    groups=(
        GroupRef(bytes(range(32)), 258, 7, 9, 2, 5),
        GroupRef(bytes(range(32, 64)), 70_000, 2**40, 2**31, 64, 8000),
    ),
    policy_step=11,
    created_ms=1_700_000_000_123,
)
KEY = bytes(range(0xA0, 0xB4))
EXPIRES_S = 1_700_000_060.5
SUBKEY = record_subkey(ANNA.peer_id, b"\xaa\xbb")

GROUP_BYTES = bytes.fromhex(
    "5357524701000200202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f8a88e3dd"
    "7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c08070605040302011413121160616263"
    "6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f28272625242322213837363534333231"
    "0000403f030000000200000000010000803f000000bebda9d25a599b9e0948625b1cb07d0a7310ed12fda3bf"
    "94668e04e055b665c1d52c3c11540163a2e2e11f74703f8e5792fe482b9ae12372b63494a6812a4e730f0300"
    "0000000000bf701101000000c0bf01000000000000c004000000000080be0500000000000000"
)
BEAT_BYTES = bytes.fromhex(
    "de0013a176920102a16191ba2f6970342f3230332e302e3131332e372f7463702f3331333337a16ea8c3a46e"
    "6e6368656ea177a5302e312e30a16da474696e79a170ce0001e240a16fa46c6f7261a17311a167c3a174a874"
    "7261696e696e67a163cb3fe8000000000000a172c0a16bcb40934a0000000000a16428a175cd012ca16502a1"
    "7103a16ca9766f6c756e74656572a162cb41d954fc40200000"
)
NEWS_BYTES = bytes.fromhex(
    "84a1769101a1679286a168c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e"
    "1fa17acd0102a16507a17009a16302a1740586a168c420202122232425262728292a2b2c2d2e2f3031323334"
    "35363738393a3b3c3d3e3fa17ace00011170a165cf0000010000000000a170ce80000000a16340a174cd1f40"
    "a1730ba174cf0000018bcfe5687b"
)
RECORD_BYTES = bytes.fromhex(
    "84a1769101a1679286a168c420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e"
    "1fa17acd0102a16507a17009a16302a1740586a168c420202122232425262728292a2b2c2d2e2f3031323334"
    "35363738393a3b3c3d3e3fa17ace00011170a165cf0000010000000000a170ce80000000a16340a174cd1f40"
    "a1730ba174cf0000018bcfe5687be93c7f53f91bd31ddd20c77e15cfff619902a9203e40323330bff531edb2"
    "5a8c4226a20f5496d886766e10ebdd252397cc6d631bb8679a2d0ff47fdb647a660c"
)


def test_group() -> None:
    assert encode_group(GROUP, ANNA) == GROUP_BYTES
    group = decode_group(GROUP_BYTES, CodecLimits(2, 3))
    assert encode_group(group, ANNA) == GROUP_BYTES
    assert group.epoch == 0x0102030405060708
    assert [rollout.token_ids.tolist() for rollout in group.rollouts] == [[3, 70_000, 1], [4, 5]]


def test_heartbeat() -> None:
    assert BEAT.pack() == BEAT_BYTES
    assert Heartbeat.unpack(BEAT_BYTES) == BEAT


def test_announcement() -> None:
    assert NEWS.pack() == NEWS_BYTES
    assert Announcement.unpack(NEWS_BYTES) == NEWS


def test_signed_record() -> None:
    assert sign_record(ANNA, KEY, SUBKEY, EXPIRES_S, NEWS_BYTES) == RECORD_BYTES
    record = verify_record(KEY, SUBKEY, EXPIRES_S, RECORD_BYTES, now_s=EXPIRES_S - 60)
    assert (record.peer_id, record.suffix, record.body) == (ANNA.peer_id, b"\xaa\xbb", NEWS_BYTES)
