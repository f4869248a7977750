import json
from collections import Counter
from dataclasses import asdict

import pytest

from swarm.tasks import (
    IN_DISTRIBUTION,
    OUT_OF_DISTRIBUTION,
    Operation,
    Problem,
    all_problems,
    arithmetic_prompts,
    draw,
)

EVERY_OPERATION = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)


@pytest.mark.parametrize(
    ("problem", "prompt", "value", "name"),
    [
        (Problem("add", (12, 34)), "12+34=", 46, "add-12-34"),
        (Problem("sub", (71, 25)), "71-25=", 46, "sub-71-25"),
        (Problem("add3", (4, 7, 9)), "4+7+9=", 20, "add3-4-7-9"),
        (Problem("addsub", (4, 7, 9)), "4+7-9=", 2, "addsub-4-7-9"),
    ],
)
def test_a_problem_says_what_it_asks(problem: Problem, prompt: str, value: int, name: str) -> None:
    assert (problem.prompt, problem.value, problem.id) == (prompt, value, name)


@pytest.mark.parametrize("operation", EVERY_OPERATION)
def test_every_answer_is_what_the_prompt_evaluates_to(operation: Operation) -> None:
    for problem in all_problems(operation, "held_out") + all_problems(operation, "train"):
        record = problem.record()
        assert len(record["prompt"]) == 6
        # The prompts are digits, plus and minus, made by the line above.
        assert int(record["answer"]) == eval(record["prompt"].rstrip("="))  # noqa: S307
        assert int(record["answer"]) >= 0
        assert record["tags"] == [operation]


def test_the_problems_are_all_of_their_kind() -> None:
    sizes = {
        o: sum(len(all_problems(o, s)) for s in ("train", "held_out")) for o in EVERY_OPERATION
    }
    at_most_their_sum = sum(
        1 for a in range(10) for b in range(10) for c in range(10) if c <= a + b
    )
    assert sizes == {
        "add": 90 * 90,
        "sub": 90 * 91 // 2,
        "add3": 1000,
        "addsub": at_most_their_sum,
    }


@pytest.mark.parametrize("operation", EVERY_OPERATION)
def test_about_a_tenth_is_held_out(operation: Operation) -> None:
    held_out, train = (len(all_problems(operation, s)) for s in ("held_out", "train"))
    assert 0.05 < held_out / (held_out + train) < 0.15


def test_train_and_held_out_share_no_operands_in_whatever_order_or_operation() -> None:
    seen = {
        split: {tuple(sorted(p.operands)) for o in EVERY_OPERATION for p in all_problems(o, split)}
        for split in ("train", "held_out")
    }
    assert seen["train"]
    assert seen["held_out"]
    assert not seen["train"] & seen["held_out"]


@pytest.mark.parametrize("operation", IN_DISTRIBUTION)
def test_the_split_says_nothing_of_the_last_digit(operation: Operation) -> None:
    problems = all_problems(operation, "held_out")
    last_digits = Counter(problem.value % 10 for problem in problems)
    expected = len(problems) / 10
    assert all(0.6 * expected < last_digits[digit] < 1.4 * expected for digit in range(10))


def test_a_draw_is_reproducible_mixed_and_without_repetition() -> None:
    drawn = draw(IN_DISTRIBUTION, "train", 301, seed=5)
    assert drawn == draw(IN_DISTRIBUTION, "train", 301, seed=5)
    assert drawn != draw(IN_DISTRIBUTION, "train", 301, seed=6)
    assert len(set(drawn)) == 301
    assert Counter(p.operation for p in drawn) == {"add": 151, "sub": 150}
    # A prefix, which is what an evaluation of fewer prompts uses, is mixed too.
    assert 15 < Counter(p.operation for p in drawn[:50])["add"] < 35


def test_a_draw_of_more_than_there_is_names_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"5000 different train problems of 'sub'.*there are \d+"):
        draw(["sub"], "train", 5000, seed=0)


def test_the_prompt_sets_are_the_same_on_every_machine() -> None:
    sets = arithmetic_prompts(0)
    assert [record["id"] for record in sets.train[:3]] == ["sub-69-19", "add-53-81", "sub-70-46"]
    assert {name: len(records) for name, records in asdict(sets).items()} == {
        "train": 4000,
        "held_out": 200,
        "out_of_distribution": 100,
    }
    identities = [record["id"] for records in asdict(sets).values() for record in records]
    assert len(set(identities)) == len(identities)
    assert {t for r in sets.train + sets.held_out for t in r["tags"]} == set(IN_DISTRIBUTION)
    assert {t for r in sets.out_of_distribution for t in r["tags"]} == set(OUT_OF_DISTRIBUTION)
    assert json.loads(json.dumps(sets.train[0])) == sets.train[0]
