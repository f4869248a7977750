"""Bytes of one group of completions: a signed header and a packed body (docs/PROTOCOL.md).

Owns: the layout, the signature over it, the structural checks of a decoder. Does not know: what a
swarm allows beyond two limits (`swarm.protocol.verify` does), how a blob travels or is stored.

A blob decodes to a group or raises RemoteProtocolError; memory is proportional to its length,
never to a number in it.
"""

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.errors import RemoteProtocolError
from swarm.protocol.identity import (
    SIGNATURE_BYTES,
    Identity,
    peer_id_of,
    public_key_of,
    verify_signature,
)
from swarm.protocol.reasons import Reason
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

CODEC_VERSION = 1
BYTES_PER_TOKEN = 8

_MAGIC = b"SWRG"
_SIGNATURE_DOMAIN = b"swarm-node group 1\0"
# magic, version, group size, swarm id, public key, epoch, prompt id, prompt hash, policy step,
# created (ms), temperature
_FIXED = struct.Struct("<4sHH32s32sQI32sQQf")
# length u32, finish u8, claimed reward f32
_BYTES_PER_COMPLETION = 9
_PAIR = np.dtype([("token_id", "<i4"), ("logprob", "<f4")])
_FINISHES = tuple(Finish)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class CodecLimits:
    """What a decoder accepts; both come from the swarm's manifest.

    Attributes:
        max_group_size: completions in a group.
        max_completion_tokens: tokens of one completion.
    """

    max_group_size: int
    max_completion_tokens: int

    @property
    def max_blob_bytes(self) -> int:
        """Size of the largest blob that can decode."""
        return blob_bytes(self.max_group_size, self.max_group_size * self.max_completion_tokens)


def header_bytes(n_completions: int) -> int:
    """Bytes before the body, the signature included."""
    return _FIXED.size + n_completions * _BYTES_PER_COMPLETION + SIGNATURE_BYTES


def blob_bytes(n_completions: int, n_tokens: int) -> int:
    """Size of a blob with so many completions that have so many tokens together."""
    return header_bytes(n_completions) + n_tokens * BYTES_PER_TOKEN


def blob_hash(blob: bytes) -> bytes:
    """The 32-byte content hash by which a blob is announced, fetched and stored."""
    return hashlib.sha256(blob).digest()


def encode_group(group: RolloutGroup, identity: Identity) -> bytes:
    """The signed blob of a group.

    Args:
        group: `group.publisher` must be the peer id of `identity`.
        identity: signs the header and the body's hash.

    Raises:
        ValueError: the group is another peer's, or its temperature exceeds a float32.
    """
    if group.publisher != identity.peer_id:
        raise ValueError(f"group of {group.publisher} cannot be signed by {identity.peer_id}")
    if group.temperature > _FLOAT32_MAX:
        raise ValueError(f"temperature {group.temperature} exceeds a float32")
    rollouts = group.rollouts
    pairs = np.empty(group.n_tokens, dtype=_PAIR)
    np.concatenate([rollout.token_ids for rollout in rollouts], out=pairs["token_id"])
    np.concatenate([rollout.logprobs for rollout in rollouts], out=pairs["logprob"])
    body = pairs.view(np.uint8).data  # its bytes, not copied
    header = b"".join(
        (
            _FIXED.pack(
                _MAGIC,
                CODEC_VERSION,
                len(rollouts),
                group.swarm_id,
                public_key_of(group.publisher),
                group.epoch,
                group.prompt_id,
                group.prompt_sha256,
                group.policy_step,
                group.created_ms,
                group.temperature,
            ),
            np.array([len(rollout.token_ids) for rollout in rollouts], dtype="<u4").tobytes(),
            bytes(rollout.finish for rollout in rollouts),
            group.claimed_rewards.astype("<f4").tobytes(),
        )
    )
    return b"".join((header, identity.sign(_signed_message(header, body)), body))


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroup:
    """A decoded group with its completions one behind the other, as on the wire.

    Attributes:
        fields: of the group, as `RolloutGroup` names them, but for `rollouts`.
        token_ids: int32 (S,), S the sum of `lengths`.
        logprobs: float32 (S,), nats.
        lengths: int64 (G,), tokens of each completion.
        finishes: uint8 (G,), values of `Finish`.
    """

    fields: Mapping[str, Any]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: NDArray[np.int64]
    finishes: NDArray[np.uint8]

    def unpack(self) -> RolloutGroup:
        """The group; its rollouts hold views of the two arrays."""
        ends = np.cumsum(self.lengths).tolist()
        return RolloutGroup(
            **self.fields,
            rollouts=tuple(
                Rollout(self.token_ids[start:end], self.logprobs[start:end], _FINISHES[finish])
                for start, end, finish in zip(
                    [0, *ends[:-1]], ends, self.finishes.tolist(), strict=True
                )
            ),
        )


def decode_group(blob: bytes, limits: CodecLimits) -> RolloutGroup:
    """`decode_packed`, unpacked."""
    return decode_packed(blob, limits).unpack()


def decode_packed(blob: bytes, limits: CodecLimits) -> PackedGroup:
    """Read a blob back and check its structure, the limits and its publisher's signature.

    Raises:
        RemoteProtocolError: the only exception, whatever the bytes are. Reasons: malformed,
            incompatible, group_size, length, signature.
    """
    if len(blob) < _FIXED.size:
        raise _malformed(f"{len(blob)} bytes; a header has at least {_FIXED.size}")
    (
        magic,
        version,
        group_size,
        swarm_id,
        public_key,
        epoch,
        prompt_id,
        prompt_sha256,
        policy_step,
        created_ms,
        temperature,
    ) = _FIXED.unpack_from(blob)
    if magic != _MAGIC:
        raise _malformed(f"begins with {magic!r}, not {_MAGIC!r}")
    if version != CODEC_VERSION:
        raise RemoteProtocolError(
            Reason.INCOMPATIBLE, f"codec version {version}; this node reads {CODEC_VERSION}"
        )
    if not 1 <= group_size <= limits.max_group_size:
        raise RemoteProtocolError(
            Reason.GROUP_SIZE, f"{group_size} completions; at most {limits.max_group_size}"
        )
    body_at = header_bytes(group_size)
    if len(blob) < body_at:
        raise _malformed(f"{len(blob)} bytes; the header alone has {body_at}")
    finish_at = _FIXED.size + 4 * group_size
    rewards_at = finish_at + group_size
    signature_at = rewards_at + 4 * group_size
    lengths = np.frombuffer(blob, "<u4", group_size, _FIXED.size).astype(np.int64)
    if lengths.min() < 1 or lengths.max() > limits.max_completion_tokens:
        raise RemoteProtocolError(
            Reason.LENGTH,
            f"completions of {lengths.min()} to {lengths.max()} tokens; "
            f"1 to {limits.max_completion_tokens} are allowed",
        )
    expected_bytes = blob_bytes(group_size, int(lengths.sum()))
    if len(blob) != expected_bytes:
        raise _malformed(f"{len(blob)} bytes; its header says {expected_bytes}")
    finishes = np.frombuffer(blob, np.uint8, group_size, finish_at)
    if finishes.max() > max(Finish):
        raise _malformed(f"finish {finishes.max()}; at most {max(Finish)}")
    claimed_rewards = np.frombuffer(blob, "<f4", group_size, rewards_at).astype(np.float32)
    if not np.isfinite(claimed_rewards).all():
        raise _malformed("a claimed reward is not finite")
    if not (temperature > 0.0 and math.isfinite(temperature)):
        raise _malformed(f"temperature {temperature} is not finite and above 0")
    message = _signed_message(blob[:signature_at], memoryview(blob)[body_at:])
    if not verify_signature(public_key, message, blob[signature_at:body_at]):
        raise RemoteProtocolError(
            Reason.SIGNATURE, f"not by {peer_id_of(public_key)}, who is named as its publisher"
        )
    pairs = np.frombuffer(blob, _PAIR, offset=body_at)
    return PackedGroup(
        fields={
            "swarm_id": swarm_id,
            "publisher": peer_id_of(public_key),
            "epoch": epoch,
            "prompt_id": prompt_id,
            "prompt_sha256": prompt_sha256,
            "policy_step": policy_step,
            "created_ms": created_ms,
            "temperature": temperature,
            "claimed_rewards": claimed_rewards,
        },
        token_ids=np.ascontiguousarray(pairs["token_id"], dtype=np.int32),
        logprobs=np.ascontiguousarray(pairs["logprob"], dtype=np.float32),
        lengths=lengths,
        finishes=finishes,
    )


def _signed_message(header: bytes, body: bytes | memoryview) -> bytes:
    return _SIGNATURE_DOMAIN + header + hashlib.sha256(body).digest()


def _malformed(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.MALFORMED, detail)
