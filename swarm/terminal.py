"""Text for a terminal: what a peer wrote made harmless, and numbers as a small curve.

Owns: which characters reach a terminal or a log. Does not know: where they came from.
"""

import math
import unicodedata
from collections.abc import Sequence

# Controls, formatting (bidi overrides, zero width), surrogates, private use, unassigned,
# line and paragraph separators.
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_MAX_MARKS = 2
_BRACKETS = {"[": "(", "]": ")"}
_BLOCKS = "▁▂▃▄▅▆▇█"
_LARGEST = 1e300  # so that no sum and no difference overflows; false for NaN too


def safe(text: str, limit: int) -> str:
    """One line of at most `limit` characters that neither a terminal nor rich interprets.

    Controls and invisible characters go, white space becomes single spaces, square brackets (rich
    reads markup in them) become round ones, and of stacked accents the first two stay. A cut is
    marked by an ellipsis.
    """
    kept: list[str] = []
    marks = 0
    for char in text[: 4 * limit + 64]:
        category = unicodedata.category(char)
        if char.isspace():
            char = " "
        elif category in _HIDDEN:
            continue
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if marks <= _MAX_MARKS and not (char == " " and kept[-1:] == [" "]):
            kept.append(_BRACKETS.get(char, char))
    line = "".join(kept).strip()
    if len(line) > limit or len(text) > 4 * limit + 64:
        line = line[: max(0, limit - 1)].rstrip() + "…"[:limit]
    return line


def printable(text: str) -> str:
    """Text of any number of lines in which what a terminal would act on is spelled out.

    For logs and error messages, where nothing may get lost: an escape becomes \\x1b.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char == "\n" or char.isprintable()
        else char.encode("unicode_escape", "surrogatepass").decode("ascii")
        for char in text
    )


def sparkline(
    values: Sequence[float], width: int, low: float | None = None, high: float | None = None
) -> str:
    """The course of some numbers in at most `width` block characters.

    Args:
        values: in order; more than `width` are averaged in equal parts; NaN or infinite: a gap.
        width: characters at most.
        low, high: value of the lowest and the highest block; None: the least and greatest shown.
    """
    parts = min(len(values), width)
    if parts <= 0:
        return ""
    means = []
    for part in range(parts):
        piece = values[part * len(values) // parts : (part + 1) * len(values) // parts]
        finite = [value for value in piece if abs(value) < _LARGEST]
        means.append(math.fsum(finite) / len(finite) if finite else None)
    shown = [mean for mean in means if mean is not None]
    bottom = low if low is not None else min(shown, default=0.0)
    span = (high if high is not None else max(shown, default=0.0)) - bottom
    return "".join(" " if mean is None else _block(mean - bottom, span) for mean in means)


def _block(height: float, span: float) -> str:
    if span <= 0:
        return _BLOCKS[0 if height <= 0 else -1]
    return _BLOCKS[min(max(int(height / span * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]
