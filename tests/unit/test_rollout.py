"""What a rollout and a group never hold."""

from typing import Any

import numpy as np
import pytest

from swarm.protocol.identity import Identity
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

ROLLOUT = Rollout(np.array([5, 6], np.int32), np.array([-1, -2], np.float32), Finish.STOP)
FIELDS: dict[str, Any] = {
    "swarm_id": bytes(32),
    "publisher": Identity(b"\x01" * 32).peer_id,
    "epoch": 0,
    "prompt_id": 0,
    "prompt_sha256": bytes(32),
    "policy_step": 0,
    "created_ms": 0,
    "temperature": 1.0,
    "rollouts": (ROLLOUT, ROLLOUT, ROLLOUT),
    "claimed_rewards": np.zeros(3, np.float32),
}


def test_a_group_counts_its_tokens() -> None:
    assert RolloutGroup(**FIELDS).n_tokens == 6


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "named"),
    [
        (np.array([1], np.int64), np.array([-1], np.float32), "int64"),
        (np.array([1], np.int32), np.array([-1], np.float64), "float64"),
        (np.array([], np.int32), np.array([], np.float32), r"\(0,\)"),
        (np.array([[1]], np.int32), np.array([[-1]], np.float32), r"\(1, 1\)"),
        (np.array([1, 2], np.int32), np.array([-1], np.float32), r"\(1,\)"),
    ],
)
def test_arrays_of_another_dtype_or_shape_are_refused(
    token_ids: Any, logprobs: Any, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Rollout(token_ids, logprobs, Finish.STOP)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("swarm_id", bytes(31), "swarm_id"),
        ("prompt_sha256", bytes(33), "prompt_sha256"),
        ("epoch", -1, "epoch"),
        ("epoch", 2**64, "epoch"),
        ("prompt_id", 2**32, "prompt_id"),
        ("policy_step", 2**64, "policy_step"),
        ("created_ms", -1, "created_ms"),
        ("temperature", 0.0, "temperature"),
        ("temperature", float("nan"), "temperature"),
        ("temperature", float("inf"), "temperature"),
        ("rollouts", (), "rollouts"),
        ("claimed_rewards", np.zeros(2, np.float32), "claimed_rewards"),
        ("claimed_rewards", np.zeros(3, np.float64), "claimed_rewards"),
        ("claimed_rewards", np.array([0, np.nan, 0], np.float32), "claimed_rewards"),
    ],
)
def test_fields_that_the_wire_cannot_hold_are_refused(field: str, value: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RolloutGroup(**FIELDS | {field: value})
