"""Divergence estimators and drop rules against hand-computed numbers."""

import math
from typing import get_args

import pytest
import torch

from swarm.rl.filter import (
    FilterRule,
    KlEstimator,
    dropped_by_advantage,
    dropped_by_kl,
    guarded_exp,
    kl_statistic,
)

NAN = math.nan


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # l = ln 2, then l = -ln 4: exp(l) is 2 and 1/4.
        ("grpo", (0.5 - 1 + math.log(2)) + (4 - 1 - math.log(4))),
        ("k3", (2 - 1 - math.log(2)) + (0.25 - 1 + math.log(4))),
        ("k1", -math.log(2) + math.log(4)),
        ("reverse", (1 - 2 + 2 * math.log(2)) + (1 - 0.25 - 0.25 * math.log(4))),
    ],
)
def test_estimator_sums_its_formula_over_live_tokens(
    estimator: KlEstimator, expected: float
) -> None:
    log_ratio = torch.tensor([[math.log(2), -math.log(4), NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    assert kl_statistic(log_ratio, mask, estimator).item() == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
def test_same_policy_has_no_divergence(estimator: KlEstimator) -> None:
    assert kl_statistic(torch.zeros(1, 4), torch.ones(1, 4) > 0, estimator).item() == 0.0


@pytest.mark.parametrize(
    ("estimator", "log_ratio", "expected"),
    [
        ("grpo", -99.0, math.exp(20) - 1 - 99),
        ("grpo", 99.0, 98.0),
        ("k3", 99.0, math.exp(20) - 1 - 99),
        ("k3", -99.0, 98.0),
        ("k1", -99.0, 99.0),
        ("k1", 99.0, -99.0),
        ("reverse", 99.0, 1 - math.exp(20) + 99 * math.exp(20)),
        ("reverse", -99.0, 1.0),
    ],
)
def test_exponentials_are_guarded_and_the_linear_term_is_not(
    estimator: KlEstimator, log_ratio: float, expected: float
) -> None:
    statistic = kl_statistic(
        torch.tensor([[log_ratio]], dtype=torch.float64), torch.ones(1, 1) > 0, estimator
    )
    assert statistic.item() == pytest.approx(expected, rel=1e-12)


def test_guarded_exp_is_exp_below_the_limit_and_flat_above() -> None:
    x = torch.tensor([-math.inf, -3.0, 19.5, 21.0, math.inf], dtype=torch.float64).requires_grad_()
    y = guarded_exp(x)
    y.sum().backward()
    top = math.exp(20)
    assert y.tolist() == pytest.approx([0.0, math.exp(-3), math.exp(19.5), top, top])
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.0, math.exp(-3), math.exp(19.5), 0.0, 0.0])


ADVANTAGES = torch.tensor([-1.0, -1.0, 0.0, 0.0, 1.0, 1.0, -1.0])
KL = torch.tensor([1.0, 9.0, 1.0, 9.0, 1.0, 9.0, NAN])


@pytest.mark.parametrize(
    ("rule", "by_advantage", "by_kl"),
    [
        ("or", [1, 1, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 1, 0]),
        ("and", [0, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]),
        ("none", [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_rules(rule: FilterRule, by_advantage: list[int], by_kl: list[int]) -> None:
    everyone = torch.ones(7, dtype=torch.bool)
    assert dropped_by_advantage(ADVANTAGES, everyone, rule).int().tolist() == by_advantage
    assert dropped_by_kl(ADVANTAGES, KL, 5.0, everyone, rule).int().tolist() == by_kl
    assert not dropped_by_advantage(ADVANTAGES, ~everyone, rule).any()
    assert not dropped_by_kl(ADVANTAGES, KL, 5.0, ~everyone, rule).any()


def test_threshold_itself_is_kept() -> None:
    one = torch.ones(1)
    assert not dropped_by_kl(one, one * 5, 5.0, one > 0, "or").any()
