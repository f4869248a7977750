r"""Reward `math` 1: is the mathematical object that the text ends with the answer's equal?

Owns: finding it, and the check before anything of it reaches math-verify (which needs the extra
`math`). It is, in this order: the content of the last `\boxed{...}`, what follows the last `####`,
the last `$...$`, `\(...\)` or `\[...\]`, the last number. An answer without such a mark counts as a
whole. Equal means what `math_verify.verify` means: numbers to six decimals, expressions that
simplify to one another, sets, intervals, matrices, or the same text.

What was examined (math-verify 0.9.0, latex2sympy2_extended 1.11.0, sympy 1.14):

- `ExprExtractionConfig`, on by default, hands a text to sympy's `parse_expr`, which is `eval`. Not
  used here: only `LatexExtractionConfig` is, whose grammar (ANTLR) builds the tree itself.
- The tree's leaves that are text go to `sympy.Symbol` and `sympy.Function`, which keep them as
  names, and to `sympy.Number`, which executes "Integer (5 )"; the grammar lets only digits, points
  and commas get there. swarm.rewards.wall refuses to execute anything else.
- `latex2sympy` evaluates with `parse_expr` only `variable_values`, which nobody gives.

Before all this only a short text of known commands passes `_admitted`.
"""

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import math_verify

from swarm.rewards import number
from swarm.rewards.reward import COMMON, Params, Reward
from swarm.rewards.tags import last_box

MAX_CHARS = 300
MAX_DEPTH = 8
MAX_DIGITS = 30
MAX_EXPONENT_DIGITS = 4
MAX_POWERS = 12

_COMMANDS = frozenset(
    """
    frac dfrac tfrac cfrac sqrt cdot cdots times div pm mp pi theta alpha beta gamma delta phi
    lambda mu sigma omega infty cup cap in notin emptyset varnothing mid left right sin cos tan
    cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg le leq ge geq lt gt ne neq
    text textbf mathrm mathbf mathbb mbox overline quad qquad circ degree ldots dots begin end
    binom dbinom lfloor rfloor lceil rceil to boxed fbox approx angle displaystyle
    """.split()  # noqa: SIM905 - a word list reads better than seventy quoted words
)
_ENVIRONMENTS = frozenset({"pmatrix", "bmatrix", "vmatrix", "matrix"})
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_SYMBOLS = frozenset(r"\{}%$,;:!| &#_")
_PLAIN = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?'+-*/=<>()[]{}|^_%$&\\\n"
)
_LONG_NUMBER = re.compile(rf"[0-9][0-9,.]{{{MAX_DIGITS}}}")
_LARGE_POWER = re.compile(rf"(\^|\*\*)[\s{{(+-]*[0-9]{{{MAX_EXPONENT_DIGITS + 1}}}")
_TOWER = re.compile(r"\^[\s{(+-]*[0-9a-zA-Z.]*[\s})]*\^")
_VARIABLE_POWER = re.compile(r"\^[\s{(+-]*[0-9]{3}")
_LARGE_CHOICE = re.compile(r"binom.*[0-9]{4}", re.DOTALL)
_FACTORIAL = re.compile(r"[0-9]{4}[\s)}]*!|![\s)}]*!")
_LARGE = (_LONG_NUMBER, _LARGE_POWER, _TOWER, _LARGE_CHOICE, _FACTORIAL)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{([a-z]*)\}")
_MATH = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def score(completion: str, answer: str, prompt: str, params: Params) -> float:
    """1.0 where both name an object and the two are equal, else 0.0."""
    wanted = _parsed(_answer_of(answer))
    found = _found(completion)
    if not wanted or found is None:
        return 0.0
    got = _parsed(found)
    return float(bool(got) and math_verify.verify(list(wanted), list(got), timeout_seconds=None))


def check_answer(answer: str, params: Params) -> str | None:
    """Why no completion could ever match this answer, or None."""
    text = _answer_of(answer)
    if not _admitted(text):
        return "it is longer or has other signs and commands than reward math admits"
    return None if _parsed(text) else "it is no mathematical object"


def _answer_of(answer: str) -> str:
    """The marked part of an answer, else the whole of it."""
    found = _marked(answer)
    return answer.strip() if found is None else found


def _found(completion: str) -> str | None:
    found = _marked(completion)
    if found is None:
        value = number.final_number(completion)
        found = None if value is None else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return found


def _marked(text: str) -> str | None:
    """What is boxed, behind #### or between mathematical delimiters; of several the last."""
    place, boxed = last_box(text, MAX_CHARS)
    mark = text.rfind("####")
    if place > mark:
        return boxed
    if mark >= 0:
        return text[mark + 4 :].strip().split("\n", 1)[0][: MAX_CHARS + 1]
    last, content = -1, None
    for opening, closing in _MATH:
        stop = text.rfind(closing)
        start = text.rfind(opening, 0, stop) if stop > 0 else -1
        if start > last:
            last, content = start, text[start + len(opening) : stop].strip("$")
    return content


def _admitted(text: str) -> bool:
    """Whether a text may reach the parser: short, flat, of known signs, commands and sizes."""
    if not text.strip() or len(text) > MAX_CHARS or not _PLAIN.issuperset(text):
        return False
    for name in _COMMAND.findall(text):
        if name not in _COMMANDS and name not in _SYMBOLS:
            return False
    if not _ENVIRONMENTS.issuperset(_ENVIRONMENT.findall(text)):
        return False
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    return (
        deepest <= MAX_DEPTH
        and text.count("^") <= MAX_POWERS
        and not any(pattern.search(text) for pattern in _LARGE)
        # Powers of numbers are computed; those of expressions may be multiplied out.
        and not (_VARIABLE_POWER.search(text) and re.search("[A-Za-z]", _COMMAND.sub("", text)))
    )


@lru_cache(maxsize=8)
def _parsed(text: str) -> tuple[Any, ...]:
    """What math-verify makes of an admitted text; nothing of any other."""
    if not _admitted(text):
        return ()
    config = math_verify.LatexExtractionConfig(boxed_match_priority=0)
    return tuple(math_verify.parse(f"\\boxed{{{text}}}", [config], parsing_timeout=None))


def _warm_up() -> None:
    """Go once through what these libraries import only where they need it: later they cannot."""
    for left, right in _SAMPLES:
        score(f"\\boxed{{{left}}}", right, "", {})
    _parsed.cache_clear()


_SAMPLES = (
    (r"x^2+2x+1", "(x+1)^2"),
    (r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"2\sqrt{3}", r"\sqrt{13}"),
    (r"x=5", "6"),
    (r"y = 2x+1", "2y = 4x + 2"),
    (r"\{1,2,3\}", r"\{3,1\}"),
    (r"x \in [1,3]", "[1,3]"),
    (r"(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(3,\infty)"),
    (r"1 \le x < 3", "[1,3)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ x \end{pmatrix}"),
    (r"6 - 5i", "5-6i"),
    (r"90^\circ", r"\sin(x)^2+\cos(x)^2"),
    (r"\log_2 8 + \ln e", r"\frac{\tan x}{e^{x}}"),
    (r"\binom{5}{2}", r"5! + |x|"),
    (r"\text{Evelyn}", "1.5"),
    (r"\lfloor 2.5 \rfloor", r"10\%"),
    (r"0.333333", r"\frac13"),
    ("AB", r"\overline{AB}"),
)

# It warns once that no timeout of its own is set; the worker's holds.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)
_warm_up()

REWARD = Reward(score, check_answer, COMMON)
VERSIONS: Mapping[int, Reward] = MappingProxyType({1: REWARD})
