"""The final number of any text, and of numbers written in many ways."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from swarm.rewards.number import final_number, numbers

# Texts made of what the scanner knows, so that the rare branches are reached.
PIECES = st.sampled_from(
    [*"0123456789", ".", ",", ":", "/", "^", "_", "e", "E", "+", "-", "\u2212", "$", "\\", "{",
     "}", "#", "####", "\\boxed{", " ", "\n", "x", "%", "\u00a0", "\u202f", "\u7b54", "\u0665"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=60).map("".join)


@given(TEXTS | st.text(max_size=200))
def test_any_text_has_a_value_or_none(text: str) -> None:
    value = final_number(text)
    assert value is None or isinstance(value, Fraction)


@given(TEXTS)
def test_the_last_word_decides_as_the_whole_text_would(text: str) -> None:
    text = text.replace("#", "").replace("\\boxed{", "").replace("^{", "").replace("{,}", "")
    text = text.replace("\\,", "").replace("\\!", "")
    found = numbers(text)
    assert final_number(text) == (found[-1][1] if found else None)


@given(
    whole=st.integers(0, 10**12),
    decimals=st.text("0123456789", max_size=8),
    negative=st.booleans(),
    grouped=st.booleans(),
    zeros=st.integers(0, 5),
    before=st.sampled_from(["", "It is ", "= ", "(", "**", "#### ", "\\boxed{", "7 + 8 = ", "x="]),
    after=st.sampled_from(["", ".", " km", "%", "\u00b0", "}", "**", ")", ",", ", so", "\n", "!"]),
)
def test_written_numbers_are_read_back(
    whole: int,
    decimals: str,
    negative: bool,
    grouped: bool,
    zeros: int,
    before: str,
    after: str,
) -> None:
    value = Fraction(int(f"{whole}{decimals}"), 10 ** len(decimals))
    written = f"{whole:,}" if grouped else str(whole)
    fraction = decimals + "0" * zeros
    if fraction:
        written += f".{fraction}"
    text = before + ("-" if negative else "") + written + after
    assert final_number(text) == (-value if negative else value)
