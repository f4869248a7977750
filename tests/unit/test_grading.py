"""Grading goes on where one text cannot be scored."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from swarm.protocol.manifest import RewardSpec
from swarm.protocol.prompts import Prompt
from swarm.rewards.combined import parse
from swarm.rewards.grading import Grader
from swarm.rewards.reward import RewardError, RewardFault, Spec

HANGS = 7


def grader(reward: Spec | None = None) -> Grader:
    async def score(spec: Any, completions: list[str], **_: Any) -> list[float]:
        if str(HANGS) in completions:
            raise RewardError(RewardFault.TIMEOUT, "killed after 10 s")
        return [0.5 if spec.name == "sum" else float(spec.name != "format") for _ in completions]

    workers: Any = SimpleNamespace(score=score)
    tokenizer: Any = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    return Grader(workers, tokenizer, reward or RewardSpec(name="number"))


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


async def test_a_prompt_s_own_reward_goes_before_the_swarm_s() -> None:
    own = replace(prompt("a"), reward=RewardSpec(name="format"))
    grade = grader()
    for asked, reward in ((prompt("a"), 1.0), (own, 0.0)):
        rewards = await grade.rewards(asked, [completion(1)])
        assert rewards is not None
        assert rewards.tolist() == [reward]
        assert await grade.accuracy([asked], [completion(1)]) == reward


async def test_evaluation_counts_what_is_right_by_a_sum_s_first_part() -> None:
    grade = grader(parse("number:0.9+format:0.1"))
    rewards = await grade.rewards(prompt("a"), [completion(1)])
    assert rewards is not None
    assert rewards.tolist() == [0.5]
    assert await grade.accuracy([prompt("a")], [completion(1)]) == 1.0
    assert await grader(parse("format+number")).accuracy([prompt("a")], [completion(1)]) == 0.0
