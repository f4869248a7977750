"""Looking rewards up, their parameters, and the rule for truncated completions."""

import math
from types import MappingProxyType

import pytest

from swarm.protocol.manifest import RewardSpec
from swarm.rewards import registry
from swarm.rewards.registry import Reward, RewardError, check_answer, check_reward, score_group


def spec(name: str = "number", version: int = 1, **params: str | int | float | bool) -> RewardSpec:
    return RewardSpec(name=name, version=version, params=params)


def test_truncated_completions_get_nothing_unless_the_manifest_says_so() -> None:
    texts, finished = ["5", "5", "6"], [True, False, False]
    assert score_group(spec(), texts, finished, "5", "") == [1.0, 0.0, 0.0]
    assert score_group(spec(truncated="zero"), texts, finished, "5", "") == [1.0, 0.0, 0.0]
    assert score_group(spec(truncated="score"), texts, finished, "5", "") == [1.0, 1.0, 0.0]


def test_every_completion_needs_its_flag() -> None:
    with pytest.raises(ValueError, match="zip"):
        score_group(spec(), ["5", "5"], [True], "5", "")


@pytest.mark.parametrize(
    ("wrong", "reason", "says"),
    [
        (spec("numbre"), "unknown", "no reward 'numbre' version 1; exact 1, number 1"),
        (spec(version=2), "unknown", "no reward 'number' version 2"),
        (spec(case=True), "params", "no parameter 'case'; it has truncated"),
        (spec(truncated="half"), "params", "truncated = 'half'; it is one of 'zero', 'score'"),
        (spec("exact", ignore_case=1), "params", "ignore_case = 1; it is one of False, True"),
    ],
)
def test_unknown_rewards_and_parameters_are_named(
    wrong: RewardSpec, reason: str, says: str
) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        score_group(wrong, ["5"], [True], "5", "")
    assert caught.value.reason == reason
    with pytest.raises(RewardError, match=says):
        check_reward(wrong)


def test_a_checked_reward_spells_its_parameters_out() -> None:
    checked = check_reward(spec("exact", ignore_case=True))
    assert checked.params == {"truncated": "zero", "ignore_case": True}
    assert check_reward(checked) == checked


def test_answers_that_nothing_can_match_are_named() -> None:
    assert check_answer(spec(), "#### 7") is None
    assert check_answer(spec(), "seven") == "it holds no number"
    assert check_answer(spec("exact"), "seven") is None
    assert check_answer(spec("exact"), " \n") == "it is empty"


def test_a_reward_that_is_no_number_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Reward(lambda *_: math.nan, lambda *_: None, {"truncated": ("zero", "score")})
    monkeypatch.setattr(registry, "REWARDS", MappingProxyType({("number", 1): broken}))
    with pytest.raises(RewardError, match="returned nan") as caught:
        score_group(spec(), ["5"], [True], "5", "")
    assert caught.value.reason == "failed"


def test_a_reason_that_no_worker_may_give_becomes_failed() -> None:
    assert RewardError("\x1b[2J", "x").reason == "failed"
