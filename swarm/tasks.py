"""The arithmetic task of the demo: problems, their answers and the split that keeps them apart.

Owns: which problems there are, how they are written, which of them are held out, and seeded
draws from them. Does not know: models, tokenizers, rewards, or how a swarm stores its prompts;
`record` gives the fields of one JSONL line for `swarm-node seed`, `python -m swarm.tasks N` a file.

In distribution are sums and differences of two two-digit numbers (`12+34=`, `71-25=`); out of
distribution are three one-digit terms (`4+7+9=`, `4+7-9=`). Every prompt has six characters, no
answer is negative.
"""

import json
import random
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, Literal

Operation = Literal["add", "sub", "add3", "addsub"]
Split = Literal["train", "held_out"]

IN_DISTRIBUTION: tuple[Operation, ...] = ("add", "sub")
OUT_OF_DISTRIBUTION: tuple[Operation, ...] = ("add3", "addsub")

HELD_OUT_ONE_IN = 10
"""One problem in so many is held out."""

_SIGNS: dict[Operation, tuple[int, ...]] = {
    "add": (1, 1),
    "sub": (1, -1),
    "add3": (1, 1, 1),
    "addsub": (1, 1, -1),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One arithmetic problem."""

    operation: Operation
    operands: tuple[int, ...]

    @property
    def value(self) -> int:
        """The right result."""
        signs = _SIGNS[self.operation]
        return sum(sign * operand for sign, operand in zip(signs, self.operands, strict=True))

    @property
    def prompt(self) -> str:
        """What the model reads, e.g. `12+34=`."""
        first, *rest = zip(_SIGNS[self.operation], self.operands, strict=True)
        return str(first[1]) + "".join(f"{'+' if s > 0 else '-'}{x}" for s, x in rest) + "="

    @property
    def split(self) -> Split:
        """The part that this problem belongs to, by a checksum of its operands.

        Their order does not count, and neither does the operation: with `12+34=` also `34+12=`
        and `34-12=` are held out. A checksum that were linear in the operands would tie the
        split to the last digit of the result; crc32 modulo ten does not.
        """
        key = ",".join(map(str, sorted(self.operands))).encode()
        return "train" if zlib.crc32(key) % HELD_OUT_ONE_IN else "held_out"

    @property
    def id(self) -> str:
        """Name of the problem, e.g. `add-12-34`."""
        return "-".join([self.operation, *map(str, self.operands)])

    def record(self) -> dict[str, Any]:
        """The problem as the fields of one line of a prompt file."""
        return {
            "prompt": self.prompt,
            "answer": str(self.value),
            "id": self.id,
            "tags": [self.operation],
        }


@dataclass(frozen=True, slots=True)
class PromptSets:
    """The three prompt sets of one swarm, as lines of their files."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    out_of_distribution: list[dict[str, Any]]


@cache
def all_problems(operation: Operation, split: Split) -> tuple[Problem, ...]:
    """Every problem of one operation and split, in a fixed order."""
    two = operation in IN_DISTRIBUTION
    operands: Iterable[tuple[int, ...]] = (
        product(range(10, 100), repeat=2) if two else product(range(10), repeat=3)
    )
    problems = (Problem(operation, numbers) for numbers in operands)
    return tuple(p for p in problems if p.value >= 0 and p.split == split)


def draw(operations: Sequence[Operation], split: Split, count: int, seed: int) -> list[Problem]:
    """Draw different problems, the operations in equal parts and in random order.

    Args:
        operations: the operations to draw from.
        split: the part to draw from.
        count: how many problems in all.
        seed: the same seed gives the same problems on every machine.

    Raises:
        ValueError: there are fewer problems than asked for.
    """
    rng = random.Random(f"{seed} {split} {' '.join(operations)}")
    drawn: list[Problem] = []
    for index, operation in enumerate(operations):
        share = count // len(operations) + (index < count % len(operations))
        problems = all_problems(operation, split)
        if share > len(problems):
            raise ValueError(
                f"{share} different {split} problems of {operation!r} asked for, "
                f"there are {len(problems)}"
            )
        drawn += rng.sample(problems, share)
    rng.shuffle(drawn)
    return drawn


def arithmetic_prompts(
    seed: int, *, train: int = 4000, held_out: int = 200, out_of_distribution: int = 100
) -> PromptSets:
    """The prompt sets of an arithmetic swarm.

    Args:
        seed: the same seed gives the same prompts on every machine.
        train: prompts to train on.
        held_out: prompts of the same kind that are never trained on.
        out_of_distribution: held-out prompts of another kind.

    Raises:
        ValueError: there are fewer problems than asked for.
    """
    return PromptSets(
        train=[p.record() for p in draw(IN_DISTRIBUTION, "train", train, seed)],
        held_out=[p.record() for p in draw(IN_DISTRIBUTION, "held_out", held_out, seed)],
        out_of_distribution=[
            p.record() for p in draw(OUT_OF_DISTRIBUTION, "held_out", out_of_distribution, seed)
        ],
    )


def main(arguments: Sequence[str]) -> int:
    """Write N training prompts to stdout."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        sys.stderr.write("usage: python -m swarm.tasks N > prompts.jsonl\n")
        return 2
    for line in arithmetic_prompts(0, train=int(arguments[0])).train:
        sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
