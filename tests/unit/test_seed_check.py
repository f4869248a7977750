"""What a few sampled groups say about a swarm that is about to be seeded."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swarm.node.seed_check import SHARED_WORDS, figures, lines, overlap
from swarm.protocol.prompts import Prompt
from swarm.protocol.rollout import Finish, Rollout

SMALL = Path(__file__).parents[2] / "swarm" / "models" / "arith-small"


def group(*lengths: int, limit: int = 10) -> list[Rollout]:
    return [
        Rollout(
            token_ids=np.zeros(n, np.int32),
            logprobs=np.zeros(n, np.float32),
            finish=Finish.LENGTH if n == limit else Finish.STOP,
        )
        for n in lengths
    ]


def rewards(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_figures_of_mixed_groups() -> None:
    found = figures(
        [group(2, 4), group(10, 10), group(3, 3), group(3, 3), group(1, 1)],
        [rewards(0, 1), rewards(0, 0), rewards(1, 1), rewards(0.1, 0.9), None],
        10,
    )
    assert found["completions"] == 10
    assert found["groups_without_rewards"] == 1
    assert found["reward_mean"] == 0.5
    assert found["reward_shares"] == {"0": 0.375, "0.1": 0.125, "0.9": 0.125, "1": 0.375}
    assert found["groups_mixed"] == 0.5
    assert found["groups_all_highest"] == 0.25
    assert found["groups_all_lowest"] == 0.25
    assert found["truncated"] == 0.2
    assert found["completion_tokens_mean"] == 4.0
    assert [text.split(":")[0] for text in found["advice"]] == ["some groups could not be scored"]


@pytest.mark.parametrize(
    ("value", "highest", "lowest", "advice"),
    [(0.0, 0.0, 1.0, "most groups get nothing"), (1.0, 1.0, 0.0, "most groups are all right")],
)
def test_groups_without_a_signal_are_told_apart(
    value: float, highest: float, lowest: float, advice: str
) -> None:
    found = figures([group(2, 3)] * 3, [rewards(value, value)] * 3, 10)
    assert (found["groups_all_highest"], found["groups_all_lowest"]) == (highest, lowest)
    assert found["groups_mixed"] == 0.0
    assert found["advice"][0].startswith(advice)


def test_truncation_is_named() -> None:
    found = figures([group(10, 10)], [rewards(0, 1)], 10)
    assert found["truncated"] == 1.0
    assert "raise --max-completion-tokens" in found["advice"][0]


def test_nothing_scored_is_no_division_by_zero() -> None:
    found = figures([group(1, 1)], [None], 10)
    assert (found["reward_mean"], found["groups_mixed"]) == (None, 0.0)


def prompt(text: str) -> Prompt:
    return Prompt(prompt=text, messages=None, answer="1")


def test_overlap_is_by_words_and_by_runs_of_words() -> None:
    story = " ".join(f"w{i}" for i in range(SHARED_WORDS + 5))
    run = " ".join(story.split()[3 : 3 + SHARED_WORDS])
    almost = " ".join(story.split()[3 : 2 + SHARED_WORDS])
    chat = Prompt(prompt=None, messages=({"role": "user", "content": "How Many?"},), answer="1")
    held_out = [prompt("Tom has 3 apples."), prompt(f"before {run} after"), prompt("3+4="), chat]
    training = [prompt("tom  has 3 APPLES"), prompt(story), prompt("3-4="), prompt("how many")]
    assert overlap(training, held_out) == {"prompts": 4, "same_words": 2, "shared_run": 3}
    assert overlap([prompt(almost)], held_out) == {"prompts": 4, "same_words": 0, "shared_run": 0}


def test_a_model_is_checked_and_nothing_is_founded(tmp_path: Path) -> None:
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n"
            for a in range(10, 30)
            for b in (11, 22)
        )
    )
    result = subprocess.run(
        [
            sys.executable, "-m", "swarm.cli", "seed", str(prompts), "--check", str(SMALL),
            "--max-prompt-tokens", "16", "--max-completion-tokens", "10", "--group-size", "4",
            "--check-prompts", "6", "--set", "model.device=cpu", "--json",
            "--data-dir", str(tmp_path / "data"),
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["schema"] == "swarm-node/seed-check/1"
    assert (found["groups"], found["completions"]) == (6, 24)
    assert found["prompts_in_sets"]["prompts"] + found["prompts_in_sets"]["held_out"] == 40
    assert 0.0 <= found["reward_mean"] < 1.0
    assert found["overlap"]["held_out"]["same_words"] == 0
    assert not (tmp_path / "data").exists()
    assert lines(found)[1].startswith("reward         mean ")
