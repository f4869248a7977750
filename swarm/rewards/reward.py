"""What a reward is: a pure function of text with a name, a version and parameters.

Owns: the form that every reward has, a package's too (docs/REWARDS.md), its parameters' check, the
rule for truncated completions and for answers in tags. Does not know: which rewards there are
(registry), processes, time limits, manifests.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from swarm.errors import ExitCode, SwarmError
from swarm.rewards import tags

ParamValue = str | int | float | bool
Params = Mapping[str, ParamValue]

# What becomes of completions that were cut at the length limit: no reward, or their text's.
TRUNCATED: Mapping[str, tuple[ParamValue, ...]] = {"truncated": ("zero", "score")}
# Where the reward looks: in the whole text, or in the last <answer>...</answer> only.
COMMON: Mapping[str, tuple[ParamValue, ...]] = {**TRUNCATED, "inside": ("text", "answer")}


class RewardFault(StrEnum):
    """Why a group has no rewards; also the metric label."""

    UNKNOWN = "unknown"
    MISSING = "missing"
    PARAMS = "params"
    SIZE = "size"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"
    FAILED = "failed"
    CLOSED = "closed"


class RewardError(SwarmError):
    """A group could not be scored.

    Args:
        reason: one of `RewardFault`; anything else (a worker's word) becomes "failed".
        detail: what was found and what would be right.
    """

    exit_code = ExitCode.CONFIG

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = RewardFault(reason) if reason in set(RewardFault) else RewardFault.FAILED
        super().__init__(f"reward: {self.reason}: {detail}")
        self.detail = detail


class Spec(Protocol):
    """What a manifest or a prompt says about a reward."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def params(self) -> Params: ...


@dataclass(frozen=True, slots=True)
class PlainSpec:
    """A reward's name, version and parameters without the manifest's checks."""

    name: str
    version: int
    params: Params


def _no_objection(params: Params) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Reward:
    """One version of one reward.

    Attributes:
        score: (completion, answer, prompt, params) -> reward; total, deterministic, finite.
        check_answer: (answer, params) -> why it can never be matched, or None.
        params: each parameter's allowed values, the default first. `truncated` and `inside` are
            obeyed here, before `score` sees the text.
        texts: parameters that are any text, with their defaults.
        check_params: (params) -> what is wrong with them together, or None. May try them out: it
            runs in a worker under its time limit.
    """

    score: Callable[[str, str, str, Params], float]
    check_answer: Callable[[str, Params], str | None]
    params: Mapping[str, tuple[ParamValue, ...]] = field(default_factory=lambda: COMMON)
    texts: Mapping[str, str] = field(default_factory=dict)
    check_params: Callable[[Params], str | None] = _no_objection


class Scorer:
    """A reward with complete parameters.

    Args:
        label: name and version, for messages.
        reward: the one of that name and version.
        given: parameters; those that are missing take their defaults.

    Attributes:
        params: all parameters.

    Raises:
        RewardError: "params", with what there is.
    """

    def __init__(self, label: str, reward: Reward, given: Params) -> None:
        self._label = label
        self._reward = reward
        self.params = _complete(label, reward, given)

    def check(self) -> None:
        """Try the parameters out.

        Raises:
            RewardError: "params".
        """
        wrong = self._reward.check_params(self.params)
        if wrong is not None:
            raise RewardError(RewardFault.PARAMS, f"{self._label}: {wrong}")

    def check_answer(self, answer: str) -> str | None:
        """Why no completion can match this answer; None: one can."""
        return self._reward.check_answer(answer, self.params)

    def score(self, completion: str, finished: bool, answer: str, prompt: str) -> float:
        """The reward of one completion.

        Raises:
            RewardError: "failed": it is no finite number.
        """
        if not finished and self.params.get("truncated", "score") == "zero":
            return 0.0
        if self.params.get("inside") == "answer":
            tagged = tags.last(completion, "answer")
            if tagged is None:
                return 0.0
            completion = tagged
        value = float(self._reward.score(completion, answer, prompt, self.params))
        if not math.isfinite(value):
            raise RewardError(RewardFault.FAILED, f"{self._label} returned {value}")
        return value


def _complete(label: str, reward: Reward, given: Params) -> Params:
    for key, value in given.items():
        allowed = reward.params.get(key)
        if allowed is None and key not in reward.texts:
            names = ", ".join((*reward.params, *reward.texts))
            raise RewardError(
                RewardFault.PARAMS, f"{label} has no parameter {key!r}; it has {names}"
            )
        if allowed is None:
            if type(value) is not str:
                raise RewardError(RewardFault.PARAMS, f"{label}: {key} = {value!r}; it is a text")
        elif not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise RewardError(
                RewardFault.PARAMS,
                f"{label}: {key} = {value!r}; "
                f"it is one of {', '.join(repr(choice) for choice in allowed)}",
            )
    defaults = {key: choices[0] for key, choices in reward.params.items()} | dict(reward.texts)
    return {key: given.get(key, default) for key, default in defaults.items()}
