"""The sample filter of F-TIS: how far a sample is from the policy, and which samples it drops.

Owns: the divergence estimators and the drop rules, as pure functions of tensors.
Does not know: rewards, gradients, or the loss that the kept samples go into.
"""

from typing import Literal

import torch
from torch import Tensor

FilterRule = Literal["none", "or", "and"]
KlEstimator = Literal["grpo", "k3", "k1", "reverse"]

EXPONENT_LIMIT = 20.0
"""exp(x) is exp(min(x, 20)) wherever it stands: beyond every clip, and far inside float32."""


def guarded_exp(x: Tensor) -> Tensor:
    """exp(min(x, 20)); differentiable, with gradient 0 above the limit."""
    return x.clamp(max=EXPONENT_LIMIT).exp()


def kl_statistic(log_ratio: Tensor, completion_mask: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate each sample's divergence between trained and sampling policy, summed over tokens.

    With l = log pi_theta - log pi_gen at tokens drawn from pi_gen, per token:
    `grpo` exp(-l) - 1 + l; `k3` exp(l) - 1 - l; `k1` -l; `reverse` 1 - exp(l) + l exp(l).
    The exponentials are guarded from above, the linear l never is.

    Args:
        log_ratio: (N, T) floating, nats, finite where the mask is set.
        completion_mask: (N, T) bool.
        estimator: which of the four.

    Returns:
        (N,) in nats per sample.
    """
    match estimator:
        case "grpo":
            per_token = _guarded_expm1(-log_ratio) + log_ratio
        case "k3":
            per_token = _guarded_expm1(log_ratio) - log_ratio
        case "k1":
            per_token = -log_ratio
        case "reverse":
            per_token = log_ratio * guarded_exp(log_ratio) - _guarded_expm1(log_ratio)
    return torch.where(completion_mask, per_token, 0.0).sum(dim=1)


def dropped_by_advantage(advantages: Tensor, subject: Tensor, rule: FilterRule) -> Tensor:
    """Tell which samples the rule drops whatever their divergence; needs no forward pass.

    Args:
        advantages: (N,) floating.
        subject: (N,) bool; the samples that the filter applies to.
        rule: `or` drops A <= 0; `and` and `none` drop nothing by advantage alone.

    Returns:
        (N,) bool.
    """
    if rule == "or":
        return subject & (advantages <= 0)
    return torch.zeros_like(subject)


def dropped_by_kl(
    advantages: Tensor, kl: Tensor, threshold: float, subject: Tensor, rule: FilterRule
) -> Tensor:
    """Tell which samples the rule drops for their divergence; NaN divergences are not dropped.

    Args:
        advantages: (N,) floating.
        kl: (N,) nats per sample.
        threshold: g, nats per sample.
        subject: (N,) bool; the samples that the filter applies to.
        rule: `or` drops KL > g; `and` drops A < 0 with KL > g; `none` drops nothing.

    Returns:
        (N,) bool.
    """
    far = subject & (kl > threshold)
    match rule:
        case "or":
            return far
        case "and":
            return far & (advantages < 0)
        case "none":
            return torch.zeros_like(far)


def _guarded_expm1(x: Tensor) -> Tensor:
    return torch.expm1(x.clamp(max=EXPONENT_LIMIT))
