r"""What the rewards of version 1 return, for ever: (completion, answer, expected).

Rows are written by hand from the rules, never copied from what the code returned. A row may be
added; one that changes needs a new version of its reward. The models' phrasings are those seen in
GSM8K and chain-of-digits runs.
"""

from dataclasses import dataclass, field

import pytest

from swarm.rewards import registry
from swarm.rewards.registry import REWARDS, score_group

NUMBER: list[tuple[str, str, float]] = [
    # -- where the final number stands
    ("72", "72", 1.0),
    ("She has 72 clips in all.", "72", 1.0),
    ("48/2 = 24, and 48 + 24 = 72.", "72", 1.0),
    ("48/2 = 24, and 48 + 24 = 72.", "24", 0.0),
    ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", "72", 1.0),
    ("72", "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", 1.0),
    ("The answer is 72", "#### 72", 1.0),
    ("#### 72 clips, 24 of them in May", "72", 1.0),
    ("#### 72\n\nQuestion: Tom has 3 apples.", "72", 1.0),
    ("#### 24\n#### 72", "72", 1.0),
    ("####72", "72", 1.0),
    ("#### **72**", "72", 1.0),
    ("#### $72", "72", 1.0),
    ("#### -$72", "-72", 1.0),
    ("#### Answer: 72", "72", 1.0),
    ("#### Step 2: add them\nThat makes 72.", "72", 1.0),
    ("####\n72", "72", 1.0),
    (r"\boxed{72}", "72", 1.0),
    (r"So $\boxed{72}$. Check: 24 * 3.", "72", 1.0),
    (r"First \boxed{24}, then \boxed{72}.", "72", 1.0),
    (r"\boxed{x = 72}", "72", 1.0),
    (r"\boxed{72\%}", "72", 1.0),
    (r"\boxed{\$72}", "72", 1.0),
    (r"\boxed{72\text{ clips}}", "72", 1.0),
    (r"\boxed{7{,}200}", "7200", 1.0),
    (r"\boxed{7\,200}", "7200", 1.0),
    (r"\boxed{\boxed{72}}", "72", 1.0),
    (r"\boxed{1, 72}", "72", 0.0),
    (r"\boxed{\frac{1}{72}}", "72", 0.0),
    (r"\boxed{}", "72", 0.0),
    (r"72 \boxed{none}", "72", 0.0),
    (r"\boxed{72", "72", 1.0),
    (r"\boxed{24} #### 72", "72", 1.0),
    (r"#### 24 \boxed{72}", "72", 1.0),
    (r"\boxed{72} #### done", "72", 1.0),
    ("<answer>72</answer>", "72", 1.0),
    ("72 apples (that is, 6 dozen)", "72", 0.0),
    ("seventy-two", "72", 0.0),
    ("", "72", 0.0),
    ("\n\n", "72", 0.0),
    ("72", "none", 0.0),
    ("none", "none", 0.0),
    # -- signs
    ("-5", "-5", 1.0),
    ("-5", "5", 0.0),
    ("+5", "5", 1.0),
    ("\u22125", "-5", 1.0),
    ("= -5", "-5", 1.0),
    ("=-5", "-5", 1.0),
    ("(-5)", "-5", 1.0),
    ("-$5", "-5", 1.0),
    ("$-5", "-5", 1.0),
    ("10-5", "5", 1.0),
    ("10 - 5", "5", 1.0),
    ("3\u20135", "5", 1.0),
    ("--5", "5", 1.0),
    ("x-5", "5", 1.0),
    ("-0", "0", 1.0),
    # -- decimals and trailing zeros
    ("5.0", "5", 1.0),
    ("5.00", "5.0", 1.0),
    ("5.", "5", 1.0),
    ("It is 5...", "5", 1.0),
    (".5", "0.5", 1.0),
    ("-.5", "-0.50", 1.0),
    ("0.30", "0.3", 1.0),
    ("0.1", "0.10000000000000001", 0.0),
    ("0.3333333333", "1/3", 0.0),
    ("007", "7", 1.0),
    ("No.5", "5", 1.0),
    ("version 1.2.3", "3", 0.0),
    ("192.168.0.1", "1", 0.0),
    ("1.5e3", "1500", 1.0),
    ("1e3", "1000", 1.0),
    ("1e3", "1", 0.0),
    ("2E-2", "0.02", 1.0),
    ("5eggs", "5", 1.0),
    ("1e99", "1", 0.0),
    # -- thousands
    ("1,234", "1234", 1.0),
    ("1,234,567.50", "1234567.5", 1.0),
    ("$1,234.00", "1234", 1.0),
    ("1,234.", "1234", 1.0),
    ("1_000", "1000", 1.0),
    ("1\u202f000", "1000", 1.0),
    ("1\u00a0000", "1000", 1.0),
    ("1,23", "23", 0.0),
    ("1,23", "123", 0.0),
    ("3,5", "5", 0.0),
    ("3, 5", "5", 1.0),
    ("0,123", "123", 0.0),
    ("1234,567", "1234567", 0.0),
    ("1.234,50", "50", 0.0),
    ("1,2345", "12345", 0.0),
    # -- units and percent
    ("50%", "50", 1.0),
    ("50%", "0.5", 0.0),
    ("50 %", "50%", 1.0),
    ("5km", "5", 1.0),
    ("5 m^2", "5", 1.0),
    ("5 m^{2}", "5", 1.0),
    ("5 s^{-1}", "5", 1.0),
    ("5 m\u00b2", "5", 1.0),
    ("90^\\circ", "90", 1.0),
    ("90\u00b0", "90", 1.0),
    ("\u20ac5", "5", 1.0),
    ("5\u4e2a\u82f9\u679c", "5", 1.0),
    ("\u7b54\u6848\u662f5\u3002", "5", 1.0),
    ("20-minute", "20", 1.0),
    ("5/day", "5", 1.0),
    # -- fractions, powers, times
    ("3/4", "0.75", 1.0),
    ("-3/4", "-0.75", 1.0),
    ("6/8", "3/4", 1.0),
    ("1/0", "1", 0.0),
    ("1/2/2024", "2024", 0.0),
    (r"$\frac{3}{4}$", "4", 0.0),
    ("2^3", "3", 0.0),
    ("2^3", "8", 0.0),
    ("10^{3}", "10", 0.0),
    ("10^-3", "10", 0.0),
    ("5:30", "30", 0.0),
    ("ratio 2:1", "1", 0.0),
    ("Step 5:", "5", 1.0),
    # -- names are no numbers
    ("72 is x2", "72", 1.0),
    ("72 H2O", "72", 1.0),
    ("72 var_3", "72", 1.0),
    # -- size
    ("9" * 40, "9" * 40, 1.0),
    ("9" * 41, "9" * 41, 0.0),
    ("9" * 100_000, "9", 0.0),
    # -- other digits than ASCII's are none
    ("\uff15", "5", 0.0),
    ("\u0665", "5", 0.0),
    ("\u00b2", "2", 0.0),
    # -- nothing is evaluated
    ("__import__('os').getpid() or 72", "72", 1.0),
    ("2+3", "5", 0.0),
    ("{{ 72 }}", "72", 1.0),
    ("\x00\x1b[0m 72\u202e", "72", 1.0),
]

EXACT: list[tuple[str, str, dict[str, str | int | float | bool], float]] = [
    ("Paris", "Paris", {}, 1.0),
    (" Paris\n", "Paris", {}, 1.0),
    ("Paris", "\tParis ", {}, 1.0),
    ("Paris.", "Paris", {}, 0.0),
    ("paris", "Paris", {}, 0.0),
    ("paris", "Paris", {"ignore_case": True}, 1.0),
    ("STRASSE", "stra\u00dfe", {"ignore_case": True}, 1.0),
    ("", "Paris", {}, 0.0),
    ("Par is", "Paris", {}, 0.0),
    ("7", "7.0", {}, 0.0),
]


@dataclass
class Spec:
    name: str
    version: int
    params: registry.Params = field(default_factory=dict)


@pytest.mark.parametrize(("completion", "answer", "expected"), NUMBER, ids=lambda v: repr(v)[:40])
def test_number_1(completion: str, answer: str, expected: float) -> None:
    assert score_group(Spec("number", 1), [completion], [True], answer, "") == [expected]


@pytest.mark.parametrize(
    ("completion", "answer", "params", "expected"), EXACT, ids=lambda v: repr(v)[:40]
)
def test_exact_1(completion: str, answer: str, params: registry.Params, expected: float) -> None:
    assert score_group(Spec("exact", 1, params), [completion], [True], answer, "") == [expected]


def test_every_version_has_golden_rows() -> None:
    assert set(REWARDS) == {("number", 1), ("exact", 1)}
