"""Looking rewards up, their parameters, and the rule for truncated completions."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from swarm.protocol.manifest import RewardSpec
from swarm.rewards import combined, registry
from swarm.rewards.registry import Reward, RewardError, resolve, score_group
from swarm.rewards.reward import PlainSpec


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
        (spec("numbre"), "unknown", "no reward 'numbre' version 1; exact 1, format 1"),
        (spec(version=2), "unknown", "no reward 'number' version 2"),
        (spec(case=True), "params", "no parameter 'case'; it has truncated, inside"),
        (spec(truncated="half"), "params", "truncated = 'half'; it is one of 'zero', 'score'"),
        (spec("exact", ignore_case=1), "params", "ignore_case = 1; it is one of False, True"),
        (spec("regex", pattern=5), "params", "regex 1: pattern = 5; it is a text"),
        (spec("sum"), "params", "they are a, b, c ... in order"),
        (spec("sum", number=1.0), "params", "sum 1 has no parameter 'number'; its parts are a, b"),
        (spec("sum", a_reward="number", c_reward="exact"), "params", "parts .'a', 'c'.; they are"),
        (spec("sum", a_reward="sum"), "params", "a part cannot be a sum itself"),
        (spec("sum", a_reward="number", a_weight=1), "params", "weight 1; they are a name"),
        (spec("sum", a_reward="number", a_case=True), "params", "number 1 has no parameter 'case'"),
        (spec("sum", a_reward="numbre"), "unknown", "no reward 'numbre' version 1"),
    ],
)
def test_unknown_rewards_and_parameters_are_named(
    wrong: RewardSpec, reason: str, says: str
) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        score_group(wrong, ["5"], [True], "5", "")
    assert caught.value.reason == reason
    with pytest.raises(RewardError, match=says):
        resolve(wrong)


def test_a_resolved_reward_spells_its_parameters_out() -> None:
    params = resolve(spec("exact", ignore_case=True)).params
    assert params == {"truncated": "zero", "inside": "text", "ignore_case": True}
    assert resolve(PlainSpec("exact", 1, params)).params == params


def test_answers_that_nothing_can_match_are_named() -> None:
    def check(checked: RewardSpec, answer: str) -> str | None:
        return resolve(checked).check_answer(answer)

    assert check(spec(), "#### 7") is None
    assert check(spec(), "seven") == "it holds no number"
    assert check(spec("exact"), "seven") is None
    assert check(spec("exact"), " \n") == "it is empty"
    assert check(spec("sum", a_reward="format", b_reward="number"), "x") == "it holds no number"
    assert check(spec("regex", pattern="x", compare="number"), "x") == "it holds no number"


def test_a_reward_that_is_no_number_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Reward(lambda *_: math.nan, lambda *_: None)
    monkeypatch.setattr(registry, "REWARDS", MappingProxyType({("number", 1): broken}))
    with pytest.raises(RewardError, match="returned nan") as caught:
        score_group(spec(), ["5"], [True], "5", "")
    assert caught.value.reason == "failed"


def test_a_reason_that_no_worker_may_give_becomes_failed() -> None:
    assert RewardError("\x1b[2J", "x").reason == "failed"


# -- sums ----------------------------------------------------------------------------------------


def test_people_write_sums_in_short() -> None:
    assert combined.parse("number") == PlainSpec("number", 1, {})
    assert combined.parse("exact@1", {"ignore_case": True}).params == {"ignore_case": True}
    parsed = combined.parse("number:0.9+format:0.1", {"b_tags": "think answer"})
    assert parsed.name == "sum"
    assert parsed.params == {
        "a_reward": "number", "a_version": 1, "a_weight": 0.9,
        "b_reward": "format", "b_version": 1, "b_weight": 0.1, "b_tags": "think answer",
    }  # fmt: skip
    assert resolve(parsed).params == parsed.params | {
        "a_truncated": "zero", "a_inside": "text", "b_truncated": "zero", "b_opened": False,
    }  # fmt: skip
    assert resolve(PlainSpec("sum", 1, resolve(parsed).params)).params == resolve(parsed).params


@pytest.mark.parametrize(
    "text", ["", "a+", "Number", "number:x", "number:1:2", "a+" * 8 + "a", "x y"]
)
def test_what_is_no_reward_is_refused(text: str) -> None:
    with pytest.raises(RewardError) as caught:
        combined.parse(text)
    assert caught.value.reason == "params"


def test_a_sum_is_of_its_weighted_parts_with_their_own_parameters() -> None:
    parsed = combined.parse("number:0.9+format:0.1", {"a_truncated": "score"})
    texts = ["<answer>5</answer>", "5", "<answer>6</answer>", "6", "<answer>5</answer>"]
    finished = [True, True, True, True, False]
    assert score_group(parsed, texts, finished, "5", "") == [1.0, 0.9, 0.1, 0.0, 0.9]
    penalty = combined.parse("number+exact:-0.5")
    assert score_group(penalty, ["5", "= 5"], [True, True], "5", "") == [0.5, 1.0]


def test_the_first_part_tells_right_from_wrong() -> None:
    parsed = combined.parse("number:0.9+format:0.1", {"a_inside": "answer"})
    assert combined.main_part(parsed) == PlainSpec("number", 1, {"inside": "answer"})
    assert combined.main_part(spec("exact")) == spec("exact")


# -- rewards of packages -------------------------------------------------------------------------

THIRD_PARTY = """
from swarm.rewards.reward import COMMON, Reward

def score(completion, answer, prompt, params):
    if params["mode"] == "eval":
        return float(eval(completion))
    if params["mode"] == "open":
        return float(len(open(completion).read()))
    return float(len(completion) == int(answer))

VERSIONS = {2: Reward(score, lambda answer, params: None, {**COMMON, "mode": ("", "eval", "open")})}
"""


def install(folder: Path, version: str = "1.5") -> None:
    """A package with a reward, as pip would leave it."""
    (folder / "length_reward.py").write_text(THIRD_PARTY)
    info = folder / f"swarm_reward_length-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: swarm-reward-length\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(
        "[swarm_node.rewards]\nlength = length_reward:VERSIONS\n"
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.load.cache_clear()
    yield tmp_path
    registry.load.cache_clear()
    sys.modules.pop("length_reward", None)


def test_a_package_s_reward_is_named_with_its_package(package: Path) -> None:
    params = resolve(spec("length", 2)).params
    assert params["package"] == "swarm-reward-length==1.5"
    found = PlainSpec("length", 2, params)
    assert resolve(found).params == params
    assert score_group(found, ["abc", "ab"], [True, True], "3", "") == [1.0, 0.0]
    with pytest.raises(RewardError, match="has no version 1 of reward 'length'"):
        resolve(spec("length", 1))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"package": "swarm-reward-length==1.6"}, "swarm-reward-length==1.5 is installed"),
        ({"package": "swarm-reward-length==1.6"}, "pip install 'swarm-reward-length==1.6'"),
    ],
)
def test_another_version_of_a_package_is_not_used(
    package: Path, params: dict[str, Any], says: str
) -> None:
    with pytest.raises(RewardError, match=says) as caught:
        resolve(spec("length", 2, **params))
    assert caught.value.reason == "missing"


def test_a_package_that_is_missing_is_named() -> None:
    asked = spec("length", 2, package="swarm-reward-length==1.5")
    with pytest.raises(
        RewardError, match=r"not installed: pip install 'swarm-reward-length==1\.5'"
    ):
        resolve(asked)
    with pytest.raises(RewardError, match="no reward 'length' version 2; exact 1"):
        resolve(spec("length", 2))
