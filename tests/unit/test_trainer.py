"""The training step on a bigram table, against steps made by hand."""

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from swarm.config import TrainSection
from swarm.errors import DataError
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.loss import FtisConfig, ftis_loss
from swarm.rl.sample_report import ratio_edges
from swarm.rl.step_report import OWN, Outcome
from swarm.rl.trainer import Trainer, TrainGroup, schedule

VOCABULARY = 11


class Bigram(torch.nn.Module):
    """Next-token logits are a table's row plus a bias. Right-pads; notes what it was asked."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.bias = torch.nn.Parameter(torch.randn(VOCABULARY, generator=generator))
        self.calls: list[list[tuple[int, ...]]] = []
        self.padded_tokens: list[int] = []
        self.temperatures: set[float] = set()
        self.poison: int | None = None
        self.poison_value = math.nan

    def trainable_parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.named_parameters())

    def completion_logprobs(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        self.calls.append([tuple(ids) for ids in completion_ids])
        self.temperatures.add(temperature)
        width = max(map(len, completion_ids))
        whole = max(len(p) + len(c) for p, c in zip(prompt_ids, completion_ids, strict=True))
        self.padded_tokens.append(len(prompt_ids) * whole)
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in completion_ids])
        before = torch.cat([torch.tensor([[ids[-1]] for ids in prompt_ids]), tokens[:, :-1]], 1)
        logits = (self.table[before] + self.bias) / temperature
        logprobs = logits.log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
        if self.poison is not None:
            factor = torch.where(tokens == self.poison, self.poison_value, 1.0)
            logprobs = logprobs * factor
        mask = torch.arange(width) < torch.tensor([[len(ids)] for ids in completion_ids])
        # What stands at padding must not matter.
        return torch.where(mask, logprobs, math.nan), mask

    @property
    def scored(self) -> set[tuple[int, ...]]:
        return {completion for call in self.calls for completion in call}


def group(
    rewards: Iterable[float],
    *,
    own: bool = False,
    publisher: str = "peer-a",
    seed: int = 0,
    lengths: Iterable[int] | None = None,
    prompt: tuple[int, ...] = (1, 2),
    sampler: Bigram | None = None,
    noise: float = 0.3,
    shift: float = 0.0,
    truncated: int = 0,
) -> TrainGroup:
    """Random completions; log-probs are the sampler's, or a bigram's with noise and shift."""
    rng = np.random.default_rng(seed)
    values = np.array(list(rewards), dtype=np.float32)
    sizes = list(lengths or [3 + i % 4 for i in range(len(values))])
    completions = [[int(t) for t in rng.integers(3, VOCABULARY, size)] for size in sizes]
    with torch.no_grad():
        logprobs, mask = (sampler or Bigram()).completion_logprobs(
            [list(prompt)] * len(sizes), completions, 1.0
        )
    rollouts = []
    for i, ids in enumerate(completions):
        off = 0.0 if sampler else noise * rng.standard_normal(len(ids)) + shift
        scores = np.minimum(logprobs[i][mask[i]].numpy() + off, 0).astype(np.float32)
        scores.flags.writeable = False  # as the wire codec's are
        finish = Finish.LENGTH if i < truncated else Finish.STOP
        rollouts.append(Rollout(np.array(ids, dtype=np.int32), scores, finish))
    return TrainGroup(bytes(32), publisher, own, prompt, tuple(rollouts), values)


def section(**changes: Any) -> TrainSection:
    return TrainSection(**{"learning_rate": 0.01, "max_grad_norm": 1e6} | changes)


def completion(group: TrainGroup, index: int) -> tuple[int, ...]:
    return tuple(group.rollouts[index].token_ids.tolist())


def weights(policy: Bigram) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=name)


def reference_step(
    policy: Bigram,
    optimizer: torch.optim.Optimizer,
    groups: list[TrainGroup],
    config: FtisConfig,
    inner_updates: int = 1,
) -> None:
    """The same step without skipping, sorting or micro-batches, and advantages by numpy."""
    rollouts = [r for g in groups for r in g.rollouts]
    advantages = []
    for g in groups:
        r = g.rewards.astype(np.float64)
        flat = r.max() == r.min()
        advantages += [0.0] * len(r) if flat else list((r - r.mean()) / (r.std(ddof=1) + 1e-4))
    anchor = None
    for _ in range(inner_updates):
        logprobs, mask = policy.completion_logprobs(
            [list(map(int, g.prompt_ids)) for g in groups for _ in g.rollouts],
            [r.token_ids.tolist() for r in rollouts],
            1.0,
        )
        sampling = torch.zeros(mask.shape)
        for i, r in enumerate(rollouts):
            sampling[i, : len(r.logprobs)] = torch.tensor(r.logprobs.tolist())
        anchor = logprobs.detach() if anchor is None else anchor
        optimizer.zero_grad()
        ftis_loss(
            logprobs,
            sampling,
            mask,
            torch.tensor(advantages, dtype=torch.float32),
            config,
            own=torch.tensor([g.own for g in groups for _ in g.rollouts]),
            anchor_logprobs=anchor,
        ).loss.backward()
        optimizer.step()


BATCH = [
    group([1, 0, 0, 1], seed=1, own=True, publisher="me"),
    group([0, 0, 0, 0], seed=2, publisher="peer-a"),
    group([0.5, 0.25, 0, 1, 0], seed=3, publisher="peer-b", prompt=(4, 5, 6, 7)),
    group([0, 1, 0], seed=4, publisher="peer-b", lengths=[9, 1, 2]),
]


@pytest.mark.parametrize(
    "ftis",
    [
        FtisConfig(kl_threshold=1.0),
        FtisConfig(filter="none"),
        FtisConfig(filter="and", kl_threshold=0.2),
        FtisConfig(importance="vanilla", filter_scope="peers"),
        FtisConfig(importance="none", kl_estimator="k3", kl_threshold=0.3),
        FtisConfig(importance_level="sequence", filter="none"),
    ],
)
@pytest.mark.parametrize("inner_updates", [1, 3])
@pytest.mark.parametrize("budget", [64, 16_384])
def test_step_equals_the_step_without_shortcuts(
    ftis: FtisConfig, inner_updates: int, budget: int
) -> None:
    policy, other = Bigram(7), Bigram(7)
    trainer = Trainer(policy, section(micro_batch_tokens=budget, inner_updates=inner_updates), ftis)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(2):
        report = trainer.step(BATCH)
        reference_step(other, optimizer, BATCH, ftis, inner_updates)
    assert report.updates == inner_updates
    assert report.micro_batches == 1 or budget == 64
    # The gradient of a step is exact to float32; Adam divides tiny ones by themselves.
    assert_same(weights(policy), weights(other), 2e-4)
    assert not torch.equal(policy.table, Bigram(7).table)


def test_gradient_of_micro_batches_is_the_whole_batchs() -> None:
    ftis = FtisConfig(filter="none")
    moments = []
    for budget in (64, 16_384):
        policy = Bigram(7)
        trainer = Trainer(policy, section(micro_batch_tokens=budget), ftis)
        assert (trainer.step(BATCH).micro_batches > 1) == (budget == 64)
        moments.append(trainer.state_dict()[0]["exp_avg/table"])
    torch.testing.assert_close(moments[0], moments[1], rtol=1e-5, atol=1e-8)


def no_gpu_memory() -> None:
    raise torch.OutOfMemoryError("no memory")


def no_main_memory() -> None:
    torch.empty(1 << 62, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("inner_updates", "exhaust"), [(1, no_gpu_memory), (2, no_gpu_memory), (1, no_main_memory)]
)
def test_micro_batches_shrink_until_they_fit_into_memory(
    inner_updates: int, exhaust: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """With the same result, the second update's included, and for good."""

    class Tight(Bigram):
        def completion_logprobs(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            result = super().completion_logprobs(*arguments)
            # Not at the first micro-batch: gradients and counts of others are there already.
            if self.padded_tokens[-1] > 40 or len(self.padded_tokens) == 4:
                exhaust()
            return result

    results = []
    for kind in (Bigram, Tight):
        policy = kind(7)
        trainer = Trainer(
            policy, section(inner_updates=inner_updates), FtisConfig(filter="none", epsilon=0.9)
        )
        report = trainer.step(BATCH)
        results.append((weights(policy), report))
    (expected, whole), (found, shrunk) = results
    assert_same(found, expected, 1e-5)
    assert (shrunk.updates, shrunk.tokens) == (inner_updates, whole.tokens)
    assert (shrunk.trained, shrunk.micro_batches > 2) == (whole.trained, True)
    assert shrunk.ratio_mean == pytest.approx(whole.ratio_mean)
    assert shrunk.micro_batch_tokens <= 40 < whole.micro_batch_tokens
    assert "out of memory" in caplog.text
    assert trainer.step(BATCH).micro_batch_tokens == shrunk.micro_batch_tokens


def test_sample_that_does_not_fit_into_memory_is_an_error() -> None:
    class Tiny(Bigram):
        def completion_logprobs(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            raise torch.OutOfMemoryError("no memory")

    policy = Tiny(7)
    before = weights(policy)
    trainer = Trainer(policy, section(), FtisConfig(filter="none"))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.step(BATCH)
    assert_same(weights(policy), before)
    assert trainer.steps == 0


def test_micro_batches_stay_within_the_budget_or_hold_one_sample() -> None:
    long = group([1, 0], seed=5, lengths=[80, 70])
    policy = Bigram()
    Trainer(policy, section(micro_batch_tokens=64), FtisConfig(filter="none")).step([*BATCH, long])
    assert len(policy.calls) > 3
    for call, tokens in zip(policy.calls, policy.padded_tokens, strict=True):
        assert tokens <= 64 or len(call) == 1
    assert [len(call) for call in policy.calls[:2]] == [1, 1]  # longest first
    assert sum(map(len, policy.calls)) == 14  # each sample with a signal once


# Work not done.


@pytest.mark.parametrize(
    ("ftis", "expected"),
    [
        (FtisConfig(), {(0, 0), (0, 3), (2, 0), (2, 3), (3, 1)}),
        (FtisConfig(filter_scope="peers"), {(0, i) for i in range(4)} | {(2, 0), (2, 3), (3, 1)}),
        (
            FtisConfig(filter="none"),
            {(0, i) for i in range(4)} | {(2, i) for i in range(5)} | {(3, i) for i in range(3)},
        ),
        (
            FtisConfig(filter="and"),
            {(0, i) for i in range(4)} | {(2, i) for i in range(5)} | {(3, i) for i in range(3)},
        ),
    ],
)
def test_samples_without_use_are_not_scored(
    ftis: FtisConfig, expected: set[tuple[int, int]]
) -> None:
    policy = Bigram()
    report = Trainer(policy, section(), ftis).step(BATCH)
    assert policy.scored == {completion(BATCH[g], i) for g, i in expected}
    assert report.tokens == sum(len(completion(BATCH[g], i)) for g, i in expected)
    assert report.batch_tokens == sum(len(r.token_ids) for g in BATCH for r in g.rollouts)


def test_dropped_samples_are_scored_when_asked_for_and_train_nothing() -> None:
    plain, asked = Bigram(), Bigram()
    report = Trainer(plain, section(), FtisConfig()).step(BATCH)
    full = Trainer(asked, section(), FtisConfig(), score_dropped=True).step(BATCH)
    assert len(asked.scored) == full.samples == 16
    assert full.per_peer["peer-a"].kl_p50 is not None  # of a group without signal
    assert report.per_peer["peer-a"].kl_p50 is None
    assert (full.trained, full.tokens) == (report.trained, report.tokens)
    assert_same(weights(plain), weights(asked))


def test_what_the_filter_dropped_is_not_scored_in_later_updates() -> None:
    near = group([1, 0], seed=1, noise=0.0)
    far = group([1, 0], seed=2, shift=-99.0)
    policy = Bigram()
    report = Trainer(policy, section(inner_updates=3), FtisConfig()).step([near, far])
    assert (report.trained, report.dropped_kl) == (1, 1)
    first = [{completion(near, 0), completion(far, 0)}]
    assert [set(call) for call in policy.calls] == first + 2 * [{completion(near, 0)}]


# No step without a signal.


@pytest.mark.parametrize(
    "batch",
    [
        [group([1, 1, 1]), group([0.1] * 7)],
        [group([1, 0, 0, 0], shift=-99.0)],
        [group([5])],
        [group([math.nan, 1.0])],
    ],
    ids=["equal rewards", "all filtered", "one sample", "one valid reward"],
)
def test_batch_without_signal_moves_nothing_but_counts(batch: list[TrainGroup]) -> None:
    policy = Bigram()
    trainer = Trainer(policy, section(warmup_steps=10, weight_decay=0.5), FtisConfig())
    assert trainer.step(BATCH).stepped  # so that there is momentum
    before = weights(policy)
    moments = {name: value.clone() for name, value in trainer.state_dict()[0].items()}
    rate = trainer.learning_rate
    report = trainer.step(batch)
    assert (report.step, report.stepped, report.updates) == (2, False, 0)
    assert (report.trained, report.loss, report.grad_norm) == (0, 0.0, None)
    assert (report.steps_without_signal, report.steps_nonfinite) == (1, 0)
    assert report.optimizer_steps == 1
    assert_same(weights(policy), before)
    assert_same(trainer.state_dict()[0], moments)
    assert trainer.learning_rate == rate
    assert trainer.steps == 2
    assert policy.table.grad is None
    assert (report.ratio_mean, report.ratio_max, report.is_weight_mean) == (None, None, None)


def test_learning_rate_warms_up_linearly_over_steps_that_move_the_weights() -> None:
    trainer = Trainer(Bigram(), section(learning_rate=0.1, warmup_steps=4), FtisConfig())
    still = [group([1, 1])]
    rates = [trainer.step(b).learning_rate for b in [BATCH, still, BATCH, BATCH, BATCH, BATCH]]
    assert rates == pytest.approx([0.025, 0.05, 0.05, 0.075, 0.1, 0.1])


def test_warm_up_scales_the_first_update() -> None:
    moved = []
    for warmup in (0, 10):
        policy = Bigram()
        Trainer(policy, section(warmup_steps=warmup), FtisConfig()).step(BATCH)
        moved.append(policy.table.detach() - Bigram().table)
    torch.testing.assert_close(moved[1], moved[0] / 10, rtol=1e-3, atol=1e-6)


# Optimizer.


def test_weight_decay_is_on_matrices_only() -> None:
    plain, decayed = Bigram(), Bigram()
    Trainer(plain, section(), FtisConfig()).step(BATCH)
    Trainer(decayed, section(weight_decay=0.5), FtisConfig()).step(BATCH)
    assert torch.equal(plain.bias, decayed.bias)
    shrunk = plain.table - 0.01 * 0.5 * Bigram().table
    torch.testing.assert_close(decayed.table, shrunk, rtol=0, atol=1e-6)


def test_gradient_is_clipped_to_its_norm_over_all_parameters() -> None:
    policy = Bigram()
    trainer = Trainer(policy, section(max_grad_norm=1e-3), FtisConfig())
    report = trainer.step(BATCH)
    assert report.grad_norm is not None
    assert report.grad_norm > 0.01
    moments, _ = trainer.state_dict()
    first = [moments["exp_avg/table"].flatten(), moments["exp_avg/bias"]]
    norm = torch.cat(first).norm().item() / (1 - 0.9)
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_rewarded_completions_become_likelier() -> None:
    policy = Bigram(3)
    batch = [group([1, 0, 0, 0], own=True, seed=1, sampler=policy)]
    trainer = Trainer(policy, section(learning_rate=0.05), FtisConfig())

    def probability() -> float:
        with torch.no_grad():
            logprobs, mask = policy.completion_logprobs(
                [[1, 2]], [list(completion(batch[0], 0))], 1
            )
        return float(logprobs[mask].sum())

    before = probability()
    reports = [trainer.step(batch) for _ in range(10)]
    assert probability() > before + 1.0
    assert reports[0].ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert reports[0].kl_p99 == pytest.approx(0.0, abs=1e-5)


# Not finite.


def test_sample_with_non_finite_policy_log_probs_costs_the_step_loudly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Bigram()
    trainer = Trainer(policy, section(), FtisConfig(filter="none"))
    trainer.step(BATCH)
    before, moments = weights(policy), {k: v.clone() for k, v in trainer.state_dict()[0].items()}
    policy.poison = completion(BATCH[0], 0)[0]
    report = trainer.step(BATCH)
    hit = {
        c for g in BATCH for i in range(len(g.rollouts)) if policy.poison in (c := completion(g, i))
    }
    hit -= {completion(BATCH[1], i) for i in range(4)}  # not scored
    assert report.not_finite == len(hit) > 0
    assert (report.stepped, report.nonfinite_gradient, report.grad_norm) == (False, True, None)
    assert report.trained == report.own_trained == report.foreign_trained == 0
    assert report.skipped == 12 - report.not_finite
    assert (report.steps_nonfinite, report.steps_without_signal) == (1, 0)
    assert report.optimizer_steps == 1
    assert "are not finite" in caplog.text
    assert "update left out" in caplog.text
    assert_same(weights(policy), before)
    assert_same(trainer.state_dict()[0], moments)
    policy.poison = None
    assert trainer.step(BATCH).stepped


def test_only_non_finite_samples_are_left_out_when_the_gradient_is_finite() -> None:
    class Impossible(Bigram):
        """-inf for one token, without a trace in the gradient."""

        def completion_logprobs(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            logprobs, mask = super().completion_logprobs(*arguments)
            forbidden = torch.zeros_like(mask)
            forbidden[:, 0] = torch.tensor([c[0] == first for c in self.calls[-1]])
            return logprobs.masked_fill(forbidden, -math.inf), mask

    batch = [group([1, 0, 1, 0], seed=8)]
    first = completion(batch[0], 0)[0]
    affected = sum(completion(batch[0], i)[0] == first for i in range(4))
    report = Trainer(Impossible(), section(), FtisConfig(filter="none")).step(batch)
    assert (report.stepped, report.nonfinite_gradient) == (True, False)
    assert (report.not_finite, report.trained) == (affected, 4 - affected)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_non_finite_gradient_of_finite_log_probs_skips_the_step(bad: float) -> None:
    policy = Bigram()
    handle = policy.bias.register_hook(lambda grad: torch.full_like(grad, bad))
    trainer = Trainer(policy, section(inner_updates=2), FtisConfig())
    report = trainer.step(BATCH)
    assert (report.nonfinite_gradient, report.updates, report.not_finite) == (True, 0, 0)
    assert (report.skipped, report.trained) == (5, 0)
    assert report.kept == 5
    assert_same(weights(policy), weights(Bigram()))
    handle.remove()
    assert trainer.step(BATCH).updates == 2


def test_later_update_with_non_finite_gradient_keeps_the_earlier_one() -> None:
    policy = Bigram()
    seen = []

    def spoil(grad: Tensor) -> Tensor:
        seen.append(1)
        return grad if len(seen) == 1 else torch.full_like(grad, math.nan)

    policy.bias.register_hook(spoil)
    report = Trainer(policy, section(inner_updates=3), FtisConfig()).step(BATCH)
    assert (report.stepped, report.updates, report.nonfinite_gradient) == (True, 1, True)
    assert report.trained == 5
    assert report.optimizer_steps == 1


# The report.


def test_report_counts_every_sample_once_and_by_peer() -> None:
    batch = [
        group([1, 0, 0, 0], seed=1, own=True, publisher="me", noise=0.0),
        group([1, 0, 1, 0], seed=2, publisher="peer-a", noise=0.0, truncated=1),
        group([1, 1, 0], seed=3, publisher="peer-b", shift=-99.0),
        group([2, 2], seed=4, publisher="peer-b"),
    ]
    broken = batch[1].rollouts[3]
    batch[1] = TrainGroup(
        b"",
        "peer-a",
        False,
        np.array([1, 2], dtype=np.int32),
        (
            *batch[1].rollouts[:3],
            Rollout(broken.token_ids, np.full_like(broken.logprobs, 0.5), Finish.STOP),
        ),
        batch[1].rewards,
    )
    policy = Bigram()
    report = Trainer(policy, section(), FtisConfig(mask_truncated=True)).step(batch)
    assert (report.groups, report.groups_without_signal, report.samples) == (4, 1, 13)
    assert (report.own_samples, report.foreign_samples) == (4, 9)
    assert (report.own_trained, report.foreign_trained, report.trained) == (1, 1, 2)
    assert (report.masked_truncated, report.truncated_completions) == (1, 1)
    assert (report.invalid, report.dropped_kl, report.dropped_advantage) == (1, 2, 7)
    assert (report.no_signal, report.not_finite, report.skipped) == (0, 0, 0)
    peers = report.per_peer
    assert set(peers) == {OWN, "peer-a", "peer-b"}
    assert (peers[OWN].samples, peers[OWN].trained, peers[OWN].dropped_advantage) == (4, 1, 3)
    assert (peers["peer-a"].samples, peers["peer-a"].trained) == (4, 1)
    assert (peers["peer-b"].samples, peers["peer-b"].dropped_kl) == (5, 2)
    assert peers[OWN].kl_p50 == pytest.approx(0.0, abs=1e-5)
    assert peers["peer-b"].kl_p50 is not None
    assert peers["peer-b"].kl_p50 > 50
    assert report.kl_p99 == peers["peer-b"].kl_p50 or report.kl_p90 == peers["peer-b"].kl_p50


def test_largest_log_ratio_of_a_token_is_reported_for_each_peer() -> None:
    own = group([1, 0, 0, 0], own=True, sampler=Bigram())
    theirs = group([1, 0, 0, 0], seed=1, sampler=Bigram())
    for rollout, off in zip(theirs.rollouts, (2.0, 9.0, 0.0, 0.0), strict=True):
        rollout.logprobs.flags.writeable = True
        rollout.logprobs[1] -= off  # the policy finds this token likelier by so many nats
    peers = Trainer(Bigram(), section(), FtisConfig()).step([own, theirs]).per_peer
    assert peers[OWN].log_ratio_max == pytest.approx(0.0, abs=1e-5)
    assert peers["peer-a"].trained == 1  # so the second sample's was not found out
    assert peers["peer-a"].log_ratio_max == pytest.approx(2.0, abs=1e-5)
    scored = Trainer(Bigram(), section(), FtisConfig(), score_dropped=True).step([own, theirs])
    assert scored.per_peer["peer-a"].log_ratio_max == pytest.approx(9.0, abs=1e-5)
    alike = Trainer(Bigram(), section(), FtisConfig()).step([group([1, 1])])
    assert alike.per_peer["peer-a"].log_ratio_max is None


def test_cut_completions_are_trained_on_by_default() -> None:
    batch = [group([1, 0, 0, 0], noise=0.0, truncated=4)]
    report = Trainer(Bigram(), section(), FtisConfig()).step(batch)
    assert (report.trained, report.masked_truncated, report.truncated_completions) == (1, 0, 4)


def repeating(own: bool) -> TrainGroup:
    """Completions 0 and 2 have the same tokens, and both a reward."""
    made = group([1, 0, 1, 0], own=own, noise=0.0)
    rollouts = (*made.rollouts[:2], made.rollouts[0], made.rollouts[3])
    return TrainGroup(b"", made.publisher, own, made.prompt_ids, rollouts, made.rewards)


def test_a_peers_repetition_of_a_completion_can_be_left_out() -> None:
    batch = [repeating(own=False), repeating(own=True), group([1, 0], seed=7)]
    every = Trainer(Bigram(), section(), FtisConfig()).step(batch)
    assert (every.trained, every.dropped_duplicate) == (5, 0)
    once = Trainer(Bigram(), section(drop_duplicates=True), FtisConfig()).step(batch)
    assert (once.own_trained, once.trained, once.dropped_duplicate) == (2, 4, 1)
    repeated, first = once.per_sample[2], once.per_sample[0]
    assert (repeated.outcome, first.outcome) == ("dropped_duplicate", "trained")
    assert repeated.advantage == first.advantage  # its place in mean and deviation stays


def test_peers_advantages_can_be_capped() -> None:
    batch = [group([1, 0, 0, 0], own=own, noise=0.0) for own in (False, True)]
    report = Trainer(Bigram(), section(max_advantage=0.5), FtisConfig(filter="none")).step(batch)
    theirs, ours = report.per_sample[:4], report.per_sample[4:]
    assert [s.advantage for s in theirs] == pytest.approx([0.5, -0.5, -0.5, -0.5], abs=1e-3)
    assert ours[0].advantage == pytest.approx(1.5, abs=1e-3)


def test_zero_advantages_outside_the_filter_are_no_signal() -> None:
    report = Trainer(Bigram(), section(), FtisConfig(filter="and")).step(BATCH)
    assert (report.no_signal, report.dropped_advantage) == (4, 0)
    assert report.kept == report.trained + 4


def test_report_is_json_without_nan() -> None:
    trainer = Trainer(Bigram(), section(), FtisConfig())
    for batch in (BATCH, [group([1, 1])]):
        fields = trainer.step(batch).to_dict()
        again = json.loads(json.dumps(fields, allow_nan=False))
        assert again == fields
        assert again["per_peer"]


def test_entropy_is_estimated_from_own_samples() -> None:
    report = Trainer(Bigram(), section(), FtisConfig()).step(BATCH)
    logprobs = np.concatenate([r.logprobs for r in BATCH[0].rollouts])
    assert report.entropy == pytest.approx(-float(logprobs.mean()), rel=1e-6)
    assert Trainer(Bigram(), section(), FtisConfig()).step(BATCH[1:]).entropy is None


@pytest.mark.parametrize("budget", [64, 16_384])
def test_every_sample_is_reported_in_the_batchs_order(budget: int) -> None:
    ftis = FtisConfig(kl_threshold=0.5, clip_max=1.3)
    policy = Bigram()
    report = Trainer(policy, section(micro_batch_tokens=budget), ftis).step(BATCH)
    rollouts = [r for g in BATCH for r in g.rollouts]
    assert [s.length for s in report.per_sample] == [len(r.token_ids) for r in rollouts]
    outcomes = [s.outcome for s in report.per_sample]
    for outcome in Outcome:
        assert outcomes.count(outcome) == getattr(report, outcome)
    assert min(report.trained, report.dropped_kl, report.dropped_advantage) > 0
    for rollout, sample in zip(rollouts, report.per_sample, strict=True):
        scored = tuple(rollout.token_ids.tolist()) in policy.scored
        assert (sample.divergence is not None) == scored
        if sample.divergence is not None:
            far = sample.divergence.kl["grpo"] > 0.5
            assert far == (sample.outcome == Outcome.DROPPED_KL)
    trained = [s for s in report.per_sample if s.outcome == Outcome.TRAINED and s.divergence]
    edge = ratio_edges(1.3).index(1.3)
    above = sum(s.divergence.tokens_above[edge] for s in trained if s.divergence)
    assert report.truncated_share == pytest.approx(above / report.tokens)
    assert report.ratio_max == max(s.divergence.ratio_max for s in trained if s.divergence)


def test_samples_are_reported_as_they_are() -> None:
    batch = [group([1, 0, 0, 0], truncated=2), group([math.nan, 1.0, 0.0])]
    policy = Bigram()
    policy.poison, policy.poison_value = int(batch[0].rollouts[0].token_ids[0]), math.inf
    samples = Trainer(policy, section(), FtisConfig(filter="none")).step(batch).per_sample
    assert [s.truncated for s in samples] == [True, True] + 5 * [False]
    assert [s.advantage > 0 for s in samples] == [True, False, False, False, False, True, False]
    assert samples[0].outcome == Outcome.NOT_FINITE
    assert samples[4].outcome == Outcome.INVALID
    assert samples[0].divergence is samples[4].divergence is None


def test_samples_are_not_reported_when_not_wanted() -> None:
    trainer = Trainer(Bigram(), section(log_samples=False), FtisConfig())
    assert trainer.step(BATCH).per_sample == ()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 1 - 0.4 * (1 - 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5), 0.2, 0.2]),
    ],
)
def test_learning_rate_rises_and_falls_as_scheduled(shape: str, expected: list[float]) -> None:
    config = section(warmup_steps=2, schedule=shape, schedule_steps=6, schedule_floor=0.2)
    assert [schedule(config, done) for done in range(7)] == pytest.approx(expected)
    trainer = Trainer(Bigram(), config, FtisConfig(filter="none"))
    rates = [trainer.step(BATCH).learning_rate for _ in range(3)]
    assert rates == pytest.approx([0.01 * share for share in expected[:3]])


def test_threshold_schedule_runs_over_batches_with_and_without_signal() -> None:
    ftis = FtisConfig(kl_threshold=((0, 1e-9), (2, 1e9)))
    trainer = Trainer(Bigram(), section(), ftis)
    reports = [trainer.step(BATCH) for _ in range(3)]
    assert [r.kl_threshold for r in reports] == [1e-9, 1e-9, 1e9]
    assert [r.stepped for r in reports] == [False, False, True]


def test_policy_is_asked_at_the_swarms_temperature() -> None:
    policy = Bigram()
    Trainer(policy, section(), FtisConfig(), temperature=0.7).step(BATCH)
    assert policy.temperatures == {0.7}


# State.


def test_training_continues_bit_exactly_from_saved_state() -> None:
    config, ftis = section(warmup_steps=5, weight_decay=0.1), FtisConfig()
    straight = Bigram()
    trainer = Trainer(straight, config, ftis)
    for _ in range(2):
        trainer.step(BATCH)
    tensors, totals = trainer.state_dict()
    data, text = save(tensors), json.dumps(totals)
    resumed = Bigram()
    resumed.load_state_dict(straight.state_dict())
    for _ in range(2):
        last = trainer.step(BATCH)
    other = Trainer(resumed, config, ftis)
    other.load_state_dict(load(data), json.loads(text))
    for _ in range(2):
        again = other.step(BATCH)
    assert_same(weights(straight), weights(resumed))
    differing = {"seconds"}
    assert {k: v for k, v in last.to_dict().items() if k not in differing} == {
        k: v for k, v in again.to_dict().items() if k not in differing
    }
    assert again.step == 4


def test_loaded_state_is_a_copy() -> None:
    first, second = (Trainer(Bigram(), section(), FtisConfig()) for _ in range(2))
    first.step(BATCH)
    tensors, totals = first.state_dict()
    before = {name: value.clone() for name, value in tensors.items()}
    second.load_state_dict(tensors, totals)
    second.step(BATCH)
    assert_same(first.state_dict()[0], before)


def test_state_before_the_first_step_is_empty_and_loads() -> None:
    trainer = Trainer(Bigram(), section(), FtisConfig())
    tensors, totals = trainer.state_dict()
    assert tensors == {}
    trainer.step(BATCH)
    trainer.load_state_dict(tensors, totals)
    assert trainer.steps == 0
    assert trainer.state_dict()[0] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"exp_avg/table": torch.zeros(2, 2)}, "table has"),
        ({"exp_avg_sq/table": None}, "table has"),
        ({"step/bias": torch.zeros(1)}, "bias has"),
        ({"exp_avg/other": torch.zeros(2)}, "no parameter for"),
    ],
)
def test_state_of_another_model_is_refused(change: dict[str, Any], message: str) -> None:
    trainer = Trainer(Bigram(), section(), FtisConfig())
    trainer.step(BATCH)
    tensors, totals = trainer.state_dict()
    changed = {k: v for k, v in (tensors | change).items() if v is not None}
    with pytest.raises(DataError, match=message):
        trainer.load_state_dict(changed, totals)
    assert trainer.steps == 1


@pytest.mark.parametrize("change", [{"step": -1}, {"step": 1.5}, {"step": True}, {"more": 1}])
def test_damaged_totals_are_refused(change: dict[str, Any]) -> None:
    trainer = Trainer(Bigram(), section(), FtisConfig())
    tensors, totals = trainer.state_dict()
    with pytest.raises(DataError, match="expected whole numbers"):
        trainer.load_state_dict(tensors, totals | change)


# Arguments.


def test_rewards_must_match_rollouts() -> None:
    made = group([1, 0])
    with pytest.raises(ValueError, match=r"rewards: expected shape \(2,\)"):
        TrainGroup(b"", "p", False, (1,), made.rollouts, np.zeros((2, 1), dtype=np.float32))


def test_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Trainer(Bigram(), section(), FtisConfig()).step([])


def test_policy_that_masks_other_lengths_is_refused() -> None:
    class Wrong(Bigram):
        def completion_logprobs(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            logprobs, mask = super().completion_logprobs(*arguments)
            return logprobs, torch.ones_like(mask)

    with pytest.raises(ValueError, match="other lengths"):
        Trainer(Wrong(), section(), FtisConfig()).step(BATCH)
