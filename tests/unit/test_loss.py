"""The loss: edge cases, options, arguments, figures."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.config import FtisSection
from swarm.errors import ConfigError
from swarm.rl.loss import (
    MAX_LOG_RATIO,
    FtisConfig,
    LossMetrics,
    LossOutput,
    ftis_loss,
    kl_quantiles,
)

NAN, INF = math.nan, math.inf
TIS = FtisConfig(filter="none")


def loss_and_grad(
    policy: list[list[float]],
    sampling: list[list[float]],
    advantages: list[float],
    config: FtisConfig,
    mask: list[list[int]] | None = None,
    **options: Any,
) -> tuple[LossOutput, Tensor]:
    logprobs = torch.tensor(policy, dtype=torch.float64).requires_grad_()
    live = torch.ones_like(logprobs) if mask is None else torch.tensor(mask)
    for name in ("own", "truncated"):
        if name in options:
            options[name] = torch.tensor(options[name])
    if "anchor_logprobs" in options:
        options["anchor_logprobs"] = torch.tensor(options["anchor_logprobs"], dtype=torch.float64)
    output = ftis_loss(
        logprobs,
        torch.tensor(sampling, dtype=torch.float64),
        live.bool(),
        torch.tensor(advantages, dtype=torch.float64),
        config,
        **options,
    )
    output.loss.backward()
    assert logprobs.grad is not None
    return output, logprobs.grad


# Edge cases.


@pytest.mark.parametrize("importance", ["none", "vanilla", "truncated"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_log_probs_at_masked_positions_are_ignored(importance: Any, bad: float) -> None:
    config = FtisConfig(importance=importance, filter="none")
    mask = [[1, 0], [1, 1]]
    got, grad = loss_and_grad(
        [[-1, bad], [-1, -2]], [[-2, bad], [-1, -1]], [1, -1], config, mask=mask
    )
    same, same_grad = loss_and_grad(
        [[-1, -5], [-1, -2]], [[-2, -7], [-1, -1]], [1, -1], config, mask=mask
    )
    assert got.loss.item() == same.loss.item()
    assert torch.equal(grad, same_grad)
    assert grad[0, 1].item() == 0.0
    assert got.keep.all()
    assert got.is_weight[0, 1].item() == 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.5])
def test_bad_sampling_log_prob_makes_the_sample_invalid_and_counted(bad: float) -> None:
    output, grad = loss_and_grad([[-1, -1], [-1, -1]], [[-1, bad], [-1, -1]], [1, 1], TIS)
    assert output.keep.tolist() == [False, True]
    assert output.metrics.invalid == 1
    assert math.isnan(output.kl[0].item())
    assert output.is_weight[0].tolist() == [0.0, 0.0]
    assert grad.tolist() == [[0.0, 0.0], [-0.25, -0.25]]  # 1/N stays 1/2
    assert output.loss.item() == -0.5


def test_empty_completion_is_invalid() -> None:
    output, grad = loss_and_grad(
        [[-1, -1], [-1, -1]], [[-1, -1], [-1, -1]], [1, 1], TIS, mask=[[0, 0], [1, 1]]
    )
    assert output.metrics.invalid == 1
    assert output.loss.item() == -0.5
    assert grad[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_policy_log_prob_is_our_fault_not_the_samples(bad: float) -> None:
    output, grad = loss_and_grad([[-1, bad], [-1, -1]], [[-1, -1], [-1, -1]], [1, 1], TIS)
    assert output.keep.tolist() == [False, True]
    assert (output.metrics.not_finite, output.metrics.invalid) == (1, 0)
    assert math.isnan(output.kl[0].item())
    assert grad.tolist() == [[0.0, 0.0], [-0.25, -0.25]]


def test_log_ratio_whose_sum_would_overflow_counts_as_not_finite() -> None:
    output, _ = loss_and_grad([[-2 * MAX_LOG_RATIO], [-1.0]], [[-1.0], [-1.0]], [1.0, 1.0], TIS)
    assert output.keep.tolist() == [False, True]
    assert output.metrics.not_finite == 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_advantage_makes_the_sample_invalid(bad: float) -> None:
    output, grad = loss_and_grad([[-1.0], [-1.0]], [[-1.0], [-1.0]], [bad, 1.0], TIS)
    assert output.metrics.invalid == 1
    assert (output.loss.item(), grad.tolist()) == (-0.5, [[0.0], [-0.5]])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_overflowing_ratio_is_capped(level: Any, advantage: float) -> None:
    config = FtisConfig(filter="none", importance_level=level)
    output, grad = loss_and_grad([[-1.0]], [[-1e6]], [advantage], config)
    assert output.is_weight.item() == config.clip_max
    assert output.loss.item() == -2 * advantage
    assert grad.item() == -2 * advantage


def test_overflowing_vanilla_ratio_is_finite() -> None:
    config = FtisConfig(importance="vanilla", filter="none")
    output, grad = loss_and_grad([[-1.0], [-1.0]], [[-1e6], [-1e6]], [1.0, -1.0], config)
    # Positive: clipped at 1 + epsilon. Negative: the guarded exponential, flat.
    assert output.loss.item() == pytest.approx(-(1.2 - math.exp(20)) / 2)
    assert grad.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("advantages", [[0.0, 0.0], [-1.0, -2.0]])
def test_all_filtered_or_no_signal_gives_zero(advantages: list[float]) -> None:
    output, grad = loss_and_grad([[-1.0], [-3.0]], [[-2.0], [-1.0]], advantages, FtisConfig())
    assert output.loss.item() == 0.0
    assert grad.tolist() == [[0.0], [0.0]]
    assert not output.keep.any()
    assert output.metrics.dropped_advantage == 2


def test_mask_truncated_leaves_cut_completions_out_of_the_loss_only() -> None:
    arguments: Any = ([[-1.0], [-1.0]], [[-1.0], [-1.0]], [1.0, 1.0])
    plain, _ = loss_and_grad(*arguments, TIS, truncated=[True, False])
    assert plain.loss.item() == -1.0
    config = FtisConfig(filter="none", mask_truncated=True)
    output, grad = loss_and_grad(*arguments, config, truncated=[True, False])
    assert output.loss.item() == -0.5
    assert grad.tolist() == [[0.0], [-0.5]]
    assert output.keep.tolist() == [False, True]
    assert output.metrics.masked_truncated == 1
    with pytest.raises(ValueError, match=r"^truncated: needed"):
        loss_and_grad(*arguments, config)


def test_own_samples_on_policy_equal_grpo_on_what_the_filter_keeps() -> None:
    logprobs = [[-1.0, -2.0], [-0.5, -1.5], [-3.0, -1.0]]
    output, grad = loss_and_grad(
        logprobs, logprobs, [1.5, -0.5, 0.25], FtisConfig(), own=[True, True, True]
    )
    assert output.is_weight.tolist() == [[1.0, 1.0]] * 3
    assert output.kl.tolist() == [0.0] * 3
    assert output.keep.tolist() == [True, False, True]
    assert grad.tolist() == [[-0.25, -0.25], [0.0, 0.0], [pytest.approx(-0.25 / 6)] * 2]


# Options.


def test_filter_scope_peers_spares_own_samples() -> None:
    config = FtisConfig(filter_scope="peers", kl_threshold=1.0)
    arguments: Any = ([[-9.0], [-9.0], [-1.0]], [[-1.0], [-1.0], [-1.0]], [-1.0, 1.0, -1.0])
    output, _ = loss_and_grad(*arguments, config, own=[True, True, False])
    assert output.keep.tolist() == [True, True, False]
    with pytest.raises(ValueError, match=r"^own: needed"):
        loss_and_grad(*arguments, config)


def test_sequence_weight_is_the_truncated_product_of_ratios() -> None:
    config = FtisConfig(filter="none", importance_level="sequence")
    output, _ = loss_and_grad(
        [[-1.0, -2.0, NAN], [-1.0, -1.0, -1.0]],
        [[-1.5, -1.2, NAN], [-1.0, -1.5, -1.5]],
        [1.0, 1.0],
        config,
        mask=[[1, 1, 0], [1, 1, 1]],
    )
    weight = math.exp(0.5 - 0.8)
    assert output.is_weight.tolist() == [
        [pytest.approx(weight), pytest.approx(weight), 0.0],
        [2.0, 2.0, 2.0],
    ]


def test_weight_has_no_gradient_of_its_own() -> None:
    # w = exp(-1): the gradient is -w A, not twice it.
    _, grad = loss_and_grad([[-2.0]], [[-1.0]], [1.0], TIS)
    assert grad.item() == pytest.approx(-math.exp(-1))


def test_large_advantage_still_teaches() -> None:
    # Clipping R * A to [0.8, 1.2] would leave no gradient here.
    _, grad = loss_and_grad([[-1.0]], [[-1.0]], [3.0], TIS)
    assert grad.item() == -3.0


@pytest.mark.parametrize(
    ("moved", "advantage", "expected_grad"),
    [
        (0.1, 1.0, True),
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (-0.5, 1.0, True),
        (-0.5, -1.0, False),
    ],
)
def test_inner_ratio_is_clipped_against_the_anchor(
    moved: float, advantage: float, expected_grad: bool
) -> None:
    output, grad = loss_and_grad(
        [[-2.0 + moved]], [[-1.0]], [advantage], TIS, anchor_logprobs=[[-2.0]]
    )
    weight, ratio = math.exp(-1), math.exp(moved)
    clipped = min(max(ratio, 0.8), 1.2)
    assert output.loss.item() == pytest.approx(
        -weight * min(ratio * advantage, clipped * advantage)
    )
    assert (grad.item() != 0) == expected_grad
    if expected_grad:
        assert grad.item() == pytest.approx(-weight * ratio * advantage)


@pytest.mark.parametrize("importance", ["none", "vanilla", "truncated"])
def test_weights_and_filter_stay_frozen_over_inner_updates(importance: Any) -> None:
    config = FtisConfig(importance=importance, kl_threshold=1.0)
    sampling, anchor = [[-1.0], [-1.0]], [[-1.5], [-4.0]]
    first, _ = loss_and_grad(anchor, sampling, [1.0, 1.0], config)
    later, _ = loss_and_grad([[-9.0], [-1.0]], sampling, [1.0, 1.0], config, anchor_logprobs=anchor)
    assert first.keep.tolist() == later.keep.tolist() == [True, False]
    assert torch.equal(first.is_weight, later.is_weight)
    assert torch.equal(first.kl, later.kl)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_anchor_is_counted_as_ours(bad: float) -> None:
    output, grad = loss_and_grad([[-1.0]], [[-1.0]], [1.0], TIS, anchor_logprobs=[[bad]])
    assert output.metrics.not_finite == 1
    assert (output.loss.item(), grad.item()) == (0.0, 0.0)


def test_threshold_schedule_follows_the_step() -> None:
    config = FtisConfig(kl_estimator="k1", kl_threshold=((0, 1.0), (10, 5.0)))
    kept = [
        loss_and_grad([[-4.0]], [[-1.0]], [1.0], config, step=step)[0].keep.item()
        for step in (0, 9, 10, 99)
    ]
    assert kept == [False, False, True, True]


def test_config_takes_every_field_of_the_section() -> None:
    section = FtisSection(
        importance="truncated",
        importance_level="sequence",
        filter="and",
        filter_scope="peers",
        kl_estimator="k3",
        kl_threshold=7.0,
        clip_max=3.0,
        epsilon=0.1,
        mask_truncated=True,
    )
    config = FtisConfig.from_section(section)
    for name in FtisConfig.__slots__:
        assert getattr(config, name) == getattr(section, name)
    assert FtisConfig.from_section(FtisSection()) == FtisConfig()
    scheduled = FtisSection(kl_threshold_schedule=((0, 5.0), (3, 50.0)))
    assert FtisConfig.from_section(scheduled).kl_threshold == ((0, 5.0), (3, 50.0))


def test_config_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(ConfigError, match="importance_level"):
        FtisConfig(importance="vanilla", importance_level="sequence")
    for schedule in [(), ((1, 5.0),), ((0, 5.0), (0, 6.0)), ((0, 5.0), (9, 6.0), (3, 7.0))]:
        with pytest.raises(ConfigError, match="kl_threshold"):
            FtisConfig(kl_threshold=schedule)


# Arguments.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy_logprobs": torch.zeros(2)}, "policy_logprobs: expected"),
        ({"policy_logprobs": torch.zeros(2, 3).long()}, "policy_logprobs: expected"),
        ({"sampling_logprobs": torch.zeros(2, 1)}, "sampling_logprobs: expected shape"),
        ({"completion_mask": torch.ones(3, 2) > 0}, "completion_mask: expected shape"),
        ({"completion_mask": torch.ones(2, 3)}, "completion_mask: expected dtype"),
        ({"advantages": torch.ones(2, 1)}, "advantages: expected shape"),
        ({"own": torch.ones(2, 1) > 0}, "own: expected shape"),
        ({"own": torch.ones(2)}, "own: expected dtype"),
        ({"truncated": torch.ones(1, 2) > 0}, "truncated: expected shape"),
        ({"anchor_logprobs": torch.zeros(2, 1)}, "anchor_logprobs: expected shape"),
        ({"n_samples": 0}, "n_samples: expected"),
    ],
)
def test_wrong_argument_is_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "policy_logprobs": torch.zeros(2, 3),
        "sampling_logprobs": torch.zeros(2, 3),
        "completion_mask": torch.ones(2, 3) > 0,
        "advantages": torch.ones(2),
        "config": TIS,
    }
    with pytest.raises(ValueError, match=f"^{message}"):
        ftis_loss(**arguments | change)


def test_no_rows_have_no_loss() -> None:
    none = torch.zeros(0, 3)
    output = ftis_loss(none, none, none > 0, torch.zeros(0), FtisConfig())
    assert output.loss.item() == 0.0
    assert output.metrics == LossMetrics()
    assert output.kl_quantiles() is None


# Figures.


def test_metrics_by_hand() -> None:
    policy = [[-1.0, -2.0], [-1.0, -1.0], [-1.0, -1.0], [-9.0, -1.0], [NAN, -1.0], [-1.0, -1.0]]
    sampling = [[-2.5, -1.5], [-1.0, -1.0], [-1.0, NAN], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]]
    config = FtisConfig(mask_truncated=True)
    output, _ = loss_and_grad(
        policy,
        sampling,
        [1.0, -1.0, 1.0, 1.0, 1.0, 1.0],
        config,
        truncated=[False, False, False, False, False, True],
    )
    metrics = output.metrics
    assert (metrics.samples, metrics.kept, metrics.tokens) == (6, 1, 2)
    assert (metrics.dropped_advantage, metrics.invalid, metrics.dropped_kl) == (1, 1, 1)
    assert (metrics.not_finite, metrics.masked_truncated) == (1, 1)
    high, low = math.exp(1.5), math.exp(-0.5)
    assert metrics.ratio_mean == pytest.approx((high + low) / 2)
    assert metrics.ratio_max == pytest.approx(high)
    assert metrics.is_weight_mean == pytest.approx((2 + low) / 2)
    assert metrics.truncated_share == 0.5
    assert metrics.kept_share == pytest.approx(1 / 6)
    assert metrics.tokens_truncated == 1


def test_metrics_add_up() -> None:
    a = LossMetrics(samples=2, kept=1, tokens=4, ratio_sum=3.0, ratio_max=2.5, is_weight_sum=2.0)
    b = LossMetrics(samples=3, kept=3, tokens=6, ratio_sum=6.0, ratio_max=1.5, tokens_truncated=2)
    both = a + b
    assert (both.samples, both.kept, both.tokens, both.tokens_truncated) == (5, 4, 10, 2)
    assert (both.ratio_mean, both.ratio_max, both.is_weight_mean) == (0.9, 2.5, 0.2)


def test_kl_quantiles_are_those_of_real_samples() -> None:
    values = [float(i) for i in range(100)] + [NAN]
    assert kl_quantiles(values) == (49.0, 89.0, 98.0)
    assert kl_quantiles([1.0, INF, NAN]) == (1.0, 1.0, 1.0)
    assert kl_quantiles([NAN]) is None
