"""What counts as a number; which one is final stands in tests/golden/test_rewards_golden.py."""

import time
from fractions import Fraction

import pytest

from swarm.rewards.number import check_answer, final_number, numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("no digits. at, all", []),
        ("3 apples, 4 pears", [Fraction(3), Fraction(4)]),
        ("-1.50 and +2", [Fraction(-3, 2), Fraction(2)]),
        ("1,2,3 2^3 5:30", [None, None, None]),
        ("x2 m^2 x_3 10^{4} _3_", [None, Fraction(3)]),
        ("1e3 1e41 1e100 1ex", [Fraction(1000), None, None, Fraction(1)]),
        ("1/2 1/2/3 1/0 1/", [Fraction(1, 2), None, None, Fraction(1)]),
    ],
)
def test_numbers(text: str, expected: list[Fraction | None]) -> None:
    assert [value for _, value in numbers(text)] == expected


def test_numbers_say_where_they_begin() -> None:
    assert [start for start, _ in numbers("a 1, .5 (x2) -$3")] == [2, 5, 15]


def test_values_are_exact() -> None:
    assert final_number("0." + "1" * 39) == Fraction(int("1" * 39), 10**39)
    assert final_number("0." + "1" * 40) is None


@pytest.mark.parametrize(
    "piece",
    ["9", "1,", "x2 ", "x2", "1e", "1e1", "-1-", "2^", "{1}{", "1\u00a0", "5.", ".", "\\boxed{",
     "####", "#### 1\n", "{,}", "^{"],
)  # fmt: skip
def test_time_grows_with_length_only(piece: str) -> None:
    """A quadratic step would take a thousand times the short text's time, not ten times."""
    times = []
    for length in (20_000, 200_000):
        text = (piece * length)[:length]
        start = time.process_time()
        final_number(text)
        times.append(time.process_time() - start)
    assert times[1] < 40 * max(times[0], 1e-3)


def test_answers_without_a_number_are_named() -> None:
    assert check_answer("#### 5", {}) is None
    assert check_answer("five", {}) == "it holds no number"
    assert check_answer("5:30", {}) == "it holds no number"
