"""Group advantages and validity against hand-computed numbers."""

import math

import pytest
import torch

from swarm.protocol.verify import LOGPROB_TOLERANCE
from swarm.rl.advantages import group_advantages, valid_samples

NAN, INF = math.nan, math.inf


def advantages(
    rewards: list[float], group_ids: list[int], valid: list[bool] | None = None
) -> list[float]:
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(group_ids),
        torch.tensor(valid if valid is not None else [True] * len(rewards)),
    ).tolist()


def test_two_groups_interleaved_with_bessel_corrected_std() -> None:
    # Group 7: mean 1/4, std = sqrt((3 * 1/16 + 9/16) / 3) = 1/2. Group -3: mean 3, std = sqrt(2).
    got = advantages([1, 2, 0, 0, 4, 0], [7, -3, 7, 7, -3, 7])
    root = math.sqrt(2)
    expected = [x / 0.5001 for x in (0.75, 0, -0.25, -0.25, 0, -0.25)]
    expected[1], expected[4] = -1 / (root + 1e-4), 1 / (root + 1e-4)
    assert got == pytest.approx(expected, abs=1e-12)


def test_equal_rewards_give_exactly_zero_though_their_mean_rounds() -> None:
    assert sum([0.1] * 3) / 3 != 0.1
    assert advantages([0.1] * 3 + [0.7] * 6, [0] * 3 + [1] * 6) == [0.0] * 9


def test_invalid_sample_is_out_of_mean_and_std() -> None:
    got = advantages([1, 0, 1], [0, 0, 0], [False, True, True])
    scaled = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert got == pytest.approx([0.0, -scaled, scaled], abs=1e-12)
    assert got[0] == 0.0


def test_group_with_fewer_than_two_valid_samples_has_no_signal() -> None:
    assert advantages([5, 1, 3, 9], [0, 0, 1, 2], [True, False, True, False]) == [0.0] * 4


@pytest.mark.parametrize("reward", [NAN, INF, -INF, 1e300])
def test_reward_that_float32_cannot_hold_counts_as_invalid(reward: float) -> None:
    assert advantages([reward, 0, 1], [0, 0, 0]) == advantages(
        [7, 0, 1], [0, 0, 0], [False, True, True]
    )


def test_largest_float32_rewards_stay_finite() -> None:
    largest = torch.finfo(torch.float32).max
    got = group_advantages(
        torch.tensor([largest, -largest, 0.0]), torch.zeros(3, dtype=torch.long), torch.ones(3) > 0
    )
    assert got.tolist() == pytest.approx([1.0, -1.0, 0.0])
    assert got.dtype == torch.float32


@pytest.mark.parametrize(
    ("rewards", "group_ids", "valid", "named"),
    [
        (torch.ones(2, 1), torch.zeros(2).long(), torch.ones(2) > 0, "rewards"),
        (torch.ones(2).long(), torch.zeros(2).long(), torch.ones(2) > 0, "rewards"),
        (torch.ones(2), torch.zeros(2, 1).long(), torch.ones(2) > 0, "group_ids"),
        (torch.ones(2), torch.zeros(2), torch.ones(2) > 0, "group_ids"),
        (torch.ones(2), torch.zeros(2).long(), torch.ones(2, 1) > 0, "valid"),
        (torch.ones(2), torch.zeros(2).long(), torch.ones(2), "valid"),
    ],
)
def test_wrong_shape_or_dtype_is_named(
    rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor, named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named}: expected"):
        group_advantages(rewards, group_ids, valid)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 2 * LOGPROB_TOLERANCE])
def test_bad_log_prob_invalidates_a_sample_only_at_a_live_token(bad: float) -> None:
    logprobs = torch.tensor([[-1.0, bad], [-1.0, bad], [-1.0, LOGPROB_TOLERANCE / 2]])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    assert valid_samples(logprobs, mask).tolist() == [False, True, True]


def test_empty_completion_is_invalid() -> None:
    mask = torch.tensor([[False, False], [False, True]])
    assert valid_samples(torch.zeros(2, 2), mask).tolist() == [False, True]
    assert valid_samples(torch.zeros(2, 0), mask[:, :0]).tolist() == [False, False]


def test_validity_checks_the_mask() -> None:
    with pytest.raises(ValueError, match=r"^completion_mask: expected shape"):
        valid_samples(torch.zeros(2, 3), torch.ones(2, 1) > 0)
