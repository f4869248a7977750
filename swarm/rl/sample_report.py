"""What a step found out about each sample, for the log and for what-if questions.

Owns: the figures that tell what another filter, estimator or truncation would have done.
Does not know: which samples are asked about, or what is logged where.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from swarm.rl.filter import KlEstimator, guarded_exp, kl_statistic

ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)

RATIO_EDGES = (1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0)
"""Truncations at which tokens are counted, beside the configured one."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far the policy is from the one that sampled a completion."""

    kl: dict[str, float]
    """By estimator, nats per sample."""
    ratio_mean: float
    ratio_max: float
    """Importance ratios of its tokens, before truncation."""
    tokens_above: tuple[int, ...]
    """Tokens whose ratio is above each edge of `ratio_edges`."""


@dataclass(frozen=True, slots=True)
class SampleReport:
    """One sample in a step."""

    outcome: str
    """A `swarm.rl.trainer.Outcome`."""
    advantage: float
    """Before the filter."""
    length: int
    """Tokens."""
    truncated: bool
    """Cut at the length limit."""
    divergence: Divergence | None
    """None where the sample did not go through the model, or its log-probs are not finite."""


def ratio_edges(clip_max: float) -> tuple[float, ...]:
    """The truncations at which tokens are counted, rising."""
    return tuple(sorted({*RATIO_EDGES, clip_max}))


def divergences(
    log_ratio: Tensor, completion_mask: Tensor, edges: tuple[float, ...]
) -> list[Divergence]:
    """Describe N samples, with one transfer from the device.

    Args:
        log_ratio: (N, T) floating, nats; 0 where the mask is not set.
        completion_mask: (N, T) bool.
        edges: from `ratio_edges`.
    """
    ratio = guarded_exp(log_ratio).where(completion_mask, 0.0)
    lengths = completion_mask.sum(dim=1).clamp(min=1)
    columns = [kl_statistic(log_ratio, completion_mask, name) for name in ESTIMATORS]
    columns += [ratio.sum(dim=1) / lengths, ratio.amax(dim=1)]
    columns += [(ratio > edge).sum(dim=1).to(ratio.dtype) for edge in edges]
    found = []
    for row in torch.stack(columns, dim=1).tolist():
        *kl, mean, largest = row[: len(ESTIMATORS) + 2]
        above = tuple(int(count) for count in row[len(ESTIMATORS) + 2 :])
        found.append(Divergence(dict(zip(ESTIMATORS, kl, strict=True)), mean, largest, above))
    return found
