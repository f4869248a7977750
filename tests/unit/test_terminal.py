"""What a peer wrote, made harmless; numbers as a curve."""

import logging
import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from swarm.cli.output import configure_logging
from swarm.terminal import printable, safe, sparkline


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alice", "alice"),
        ("Zo\u00eb \u8cc7\u6599 \U0001f600", "Zo\u00eb \u8cc7\u6599 \U0001f600"),
        ("\x1b[31mred\x1b[0m", "(31mred(0m"),
        ("\x9b31mred\x07\x00\x7f", "31mred"),
        ("a\r\nb\tc\x0bd\u2028e\u00a0f", "a b c d e f"),
        ("  much   room  ", "much room"),
        ("user\u202egnp.exe\u2066\u200b\u200f\ufeff", "usergnp.exe"),
        ("[bold red]x[/] [link=http://a]b[/link]", "(bold red)x(/) (link=http://a)b(/link)"),
        ("a\U000e0041\ue000\ud800b", "ab"),
        ("e\u0301\u0302\u0303\u0304x", "e\u0301\u0302x"),
        ("", ""),
        ("\x1b\x00", ""),
    ],
)
def test_safe(text: str, expected: str) -> None:
    assert safe(text, 60) == expected


@pytest.mark.parametrize(("limit", "expected"), [(6, "abcdef"), (5, "abcd…"), (1, "…"), (0, "")])
def test_safe_cuts(limit: int, expected: str) -> None:
    assert safe("abcdef", limit) == expected


def test_safe_reads_no_more_than_it_may_show() -> None:
    assert safe("\x00" * 10_000 + "late", 10) == "…"
    assert safe("a" * 10**7, 3) == "aa…"


@given(st.text(max_size=300), st.integers(0, 80))
def test_whatever_the_text_one_harmless_line_comes_out(text: str, limit: int) -> None:
    line = safe(text, limit)
    assert len(line) <= limit
    assert not set(line) & set("[]\n\r\t\x1b")
    assert all(unicodedata.category(char)[0] != "C" for char in line)
    assert safe(line, limit) == line
    console = Console(width=400, color_system=None, emoji=False)
    with console.capture() as capture:
        console.print(line, soft_wrap=True, highlight=False)
    assert capture.get() == line + "\n"


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 8, ""),
        ([1.0], 0, ""),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 0], 8, "█▁"),
        ([0, 0, 4, 4, 8, 8], 3, "▁▅█"),
        ([0.0, 8.0, 8.0], 2, "▁█"),
        ([5.0, 5.0], 8, "▁▁"),
        ([0.0, math.nan, 1.0], 8, "▁ █"),
        ([math.nan, math.inf], 8, "  "),
        ([math.nan, 2.0, 0.0, 0.0], 2, "█▁"),
        ([-1.0, 0.0, 1.0], 8, "▁▅█"),
        ([-1.7e308, 1.7e308, 1.0, 2.0], 8, "  ▁█"),
        ([1.7e308, 1.7e308, 1.0], 2, " ▁"),
    ],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width) == expected


def test_sparkline_on_a_given_scale() -> None:
    assert sparkline([0.5, 0.5], 8, low=0.0, high=1.0) == "▅▅"
    assert sparkline([-1.0, 2.0], 8, low=0.0, high=1.0) == "▁█"
    assert sparkline([0.0, 1.0], 8, low=1.0, high=1.0) == "▁▁"


@given(st.lists(st.floats(), max_size=60), st.integers(0, 20))
def test_sparkline_never_fails_nor_exceeds_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(len(values), width)


def test_printable_spells_out_what_a_terminal_acts_on() -> None:
    assert printable("zwei Zeilen,\nmit Grüßen 🙂") == "zwei Zeilen,\nmit Grüßen 🙂"
    hostile = "\x1b]0;title\x07 \x9b31m \r\u202e\ud800"
    assert printable(hostile) == r"\x1b]0;title\x07 \x9b31m \r\u202e\ud800"
    assert printable(printable(hostile)) == printable(hostile)


def test_what_a_log_holds_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        configure_logging("info", None)
        logging.getLogger("swarm.test").info("a peer said %s", "\x1b[2J")
    finally:
        root.handlers[:], _ = before, root.setLevel(level)
    assert capsys.readouterr().err.endswith("a peer said \\x1b[2J\n")
