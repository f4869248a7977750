"""Any group survives the codec; any bytes give a group or the one protocol error."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swarm.errors import RemoteProtocolError
from swarm.protocol.codec import CodecLimits, blob_bytes, decode_group, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.reasons import Reason
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

ANNA = Identity(b"\x01" * 32)
LIMITS = CodecLimits(max_group_size=6, max_completion_tokens=12)
U64 = st.integers(0, 2**64 - 1)
HASH = st.binary(min_size=32, max_size=32)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    length = draw(st.integers(1, LIMITS.max_completion_tokens))
    return Rollout(
        token_ids=draw(hnp.arrays(np.int32, length)),
        logprobs=draw(hnp.arrays(np.float32, length, elements=st.floats(width=32))),
        finish=draw(st.sampled_from(Finish)),
    )


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    members = tuple(draw(st.lists(rollouts(), min_size=1, max_size=LIMITS.max_group_size)))
    return RolloutGroup(
        swarm_id=draw(HASH),
        publisher=ANNA.peer_id,
        epoch=draw(U64),
        prompt_id=draw(st.integers(0, 2**32 - 1)),
        prompt_sha256=draw(HASH),
        policy_step=draw(U64),
        created_ms=draw(U64),
        temperature=draw(st.floats(min_value=2.0**-20, max_value=2.0**20, width=32)),
        rollouts=members,
        claimed_rewards=draw(hnp.arrays(np.float32, len(members), elements=FLOAT32)),
    )


@given(groups())
def test_a_group_survives_the_codec_bit_by_bit(group: RolloutGroup) -> None:
    blob = encode_group(group, ANNA)
    assert len(blob) == blob_bytes(len(group.rollouts), group.n_tokens)
    back = decode_group(blob, LIMITS)
    for field in (
        "swarm_id",
        "publisher",
        "epoch",
        "prompt_id",
        "prompt_sha256",
        "policy_step",
        "created_ms",
        "temperature",
        "n_tokens",
    ):
        assert getattr(back, field) == getattr(group, field)
    assert back.claimed_rewards.tobytes() == group.claimed_rewards.tobytes()
    assert len(back.rollouts) == len(group.rollouts)
    for ours, theirs in zip(group.rollouts, back.rollouts, strict=True):
        assert theirs.token_ids.tobytes() == ours.token_ids.tobytes()
        assert theirs.logprobs.tobytes() == ours.logprobs.tobytes()
        assert theirs.finish is ours.finish
    assert encode_group(back, ANNA) == blob


@given(groups(), st.data())
def test_one_changed_byte_is_always_noticed(group: RolloutGroup, data: st.DataObject) -> None:
    blob = bytearray(encode_group(group, ANNA))
    place = data.draw(st.integers(0, len(blob) - 1))
    blob[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError) as caught:
        decode_group(bytes(blob), LIMITS)
    assert Reason(caught.value.reason)


@given(groups(), st.data())
def test_a_cut_or_longer_blob_is_always_noticed(group: RolloutGroup, data: st.DataObject) -> None:
    blob = encode_group(group, ANNA)
    other = data.draw(
        st.one_of(
            st.integers(0, len(blob) - 1).map(lambda end: blob[:end]),
            st.binary(min_size=1, max_size=64).map(lambda more: blob + more),
        )
    )
    with pytest.raises(RemoteProtocolError):
        decode_group(other, LIMITS)


def decodes_or_is_refused(blob: bytes) -> None:
    try:
        group = decode_group(blob, LIMITS)
    except RemoteProtocolError as error:
        reason = error.reason
    else:
        assert encode_group(group, ANNA) == blob
        return
    assert reason in set(Reason)


@settings(max_examples=500)
@given(st.binary(max_size=400))
@example(b"SWRG")
@example(b"SWRG\x01\x00\xff\xff" + bytes(400))
def test_any_bytes_give_a_group_or_the_one_error(blob: bytes) -> None:
    decodes_or_is_refused(blob)


@settings(max_examples=500)
@given(
    fixed=st.binary(min_size=136, max_size=136),
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=7),
    finishes=st.binary(min_size=7, max_size=7) | st.just(bytes(7)),
    rewards=st.binary(min_size=28, max_size=28) | st.just(bytes(28)),
    cut=st.integers(0, 1),
    data=st.data(),
)
def test_signed_bytes_of_any_content_give_a_group_or_the_one_error(
    fixed: bytes, lengths: list[int], finishes: bytes, rewards: bytes, cut: int, data: st.DataObject
) -> None:
    """Past magic number and signature, where a malicious member gets by itself."""
    count = len(lengths)
    size = max(0, 8 * sum(lengths) - cut)
    body = data.draw(st.binary(min_size=size, max_size=size))
    header = b"SWRG" + struct.pack("<HH", 1, count) + fixed[:32] + ANNA.public_key + fixed[72:]
    header += struct.pack(f"<{count}I", *lengths) + finishes[:count] + rewards[: 4 * count]
    message = b"swarm-node group 1\0" + header + hashlib.sha256(body).digest()
    decodes_or_is_refused(header + ANNA.sign(message) + body)
