r"""Reward `number` 1: is the final number of the completion the final number of the answer?

Owns: what counts as a number and which one is final. Works on text alone; evaluates nothing.

The final number is, in this order: the one number inside the last `\boxed{...}` (or `\fbox`) or
directly behind the last `####`, whichever stands later; else the last number of the text. In a box
with an equation the number behind its last `=` counts. A box that holds no number or several has
no final number: whoever names two answers has named none. Values are compared exactly, as
fractions of integers of at most 40 digits.

A number may have a sign, a currency sign, thousands separators (comma, underscore, no-break
spaces; groups of three), decimals, an exponent (`1.5e3`), one slash (`3/4`, `\frac{3}{4}`).
Percent signs and units are ignored: `50%`, `50 km` and `50` are equal, since GSM8K's answers are
bare numbers and its graders drop both. Times and ratios (`5:30`), powers (`2^3`), versions
(`1.2.3`), dates (`1/2/2024`), badly grouped digits (`3,5`), mixed TeX fractions
(`1\frac{1}{2}`) and other TeX fractions' denominators are numbers without a value: equal to
nothing. Digits that belong to a name (`x2`) or to a unit's exponent (`m^2`) are none. `5-3` holds 5
and 3.
"""

import re
from fractions import Fraction

from swarm.rewards.reward import Params, Reward
from swarm.rewards.tags import MAX_BOX_CHARS, last_box

MAX_DIGITS = 40

_DIGIT = re.compile("[0-9]")
_NO_BREAK_SPACES = "\u00a0\u2007\u2009\u202f"
_SEPARATORS = "," + "_" + _NO_BREAK_SPACES
_RUN = frozenset("0123456789.:/^" + _SEPARATORS)
_CURRENCY = frozenset("$€£¥₹")
_MINUS = frozenset("-\u2212")
_BETWEEN_MARKER_AND_NUMBER = " \t*:=(\\$€£¥₹+-\u2212"
# What TeX writes around digits and that does not change the number.
_TEX = (
    ("{,}", ","),
    ("\\,", ""),
    ("\\!", ""),
    ("^\\circ", ""),
    ("^{\\circ}", ""),
)
# Bounded, so that a text is passed over once.
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]{1,40})\}\{([0-9]{1,40})\}")


def score(completion: str, answer: str, prompt: str, params: Params) -> float:
    """1.0 where both texts have a final number and the two are equal, else 0.0."""
    wanted = final_number(answer)
    return float(wanted is not None and final_number(completion) == wanted)


def check_answer(answer: str, params: Params) -> str | None:
    """Why no completion could ever match this answer, or None."""
    return None if final_number(answer) is not None else "it holds no number"


def final_number(text: str) -> Fraction | None:
    """The value of the final number (see the module); None where there is none."""
    for tex, plain in _TEX:
        text = text.replace(tex, plain)
    text = _FRACTION.sub(_slashed, text)
    mark = text.rfind("####")
    box, boxed = last_box(text)
    marked = _number_at(text, mark + len("####")) if mark >= 0 else []
    if boxed is not None and (box > mark or not marked):
        values = [value for _, value in numbers(boxed.rpartition("=")[2])]
        return values[0] if len(values) == 1 else None
    if marked:
        return marked[0]
    # No number crosses a space, so the last word that holds one is enough.
    for word in reversed(text.replace("\n", " ").replace("\r", " ").replace("\t", " ").split(" ")):
        found = numbers(word)
        if found:
            return found[-1][1]
    return None


def numbers(text: str) -> list[tuple[int, Fraction | None]]:
    """All numbers of a text in order: where the digits begin, and the value if it has one."""
    found: list[tuple[int, Fraction | None]] = []
    position = 0
    while match := _DIGIT.search(text, position):
        first = match.start()
        stop = first
        while stop < len(text) and text[stop] in _RUN:
            stop += 1
        start = first - 1 if _is_leading_point(text, first) else first
        run = text[start:stop].rstrip(".:/" + _SEPARATORS)
        position = start + len(run)
        if _is_part_of_a_name(text, start):
            continue
        value = _value(run)
        factor, position = _exponent(text, position)
        if value is not None and factor is not None:
            value *= factor
        if value is not None and _is_negative(text, start):
            value = -value
        if factor is None or text[max(0, start - 2) : start] == "}{":
            value = None
        found.append((start, value))
    return found


def _value(run: str) -> Fraction | None:
    """The value of one run of digits and inner punctuation, with at most one slash."""
    above, slash, below = run.partition("/")
    if not slash:
        return _plain(run)
    numerator, denominator = _plain(above), _plain(below)
    return numerator / denominator if numerator is not None and denominator else None


def _plain(run: str) -> Fraction | None:
    """The value of digits with at most one decimal point and well-placed separators."""
    whole, _, decimals = run.partition(".")
    if decimals and not _all_digits(decimals):
        return None
    for separator in _SEPARATORS:
        if separator in whole:
            first, *groups = whole.split(separator)
            if not 1 <= len(first) <= 3 or first.startswith("0"):
                return None
            if any(len(group) != 3 for group in groups):
                return None
            whole = first + "".join(groups)
            break
    digits = whole + decimals
    if not _all_digits(digits) or len(digits) > MAX_DIGITS:
        return None
    return Fraction(int(digits), 10 ** len(decimals))


def _exponent(text: str, position: int) -> tuple[Fraction | None, int]:
    """The factor that an `e` with an integer is, None if too large; and where it ends."""
    one = Fraction(1)
    if text[position : position + 1] not in ("e", "E"):
        return one, position
    start = position + 1
    digits = start + (text[start : start + 1] in ("+", "-"))
    stop = digits
    while stop < len(text) and "0" <= text[stop] <= "9":
        stop += 1
    if stop == digits or _is_name_char(text[stop : stop + 1]):
        return one, position
    if stop - digits > 2 or int(text[digits:stop]) > MAX_DIGITS:
        return None, stop
    return Fraction(10) ** int(text[start:stop]), stop


def _is_leading_point(text: str, first: int) -> bool:
    """Whether the digit at `first` continues a decimal without a whole part, as in `.5`."""
    if first == 0 or text[first - 1] != ".":
        return False
    before = text[first - 2 : first - 1] if first >= 2 else ""
    return not _is_name_char(before) and before not in (".", ")", "]", "}")


def _is_part_of_a_name(text: str, start: int) -> bool:
    """Whether digits at `start` continue a word (`x2`) or are a unit's exponent (`m^2`)."""
    before = text[max(0, start - 3) : start]
    word = before.rstrip("_")  # _5_ and __5__ are Markdown
    return _is_name_char(word[-1:]) or before.rstrip("{+-\u2212").endswith("^")


def _is_negative(text: str, start: int) -> bool:
    place = start - 1
    if place >= 0 and text[place] in _CURRENCY:
        place -= 1
        if place >= 0 and text[place] == "\\":
            place -= 1
    if place < 0 or text[place] not in _MINUS:
        return False
    before = text[place - 1] if place > 0 else " "
    # Behind any of these a minus is a subtraction, a range or a dash, not a sign.
    return not (_is_name_char(before) or before in ")]}%.!?" or before in _MINUS)


def _is_name_char(char: str) -> bool:
    return char == "_" or (char.isascii() and char.isalnum())


def _all_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _slashed(match: re.Match[str]) -> str:
    """`3/4` for a TeX fraction; behind a digit (a mixed number) what has no value."""
    before = match.string[max(0, match.start() - 1) : match.start()]
    glue = "/" if before.isdigit() else " " if before.isalpha() else ""
    return f"{glue}{match[1]}/{match[2]}"


def _number_at(text: str, start: int) -> list[Fraction | None]:
    """The number that follows directly, on the same line; [] where something else does."""
    line = text[start : start + MAX_BOX_CHARS].split("\n", 1)[0]
    found = numbers(line)
    if found and not line[: found[0][0]].strip(_BETWEEN_MARKER_AND_NUMBER):
        return [found[0][1]]
    return []


REWARD = Reward(score, check_answer)
