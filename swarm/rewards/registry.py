"""Which rewards there are, by name and version, and how a group is scored with one.

Owns: the table of built-in rewards, and finding those that a package brings. A version never
changes what it returns (tests/golden holds it); a better extraction is a new version. Does not
know: processes, time limits, manifests.

A reward of a package stands in the manifest together with that package's name and version, in the
parameter `package`, so that whoever lacks it can be told what to install. Such code runs in worker
processes only: the node asks them, and never imports it.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from types import MappingProxyType

from swarm.rewards import combined, exact, format_tags, gym, number, pattern
from swarm.rewards.reward import (
    Params,
    Reward,
    RewardError,
    RewardFault,
    Scorer,
    Spec,
)

__all__ = ["Params", "Reward", "RewardError", "RewardFault", "load", "resolve", "score_group"]

ENTRY_POINTS = "swarm_node.rewards"
PACKAGE = "package"

REWARDS: Mapping[tuple[str, int], Reward] = MappingProxyType(
    {
        ("exact", 1): exact.REWARD,
        ("format", 1): format_tags.REWARD,
        ("number", 1): number.REWARD,
        ("reasoning-gym", 1): gym.REWARD,
        ("regex", 1): pattern.REWARD,
    }
)

# Built-in rewards that need a package of their own: module, and distribution.
_OPTIONAL = {"math": ("swarm.rewards.math_answer", "math-verify")}
_EXTRA = {"math": "swarm-node[math]"}


def needs_loading(name: str) -> bool:
    """Whether a reward's code is beyond the standard library, and imported where it is used."""
    return name != combined.NAME and not any(name == built_in for built_in, _ in REWARDS)


@lru_cache
def load(name: str) -> tuple[Mapping[int, Reward], str]:
    """Import the code of a reward that is not in the table above.

    Returns:
        Its versions (none where it is not installed), and its package as "name==version".
    """
    if name in _OPTIONAL:
        module, distribution = _OPTIONAL[name]
        try:
            versions: Mapping[int, Reward] = import_module(module).VERSIONS
            return versions, f"{distribution}=={version(distribution)}"
        except (ImportError, PackageNotFoundError):
            return {}, ""
    for entry in entry_points(group=ENTRY_POINTS, name=name):
        if entry.dist is not None:
            return entry.load(), f"{entry.dist.name}=={entry.dist.version}"
    return {}, ""


def resolve(spec: Spec) -> Scorer | combined.Sum:
    """Look a reward up and complete its parameters with the defaults.

    Raises:
        RewardError: "unknown", "missing" (with what to install) or "params".
    """
    if spec.name == combined.NAME and spec.version == combined.VERSION:
        return combined.Sum(spec.params, _single)
    return _single(spec)


def _single(spec: Spec) -> Scorer:
    label = f"{spec.name} {spec.version}"
    reward = REWARDS.get((spec.name, spec.version))
    if reward is not None:
        return Scorer(label, reward, spec.params)
    if not needs_loading(spec.name):
        raise _unknown(spec)
    versions, package = load(spec.name)
    asked = spec.params.get(PACKAGE, package)
    if not versions or asked != package:
        raise _missing(spec, asked, package)
    reward = versions.get(spec.version)
    if reward is None:
        raise RewardError(
            RewardFault.UNKNOWN, f"{package} has no version {spec.version} of reward {spec.name!r}"
        )
    params = {key: value for key, value in spec.params.items() if key != PACKAGE}
    scorer = Scorer(label, reward, params)
    scorer.params = {**scorer.params, PACKAGE: package}
    return scorer


def _missing(spec: Spec, asked: object, installed: str) -> RewardError:
    if not asked and spec.name not in _EXTRA:
        return _unknown(spec)
    here = f"{installed} is installed" if installed else "it is not installed"
    what = f"'{asked or _EXTRA[spec.name]}'"
    return RewardError(
        RewardFault.MISSING,
        f"reward {spec.name!r} comes with {asked or _EXTRA[spec.name]}; {here}: pip install {what}",
    )


def _unknown(spec: Spec) -> RewardError:
    known = ", ".join(
        f"{name} {number}" for name, number in sorted([*REWARDS, ("math", 1), ("sum", 1)])
    )
    return RewardError(
        RewardFault.UNKNOWN, f"no reward {spec.name!r} version {spec.version}; {known}"
    )


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
    scorer = resolve(spec)
    return [
        scorer.score(text, complete, answer, prompt)
        for text, complete in zip(completions, finished, strict=True)
    ]
