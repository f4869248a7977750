"""Grading goes on where one text cannot be scored."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from swarm.protocol.manifest import RewardSpec
from swarm.protocol.prompts import Prompt
from swarm.rewards.grading import Grader
from swarm.rewards.registry import RewardFault
from swarm.rewards.workers import RewardError

HANGS = 7


def grader() -> Grader:
    async def score(spec: Any, completions: list[str], **_: Any) -> list[float]:
        if str(HANGS) in completions:
            raise RewardError(RewardFault.TIMEOUT, "killed after 10 s")
        return [1.0 for _ in completions]

    workers: Any = SimpleNamespace(score=score)
    tokenizer: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    return Grader(workers, tokenizer, RewardSpec(name="number"))


def prompt(text: str) -> Prompt:
    return Prompt(prompt=text, messages=None, answer="1")


def completion(*ids: int) -> tuple[np.ndarray, bool]:
    return np.array(ids, np.int32), True


async def test_a_text_that_hangs_the_worker_costs_its_own_group_only() -> None:
    grade = grader()
    assert await grade.rewards(prompt("a"), [completion(1), completion(HANGS)]) is None
    assert "killed after 10 s" in grade.trouble
    rewards = await grade.rewards(prompt("b"), [completion(1), completion(2)])
    assert rewards is not None
    assert rewards.tolist() == [1.0, 1.0]
    assert grade.trouble == ""


async def test_a_greedy_completion_without_a_reward_is_not_right() -> None:
    prompts = [prompt("a"), prompt("b"), prompt("c"), prompt("d")]
    completions = [completion(1), completion(HANGS), completion(2), completion(3)]
    assert await grader().accuracy(prompts, completions) == 0.75
