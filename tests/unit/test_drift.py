"""The drift of an engine from its policy, and what becomes of one that drifts."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm.config import ModelSection
from swarm.errors import EngineDriftError
from swarm.protocol.rollout import Rollout
from swarm.rl.drift import LIMITS, PROBE_COMPLETIONS, PROBE_TOKENS, ProbedEngine, measure
from swarm.rl.engine import SamplingParams, TransformersEngine
from swarm.rl.policy import Policy, TokenIds

SAMPLING = SamplingParams(0.8, 100, ())


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Policy:
    return Policy.load(ModelSection(path=str(tiny_folder)), seed=0)


class Stale(TransformersEngine):
    """Says log-probs that are off by `error`, until it was started again `restarts_needed` times.

    Attributes:
        errors: added to the log-probs, by rank in the group.
    """

    def __init__(self, policy: Policy, errors: Sequence[float], restarts_needed: int = 99) -> None:
        super().__init__(policy)
        self.syncs = 1
        self.errors = errors
        self.restarts = 0
        self.restarts_needed = restarts_needed

    def sync(self) -> None:
        self.syncs += 1

    def restart(self) -> None:
        self.restarts += 1
        self.syncs += 1

    def describe(self) -> dict[str, Any]:
        return {"kind": "stale", "syncs": self.syncs}

    def generate(
        self,
        prompts: Sequence[TokenIds],
        n: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> list[list[Rollout]]:
        groups = super().generate(prompts, n, sampling, seeds)
        if self.restarts >= self.restarts_needed:
            return groups
        return [
            [
                Rollout(r.token_ids, (r.logprobs - error).astype(np.float32), r.finish)
                for r, error in zip(group, self.errors, strict=True)
            ]
            for group in groups
        ]


def test_what_is_measured(policy: Policy) -> None:
    prompts = [[1, 2], [3]]
    groups = Stale(policy, [0.5]).generate(prompts, 1, SAMPLING, [1, 2])
    exact = TransformersEngine(policy).generate(prompts, 1, SAMPLING, [1, 2])
    found = measure(policy, prompts, [groups[0][0], exact[1][0]], SAMPLING.temperature)
    assert found.mean == pytest.approx(0.25, abs=1e-4)
    assert found.largest == pytest.approx(0.5, abs=1e-4)
    assert found.tokens == 2 * PROBE_TOKENS


def test_engine_that_agrees_is_probed_once_for_each_sync(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Stale(policy, [], restarts_needed=0)
    engine = ProbedEngine(inner, policy)
    scored = []
    original = policy.completion_logprobs

    def counted(prompts: Sequence[TokenIds], *rest: Any) -> Any:
        scored.append(len(prompts))
        return original(prompts, *rest)

    monkeypatch.setattr(policy, "completion_logprobs", counted)
    for _ in range(3):
        engine.generate([[1], [2]], 3, SAMPLING, [1, 2])
    assert scored == [PROBE_COMPLETIONS]
    engine.sync()
    engine.generate([[1]], 3, SAMPLING, [1])
    assert scored == [PROBE_COMPLETIONS, 3]
    told = engine.describe()
    assert told["drift"] < 1e-5 < told["drift_limit"] == LIMITS[torch.float32]
    assert told["drift_tokens"] == 3 * PROBE_TOKENS
    assert (told["kind"], inner.restarts) == ("stale", 0)


def test_drift_is_mended_by_a_new_start(policy: Policy) -> None:
    inner = Stale(policy, [0.0, 0.1], restarts_needed=1)
    engine = ProbedEngine(inner, policy)
    (group,) = engine.generate([[1]], 2, SAMPLING, [1])
    assert inner.restarts == 1
    assert measure(policy, [[1], [1]], group, 0.8).largest < 1e-5


@pytest.mark.parametrize("error", [0.01, math.nan, math.inf])
def test_drift_that_stays_is_an_error_each_time(policy: Policy, error: float) -> None:
    inner = Stale(policy, [0.0, error])
    engine = ProbedEngine(inner, policy)
    for again in (1, 2):
        with pytest.raises(EngineDriftError, match=r"differ .* on average \(limit 0\.001\)"):
            engine.generate([[1]], 2, SAMPLING, [1])
        assert inner.restarts == again
    drift = engine.describe()["drift"]
    assert drift == (pytest.approx(0.005, rel=0.01) if error == 0.01 else None)
    patient = ProbedEngine(Stale(policy, [0.0, 0.01]), policy, limit=0.5)
    patient.generate([[1]], 2, SAMPLING, [1])


def test_each_prompt_is_probed_before_a_second_completion_of_one(policy: Policy) -> None:
    """One prompt's cache may be stale, the others' not."""

    class StaleForOne(Stale):
        def generate(self, prompts: Any, n: int, sampling: Any, seeds: Any) -> Any:
            exact = TransformersEngine(policy).generate(prompts, n, sampling, seeds)
            exact[-1] = Stale(policy, [9.0] * n).generate(prompts[-1:], n, sampling, seeds[-1:])[0]
            return exact

    engine = ProbedEngine(StaleForOne(policy, []), policy)
    with pytest.raises(EngineDriftError):
        engine.generate([[1], [2], [3], [4]], 4, SAMPLING, [1, 2, 3, 4])
