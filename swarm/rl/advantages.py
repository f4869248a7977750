"""Which samples count, and the group-relative advantage of each.

Owns: validity of what arrived, and the normalisation of rewards within a group. Both need only
what came with a sample, so advantages are known before any forward pass.
Does not know: policies, losses, filters, or who sampled what.
"""

import torch
from torch import Tensor

from swarm.protocol.verify import LOGPROB_TOLERANCE

STD_OFFSET = 1e-4
"""Added to a group's standard deviation, as in GRPO."""


def valid_samples(sampling_logprobs: Tensor, completion_mask: Tensor) -> Tensor:
    """Tell which samples can be trained on, from what arrived alone.

    A sample is invalid when it has no token, or at one of its tokens a sampling log-prob that is
    not finite or more than rounding above 0. What stands at masked positions does not matter.

    Args:
        sampling_logprobs: (N, T) floating, nats; log-probs under the policy that sampled.
        completion_mask: (N, T) bool; the completion's tokens.

    Returns:
        (N,) bool.

    Raises:
        ValueError: names the argument whose shape or dtype is wrong.
    """
    check_shape("completion_mask", completion_mask, sampling_logprobs.shape, torch.bool)
    possible = torch.isfinite(sampling_logprobs) & (sampling_logprobs <= LOGPROB_TOLERANCE)
    return (possible | ~completion_mask).all(dim=1) & completion_mask.any(dim=1)


def group_advantages(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Normalise rewards within each group: (r - mean) / (std + 1e-4), std with ddof = 1.

    Invalid samples, and samples whose reward float32 cannot hold, are out of mean and std and get
    0. So does every sample of a group with fewer than 2 valid ones, or with all rewards equal:
    exactly 0, because the rounding of a mean must not make a signal.

    Args:
        rewards: (N,) floating.
        group_ids: (N,) integer, any values; equal ids are one group.
        valid: (N,) bool.

    Returns:
        (N,) in the dtype of `rewards`, always finite, not differentiable.

    Raises:
        ValueError: names the argument whose shape or dtype is wrong.
    """
    if rewards.dim() != 1 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards: expected (N,) floating, got {tuple(rewards.shape)} {rewards.dtype}"
        )
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool:
        raise ValueError(f"group_ids: expected an integer dtype, got {group_ids.dtype}")
    check_shape("group_ids", group_ids, rewards.shape)
    check_shape("valid", valid, rewards.shape, torch.bool)
    r = rewards.detach().to("cpu", torch.float64)
    # Float32's range leaves room for squares in float64, so no group overflows.
    counted = valid.cpu() & torch.isfinite(r.to(torch.float32))
    ids, index = torch.unique(group_ids.cpu(), return_inverse=True)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.float64).index_add(0, index, x)

    def group_max(x: Tensor) -> Tensor:
        start = torch.full((len(ids),), -torch.inf, dtype=torch.float64)
        return start.scatter_reduce(0, index, torch.where(counted, x, -torch.inf), "amax")

    count = group_sum(counted.double())
    mean = group_sum(torch.where(counted, r, 0.0)) / count.clamp(min=1)
    centred = torch.where(counted, r - mean[index], 0.0)
    std = (group_sum(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    # One valid sample is its own max and min, so this also covers groups that are too small.
    differs = group_max(r) > -group_max(-r)
    advantages = torch.where(differs[index], centred / (std[index] + STD_OFFSET), 0.0)
    return advantages.to(rewards.device, rewards.dtype)


def check_shape(
    name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype | None = None
) -> None:
    """Raise ValueError, naming the argument, unless `tensor` has this shape and dtype.

    (N,) against (N, 1) would broadcast to (N, N) and train on nonsense without a word.
    """
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
