"""The loss of collaborative GRPO: importance weights, sample filter, clipped objective.

Owns: one differentiable function for NoIS, VIS, TIS and their filtered forms (arXiv:2605.22537),
and the figures that describe what it did. Does not know: models, optimizers, micro-batches, or how
advantages came about.

Shapes: N completions, padded to T tokens. Log-probs are in nats, of completion tokens only.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor

from swarm.config import FtisSection
from swarm.errors import ConfigError
from swarm.rl.advantages import check_shape, valid_samples
from swarm.rl.filter import (
    FilterRule,
    KlEstimator,
    dropped_by_advantage,
    dropped_by_kl,
    guarded_exp,
    kl_statistic,
)

MAX_LOG_RATIO = 1e30
"""A log-ratio beyond this (nats) counts as not finite: sums of such overflow in float32."""


@dataclass(frozen=True, slots=True)
class FtisConfig:
    """Which of the methods, and its constants; see `swarm.config.FtisSection` for each field.

    `kl_threshold` is a number, or a schedule ((step, g), ...) with rising steps from 0 on.

    Raises:
        ConfigError: the fields do not fit together.
    """

    importance: Literal["none", "vanilla", "truncated"] = "truncated"
    importance_level: Literal["token", "sequence"] = "token"
    filter: FilterRule = "or"
    filter_scope: Literal["all", "peers"] = "all"
    kl_estimator: KlEstimator = "grpo"
    kl_threshold: float | tuple[tuple[int, float], ...] = 50.0
    clip_max: float = 2.0
    epsilon: float = 0.2
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        if self.importance_level == "sequence" and self.importance != "truncated":
            raise ConfigError(
                f"ftis.importance_level = 'sequence' with importance = {self.importance!r}: "
                "only importance = 'truncated' has a weight per sequence"
            )
        if isinstance(self.kl_threshold, tuple):
            steps = [step for step, _ in self.kl_threshold]
            if not steps or steps[0] != 0 or steps != sorted(set(steps)):
                raise ConfigError(
                    f"ftis.kl_threshold: steps {steps} must rise and begin with 0, "
                    "e.g. ((0, 5.0), (100, 50.0))"
                )

    @classmethod
    def from_section(cls, section: FtisSection) -> Self:
        """Take the fields of node.toml's [ftis]."""
        return cls(
            importance=section.importance,
            importance_level=section.importance_level,
            filter=section.filter,
            filter_scope=section.filter_scope,
            kl_estimator=section.kl_estimator,
            kl_threshold=section.kl_threshold_schedule or section.kl_threshold,
            clip_max=section.clip_max,
            epsilon=section.epsilon,
            mask_truncated=section.mask_truncated,
        )

    def threshold_at(self, step: int) -> float:
        """The filter's threshold g (nats per sample) in training step `step`, from 0 on."""
        if isinstance(self.kl_threshold, tuple):
            return [g for start, g in self.kl_threshold if start <= step][-1]
        return self.kl_threshold


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """Counts and sums over one call's samples; those of micro-batches add up with `+`.

    The first seven partition the samples: `samples` is the sum of the other six. Ratios are those
    of the tokens of kept samples.
    """

    samples: int = 0
    kept: int = 0
    dropped_advantage: int = 0
    """By the filter, for A <= 0 (rule `or`), whatever their divergence."""
    dropped_kl: int = 0
    """By the filter, for their divergence."""
    masked_truncated: int = 0
    """Cut at the length limit and left out for `mask_truncated`."""
    invalid: int = 0
    """Unusable as they arrived."""
    not_finite: int = 0
    """Valid, but the policy's own log-probs are not finite: our fault."""
    tokens: int = 0
    """Tokens of kept samples."""
    ratio_sum: float = 0.0
    """Sum of exp(l) before truncation."""
    ratio_max: float = 0.0
    is_weight_sum: float = 0.0
    tokens_truncated: int = 0
    """Tokens whose ratio is above `clip_max`, whatever `importance` makes of it."""

    def __add__(self, other: "LossMetrics") -> "LossMetrics":
        values = {name: getattr(self, name) + getattr(other, name) for name in self.__slots__}
        values["ratio_max"] = max(self.ratio_max, other.ratio_max)
        return LossMetrics(**values)

    @property
    def kept_share(self) -> float | None:
        """Kept samples among all; None without samples."""
        return self.kept / self.samples if self.samples else None

    @property
    def ratio_mean(self) -> float | None:
        """Mean raw ratio per kept token; None without tokens."""
        return self.ratio_sum / self.tokens if self.tokens else None

    @property
    def is_weight_mean(self) -> float | None:
        """Mean weight per kept token; None without tokens."""
        return self.is_weight_sum / self.tokens if self.tokens else None

    @property
    def truncated_share(self) -> float | None:
        """Share of kept tokens whose ratio is above `clip_max`; None without tokens."""
        return self.tokens_truncated / self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What `ftis_loss` returns."""

    loss: Tensor
    """() differentiable."""
    keep: Tensor
    """(N,) bool: the sample is in the loss."""
    kl: Tensor
    """(N,) nats per sample; NaN where a log-prob is not finite or the sample invalid."""
    log_ratio_max: Tensor
    """(N,) nats, the largest |l| of the sample's tokens; NaN as for `kl`."""
    log_ratio: Tensor
    """(N, T) nats, l; detached; 0 at masked positions and where `kl` is NaN."""
    is_weight: Tensor
    """(N, T) detached; 0 at masked positions and where `kl` is NaN."""
    metrics: LossMetrics

    def kl_quantiles(self) -> tuple[float, float, float] | None:
        """The samples' 50, 90 and 99 % quantiles of `kl`; None where no sample has one."""
        return kl_quantiles(self.kl.tolist())


def kl_quantiles(values: list[float]) -> tuple[float, float, float] | None:
    """50, 90 and 99 % quantiles, NaN left out; None when nothing is left."""
    known = np.array([value for value in values if not np.isnan(value)], dtype=np.float64)
    if not len(known):
        return None
    # "lower" names a real sample and, unlike interpolation, makes no NaN beside an infinite one.
    p50, p90, p99 = np.quantile(known, [0.5, 0.9, 0.99], method="lower").tolist()
    return p50, p90, p99


def ftis_loss(
    policy_logprobs: Tensor,
    sampling_logprobs: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    config: FtisConfig,
    *,
    own: Tensor | None = None,
    truncated: Tensor | None = None,
    anchor_logprobs: Tensor | None = None,
    step: int = 0,
    n_samples: int | None = None,
) -> LossOutput:
    """Compute the loss of one (micro-)batch.

    With l = log pi_anchor - log pi_gen, C = `clip_max`, e = `epsilon`, per token of a kept sample:

        w = 1 (none, vanilla) or min(exp(l), C) (truncated), without gradient
        R = exp(log pi_theta - log pi_anchor), or exp(log pi_theta - log pi_gen) (vanilla)
        loss = -1/N sum_i 1/|a_i| sum_t w * min(R * A_i, clip(R, 1 - e, 1 + e) * A_i)

    Weights and filter depend on the anchor only, so they are frozen over the inner updates that
    pass the same `anchor_logprobs`. Filtering changes neither 1/N nor 1/|a_i|. The gradient at
    masked tokens and at samples that are not kept is exactly 0.

    Args:
        policy_logprobs: (N, T) floating, differentiable; under the policy being trained.
        sampling_logprobs: (N, T) floating; under the policy that sampled.
        completion_mask: (N, T) bool; the completion's tokens, its end token included.
        advantages: (N,) floating, from `group_advantages` with `valid_samples`.
        config: the method.
        own: (N,) bool; samples of this node. Needed for `filter_scope = "peers"` only.
        truncated: (N,) bool; cut at the length limit. Needed for `mask_truncated` only.
        anchor_logprobs: (N, T) floating; under the policy at the start of the batch. None: the
            policy itself, as in the first update on a batch.
        step: training step, for a threshold schedule.
        n_samples: N in 1/N. None: the number of rows. Micro-batches that all pass the number of
            samples in the whole batch have losses and gradients that add up to the whole batch's.

    Returns:
        The loss and what it did; finite for any log-probs, mask and reward.

    Raises:
        ValueError: names the argument whose shape or dtype is wrong, or that is missing.
    """
    if policy_logprobs.dim() != 2 or not policy_logprobs.is_floating_point():
        raise ValueError(
            "policy_logprobs: expected (N, T) floating, "
            f"got {tuple(policy_logprobs.shape)} {policy_logprobs.dtype}"
        )
    shape, per_sample = policy_logprobs.shape, policy_logprobs.shape[:1]
    check_shape("sampling_logprobs", sampling_logprobs, shape)
    check_shape("completion_mask", completion_mask, shape, torch.bool)
    check_shape("advantages", advantages, per_sample)
    anchor = policy_logprobs.detach() if anchor_logprobs is None else anchor_logprobs.detach()
    check_shape("anchor_logprobs", anchor, shape)
    none = torch.zeros(per_sample, dtype=torch.bool, device=policy_logprobs.device)
    if own is None and config.filter_scope == "peers":
        raise ValueError("own: needed with filter_scope = 'peers'")
    if truncated is None and config.mask_truncated:
        raise ValueError("truncated: needed with mask_truncated")
    own = none if own is None else own
    truncated = none if truncated is None else truncated
    check_shape("own", own, per_sample, torch.bool)
    check_shape("truncated", truncated, per_sample, torch.bool)
    n_samples = max(per_sample[0], 1) if n_samples is None else n_samples
    if n_samples < 1:
        raise ValueError(f"n_samples: expected at least 1, got {n_samples}")

    mask = completion_mask
    advantages = advantages.detach().to(policy_logprobs.dtype)
    sampling = sampling_logprobs.detach()

    # Which samples stay, from what arrived, our log-probs, and the filter, in this order.
    valid = valid_samples(sampling, mask) & torch.isfinite(advantages)
    moved = policy_logprobs.detach() - anchor
    finite = valid & (_bounded(anchor - sampling) & _bounded(moved) | ~mask).all(dim=1)
    scored = mask & finite[:, None]
    log_ratio = torch.where(scored, anchor - sampling, 0.0)
    largest = log_ratio.abs().amax(dim=1) if shape[1] else log_ratio.sum(dim=1)
    kl = kl_statistic(log_ratio, scored, config.kl_estimator)
    subject = ~own if config.filter_scope == "peers" else ~none
    by_advantage = valid & dropped_by_advantage(advantages, subject, config.filter)
    masked = valid & ~by_advantage & truncated if config.mask_truncated else none
    not_finite = valid & ~by_advantage & ~masked & ~finite
    candidate = finite & ~by_advantage & ~masked
    threshold = config.threshold_at(step)
    by_kl = candidate & dropped_by_kl(advantages, kl, threshold, subject, config.filter)
    keep = candidate & ~by_kl

    raw_ratio = guarded_exp(log_ratio)
    if config.importance != "truncated":
        weight = torch.ones_like(log_ratio)
    elif config.importance_level == "sequence":
        weight = guarded_exp(log_ratio.sum(dim=1, keepdim=True)).clamp(max=config.clip_max)
    else:
        weight = raw_ratio.clamp(max=config.clip_max)
    weight = torch.where(scored, weight, 0.0)

    # Selecting before exp, not after it, keeps 0 * inf out of the gradient.
    live = mask & keep[:, None]
    base = sampling if config.importance == "vanilla" else anchor
    ratio = guarded_exp(torch.where(live, policy_logprobs - base, 0.0))
    signal = torch.where(keep, advantages, 0.0)[:, None]
    clipped = ratio.clamp(1.0 - config.epsilon, 1.0 + config.epsilon)
    objective = weight * torch.minimum(ratio * signal, clipped * signal)
    lengths = mask.sum(dim=1).clamp(min=1)
    loss = -(objective.sum(dim=1) / lengths).sum() / n_samples

    live_ratio = torch.where(live, raw_ratio, 0.0)
    metrics = _metrics(
        kept=keep,
        dropped_advantage=by_advantage,
        dropped_kl=by_kl,
        masked_truncated=masked,
        invalid=~valid,
        not_finite=not_finite,
        tokens=live,
        ratio_sum=live_ratio,
        is_weight_sum=torch.where(live, weight, 0.0),
        tokens_truncated=live_ratio > config.clip_max,
    )
    return LossOutput(
        loss=loss,
        keep=keep,
        kl=torch.where(finite, kl, torch.nan),
        log_ratio_max=torch.where(finite, largest, torch.nan),
        log_ratio=log_ratio,
        is_weight=weight,
        metrics=metrics,
    )


def _bounded(x: Tensor) -> Tensor:
    return x.abs() <= MAX_LOG_RATIO  # False for NaN


def _metrics(*, kept: Tensor, ratio_sum: Tensor, **summed: Tensor) -> LossMetrics:
    """Sum each tensor into the field of its name, with one transfer from the device."""
    summed = {"kept": kept, "ratio_sum": ratio_sum, **summed}
    largest = ratio_sum.max() if ratio_sum.numel() else ratio_sum.sum()
    totals = torch.stack([largest, *(t.sum().to(ratio_sum.dtype) for t in summed.values())])
    ratio_max, *sums = totals.tolist()
    values = dict(zip(summed, sums, strict=True))
    floats = {name: values.pop(name) for name in ("ratio_sum", "is_weight_sum")}
    counts = {name: int(value) for name, value in values.items()}
    return LossMetrics(samples=len(kept), ratio_max=ratio_max, **floats, **counts)
