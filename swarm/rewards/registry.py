"""Which rewards there are: (name, version) -> a pure function of text.

Owns: the table, the check of a reward's parameters, and how a group is scored, the rule for
truncated completions included. A version never changes what it returns (tests/golden holds it);
a better extraction is a new version. Does not know: processes, time limits, manifests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from swarm.errors import ExitCode, SwarmError
from swarm.rewards import exact, number

if TYPE_CHECKING:  # pydantic has no place in the worker processes, which import this module
    from swarm.protocol.manifest import RewardSpec

ParamValue = str | int | float | bool
Params = Mapping[str, ParamValue]


class RewardFault(StrEnum):
    """Why a group has no rewards; also the metric label."""

    UNKNOWN = "unknown"
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
    """What a manifest says about its reward."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def params(self) -> Params: ...


@dataclass(frozen=True, slots=True)
class Reward:
    """One version of one reward.

    Attributes:
        score: (completion, answer, prompt, params) -> reward; total, deterministic, linear time.
        check_answer: (answer, params) -> why it can never be matched, or None.
        params: each parameter's allowed values, the default first.
    """

    score: Callable[[str, str, str, Params], float]
    check_answer: Callable[[str, Params], str | None]
    params: Mapping[str, tuple[ParamValue, ...]]


# What becomes of completions that were cut at the length limit: no reward, or their text's.
_COMMON: Mapping[str, tuple[ParamValue, ...]] = {"truncated": ("zero", "score")}

REWARDS: Mapping[tuple[str, int], Reward] = MappingProxyType(
    {
        ("number", 1): Reward(number.score, number.check_answer, _COMMON),
        ("exact", 1): Reward(
            exact.score, exact.check_answer, {**_COMMON, "ignore_case": (False, True)}
        ),
    }
)


def resolve(name: str, version: int, params: Params) -> tuple[Reward, Params]:
    """Look a reward up and complete its parameters with the defaults.

    Raises:
        RewardError: "unknown" or "params", with what there is.
    """
    reward = REWARDS.get((name, version))
    if reward is None:
        known = ", ".join(f"{n} {v}" for n, v in sorted(REWARDS))
        raise RewardError(RewardFault.UNKNOWN, f"no reward {name!r} version {version}; {known}")
    for key, value in params.items():
        allowed = reward.params.get(key)
        if allowed is None:
            raise RewardError(
                RewardFault.PARAMS,
                f"{name} {version} has no parameter {key!r}; it has {', '.join(reward.params)}",
            )
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            raise RewardError(
                RewardFault.PARAMS,
                f"{name} {version}: {key} = {value!r}; "
                f"it is one of {', '.join(repr(choice) for choice in allowed)}",
            )
    return reward, {key: params.get(key, choices[0]) for key, choices in reward.params.items()}


def check_reward(spec: "RewardSpec") -> "RewardSpec":
    """The same reward with every parameter written out.

    Raises:
        RewardError: "unknown" or "params".
    """
    _, params = resolve(spec.name, spec.version, spec.params)
    return spec.model_copy(update={"params": dict(params)})


def check_answer(spec: Spec, answer: str) -> str | None:
    """Why no completion can match this answer, for whoever makes a prompt set; None: it can."""
    reward, params = resolve(spec.name, spec.version, spec.params)
    return reward.check_answer(answer, params)


def score_group(
    spec: Spec,
    completions: Sequence[str],
    finished: Sequence[bool],
    answer: str,
    prompt: str,
) -> list[float]:
    """Score all completions of one prompt.

    Args:
        spec: name, version and parameters.
        completions: decoded texts, without special tokens.
        finished: for each, whether it ended by itself and not at the length limit.
        answer: the prompt's reference answer.
        prompt: the prompt's text.

    Raises:
        RewardError: unknown reward, wrong parameters, or a reward that is not a finite number.
    """
    reward, params = resolve(spec.name, spec.version, spec.params)
    scores = []
    for text, complete in zip(completions, finished, strict=True):
        value = 0.0
        if complete or params["truncated"] == "score":
            value = reward.score(text, answer, prompt, params)
        if not math.isfinite(value):
            raise RewardError(RewardFault.FAILED, f"{spec.name} {spec.version} returned {value}")
        scores.append(value)
    return scores
