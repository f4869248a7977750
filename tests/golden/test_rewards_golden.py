r"""What the rewards of version 1 return, for ever: (completion, answer, expected).

Rows are written by hand from the rules, never copied from what the code returned. A row may be
added; one that changes needs a new version of its reward. The models' phrasings are those seen in
GSM8K and chain-of-digits runs.
"""

from dataclasses import dataclass, field

import pytest

from swarm.rewards import registry
from swarm.rewards.combined import parse
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
    # -- as models of 0.5B to 7B end their answers to GSM8K
    ("Therefore, Janet makes $18 every day at the farmers' market.", "18", 1.0),
    ("Janet makes 9 * 2 = $<<9*2=18>>18 a day.\nThe final answer is 18.", "18", 1.0),
    ("**Final Answer:** $\\boxed{18}$ dollars", "18", 1.0),
    ("### Final Answer\n\\[\n\\boxed{18}\n\\]", "18", 1.0),
    ("Thus \\( 9 \\times 2 = \\boxed{18} \\).", "18", 1.0),
    (r"\boxed{9 \times 2 = 18}", "18", 1.0),
    (r"\boxed{x = 9 \cdot 2 = 18}", "18", 1.0),
    (r"\boxed{9 \times 2}", "18", 0.0),
    (r"\boxed{18 \text{ or } 19}", "18", 0.0),
    (r"\boxed{18 = 9 \times 2}", "18", 0.0),
    (r"\fbox{18}", "18", 1.0),
    (r"\boxed{18} and then \fbox{19}", "19", 1.0),
    (r"\boxed{\text{18 dollars}}", "18", 1.0),
    (r"\boxed{\text{eighteen}}", "18", 0.0),
    (r"\boxed{\mathbf{18}}", "18", 1.0),
    (r"\boxed{ 18 }", "18", 1.0),
    (r"\boxed{18.00}", "18", 1.0),
    (r"\boxed{\$18.50}", "18.5", 1.0),
    (r"\boxed{1,080}", "1080", 1.0),
    (r"\boxed{1\!,\!080}", "1080", 1.0),
    (r"\boxed{-18}", "-18", 1.0),
    (r"\boxed{\frac{36}{2}}", "18", 1.0),
    (r"\boxed{\dfrac{1}{2}}", "0.5", 1.0),
    (r"\boxed{-\frac{1}{2}}", "-0.5", 1.0),
    (r"\boxed{1\frac{1}{2}}", "0.5", 0.0),
    (r"\boxed{1\frac{1}{2}}", "1.5", 0.0),
    (r"\boxed{2\cdot\frac{3}{4}}", "0.75", 0.0),
    (r"It is $\frac{3}{4}$", "0.75", 1.0),
    (r"\frac{x}{4}", "4", 0.0),
    (r"\boxed{75\%}", "75", 1.0),
    (r"\boxed{0.75}", "75", 0.0),
    (r"\boxed{6:30}", "6", 0.0),
    ("The answer is: 18", "18", 1.0),
    ("The answer is 18 (eighteen).", "18", 1.0),
    ("A: 18", "18", 1.0),
    ("= 18 hours", "18", 1.0),
    ("= 18hrs", "18", 1.0),
    ("18 minutes/day", "18", 1.0),
    ("$18/hour", "18", 1.0),
    ("She has $18.", "18", 1.0),
    ("She has $18,000.", "18000", 1.0),
    ("She has $18k", "18", 1.0),
    ("That is 18,", "18", 1.0),
    ("That is 18;", "18", 1.0),
    ("That is '18'", "18", 1.0),
    ('"18"', "18", 1.0),
    ("`18`", "18", 1.0),
    ("__18__", "18", 1.0),
    ("_18_", "18", 1.0),
    ("~18", "18", 1.0),
    ("\u224818", "18", 1.0),
    ("18\u00a0%", "18", 1.0),
    ("18th", "18", 1.0),
    ("3x = 54\nx = 18", "18", 1.0),
    ("x=18, y=2", "2", 1.0),
    ("18 eggs, as 16 - 3 - 4 = 9 and 9 * 2 = 18", "18", 1.0),
    ("1. Add.\n2. Multiply: 18\n", "18", 1.0),
    ("The answer is 18.\n\nStep 3: done", "18", 0.0),
    ("#### 18\n#### The answer is 18", "18", 1.0),
    ("#### 18.\nI hope this helps! 100%", "18", 1.0),
    ("#### x = 18", "18", 1.0),
    ("#### 9 * 2 = 18", "18", 0.0),
    ("####\\boxed{18}", "18", 1.0),
    ("so 18. </s>", "18", 1.0),
    ("18<|im_end|>", "18", 1.0),
    ("18\n\n\n\n", "18", 1.0),
    ("18 18 18 18", "18", 1.0),
    ("181818", "18", 0.0),
    ("<think>9 * 2 = 18</think>\n<answer>18</answer>", "18", 1.0),
    ("<answer>18 dollars</answer> (2 steps)", "18", 0.0),
    ("def f():\n    return 9 * 2\nprint(f())  # 18", "18", 1.0),
    ("USD18", "18", 0.0),
    ("Rs. 18", "18", 1.0),
    ("\u20b918", "18", 1.0),
    ("18\u5143", "18", 1.0),
    ("1 1/2", "1.5", 0.0),
    ("2.5 million", "2500000", 0.0),
    ("5 000", "5000", 0.0),
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


ANSWERED = "<answer>5</answer>"
THOUGHT = f"<think>2 + 3</think>\n{ANSWERED}"

# (reward and parameters, completion, answer, expected)
OTHERS: list[tuple[str, dict[str, str | int | float | bool], str, str, float]] = [
    # -- only what stands in the last answer tags
    ("number", {"inside": "answer"}, "<answer>5</answer> 6", "5", 1.0),
    ("number", {"inside": "answer"}, "<answer>4</answer><answer>5</answer>", "5", 1.0),
    ("number", {"inside": "answer"}, "<answer>5", "5", 0.0),
    ("number", {"inside": "answer"}, "5</answer>", "5", 0.0),
    ("number", {"inside": "answer"}, "5", "5", 0.0),
    ("number", {"inside": "answer"}, "</answer>5<answer>", "5", 0.0),
    ("exact", {"inside": "answer"}, "So: <answer> Paris </answer>.", "Paris", 1.0),
    # -- format
    ("format", {}, ANSWERED, "", 1.0),
    ("format", {}, f"2 + 3 = 5\n{ANSWERED}\n", "", 1.0),
    ("format", {}, f"{ANSWERED} indeed", "", 0.0),
    ("format", {}, f"{ANSWERED}{ANSWERED}", "", 0.0),
    ("format", {}, "<answer> </answer>", "", 0.0),
    ("format", {}, "</answer>5<answer>", "", 0.0),
    ("format", {}, "<answer>5", "", 0.0),
    ("format", {}, "5</answer>", "", 0.0),
    ("format", {}, "", "", 0.0),
    ("format", {"opened": True}, "5</answer>", "", 1.0),
    ("format", {"opened": True}, ANSWERED, "", 0.0),
    ("format", {"tags": "think answer"}, THOUGHT, "", 1.0),
    ("format", {"tags": "think answer"}, f" \n{THOUGHT}\n", "", 1.0),
    ("format", {"tags": "think answer"}, f"Well. {THOUGHT}", "", 0.0),
    ("format", {"tags": "think answer"}, ANSWERED, "", 0.0),
    ("format", {"tags": "think answer"}, f"<think>x</think> so {ANSWERED}", "", 0.0),
    ("format", {"tags": "think answer"}, f"{ANSWERED}<think>x</think>", "", 0.0),
    ("format", {"tags": "think answer"}, f"<think></think>{ANSWERED}", "", 0.0),
    ("format", {"tags": "think answer"}, f"<think>{ANSWERED}</think>", "", 0.0),
    ("format", {"tags": "think answer", "opened": True}, f"x</think>{ANSWERED}", "", 1.0),
    ("format", {"tags": "think answer", "opened": True}, THOUGHT, "", 0.0),
    ("format", {"tags": "boxed"}, r"so \boxed{5} it is", "", 1.0),
    ("format", {"tags": "boxed"}, r"\boxed{}", "", 0.0),
    ("format", {"tags": "boxed"}, r"\boxed{5", "", 0.0),
    ("format", {"tags": "boxed"}, "5", "", 0.0),
    # -- regex
    ("regex", {"pattern": "Answer: (.*)"}, "Answer: a\nAnswer:  Paris ", "Paris", 1.0),
    ("regex", {"pattern": "Answer: (.*)"}, "answer: Paris", "Paris", 0.0),
    ("regex", {"pattern": "(?i)answer: (.*)"}, "ANSWER: Paris", "Paris", 1.0),
    ("regex", {"pattern": "(x|y) is (?P<answer>.*)"}, "x is 5", "5", 1.0),
    ("regex", {"pattern": "[A-D]"}, "A, no, C", "C", 1.0),
    ("regex", {"pattern": "(x)?y"}, "y", "x", 0.0),
    ("regex", {"pattern": "= (.*)", "compare": "number"}, "= $5.00 each", "5", 1.0),
    ("regex", {"pattern": "= (.*)", "compare": "number"}, "= five", "5", 0.0),
    ("regex", {"pattern": r"\bso\b", "compare": "none"}, "and so on", "-", 1.0),
    ("regex", {"pattern": r"\bso\b", "compare": "none"}, "some", "-", 0.0),
    # -- reasoning-gym
    ("reasoning-gym", {"task": "chain_sum"}, "4 + 3 = 7", "7", 1.0),
    ("reasoning-gym", {"task": "chain_sum"}, "8", "7", 0.0),
    ("reasoning-gym", {"task": "chain_sum"}, "77", "7", 0.0),
    ("reasoning-gym", {"task": "caesar_cipher"}, " ONE TWO\n", "ONE TWO", 1.0),
    ("reasoning-gym", {"task": "caesar_cipher"}, "It is ONE TWO", "ONE TWO", 0.0),
    ("reasoning-gym", {"task": "caesar_cipher"}, "one two", "ONE TWO", 0.0),
    ("reasoning-gym", {"task": "syllogism", "inside": "answer"}, "<answer>No</answer>", "No", 1.0),
    ("reasoning-gym", {"task": "rotate_matrix"}, "1 2 \n3 4", "1 2\n3 4", 1.0),
    ("reasoning-gym", {"task": "rotate_matrix"}, "1 2 3 4", "1 2\n3 4", 0.0),
    ("reasoning-gym", {"task": "spell_backward"}, " Olleh", "olleh", 1.0),
    # -- sums
    ("number:0.9+format:0.1", {}, ANSWERED, "5", 1.0),
    ("number:0.9+format:0.1", {}, "5", "5", 0.9),
    ("number:0.9+format:0.1", {}, "<answer>6</answer>", "5", 0.1),
    ("number+format:0.5+exact:-0.25", {}, "5", "5", 0.75),
]  # fmt: skip

MATH: list[tuple[str, str, float]] = [
    (r"\boxed{\frac{1}{2}}", r"\frac{2}{4}", 1.0),
    (r"\boxed{0.5}", r"\frac12", 1.0),
    ("so it is 1/2", r"\frac12", 1.0),
    ("#### 42", "42", 1.0),
    ("$x=5$", "5", 1.0),
    (r"\(5\) or \[6\]", "6", 1.0),
    (r"\boxed{(3,\frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
    (r"\boxed{(3,\frac{\pi}{3})}", r"\left( 3, \frac{\pi}{2} \right)", 0.0),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    (r"\boxed{x^2+2x+2}", "(x+1)^2", 0.0),
    (r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1.0),
    (r"\boxed{\text{(C)}}", r"\text{(C)}", 1.0),
    (r"\boxed{[-2,7]}", "[-2,7]", 1.0),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1.0),
    (r"\boxed{1,234}", "1234", 1.0),
    (r"\boxed{2^{2023}}", "2^{2023}", 1.0),
    (r"\boxed{3}", "4", 0.0),
    (r"$5$ and \boxed{}", "5", 0.0),
    ("", "5", 0.0),
    # -- what does not pass the check in front
    (r"\boxed{9^{9^{9}}}", r"5", 0.0),
    (r"\boxed{(9^{99999})}", r"9^{99999}", 0.0),
    (r"\boxed{99999!}", r"99999!", 0.0),
    (r"\boxed{\input{5}}", "5", 0.0),
    (r"\boxed{" + "1+" * 200 + "1}", "201", 0.0),
    (r"\boxed{" + "(" * 9 + "5" + ")" * 9 + "}", "5", 0.0),
    (r"\boxed{" + "9" * 40 + "}", "9" * 40, 0.0),
    ("\\boxed{5\u2009}", "5", 0.0),
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


@pytest.mark.parametrize(
    ("reward", "params", "completion", "answer", "expected"), OTHERS, ids=lambda v: repr(v)[:40]
)
def test_others_1(
    reward: str, params: registry.Params, completion: str, answer: str, expected: float
) -> None:
    spec = parse(reward, params)
    assert spec.version == 1
    assert score_group(spec, [completion], [True], answer, "") == [expected]


@pytest.mark.parametrize(("completion", "answer", "expected"), MATH, ids=lambda v: repr(v)[:40])
def test_math_1(completion: str, answer: str, expected: float) -> None:
    assert score_group(Spec("math", 1), [completion], [True], answer, "") == [expected]


def test_every_version_has_golden_rows() -> None:
    rows = {(parse(reward).name, 1) for reward, *_ in OTHERS if "+" not in reward}
    assert set(REWARDS) == rows | {("number", 1), ("exact", 1)}
