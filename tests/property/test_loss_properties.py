"""What holds for the loss whatever the batch."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.rl.advantages import group_advantages, valid_samples
from swarm.rl.loss import FtisConfig, LossMetrics, LossOutput, ftis_loss

CONFIGS = st.builds(
    FtisConfig,
    importance=st.sampled_from(["none", "vanilla", "truncated"]),
    filter=st.sampled_from(["none", "or", "and"]),
    filter_scope=st.sampled_from(["all", "peers"]),
    kl_estimator=st.sampled_from(["grpo", "k3", "k1", "reverse"]),
    kl_threshold=st.sampled_from([0.1, 2.0, 50.0]),
    clip_max=st.sampled_from([1.0, 2.0, 5.0]),
    epsilon=st.sampled_from([0.01, 0.2]),
    mask_truncated=st.booleans(),
) | st.builds(
    FtisConfig,
    importance=st.just("truncated"),
    importance_level=st.just("sequence"),
    filter=st.sampled_from(["none", "or", "and"]),
    filter_scope=st.just("peers"),
)


@dataclass
class Batch:
    policy: Tensor
    sampling: Tensor
    mask: Tensor
    rewards: Tensor
    group_ids: Tensor
    own: Tensor
    truncated: Tensor
    anchor: Tensor | None

    @property
    def advantages(self) -> Tensor:
        return group_advantages(
            self.rewards, self.group_ids, valid_samples(self.sampling, self.mask)
        )

    def rows(self, index: Tensor) -> "Batch":
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return Batch(**{"anchor": None} | {name: value[index] for name, value in fields.items()})


def evaluate(
    batch: Batch, config: FtisConfig, advantages: Tensor | None = None, **options: Any
) -> tuple[LossOutput, Tensor]:
    policy = batch.policy.clone().requires_grad_()
    output = ftis_loss(
        policy,
        batch.sampling,
        batch.mask,
        batch.advantages if advantages is None else advantages,
        config,
        own=batch.own,
        truncated=batch.truncated,
        anchor_logprobs=batch.anchor,
        **options,
    )
    output.loss.backward()
    assert policy.grad is not None
    return output, policy.grad


@st.composite
def batches(draw: st.DrawFn, anchored: bool = True) -> Batch:
    """Plausible batches in float64, right-padded."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n, width = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    gap = draw(st.sampled_from([0.0, 0.1, 1.0, 5.0]))

    def normal() -> Tensor:
        return torch.randn(n, width, generator=generator, dtype=torch.float64)

    sampling = -2 * normal().abs()
    lengths = torch.randint(1, width + 1, (n,), generator=generator)
    policy = (sampling + gap * normal()).clamp(max=0)
    anchor = (policy + 0.3 * normal()).clamp(max=0) if anchored and draw(st.booleans()) else None
    return Batch(
        policy=policy,
        sampling=sampling,
        mask=torch.arange(width) < lengths[:, None],
        rewards=torch.randint(0, 3, (n,), generator=generator).double(),
        group_ids=torch.randint(0, 3, (n,), generator=generator),
        own=torch.rand(n, generator=generator) < 0.5,
        truncated=torch.rand(n, generator=generator) < 0.2,
        anchor=anchor,
    )


@st.composite
def hostile_batches(draw: st.DrawFn) -> Batch:
    """Anything that the tensors can hold."""
    n, width = draw(st.integers(1, 5)), draw(st.integers(0, 4))
    number = st.floats(width=32) | st.sampled_from([0.0, -1.0, -99.0, -3e38, 3e38, -1e30, 1e30])

    def matrix() -> Tensor:
        rows = draw(st.lists(number, min_size=n * width, max_size=n * width))
        return torch.tensor(rows, dtype=torch.float32).reshape(n, width)

    def flags(count: int) -> Tensor:
        drawn = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return torch.tensor(drawn, dtype=torch.bool)

    return Batch(
        policy=matrix(),
        sampling=matrix(),
        mask=flags(n * width).reshape(n, width),
        rewards=torch.tensor(draw(st.lists(number, min_size=n, max_size=n)), dtype=torch.float32),
        group_ids=torch.tensor(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))),
        own=flags(n),
        truncated=flags(n),
        anchor=matrix() if draw(st.booleans()) else None,
    )


@settings(max_examples=300)
@given(hostile_batches(), CONFIGS)
def test_loss_and_gradient_are_finite_for_any_input(batch: Batch, config: FtisConfig) -> None:
    advantages = batch.advantages
    assert torch.isfinite(advantages).all()
    output, grad = evaluate(batch, config)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(grad).all()
    assert torch.isfinite(output.is_weight).all()
    assert (grad[~output.keep] == 0).all()
    assert (grad[~batch.mask] == 0).all()
    metrics = output.metrics
    assert metrics.samples == len(advantages)
    assert metrics.kept == int(output.keep.sum())
    assert metrics.samples == (
        metrics.kept
        + metrics.dropped_advantage
        + metrics.dropped_kl
        + metrics.masked_truncated
        + metrics.invalid
        + metrics.not_finite
    )


@settings(max_examples=150)
@given(batches(), CONFIGS)
def test_filtered_samples_have_exactly_zero_gradient(batch: Batch, config: FtisConfig) -> None:
    output, grad = evaluate(batch, config)
    assert (grad[~output.keep] == 0).all()
    advantages = batch.advantages
    if config.filter == "or" and config.filter_scope == "all":
        assert (advantages[output.keep] > 0).all()
        assert (output.kl[output.keep] <= config.threshold_at(0)).all()
    if batch.anchor is None and config.importance != "vanilla":
        reached = (output.is_weight > 1e-12) & (advantages[:, None] != 0)
        assert ((grad != 0) | ~reached | ~output.keep[:, None]).all()


def plain_grpo(policy: Tensor, mask: Tensor, rewards: Tensor, group_ids: Tensor) -> Tensor:
    """One on-policy GRPO update's loss, sample by sample: -1/N sum 1/|a| sum A * log pi.

    Its gradient is GRPO's, because the ratio is 1 there; its value is not.
    """
    total = torch.zeros((), dtype=policy.dtype)
    for i in range(len(policy)):
        group = [float(rewards[j]) for j in range(len(policy)) if group_ids[j] == group_ids[i]]
        if len(group) < 2 or min(group) == max(group):
            continue
        mean = sum(group) / len(group)
        std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
        tokens = [policy[i, t] for t in range(policy.shape[1]) if mask[i, t]]
        total = total - (float(rewards[i]) - mean) / (std + 1e-4) * sum(tokens) / len(tokens)
    return total / len(policy)


@settings(max_examples=100)
@given(batches(anchored=False), st.sampled_from(["token", "sequence"]))
def test_on_policy_without_filter_is_plain_grpo(batch: Batch, level: Any) -> None:
    batch.policy = batch.sampling.clone()
    config = FtisConfig(filter="none", importance_level=level)
    output, grad = evaluate(batch, config)
    policy = batch.policy.clone().requires_grad_()
    reference = plain_grpo(policy, batch.mask, batch.rewards, batch.group_ids)
    if not reference.requires_grad:
        assert not grad.any()
        return
    reference.backward()
    assert policy.grad is not None
    torch.testing.assert_close(grad, policy.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(output.loss.detach(), -batch.advantages.mean(), rtol=0, atol=1e-14)


@settings(max_examples=100)
@given(batches(), CONFIGS, st.integers(1, 5), st.sampled_from([0.0, float("nan"), -7.0]))
def test_padding_changes_nothing(
    batch: Batch, config: FtisConfig, extra: int, filler: float
) -> None:
    def pad(x: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, extra), value=value)

    output, grad = evaluate(batch, config)
    padded = Batch(
        pad(batch.policy, filler),
        pad(batch.sampling, filler),
        pad(batch.mask, 0),
        batch.rewards,
        batch.group_ids,
        batch.own,
        batch.truncated,
        None if batch.anchor is None else pad(batch.anchor, filler),
    )
    wider, wider_grad = evaluate(padded, config)
    torch.testing.assert_close(wider.loss, output.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(wider_grad, pad(grad, 0.0), rtol=1e-12, atol=1e-14)
    assert torch.equal(wider.keep, output.keep)


@settings(max_examples=100)
@given(batches(), CONFIGS, st.randoms(use_true_random=False))
def test_order_of_samples_changes_nothing(batch: Batch, config: FtisConfig, random: Any) -> None:
    order = list(range(len(batch.policy)))
    random.shuffle(order)
    index = torch.tensor(order)
    output, grad = evaluate(batch, config)
    shuffled, shuffled_grad = evaluate(batch.rows(index), config)
    torch.testing.assert_close(shuffled.loss, output.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(shuffled_grad, grad[index], rtol=1e-12, atol=1e-14)
    assert torch.equal(shuffled.keep, output.keep[index])


@settings(max_examples=100)
@given(batches(), CONFIGS, st.lists(st.integers(0, 9), max_size=3))
def test_micro_batches_add_up(batch: Batch, config: FtisConfig, cuts: list[int]) -> None:
    n = len(batch.policy)
    whole, grad = evaluate(batch, config)
    advantages = batch.advantages
    bounds = [0, *sorted(min(cut, n) for cut in cuts), n]
    total, parts, metrics = torch.zeros((), dtype=torch.float64), [], LossMetrics()
    for start, end in pairwise(bounds):
        rows = torch.arange(start, end)
        output, part = evaluate(batch.rows(rows), config, advantages[rows], n_samples=n)
        total, metrics = total + output.loss.detach(), metrics + output.metrics
        parts.append(part)
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat(parts), grad, rtol=1e-12, atol=1e-14)
    assert metrics.samples == whole.metrics.samples
    assert metrics.kept == whole.metrics.kept
    assert abs(metrics.ratio_sum - whole.metrics.ratio_sum) <= 1e-9 * whole.metrics.ratio_sum
    assert metrics.ratio_max == whole.metrics.ratio_max
