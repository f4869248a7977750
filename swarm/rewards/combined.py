"""Reward `sum` 1: the weighted sum of up to eight other rewards.

Owns: how the parts stand in a manifest's flat parameters, and the short form in which people write
them, `number:0.9+format:0.1`. The parts are called a, b, c ... in order: `a_reward`, `a_version`,
`a_weight`, and every parameter of that reward behind `a_`. The first part is the one that tells
right from wrong: evaluation counts what earns its full reward. Does not know: which rewards there
are (it is given a function that looks them up).
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence

from swarm.rewards.reward import (
    Params,
    ParamValue,
    PlainSpec,
    RewardError,
    RewardFault,
    Scorer,
    Spec,
)

NAME = "sum"
VERSION = 1
LABELS = "abcdefgh"

_TERM = re.compile(r"([a-z][a-z0-9_-]{0,63})(?:@([0-9]{1,5}))?(?::([+-]?[0-9.]{1,20}))?")


class Sum:
    """A weighted sum with complete parameters.

    Args:
        given: as in the manifest.
        resolve: looks one part up.

    Attributes:
        params: all parameters of all parts, and the weights.

    Raises:
        RewardError: of a part; "params" for parameters that make no parts.
    """

    def __init__(self, given: Params, resolve: Callable[[Spec], Scorer]) -> None:
        self._parts: list[tuple[float, Scorer]] = []
        self.params: dict[str, ParamValue] = {}
        for label, weight, spec in _parts(given):
            scorer = resolve(spec)
            self._parts.append((weight, scorer))
            own = {"reward": spec.name, "version": spec.version, "weight": weight, **scorer.params}
            self.params |= {f"{label}_{key}": value for key, value in own.items()}

    def check(self) -> None:
        """Try the parameters of every part out."""
        for _, scorer in self._parts:
            scorer.check()

    def check_answer(self, answer: str) -> str | None:
        """Why one of the parts can never be earned with this answer, or None."""
        reasons = (scorer.check_answer(answer) for _, scorer in self._parts)
        return next((reason for reason in reasons if reason is not None), None)

    def score(self, completion: str, finished: bool, answer: str, prompt: str) -> float:
        """The parts' rewards, each times its weight, added up without loss."""
        return math.fsum(
            weight * scorer.score(completion, finished, answer, prompt)
            for weight, scorer in self._parts
        )


def names(specs: Iterable[Spec]) -> set[str]:
    """The names of all single rewards in these; parameters that make no parts name none."""
    found: set[str] = set()
    for spec in specs:
        if spec.name == NAME:
            found |= {str(v) for k, v in spec.params.items() if k in _REWARD_KEYS}
        else:
            found.add(spec.name)
    return found


def main_part(spec: Spec) -> Spec:
    """The reward that tells right from wrong: a sum's first part, else the reward itself."""
    return _parts(spec.params)[0][2] if spec.name == NAME else spec


def parse(text: str, params: Params | None = None) -> PlainSpec:
    """Read `NAME`, `NAME@VERSION` or a sum `NAME:WEIGHT+NAME:WEIGHT`.

    Args:
        text: as a person writes it.
        params: further parameters; of a sum's parts behind `a_`, `b_` ...

    Raises:
        RewardError: "params".
    """
    terms = [_TERM.fullmatch(term.strip()) for term in text.split("+")]
    if None in terms or len(terms) > len(LABELS):
        raise RewardError(
            RewardFault.PARAMS,
            f"{text!r}: expected a name such as number, or a sum of at most {len(LABELS)} such as "
            "number:0.9+format:0.1",
        )
    parts = [(match[1], int(match[2] or 1), match[3]) for match in terms if match is not None]
    if len(parts) == 1 and parts[0][2] is None:
        return PlainSpec(parts[0][0], parts[0][1], dict(params or {}))
    flat: dict[str, ParamValue] = {}
    for label, (name, version, weight) in zip(LABELS, parts, strict=False):
        try:
            number = float(weight or 1.0)
        except ValueError:
            raise RewardError(
                RewardFault.PARAMS, f"{text!r}: the weight {weight!r} is no number"
            ) from None
        flat |= {f"{label}_reward": name, f"{label}_version": version, f"{label}_weight": number}
    return PlainSpec(NAME, VERSION, flat | dict(params or {}))


_REWARD_KEYS = frozenset(f"{label}_reward" for label in LABELS)


def _parts(params: Params) -> Sequence[tuple[str, float, PlainSpec]]:
    """Label, weight and reward of each part.

    Raises:
        RewardError: "params".
    """
    grouped: dict[str, dict[str, ParamValue]] = {}
    for key, value in params.items():
        label, _, name = key.partition("_")
        if len(label) != 1 or label not in LABELS or not name:
            raise RewardError(
                RewardFault.PARAMS,
                f"sum 1 has no parameter {key!r}; its parts are a, b, c ...: a_reward, a_weight, "
                "and a_ before any parameter of that reward",
            )
        grouped.setdefault(label, {})[name] = value
    if not grouped or "".join(sorted(grouped)) != LABELS[: len(grouped)]:
        raise RewardError(
            RewardFault.PARAMS, f"sum 1: parts {sorted(grouped)}; they are a, b, c ... in order"
        )
    found = []
    for label in sorted(grouped):
        own = grouped[label]
        reward: ParamValue = own.pop("reward", "")
        version: ParamValue = own.pop("version", 1)
        weight: ParamValue = own.pop("weight", 1.0)
        if type(reward) is not str or type(version) is not int or type(weight) is not float:
            raise RewardError(
                RewardFault.PARAMS,
                f"sum 1: part {label}: reward {reward!r}, version {version!r}, weight {weight!r}; "
                "they are a name, a whole number and a number with a point",
            )
        if reward == NAME:
            raise RewardError(RewardFault.PARAMS, "sum 1: a part cannot be a sum itself")
        if not math.isfinite(weight):
            raise RewardError(RewardFault.PARAMS, f"sum 1: {label}_weight = {weight}")
        found.append((label, weight, PlainSpec(reward, version, own)))
    return found
