"""Whether what an engine samples is what the trainer trains: its log-probs against the policy's.

Owns: the measurement, its limit, and one new start of an engine that fails it. Does not know: how
an engine takes over weights. Weights, caches and adapters that stayed the old ones look like
samples of another policy, and nothing else tells.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swarm.errors import EngineDriftError
from swarm.protocol.rollout import Rollout
from swarm.rl.engine import Engine, SamplingParams
from swarm.rl.policy import Policy, TokenIds

log = logging.getLogger(__name__)

PROBE_COMPLETIONS = 4
PROBE_TOKENS = 64
"""Of each, the first so many: some hundred tokens tell a stale policy from rounding."""

LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats, mean absolute difference. Rounding gives 1e-5 in float32. In bfloat16 it gives 0.04, as
much as between two ways of computing within one library."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Absolute differences of log-probs, in nats; NaN where a log-prob is not finite."""

    mean: float
    largest: float
    tokens: int


def measure(
    policy: Policy,
    prompts: Sequence[TokenIds],
    rollouts: Sequence[Rollout],
    temperature: float,
) -> Drift:
    """Compare the log-probs that came with these completions to the policy's own.

    Args:
        prompts: one for each rollout.
    """
    cut = [rollout.token_ids[:PROBE_TOKENS] for rollout in rollouts]
    with torch.no_grad():
        values, mask = policy.completion_logprobs(prompts, cut, temperature)
    expected = values[mask].double().cpu().numpy()
    found = np.concatenate([rollout.logprobs[:PROBE_TOKENS] for rollout in rollouts])
    difference = np.abs(expected - found.astype(np.float64))
    return Drift(float(difference.mean()), float(difference.max()), len(difference))


class ProbedEngine:
    """An engine whose first completions after each change of weights are measured.

    Args:
        engine: to be probed.
        policy: that it should sample from.
        limit: of the mean difference; 0: by the weights' dtype, see `LIMITS`.
    """

    def __init__(self, engine: Engine, policy: Policy, limit: float = 0.0) -> None:
        self._engine = engine
        self._policy = policy
        self.limit = limit or LIMITS.get(policy.dtype, max(LIMITS.values()))
        self._proved = -1
        self.drift: Drift | None = None

    @property
    def syncs(self) -> int:
        return self._engine.syncs

    def generate(
        self,
        prompts: Sequence[TokenIds],
        n: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> list[list[Rollout]]:
        """See `Engine.generate`.

        Raises:
            EngineDriftError: the log-probs differ too much, and after a new start too.
        """
        groups = self._engine.generate(prompts, n, sampling, seeds)
        if not groups or self._proved == self._engine.syncs:
            return groups
        if not self._probe(prompts, groups, sampling):
            log.error("%s; starting the engine again", self._finding())
            self._engine.restart()
            groups = self._engine.generate(prompts, n, sampling, seeds)
            if not self._probe(prompts, groups, sampling):
                raise EngineDriftError(self._finding())
        self._proved = self._engine.syncs
        return groups

    def sync(self) -> None:
        self._engine.sync()

    def sleep(self) -> None:
        self._engine.sleep()

    def restart(self) -> None:
        self._engine.restart()

    def close(self) -> None:
        self._engine.close()

    def describe(self) -> dict[str, Any]:
        drift = self.drift
        known = drift is not None and math.isfinite(drift.mean)
        return {
            **self._engine.describe(),
            "drift": drift.mean if drift is not None and known else None,
            "drift_max": drift.largest if drift is not None and known else None,
            "drift_tokens": drift.tokens if drift is not None else 0,
            "drift_limit": self.limit,
        }

    # -- internals -------------------------------------------------------------------------------

    def _probe(
        self,
        prompts: Sequence[TokenIds],
        groups: Sequence[Sequence[Rollout]],
        sampling: SamplingParams,
    ) -> bool:
        """Measure; whether it is within the limit."""
        # Of as many prompts as possible: one's cache may be stale, another's not.
        chosen = sorted(
            ((rank, index) for index, group in enumerate(groups) for rank in range(len(group)))
        )[:PROBE_COMPLETIONS]
        self.drift = measure(
            self._policy,
            [prompts[index] for _, index in chosen],
            [groups[index][rank] for rank, index in chosen],
            sampling.temperature,
        )
        return self.drift.mean <= self.limit

    def _finding(self) -> str:
        mean = math.nan if self.drift is None else self.drift.mean
        return (
            f"the engine's log-probs differ from the trained model's by {mean:.3g} nats on average "
            f"(limit {self.limit:g})"
        )
