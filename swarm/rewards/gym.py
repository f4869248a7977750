"""Reward `reasoning-gym` 1: the answers of tasks of the package reasoning-gym.

Owns: which of its tasks may be used, and by which rule each one's answers are compared.

The package's own scorers do not run here. Several of them evaluate what they are given (`eval`,
sympy's `parse_expr`), some need more than the answer, and most give partial credit for a wrong
answer that is long enough. So this list holds only tasks whose scorer, as read in version 0.1.25,
is a comparison of texts or of numbers, and the comparison is made anew: it gives 1 exactly where
the package gives full credit for the answer alone, and 0 elsewhere. Members need not install it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from swarm.rewards import number
from swarm.rewards.reward import COMMON, Params, Reward

NUMBER = "number"
TEXT = "text"
WORDS = "words"

# Why a group of tasks may be used: what their score_answer does in the package.
_EQUAL = "ProceduralDataset.score_answer: the texts are equal (or one holds the other: partial)"
_DECIMAL = "utils.compute_decimal_reward: Decimal(answer) == Decimal(oracle)"
_OWN_EQUAL = "own score_answer: the texts are equal"
_FOLDED = "own score_answer: the texts are equal without regard to case and blanks"

TASKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ab": (TEXT, _OWN_EQUAL),
        "aiw": (TEXT, _EQUAL),
        "base_conversion": (TEXT, _EQUAL),
        "basic_arithmetic": (NUMBER, _EQUAL),
        "binary_alternation": (NUMBER, _EQUAL),
        "caesar_cipher": (TEXT, _EQUAL),
        "chain_sum": (NUMBER, _DECIMAL),
        "circuit_logic": (TEXT, _OWN_EQUAL),
        "count_bits": (NUMBER, _EQUAL),
        "count_primes": (NUMBER, _EQUAL),
        "course_schedule": (TEXT, _EQUAL),
        "decimal_chain_sum": (NUMBER, "own score_answer: Decimal(answer) == Decimal(oracle)"),
        "family_relationships": (WORDS, _FOLDED),
        "gcd": (NUMBER, _EQUAL),
        "gsm_symbolic": (
            NUMBER,
            "own score_answer: a bounded regular expression, float(found) == float(oracle)",
        ),
        "isomorphic_strings": (TEXT, _EQUAL),
        "largest_island": (NUMBER, _EQUAL),
        "lcm": (NUMBER, _EQUAL),
        "leg_counting": (NUMBER, _EQUAL),
        "letter_counting": (NUMBER, _EQUAL),
        "maze": (NUMBER, _EQUAL),
        "number_filtering": (TEXT, _EQUAL),
        "number_sequence": (NUMBER, _EQUAL),
        "products": (NUMBER, _DECIMAL),
        "ransom_note": (TEXT, _EQUAL),
        "rectangle_count": (NUMBER, "own score_answer: int(answer) == int(oracle)"),
        "rotate_matrix": (TEXT, _EQUAL),
        "rotten_oranges": (NUMBER, _EQUAL),
        "self_reference": (NUMBER, _OWN_EQUAL),
        "simple_equations": (NUMBER, _EQUAL),
        "spell_backward": (WORDS, _FOLDED),
        "string_manipulation": (TEXT, _EQUAL),
        "string_splitting": (TEXT, _EQUAL),
        "string_synthesis": (TEXT, _EQUAL),
        "syllogism": (TEXT, _EQUAL),
        "word_sequence_reversal": (TEXT, _EQUAL),
        "zebra_puzzles": (WORDS, _FOLDED),
    }
)


def score(completion: str, answer: str, prompt: str, params: Params) -> float:
    """1.0 where the completion is the answer by the task's rule, else 0.0."""
    rule = TASKS[str(params["task"])][0]
    if rule == NUMBER:
        wanted = number.final_number(answer)
        return float(wanted is not None and number.final_number(completion) == wanted)
    return float(_normal(completion, rule) == _normal(answer, rule))


def check_answer(answer: str, params: Params) -> str | None:
    """Why no completion could ever match this answer, or None."""
    if TASKS[str(params["task"])][0] == NUMBER:
        return number.check_answer(answer, params)
    return None if answer.strip() else "it is empty"


def check_params(params: Params) -> str | None:
    """Name the tasks where the given one is none of them."""
    task = params["task"]
    return None if task in TASKS else f"task {task!r:.80} is none of {', '.join(TASKS)}"


def _normal(text: str, rule: str) -> str:
    if rule == WORDS:
        return " ".join(text.split()).casefold()
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


REWARD = Reward(score, check_answer, COMMON, {"task": ""}, check_params)
