"""Tasks of reasoning-gym: the reward agrees with the package, and the package's scorers are read.

The package is imported here only; a node never does.
"""

import ast
import inspect
import textwrap
from typing import Any

import pytest
from reasoning_gym import factory

from swarm.rewards import gym
from swarm.rewards.registry import score_group
from swarm.rewards.reward import PlainSpec

EVALUATORS = {"eval", "exec", "compile", "parse_expr", "sympify", "literal_eval", "loads", "load"}


@pytest.mark.parametrize("task", gym.TASKS)
def test_the_package_s_scorer_of_an_allowed_task_evaluates_nothing(task: str) -> None:
    """Its source calls nothing that evaluates: a version of the package that does fails here."""
    source = textwrap.dedent(inspect.getsource(factory.DATASETS[task][0].score_answer))
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
    }
    assert not called & EVALUATORS
    assert "metadata" not in source


@pytest.mark.parametrize("task", gym.TASKS)
def test_full_credit_is_the_package_s(task: str) -> None:
    data: Any = factory.create_dataset(task, size=6, seed=3)
    entries = [data[i] for i in range(6)]
    spec = PlainSpec("reasoning-gym", 1, {"task": task})
    answers = [str(entry["answer"]) for entry in entries]
    for entry, answer in zip(entries, answers, strict=True):
        assert gym.check_answer(answer, spec.params) is None
        theirs = [float(data.score_answer(other, entry) == 1.0) for other in answers]
        assert theirs[answers.index(answer)] == 1.0
        assert score_group(spec, answers, [True] * len(answers), answer, "") == theirs
