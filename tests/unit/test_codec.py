"""The codec against bytes laid out by hand, and every rule of its decoder."""

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest

from swarm.errors import RemoteProtocolError
from swarm.protocol.codec import (
    CodecLimits,
    blob_bytes,
    blob_hash,
    decode_group,
    encode_group,
    header_bytes,
)
from swarm.protocol.identity import Identity, verify_signature
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

ANNA = Identity(b"\x01" * 32)
MALLORY = Identity(b"\x03" * 32)
LIMITS = CodecLimits(max_group_size=4, max_completion_tokens=5)


def rollout(token_ids: list[int], finish: Finish = Finish.STOP) -> Rollout:
    logprobs = -np.arange(1, len(token_ids) + 1, dtype=np.float32) / np.float32(4)
    return Rollout(np.array(token_ids, np.int32), logprobs, finish)


GROUP = RolloutGroup(
    swarm_id=bytes(range(32)),
    publisher=ANNA.peer_id,
    epoch=7,
    prompt_id=9,
    prompt_sha256=bytes(range(32, 64)),
    policy_step=11,
    created_ms=1_700_000_000_123,
    temperature=0.5,
    rollouts=(rollout([3, 1, 0]), rollout([2, 2, 2, 2, 2], Finish.LENGTH)),
    claimed_rewards=np.array([1.0, -0.25], np.float32),
)
BLOB = encode_group(GROUP, ANNA)
BODY_AT = header_bytes(2)


def reason(blob: bytes, limits: CodecLimits = LIMITS) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_group(blob, limits)
    return caught.value.reason


def resigned(
    changes: dict[int, bytes], identity: Identity = ANNA, cut: int = 0, more: bytes = b""
) -> bytes:
    """BLOB with bytes replaced at offsets, its body cut or lengthened, and signed again."""
    data = bytearray(BLOB)
    for offset, value in changes.items():
        data[offset : offset + len(value)] = value
    header, body = bytes(data[: BODY_AT - 64]), bytes(data[BODY_AT : len(data) - cut]) + more
    message = b"swarm-node group 1\0" + header + hashlib.sha256(body).digest()
    return header + identity.sign(message) + body


def test_the_layout_is_the_one_of_the_protocol() -> None:
    header = struct.pack("<4sHH", b"SWRG", 1, 2) + bytes(range(32)) + ANNA.public_key
    header += struct.pack("<QI", 7, 9) + bytes(range(32, 64))
    header += struct.pack("<QQf", 11, 1_700_000_000_123, 0.5)
    assert len(header) == 136
    header += struct.pack("<II", 3, 5) + bytes([0, 1]) + struct.pack("<ff", 1.0, -0.25)
    pairs = [(3, -0.25), (1, -0.5), (0, -0.75)]
    pairs += [(2, -0.25), (2, -0.5), (2, -0.75), (2, -1.0), (2, -1.25)]
    body = b"".join(struct.pack("<if", *pair) for pair in pairs)
    signature = BLOB[len(header) : len(header) + 64]
    assert header + signature + body == BLOB
    message = b"swarm-node group 1\0" + header + hashlib.sha256(body).digest()
    assert verify_signature(ANNA.public_key, message, signature)


def test_decoding_gives_the_group_back() -> None:
    group = decode_group(BLOB, LIMITS)
    for field in ("swarm_id", "publisher", "epoch", "prompt_id", "prompt_sha256", "policy_step"):
        assert getattr(group, field) == getattr(GROUP, field)
    assert (group.created_ms, group.temperature) == (1_700_000_000_123, 0.5)
    assert group.claimed_rewards.tolist() == [1.0, -0.25]
    assert [r.token_ids.tolist() for r in group.rollouts] == [[3, 1, 0], [2] * 5]
    assert group.rollouts[0].logprobs.tolist() == [-0.25, -0.5, -0.75]
    assert [r.finish for r in group.rollouts] == [Finish.STOP, Finish.LENGTH]
    assert group.rollouts[0].token_ids.dtype == np.int32
    assert group.rollouts[0].token_ids.flags.c_contiguous


def test_the_header_is_small_and_the_body_has_8_bytes_a_token() -> None:
    many = tuple(rollout([1] * 256, Finish.LENGTH) for _ in range(64))
    group = replace(GROUP, rollouts=many, claimed_rewards=np.zeros(64, np.float32))
    blob = encode_group(group, ANNA)
    assert len(blob) - header_bytes(64) == 8 * 64 * 256
    assert header_bytes(64) == 776
    assert header_bytes(64) / len(blob) < 0.02
    assert blob_bytes(64, 64 * 256) == len(blob)
    assert CodecLimits(64, 256).max_blob_bytes == len(blob)


def test_the_content_hash_is_plain_sha256() -> None:
    assert blob_hash(BLOB) == hashlib.sha256(BLOB).digest()


def test_one_cannot_sign_for_another() -> None:
    with pytest.raises(ValueError, match=ANNA.peer_id):
        encode_group(GROUP, MALLORY)


def test_a_temperature_beyond_float32_is_refused_by_the_encoder() -> None:
    with pytest.raises(ValueError, match="temperature"):
        encode_group(replace(GROUP, temperature=1e39), ANNA)


def test_resigning_without_a_change_decodes() -> None:
    assert resigned({}) == BLOB


@pytest.mark.parametrize("length", [0, 3, 135, 136, 200, BODY_AT - 1, BODY_AT, len(BLOB) - 1])
def test_a_cut_blob_is_malformed(length: int) -> None:
    assert reason(BLOB[:length]) == "malformed"


def test_a_longer_blob_is_malformed() -> None:
    assert reason(resigned({}, more=b"\0")) == "malformed"
    assert reason(resigned({}, more=bytes(8))) == "malformed"
    assert reason(resigned({}, cut=8)) == "malformed"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({0: b"SWRH"}, "malformed"),
        ({4: struct.pack("<H", 2)}, "incompatible"),
        ({6: struct.pack("<H", 0)}, "group_size"),
        ({6: struct.pack("<H", 5)}, "group_size"),
        ({6: struct.pack("<H", 65_535)}, "group_size"),
        ({136: struct.pack("<II", 0, 5)}, "length"),
        ({136: struct.pack("<II", 3, 6)}, "length"),
        ({136: struct.pack("<II", 2**32 - 1, 5)}, "length"),
        ({136: struct.pack("<II", 3, 4)}, "malformed"),
        ({144: b"\x02"}, "malformed"),
        ({132: struct.pack("<f", float("nan"))}, "malformed"),
        ({132: struct.pack("<f", float("inf"))}, "malformed"),
        ({132: struct.pack("<f", 0.0)}, "malformed"),
        ({132: struct.pack("<f", -1.0)}, "malformed"),
        ({146: struct.pack("<f", float("nan"))}, "malformed"),
        ({150: struct.pack("<f", float("inf"))}, "malformed"),
    ],
)
def test_signed_nonsense_is_refused_by_reason(changes: dict[int, bytes], expected: str) -> None:
    assert reason(resigned(changes)) == expected


@pytest.mark.parametrize("offset", [8, 40, 72, 84, 116, 124, 145, BODY_AT - 1, BODY_AT, -1])
def test_any_changed_byte_breaks_the_signature(offset: int) -> None:
    data = bytearray(BLOB)
    data[offset] ^= 1
    assert reason(bytes(data)) == "signature"


def test_a_signature_by_another_key_is_refused() -> None:
    assert reason(resigned({}, MALLORY)) == "signature"


def test_a_huge_length_is_refused_before_memory_is_taken() -> None:
    generous = CodecLimits(max_group_size=65_535, max_completion_tokens=2**32 - 1)
    blob = resigned({136: struct.pack("<II", 2**32 - 1, 2**32 - 1)})
    assert reason(blob, generous) == "malformed"


def test_bit_patterns_of_logprobs_survive() -> None:
    odd = np.array([-0.0, np.finfo(np.float32).tiny / 2, -np.inf, np.nan], np.float32)
    ids = np.array([0, -1, 2**31 - 1, -(2**31)], np.int32)
    group = replace(GROUP, rollouts=(Rollout(ids, odd, Finish.STOP),) * 2)
    back = decode_group(encode_group(group, ANNA), LIMITS).rollouts[1]
    assert back.logprobs.tobytes() == odd.tobytes()
    assert back.token_ids.tolist() == ids.tolist()
