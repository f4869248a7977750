"""One training step: from groups of rewarded completions to new weights.

Owns: which samples go through the model, micro-batches, the learning rate's schedule, the step's
report. Does not know: where groups come from, how the model computes log-probs (`swarm.rl.policy`),
the loss's formula (`swarm.rl.loss`), the optimizer's (`swarm.rl.optimizer`), or files
(`swarm.rl.checkpoint`).
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.config import TrainSection
from swarm.errors import DataError
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.advantages import group_advantages, valid_samples
from swarm.rl.filter import dropped_by_advantage
from swarm.rl.host_memory import one_out_of_memory
from swarm.rl.loss import FtisConfig, LossMetrics, LossOutput, ftis_loss, kl_quantiles
from swarm.rl.optimizer import Optimizer
from swarm.rl.sample_report import Divergence, SampleReport, divergences, ratio_edges
from swarm.rl.step_report import OWN, Outcome, PeerReport, StepReport

log = logging.getLogger(__name__)


class TrainablePolicy(Protocol):
    """What the trainer needs of a policy."""

    def completion_logprobs(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probs (N, T) float32, differentiable, and mask (N, T) bool of N completions.

        What it computes grows with N times the longest prompt and completion together.
        """

    def trainable_parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The parameters that training changes, by stable names."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainGroup:
    """One prompt's completions, sampled by one node, with the rewards computed here.

    Attributes:
        hash: of the group's blob.
        publisher: peer id of the node that sampled it.
        own: this node sampled it.
        prompt_ids: the rendered prompt's tokens.
        rollouts: the G completions.
        rewards: float32 (G,).

    Raises:
        ValueError: rewards and rollouts differ in number.
    """

    hash: bytes
    publisher: str
    own: bool
    prompt_ids: tuple[int, ...] | NDArray[np.int32]
    rollouts: tuple[Rollout, ...]
    rewards: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.rewards.shape != (len(self.rollouts),):
            raise ValueError(
                f"rewards: expected shape ({len(self.rollouts)},), got {self.rewards.shape}"
            )


@dataclass(slots=True, eq=False)
class _Sample:
    group: int
    publisher: str
    own: bool
    prompt_ids: list[int]
    rollout: Rollout
    advantage: float = 0.0
    outcome: Outcome = Outcome.TRAINED  # until something else is known
    kl: float = math.nan
    log_ratio_max: float = math.nan
    divergence: Divergence | None = None
    anchor: Tensor | None = None  # (L,), on the policy's device

    @property
    def truncated(self) -> bool:
        return self.rollout.finish is Finish.LENGTH

    @property
    def length(self) -> int:
        return len(self.rollout.token_ids)

    @property
    def width(self) -> int:
        return len(self.prompt_ids) + self.length


@dataclass(slots=True)
class _Progress:
    """Totals that a checkpoint keeps."""

    step: int = 0
    optimizer_steps: int = 0
    steps_without_signal: int = 0
    steps_nonfinite: int = 0


@dataclass(slots=True)
class _Updates:
    """What the updates on one batch came to."""

    made: int = 0
    nonfinite: bool = False
    loss: float = 0.0
    grad_norm: float | None = None
    tokens: int = 0
    micro_batches: int = 0
    metrics: LossMetrics = field(default_factory=LossMetrics)


class Trainer:
    """AdamW on the F-TIS loss.

    A batch without a signal, or with a gradient that is not finite, moves neither weights nor
    optimizer state nor the learning rate's schedule.

    Args:
        policy: what is trained.
        config: optimizer and micro-batches.
        ftis: the loss.
        temperature: of the softmax that the swarm samples with.
        score_dropped: also run the samples that are not trained on through the model, without
            gradient, so that the divergences in the report cover the whole batch.
    """

    def __init__(
        self,
        policy: TrainablePolicy,
        config: TrainSection,
        ftis: FtisConfig,
        *,
        temperature: float = 1.0,
        score_dropped: bool = False,
    ) -> None:
        self._policy = policy
        self._config = config
        self._ftis = ftis
        self._ratio_edges = ratio_edges(ftis.clip_max)
        self._temperature = temperature
        self._score_dropped = score_dropped
        self._micro_batch_tokens = config.micro_batch_tokens
        self._optimizer = Optimizer(
            policy.trainable_parameters(),
            storage="adamw" if config.optimizer == "auto" else config.optimizer,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=config.weight_decay,
        )
        self._progress = _Progress()

    @property
    def steps(self) -> int:
        """Batches so far, whether or not they moved the weights."""
        return self._progress.step

    @property
    def learning_rate(self) -> float:
        """Of the next step that moves the weights."""
        return self._config.learning_rate * schedule(self._config, self._progress.optimizer_steps)

    def step(self, groups: Sequence[TrainGroup]) -> StepReport:
        """Train on one batch of groups.

        Raises:
            ValueError: no groups, or the policy scores other tokens than it was given.
        """
        if not groups:
            raise ValueError("groups: expected at least one")
        started = time.monotonic()
        samples = self._judge(groups)
        if self._score_dropped:
            self._score([s for s in samples if s.outcome in _UNSCORED], len(samples))
        learning_rate = self.learning_rate
        updates = self._update(samples, learning_rate)
        progress, threshold = self._progress, self._ftis.threshold_at(self._progress.step)
        progress.step += 1
        progress.optimizer_steps += updates.made > 0
        progress.steps_nonfinite += updates.nonfinite
        progress.steps_without_signal += not (updates.made or updates.nonfinite)
        outcomes = Counter(s.outcome for s in samples)
        if outcomes[Outcome.NOT_FINITE]:
            log.error(
                "step %d: the model's log-probs of %d samples are not finite",
                progress.step,
                outcomes[Outcome.NOT_FINITE],
            )
        if updates.nonfinite:
            log.error("step %d: gradient not finite, update left out", progress.step)
        signal = {s.group for s in samples if s.advantage != 0}
        own = [s for s in samples if s.own]
        own_trained = sum(s.outcome is Outcome.TRAINED for s in own)
        p50, p90, p99 = _quantiles(samples)
        metrics = updates.metrics
        return StepReport(
            step=progress.step,
            stepped=updates.made > 0,
            updates=updates.made,
            nonfinite_gradient=updates.nonfinite,
            loss=updates.loss,
            groups=len(groups),
            groups_without_signal=len(groups) - len(signal),
            samples=len(samples),
            **{outcome.value: outcomes[outcome] for outcome in Outcome},
            own_samples=len(own),
            own_trained=own_trained,
            foreign_samples=len(samples) - len(own),
            foreign_trained=outcomes[Outcome.TRAINED] - own_trained,
            kept=sum(outcomes[o] for o in _KEPT),
            truncated_completions=sum(s.truncated for s in samples),
            kl_threshold=threshold,
            kl_p50=p50,
            kl_p90=p90,
            kl_p99=p99,
            per_peer=_per_peer(samples),
            ratio_mean=metrics.ratio_mean,
            ratio_max=metrics.ratio_max if metrics.tokens else None,
            is_weight_mean=metrics.is_weight_mean,
            truncated_share=metrics.truncated_share,
            entropy=_entropy(own),
            grad_norm=updates.grad_norm,
            learning_rate=learning_rate,
            tokens=updates.tokens,
            batch_tokens=sum(s.length for s in samples),
            micro_batches=updates.micro_batches,
            micro_batch_tokens=self._micro_batch_tokens,
            optimizer_steps=progress.optimizer_steps,
            steps_without_signal=progress.steps_without_signal,
            steps_nonfinite=progress.steps_nonfinite,
            per_sample=_per_sample(samples) if self._config.log_samples else (),
            seconds=time.monotonic() - started,
        )

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Optimizer state and totals, without the weights.

        Returns:
            Tensors named "<kind>/<parameter>" (the optimizer's own, not copies: write them before
            the next step), and JSON-able totals.
        """
        return self._optimizer.state_dict(), asdict(self._progress)

    def load_state_dict(self, tensors: Mapping[str, Tensor], totals: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; the policy's weights must be those of then.

        Raises:
            DataError: the state belongs to other parameters, or is incomplete.
        """
        expected = set(asdict(_Progress()))
        if set(totals) != expected or not all(type(v) is int and v >= 0 for v in totals.values()):
            raise DataError(
                f"trainer state: expected whole numbers {sorted(expected)}, got {dict(totals)!r}"
            )
        self._optimizer.load_state_dict(tensors)
        self._progress = _Progress(**totals)

    def _judge(self, groups: Sequence[TrainGroup]) -> list[_Sample]:
        """Everything that is known of the samples before a forward pass."""
        samples = []
        for index, group in enumerate(groups):
            prompt_ids = [int(token) for token in group.prompt_ids]
            for rollout in group.rollouts:
                samples.append(_Sample(index, group.publisher, group.own, prompt_ids, rollout))
        rewards = torch.tensor(
            np.concatenate([group.rewards for group in groups]), dtype=torch.float64
        )
        valid = _valid([s.rollout for s in samples]) & torch.isfinite(rewards)
        group_ids = torch.tensor([s.group for s in samples])
        advantages = group_advantages(rewards, group_ids, valid).float()
        own = torch.tensor([s.own for s in samples])
        if self._config.max_advantage:
            capped = advantages.clamp(max=self._config.max_advantage)
            advantages = torch.where(own, advantages, capped)
        subject = ~own if self._ftis.filter_scope == "peers" else torch.ones_like(own)
        dropped = dropped_by_advantage(advantages, subject, self._ftis.filter).tolist()
        repeated = _repetitions(samples) if self._config.drop_duplicates else set()
        for sample, advantage, is_valid, is_dropped in zip(
            samples, advantages.tolist(), valid.tolist(), dropped, strict=True
        ):
            sample.advantage = advantage
            if not is_valid:
                sample.outcome = Outcome.INVALID
            elif sample in repeated:
                sample.outcome = Outcome.DROPPED_DUPLICATE
            elif is_dropped:
                sample.outcome = Outcome.DROPPED_ADVANTAGE
            elif self._ftis.mask_truncated and sample.truncated:
                sample.outcome = Outcome.MASKED_TRUNCATED
            elif sample.advantage == 0:
                sample.outcome = Outcome.NO_SIGNAL
        return samples

    def _score(self, samples: list[_Sample], n_samples: int) -> None:
        """Find the divergences of samples that are not trained on."""
        with torch.no_grad():
            for batch in _micro_batches(samples, self._micro_batch_tokens):
                output, _, mask = self._loss(batch, n_samples)
                self._note_divergences(batch, output, mask)

    def _update(self, samples: list[_Sample], learning_rate: float) -> _Updates:
        """Make the inner updates; fill in each sample's outcome and divergence."""
        result = _Updates()
        for update in range(self._config.inner_updates):
            # The filter is frozen: what the first update dropped needs no further pass.
            trained = [s for s in samples if s.outcome is Outcome.TRAINED]
            loss = self._gradient(trained, len(samples), None if update else result)
            if loss is None:
                # Every sample dropped; or, later, every log-prob spoilt by the update before.
                result.nonfinite = update > 0
                break
            norm = self._optimizer.clip(self._config.max_grad_norm)
            if update == 0:
                result.loss = loss
                result.grad_norm = norm if math.isfinite(norm) else None
            if not math.isfinite(norm):
                result.nonfinite = True
                break
            self._optimizer.step(learning_rate)
            result.made += 1
        self._optimizer.clear()
        if not result.made:
            for sample in samples:
                if sample.outcome is Outcome.TRAINED:
                    sample.outcome = Outcome.SKIPPED
        return result

    def _gradient(
        self, samples: list[_Sample], n_samples: int, first: _Updates | None
    ) -> float | None:
        """`_backward`, again in smaller micro-batches where the memory does not suffice."""
        sizes = [len(s.prompt_ids) + s.length for s in samples]
        while True:
            self._optimizer.clear()
            if first is not None:
                first.metrics, first.tokens, first.micro_batches = LossMetrics(), 0, 0
            try:
                with one_out_of_memory():
                    return self._backward(samples, n_samples, first)
            except torch.OutOfMemoryError as error:
                if self._micro_batch_tokens <= max(sizes):
                    raise
                tokens = min(self._micro_batch_tokens, sum(sizes))
                self._micro_batch_tokens = max(max(sizes), tokens // 2)
                log.warning(
                    "out of memory in a micro-batch: %d tokens at most from now on (%s)",
                    self._micro_batch_tokens,
                    error,
                )
            torch.cuda.empty_cache()  # after the exception, whose traceback holds tensors

    def _backward(
        self, samples: list[_Sample], n_samples: int, first: _Updates | None
    ) -> float | None:
        """Accumulate the gradient of the whole batch.

        `first` collects what the first update finds out. Returns the loss, None without gradient.
        """
        loss = None
        for batch in _micro_batches(samples, self._micro_batch_tokens):
            output, logprobs, mask = self._loss(batch, n_samples)
            if first is not None:
                first.metrics += output.metrics
                first.tokens += sum(s.length for s in batch)
                first.micro_batches += 1
                self._record(batch, output, mask)
                if self._config.inner_updates > 1:
                    for sample, row, live in zip(batch, logprobs.detach(), mask, strict=True):
                        sample.anchor = row[live]
            if output.metrics.kept:
                output.loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
                loss = (loss or 0.0) + output.loss.item()
        return loss

    def _loss(self, batch: list[_Sample], n_samples: int) -> tuple[LossOutput, Tensor, Tensor]:
        """One micro-batch's loss, with the policy's log-probs (N, T) and the mask (N, T)."""
        logprobs, mask = self._policy.completion_logprobs(
            [s.prompt_ids for s in batch],
            [s.rollout.token_ids.tolist() for s in batch],
            self._temperature,
        )
        if mask.sum(dim=1).tolist() != [s.length for s in batch]:
            raise ValueError("completion_logprobs: its mask has other lengths than the completions")
        device = logprobs.device

        def padded(rows: Iterable[Tensor]) -> Tensor:
            values = torch.cat(list(rows)).to(device, logprobs.dtype)
            return torch.zeros_like(logprobs.detach()).masked_scatter(mask, values)

        def per_sample(value: Callable[[_Sample], Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor([value(s) for s in batch], dtype=dtype, device=device)

        anchors = [s.anchor for s in batch if s.anchor is not None]
        output = ftis_loss(
            logprobs,
            # A copy: arrays that came over the wire are read-only, which torch warns of.
            padded(torch.from_numpy(np.array(s.rollout.logprobs)) for s in batch),
            mask,
            per_sample(lambda s: s.advantage, logprobs.dtype),
            self._ftis,
            own=per_sample(lambda s: s.own, torch.bool),
            truncated=per_sample(lambda s: s.truncated, torch.bool),
            anchor_logprobs=padded(anchors) if anchors else None,
            step=self._progress.step,
            n_samples=n_samples,
        )
        return output, logprobs, mask

    def _record(self, batch: list[_Sample], output: LossOutput, mask: Tensor) -> None:
        self._note_divergences(batch, output, mask)
        for sample, keep in zip(batch, output.keep.tolist(), strict=True):
            if not keep:
                lost = math.isnan(sample.kl)
                sample.outcome = Outcome.NOT_FINITE if lost else Outcome.DROPPED_KL

    def _note_divergences(self, batch: list[_Sample], output: LossOutput, mask: Tensor) -> None:
        found = torch.stack([output.kl, output.log_ratio_max], dim=1).tolist()
        for sample, (kl, log_ratio_max) in zip(batch, found, strict=True):
            sample.kl, sample.log_ratio_max = kl, log_ratio_max
        if self._config.log_samples:
            described = divergences(output.log_ratio, mask, self._ratio_edges)
            for sample, divergence in zip(batch, described, strict=True):
                sample.divergence = None if math.isnan(sample.kl) else divergence


def schedule(config: TrainSection, done: int) -> float:
    """Share of the peak learning rate for the step after `done` steps that moved the weights."""
    step, warmup = done + 1, config.warmup_steps
    if step <= warmup:
        return step / warmup
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / (config.schedule_steps - warmup))
    fall = progress if config.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - fall * (1 - config.schedule_floor)


_KEPT = (Outcome.TRAINED, Outcome.NO_SIGNAL, Outcome.SKIPPED)
_UNSCORED = frozenset(
    {
        Outcome.NO_SIGNAL,
        Outcome.DROPPED_ADVANTAGE,
        Outcome.DROPPED_DUPLICATE,
        Outcome.MASKED_TRUNCATED,
    }
)


def _repetitions(samples: Sequence[_Sample]) -> set[_Sample]:
    """Other nodes' samples that an earlier one of their group has the tokens of."""
    seen: set[tuple[int, bytes]] = set()
    repeated = set()
    for sample in samples:
        content = (sample.group, sample.rollout.token_ids.tobytes())
        if not sample.own and content in seen:
            repeated.add(sample)
        seen.add(content)
    return repeated


def _valid(rollouts: Sequence[Rollout]) -> Tensor:
    """`valid_samples` of rollouts of different lengths: (N,), bool."""
    lengths = np.array([len(rollout.logprobs) for rollout in rollouts])
    mask = np.arange(max(1, lengths.max())) < lengths[:, None]
    logprobs = np.zeros(mask.shape, np.float32)
    logprobs[mask] = np.concatenate([rollout.logprobs for rollout in rollouts])
    return valid_samples(torch.from_numpy(logprobs), torch.from_numpy(mask))


def _micro_batches(samples: list[_Sample], max_tokens: int) -> Iterator[list[_Sample]]:
    """Split into batches whose padded size stays within `max_tokens`, or that hold one sample.

    Longest first: similar lengths pad little, and what does not fit in memory fails at once.
    """
    batch: list[_Sample] = []
    for sample in sorted(samples, key=lambda s: -s.width):
        if batch and (len(batch) + 1) * batch[0].width > max_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _per_sample(samples: list[_Sample]) -> tuple[SampleReport, ...]:
    return tuple(
        SampleReport(s.outcome.value, s.advantage, s.length, s.truncated, s.divergence)
        for s in samples
    )


def _per_peer(samples: list[_Sample]) -> dict[str, PeerReport]:
    by_peer: dict[str, list[_Sample]] = {}
    for sample in samples:
        by_peer.setdefault(OWN if sample.own else sample.publisher, []).append(sample)
    reports = {}
    for peer, theirs in by_peer.items():
        outcomes = Counter(s.outcome for s in theirs)
        p50, p90, p99 = _quantiles(theirs)
        reports[peer] = PeerReport(
            samples=len(theirs),
            trained=outcomes[Outcome.TRAINED],
            dropped_advantage=outcomes[Outcome.DROPPED_ADVANTAGE],
            dropped_kl=outcomes[Outcome.DROPPED_KL],
            kl_p50=p50,
            kl_p90=p90,
            kl_p99=p99,
            log_ratio_max=max(
                (s.log_ratio_max for s in theirs if not math.isnan(s.log_ratio_max)), default=None
            ),
        )
    return reports


def _quantiles(samples: list[_Sample]) -> tuple[float | None, float | None, float | None]:
    return kl_quantiles([s.kl for s in samples]) or (None, None, None)


def _entropy(samples: list[_Sample]) -> float | None:
    """Mean of -log p over tokens drawn from p: an unbiased estimate of the entropy per token."""
    logprobs = [s.rollout.logprobs for s in samples if s.outcome is not Outcome.INVALID]
    return -float(np.concatenate(logprobs).mean(dtype=np.float64)) if logprobs else None
