"""Texts and parameters that try to run code, exhaust memory or hang, against every reward.

In real worker processes: a text is refused by the scorer, by the wall, or by killing the worker;
never does it run, and never does it cost more than its own group.
"""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from swarm.rewards import combined, gym, wall, workers
from swarm.rewards.reward import PlainSpec, RewardError, Spec
from swarm.rewards.workers import WorkerPool
from tests.unit.test_reward_registry import install

MARK = "/tmp/swarm-reward-attack"

REWARDS = {
    "number": combined.parse("number"),
    "number in tags": combined.parse("number", {"inside": "answer"}),
    "exact": combined.parse("exact"),
    "format": combined.parse("format", {"tags": "think answer"}),
    "regex": combined.parse("regex", {"pattern": "Answer: (.*)"}),
    "chain_sum": combined.parse("reasoning-gym", {"task": "chain_sum"}),
    "zebra_puzzles": combined.parse("reasoning-gym", {"task": "zebra_puzzles"}),
    "sum": combined.parse("number:0.9+format:0.1"),
}
MATH = combined.parse("math")

CODE = [
    f"__import__('os').system('touch {MARK}')",
    f"open('{MARK}', 'w')",
    f"exec(\"open('{MARK}','w')\")",
    f"[].__class__.__base__.__subclasses__()[0]('{MARK}')",
    f"Integer(__import__('os').system('touch {MARK}'))",
    f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}} $(touch {MARK}) `touch {MARK}`",
    f"lambda: open('{MARK}', 'w')",
    f"\\input{{{MARK}}} \\write18{{touch {MARK}}}",
    f"!!python/object/apply:os.system ['touch {MARK}']",
    "cos\nsystem\n(S'touch " + MARK + "'\ntR.",
    f'f\'{{open("{MARK}", "w")}}\'',
    "().__class__.__bases__[0].__subclasses__()",
]
HEAVY = [
    "9" * 100_000,
    "9**9**9**9",
    "10^{10^{10^{10}}}",
    "(" * 50_000,
    "{" * 50_000,
    "\\boxed{" * 20_000,
    "####" * 25_000,
    "<answer>" * 12_000 + "</answer>",
    "Answer: " * 12_000,
    "$" * 50_000,
    "\\frac{1}{" * 8_000,
    "1e999999999",
    "99999999!!!!!!!!",
    "-" * 100_000 + "5",
    "a" * 400_000,
    "\x00" * 100_000,
    "\\sqrt{" * 100 + "2" + "}" * 100,
    "x^{9999}" * 12,
    "(1+x)^{9999}(1-x)^{9999}",
    "\\binom{9999999}{4999999}",
    "\\sum_{n=1}^{\\infty} \\frac{1}{n^2}",
]


def dressed(text: str) -> list[str]:
    """A text as it is, and everywhere a reward may look for an answer."""
    return [text, f"\\boxed{{{text}}}", f"#### {text}", f"<answer>{text}</answer>", f"${text}$"]


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    Path(MARK).unlink(missing_ok=True)
    yield
    assert not Path(MARK).exists()


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    async with WorkerPool(1, 60.0) as opened:
        yield opened


async def score(pool: WorkerPool, spec: Spec, text: str, answer: str = "5") -> list[float]:
    texts = dressed(text)
    return await pool.score(spec, texts, [True] * len(texts), answer, "2 + 3 =")


@pytest.mark.parametrize("name", REWARDS)
async def test_a_text_that_is_code_is_only_text(pool: WorkerPool, name: str) -> None:
    for text in CODE:
        assert await score(pool, REWARDS[name], text) == pytest.approx([0.0] * 5, abs=0.11)
    assert pool.counts["started"] == 1


@pytest.mark.parametrize("name", REWARDS)
async def test_a_heavy_text_takes_no_time(pool: WorkerPool, name: str) -> None:
    pool._timeout_s = 20.0  # a quadratic scan of these takes minutes
    for text in HEAVY:
        values = await score(pool, REWARDS[name], text)
        assert all(0.0 <= value <= 1.0 for value in values)
    assert pool.counts["started"] == 1


async def test_formulas(pool: WorkerPool) -> None:
    """All about `math` in one test: its worker takes seconds to start."""
    assert await pool.score(REWARDS["number"], ["5"], [True], "5") == [1.0]
    assert await pool.score(MATH, ["5", "6"], [True, True], "5") == [1.0, 0.0]
    assert pool.counts["started"] == 2  # one with the code in place of one without
    both = combined.parse("math:0.5+number:0.5")
    assert await pool.score(both, ["5"], [True], "5") == [1.0]
    assert (await pool.complete(MATH))["package"].startswith("math-verify==")
    for text in CODE:
        assert await score(pool, MATH, text) == [0.0] * 5
        await score(pool, MATH, "5", answer=text)
    checked = await pool.check_answers(MATH, [*CODE, "5"])
    assert checked[-1] == ""
    for text in HEAVY:
        assert set(await score(pool, MATH, text)) <= {0.0, 1.0}
    assert pool.counts["started"] == 2
    if sys.platform == "linux":
        limits = await asyncio.to_thread(Path(f"/proc/{pool._processes[-1].pid}/limits").read_text)
        line = next(line for line in limits.splitlines() if line.startswith("Max address space"))
        assert int(line.split()[3]) > workers.MEMORY_BYTES  # libraries are not the text's doing


# -- the organizer's expressions ------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", "(x*)*y", r"(\s*\S*)*#"])
async def test_an_expression_without_end_is_refused(pool: WorkerPool, pattern: str) -> None:
    pool._timeout_s = 2.0
    with pytest.raises(RewardError, match="killed after 2 s") as caught:
        await pool.complete(combined.parse("regex", {"pattern": pattern}))
    assert caught.value.reason == "timeout"


@pytest.mark.parametrize(
    "pattern",
    [
        "Answer: (.*)",
        r"<answer>([^<]*)</answer>",
        r"(?s)<think>.*?</think>\s*<answer>(?P<answer>.*?)</answer>",
        r"\bthe answer is\s+(-?[0-9][0-9,.]*)",
        "^([A-D])[.)]?$",
    ],
)
async def test_an_ordinary_expression_is_taken(pool: WorkerPool, pattern: str) -> None:
    params = await pool.complete(combined.parse("regex", {"pattern": pattern}))
    assert params["pattern"] == pattern
    assert params["compare"] == "text"


async def test_a_text_that_hangs_an_expression_costs_its_own_group(pool: WorkerPool) -> None:
    spec = combined.parse("regex", {"pattern": "(a+)+$"})
    pool._timeout_s = 1.0
    with pytest.raises(RewardError, match="killed after 1 s"):
        await pool.score(spec, ["a" * 50 + "!"], [True], "5")
    pool._timeout_s = 60.0
    assert await pool.score(spec, ["aaa"], [True], "aaa") == [1.0]


@pytest.mark.parametrize("pattern", ["(", "*", "(?P<answer>x", "a{99999999999}", "[z-a]", ""])
async def test_what_is_no_expression_is_named(pool: WorkerPool, pattern: str) -> None:
    with pytest.raises(RewardError, match="regex 1: pattern") as caught:
        await pool.complete(combined.parse("regex", {"pattern": pattern}))
    assert caught.value.reason == "params"


# -- tasks of reasoning-gym ----------------------------------------------------------------------


async def test_tasks_whose_scorers_evaluate_are_not_there(pool: WorkerPool) -> None:
    for task in ("countdown", "puzzle24", "simple_integration", "spiral_matrix", "n_queens", ""):
        assert task not in gym.TASKS
        with pytest.raises(RewardError, match="is none of ab, aiw"):
            await pool.complete(combined.parse("reasoning-gym", {"task": task}))


# -- the code of packages ------------------------------------------------------------------------


async def test_a_package_s_reward_cannot_execute_or_open(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its author made the mistake: the wall stands while a text is judged."""
    install(tmp_path)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH="{tmp_path}:$PYTHONPATH" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    spec = PlainSpec("length", 2, {"package": "swarm-reward-length==1.5"})
    assert await pool.score(spec, ["abc"], [True], "3") == [1.0]
    for mode, text in (("eval", "6 * 7"), ("open", "/etc/passwd")):
        evil = PlainSpec("length", 2, {**spec.params, "mode": mode})
        with pytest.raises(RewardError, match="is refused while what others wrote") as caught:
            await pool.score(evil, [text], [True], "3")
        assert caught.value.reason == "failed"
    assert (await pool.complete(PlainSpec("length", 2, {})))[
        "package"
    ] == "swarm-reward-length==1.5"
    assert pool.counts["started"] == 1


async def test_what_is_not_installed_is_named(pool: WorkerPool) -> None:
    spec = PlainSpec("length", 2, {"package": "swarm-reward-length==1.5"})
    for call in (pool.complete(spec), pool.score(spec, ["5"], [True], "5")):
        with pytest.raises(RewardError, match=r"pip install 'swarm-reward-length==1\.5'") as caught:
            await call
        assert caught.value.reason == "missing"


# -- the wall itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attempt",
    [
        "eval('1 + 1')",
        "exec('x = 1')",
        "exec(compile('x = 1', '', 'exec'))",
        "open('/dev/null')",
        "import colorsys",
        "os.listdir('/')",
        "os.system('true')",
        "subprocess.run(['true'])",
        "socket.socket()",
        "ctypes.CDLL(None)",
        "pickle.loads(pickle.dumps(os.getcwd))",
        "eval(\"Integer(__import__('os').getpid())\")",
        "eval(\"Integer('x')\")",
        "eval('Integer(open)', {'Integer': print})",
    ],
)
def test_while_the_wall_stands_nothing_but_computing_is_possible(attempt: str) -> None:
    script = textwrap.dedent(
        f"""
        import ctypes, os, pickle, socket, subprocess
        from swarm.rewards import wall
        def attempt():
            {attempt}
        try:
            with wall.standing():
                attempt()
        except (wall.WallError, ImportError) as error:
            print("refused:", error)
        with open(os.devnull):
            print(eval("1 + 1"))
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.startswith("refused:"), result
    assert result.stdout.endswith("2\n")


def test_templates_may_be_compiled_behind_the_wall_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with wall.standing(executing=True):
        assert eval("1 + 1") == 2  # noqa: S307 - what jinja2 does with its own code
        with pytest.raises(wall.WallError, match="open is refused"):
            open("/dev/null")  # noqa: SIM115
        with pytest.raises(ImportError):
            import colorsys  # noqa: F401
    with open("/dev/null"):
        pass


def test_the_wall_lets_sympy_make_numbers() -> None:
    made = {"Integer": int, "Float": float}
    with wall.standing():
        assert eval("Integer (12 )", made) == 12  # noqa: S307 - as sympy does
        assert eval("Float ('12.5' )", made) == 12.5  # noqa: S307
