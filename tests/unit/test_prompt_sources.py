"""Prompts from files, data sets and reasoning-gym: what is read, tagged, and named when wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.errors import DataError, UsageError
from swarm.node.prompt_sources import read, title
from swarm.rewards.reward import PlainSpec


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_a_file_is_read_with_its_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(
        '{"prompt":"1+1=","answer":2}\n\n{"prompt":"x"}\n{"prompt":"2+2=","answer":"4"}\n'
    )
    first, bad, last = read([str(path)])
    assert first.prompt is not None
    assert (first.where, first.prompt.answer, first.prompt.tags) == (f"{path}:1", "2", ())
    assert (bad.where, bad.wrong, bad.prompt) == (f"{path}:3", "'answer' is missing", None)
    assert last.where == f"{path}:4"


def test_several_sources_are_tagged_each_with_its_name(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1", "tags": ["old"]})
    b = write(tmp_path / "b.jsonl", {"prompt": "2", "answer": "2"}, {"prompt": "3", "answer": "3"})
    found = read([a, f"{b}?tag=easy&reward=exact&limit=1"])
    assert [item.prompt.tags for item in found if item.prompt] == [("old", "a"), ("easy",)]
    assert [item.reward for item in found] == [None, PlainSpec("exact", 1, {})]
    assert title([a, b]) == "a"


def test_a_sum_can_be_a_source_s_reward(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"})
    (item,) = read([f"{a}?reward=number:0.9+format:0.1"])
    assert item.reward is not None
    assert item.reward.params["b_reward"] == "format"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{}?colour=red", "no option colour; there are reward, tag, limit"),
        ("{}?split=test", "no option split"),
        ("{}?limit=few", "limit = 'few'; a whole number is right"),
        ("{}?limit", r"expected .*\?key=value"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, source: str, says: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"})
    with pytest.raises(UsageError, match=says):
        read([source.format(path)])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no prompts"):
        read([write(tmp_path / "a.jsonl")])


# -- data sets -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set folder with two splits, as the Hub has them."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    root = tmp_path / "gsm8k"
    root.mkdir()
    rows = [
        {"question": "1 + 1?", "answer": "so\n#### 2", "level": 3, "none": None},
        {"question": "2 + 2?", "answer": "#### 4", "level": 4, "none": None},
        {"question": " ", "answer": "#### 5", "level": 5, "none": None},
    ]
    write(root / "train.jsonl", *rows)
    write(root / "test.jsonl", {"question": "3 + 3?", "answer": "#### 6", "level": 1, "none": None})
    return root


def test_a_data_set_s_columns_are_mapped(folder: Path) -> None:
    mapped = {"map": "prompt=question,answer=level"}
    first, second, third = read([f"hf:{folder}"], mapped)
    assert first.prompt is not None
    assert (first.prompt.prompt, first.prompt.answer) == ("1 + 1?", "3")
    assert second.where == f"hf:{folder}/train:2"
    assert third.wrong == "'prompt' is empty"
    (test,) = read([f"hf:{folder}?split=test&map=prompt=question,answer=answer"])
    assert test.prompt is not None
    assert test.prompt.answer == "#### 6"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({}, UsageError, "no column prompt; it has question, answer, level"),
        ({"map": "prompt"}, UsageError, "expected FIELD=COLUMN"),
        ({"map": "colour=question"}, UsageError, "the fields being prompt or messages, answer"),
        ({"map": "prompt=question,answer=none"}, None, "'answer' must be text, not null"),
        ({"split": "dev"}, DataError, "split 'dev' is neither in the cache here nor to be had"),
        ({"config": "main2"}, DataError, "is neither in the cache here nor to be had"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_named(
    folder: Path, options: dict[str, str], error: type[Exception] | None, says: str
) -> None:
    if error is None:
        assert read([f"hf:{folder}"], options)[0].wrong == says
        return
    with pytest.raises(error, match=says):
        read([f"hf:{folder}"], options)


def test_a_data_set_of_several_configurations_asks_for_one(folder: Path) -> None:
    """As openai/gsm8k has them; a default one would be taken."""
    read_me = "configs:\n- {config_name: main, data_files: train.jsonl}\n"
    read_me += "- {config_name: other, data_files: test.jsonl}\n"
    (folder / "README.md").write_text(f"---\n{read_me}---\n")
    says = rf"configurations main, other; name one: 'hf:{folder}\?config=main'"
    with pytest.raises(UsageError, match=says):
        read([f"hf:{folder}"], {"map": "prompt=question,answer=level"})
    (only,) = read([f"hf:{folder}?config=other&map=prompt=question,answer=level"])
    assert only.prompt is not None
    assert only.prompt.prompt == "3 + 3?"


def test_without_a_network_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"hf:nobody/nothing: split 'train' is neither in the cache"
    ):
        read(["hf:nobody/nothing"], {"map": "prompt=question,answer=answer"})


@pytest.mark.parametrize(
    ("missing", "source", "extra"),
    [("datasets", "hf:a/b", "data"), ("reasoning_gym", "reasoning-gym:gcd", "reasoning-gym")],
)
def test_an_extra_that_is_missing_is_named(missing: str, source: str, extra: str) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from swarm.errors import UsageError\n"
        "from swarm.node.prompt_sources import read\n"
        "try:\n"
        f"    read([{source!r}])\n"
        "except UsageError as error:\n"
        "    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"pip install 'swarm-node[{extra}]'" in result.stdout, result.stderr


# -- reasoning-gym -------------------------------------------------------------------------------


def test_tasks_are_made_from_their_seed() -> None:
    options = {"size": "3", "seed": "7"}
    small = "reasoning-gym:chain_sum?min_digits=1&max_digits=1&min_terms=2&max_terms=2"
    first = read([small], options)
    assert read([small], options) == first
    assert read([f"{small}&seed=8"], options) != first
    assert [item.prompt.id for item in first if item.prompt] == [
        f"chain_sum/7/{i}" for i in range(3)
    ]
    for item in first:
        assert item.prompt is not None
        assert item.reward == PlainSpec("reasoning-gym", 1, {"task": "chain_sum"})
        assert len(item.prompt.answer.lstrip("-")) <= 2


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("reasoning-gym:countdown", "not among the tasks that can be scored: ab, aiw"),
        ("reasoning-gym:gcd?colour=red", "colour"),
        ("reasoning-gym:gcd?min_numbers=0", "reasoning-gym:gcd"),
    ],
)
def test_wrong_tasks_are_named(source: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read([source], {"size": "3"})
