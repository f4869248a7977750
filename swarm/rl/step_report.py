"""What one training step did, in numbers: outcomes of its samples, shares of its publishers.

Owns: the report's fields and what they mean. Does not know: how a step is made.
"""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from swarm.rl.sample_report import SampleReport

OWN = "own"
"""Key of this node's own samples in `StepReport.per_peer`."""


class Outcome(StrEnum):
    """What became of a sample in a step; each has exactly one."""

    TRAINED = "trained"
    NO_SIGNAL = "no_signal"  # A = 0, and not the filter's to drop
    DROPPED_ADVANTAGE = "dropped_advantage"
    DROPPED_KL = "dropped_kl"
    DROPPED_DUPLICATE = "dropped_duplicate"
    MASKED_TRUNCATED = "masked_truncated"
    INVALID = "invalid"
    NOT_FINITE = "not_finite"  # the policy's log-probs are not
    SKIPPED = "skipped"  # kept, but the step's gradient was not finite


@dataclass(frozen=True, slots=True)
class PeerReport:
    """One publisher's share of a step. Statistics are of its scored samples; None without any."""

    samples: int
    trained: int
    dropped_advantage: int
    dropped_kl: int
    kl_p50: float | None
    kl_p90: float | None
    kl_p99: float | None
    log_ratio_max: float | None
    """Nats, the largest |log-ratio| of a token: 0 up to rounding for a policy like one's own."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. Samples are completions; None stands for "not known in this step"."""

    step: int
    """Batches so far, this one included, whether or not they moved the weights."""
    stepped: bool
    """The optimizer made at least one update."""
    updates: int
    """Optimizer updates made, of `inner_updates`."""
    nonfinite_gradient: bool
    """An update was left out because its gradient was not finite."""
    loss: float
    """Of the first update; 0 when nothing was trained on."""
    groups: int
    groups_without_signal: int
    """Groups in which every advantage is 0."""
    samples: int
    """The sum of the next nine."""
    trained: int
    no_signal: int
    dropped_advantage: int
    dropped_kl: int
    dropped_duplicate: int
    """Samples that repeat another one of their group (`train.drop_duplicates`)."""
    masked_truncated: int
    invalid: int
    not_finite: int
    """Samples for which our own log-probs are not finite."""
    skipped: int
    """Samples that passed the filter for nothing, because the gradient was not finite."""
    own_samples: int
    own_trained: int
    foreign_samples: int
    foreign_trained: int
    kept: int
    """Samples that the filter passes: `trained`, `no_signal`, `skipped`."""
    truncated_completions: int
    """Completions cut at the length limit."""
    kl_threshold: float
    kl_p50: float | None
    kl_p90: float | None
    kl_p99: float | None
    """Quantiles over the scored samples (those that went through the model), nats per sample."""
    per_peer: dict[str, PeerReport]
    """By publisher; this node's own samples under "own"."""
    ratio_mean: float | None
    ratio_max: float | None
    """Importance ratios before truncation, over the tokens trained on."""
    is_weight_mean: float | None
    truncated_share: float | None
    """Share of the tokens trained on whose ratio is above the truncation."""
    entropy: float | None
    """Nats per token of this node's policy when it sampled, estimated from its own samples."""
    grad_norm: float | None
    """Before clipping, of the first update."""
    learning_rate: float
    tokens: int
    """Completion tokens in forward and backward passes (the first update's)."""
    batch_tokens: int
    """Completion tokens of the whole batch."""
    micro_batches: int
    micro_batch_tokens: int
    """Their limit; below the configured one after the memory did not suffice."""
    optimizer_steps: int
    steps_without_signal: int
    steps_nonfinite: int
    """Totals since the start; they are part of the trainer's state."""
    seconds: float
    per_sample: tuple[SampleReport, ...]
    """Group by group, in the batch's order; empty without `train.log_samples`."""

    def to_dict(self) -> dict[str, Any]:
        """A flat dict of JSON-able values, but for `per_peer`: dicts by publisher.

        Without `per_sample`, which is large.
        """
        values = asdict(replace(self, per_sample=()))
        del values["per_sample"]
        return values
