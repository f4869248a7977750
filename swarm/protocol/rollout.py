"""Sampled completions as the program holds them: one rollout, and one prompt's whole group.

Owns: their fields and what always holds of them. Does not know: bytes (`swarm.protocol.codec`),
what a swarm allows (`swarm.protocol.verify`), text, rewards of one's own.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MAX_GROUP_SIZE = 2**16 - 1
MAX_PROMPT_ID = 2**32 - 1
MAX_COMPLETION_TOKENS = 2**32 - 1
_MAX_U64 = 2**64 - 1
_HASH_BYTES = 32
# Compared with a dtype some ten times as fast as the types are.
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


class Finish(IntEnum):
    """Why a completion ended; the value is the byte on the wire."""

    STOP = 0  # its last token is a stop token
    LENGTH = 1  # it reached the swarm's length limit


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One completion.

    Attributes:
        token_ids: int32 (L,), L >= 1, the stop token included.
        logprobs: float32 (L,), nats: log-prob of each token under the distribution that it was
            drawn from, log_softmax(logits / temperature) of the publisher's policy then.
        finish: why it ended.

    Raises:
        ValueError: the arrays have another dtype or shape.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish: Finish

    def __post_init__(self) -> None:
        if self.token_ids.dtype != _INT32 or self.logprobs.dtype != _FLOAT32:
            raise ValueError(
                "token_ids must be int32 and logprobs float32, not "
                f"{self.token_ids.dtype} and {self.logprobs.dtype}"
            )
        if self.token_ids.ndim != 1 or not len(self.token_ids):
            raise ValueError(f"token_ids must be (L,) with L >= 1, not {self.token_ids.shape}")
        if self.logprobs.shape != self.token_ids.shape:
            raise ValueError(
                f"logprobs {self.logprobs.shape} and token_ids {self.token_ids.shape} must agree"
            )


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """All completions of one prompt by one node, and what the node says about them.

    Attributes:
        swarm_id: 32 bytes.
        publisher: peer id of the node that sampled and signed it.
        epoch: the publisher's own pass over the prompts.
        prompt_id: index over all prompt sets in order.
        prompt_sha256: hash of the rendered prompt's token ids (int32, little-endian).
        policy_step: optimizer steps of the publisher's policy when it began to sample; a claim.
        created_ms: Unix time by the publisher's clock; a claim.
        temperature: of the softmax; a float32 on the wire.
        rollouts: the G completions.
        claimed_rewards: float32 (G,), finite; shown to people, never trained on.

    Raises:
        ValueError: a field is out of the bounds that the wire format has.
    """

    swarm_id: bytes
    publisher: str
    epoch: int
    prompt_id: int
    prompt_sha256: bytes
    policy_step: int
    created_ms: int
    temperature: float
    rollouts: tuple[Rollout, ...]
    claimed_rewards: NDArray[np.float32]

    def __post_init__(self) -> None:
        if len(self.swarm_id) != _HASH_BYTES or len(self.prompt_sha256) != _HASH_BYTES:
            raise ValueError(f"swarm_id and prompt_sha256 must have {_HASH_BYTES} bytes")
        for name, value, limit in (
            ("epoch", self.epoch, _MAX_U64),
            ("prompt_id", self.prompt_id, MAX_PROMPT_ID),
            ("policy_step", self.policy_step, _MAX_U64),
            ("created_ms", self.created_ms, _MAX_U64),
        ):
            if not 0 <= value <= limit:
                raise ValueError(f"{name} must be in [0, {limit}], not {value}")
        if not (self.temperature > 0.0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be finite and above 0, not {self.temperature}")
        if not 1 <= len(self.rollouts) <= MAX_GROUP_SIZE:
            raise ValueError(f"a group has 1 to {MAX_GROUP_SIZE} rollouts: {len(self.rollouts)}")
        rewards = self.claimed_rewards
        if rewards.dtype != np.float32 or rewards.shape != (len(self.rollouts),):
            raise ValueError(
                f"claimed_rewards must be float32 ({len(self.rollouts)},), "
                f"not {rewards.dtype} {rewards.shape}"
            )
        if not np.isfinite(rewards).all():
            raise ValueError("claimed_rewards must be finite")

    @property
    def n_tokens(self) -> int:
        """Completion tokens of all rollouts together."""
        return sum(len(rollout.token_ids) for rollout in self.rollouts)
