"""Swarms and nodes that do not fit together: refused at the door, with the reason named."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import LOOPBACK, SMALL, Swarm, cli, settings, sums, wait_until, write_prompts

from swarm.paths import DataDir
from swarm.protocol.invite import Invite


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("refusals")
    with Swarm(folder) as swarm:
        swarm.seed(write_prompts(folder / "prompts.jsonl", sums(range(3, 9), range(2, 12))))
        yield swarm


def refused_join(swarm: Swarm, data_dir: Path, model: Path, **changes: str) -> str:
    """What `swarm-node join` says before it ends with the exit code for configuration."""
    flags = settings(LOOPBACK | {k.replace("__", "."): v for k, v in changes.items()})
    result = cli("join", swarm.invite, "--model", str(model), "--data-dir", str(data_dir), *flags)
    assert result.returncode == 78, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


def with_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A model folder like the small one's, with another tokenizer."""
    shutil.copytree(SMALL, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    return folder


def test_another_vocabulary(swarm: Swarm, tmp_path: Path) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["8"], vocabulary["9"] = vocabulary["9"], vocabulary["8"]

    model = with_tokenizer(tmp_path / "swapped", swap)
    message = refused_join(swarm, tmp_path / "data", model)
    assert "tokenizer mismatch" in message
    assert str(model) in message
    assert "'arith-small'" in message


def test_the_same_vocabulary_that_splits_otherwise(swarm: Swarm, tmp_path: Path) -> None:
    def strip_plus(tokenizer: dict[str, Any]) -> None:
        tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "+"}, "content": "-"}

    model = with_tokenizer(tmp_path / "normalizing", strip_plus)
    message = refused_join(swarm, tmp_path / "data", model)
    assert "tokenizer mismatch" in message
    assert "with the same vocabulary" in message
    assert str(model) in message
    assert "'arith-small'" in message


def test_a_model_with_too_short_a_context(swarm: Swarm, tmp_path: Path) -> None:
    model = tmp_path / "short"
    shutil.copytree(SMALL, model)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 14}))
    message = refused_join(swarm, tmp_path / "data", model)
    assert str(model) in message
    assert "context of 14 tokens" in message
    assert "context of 15 or more" in message  # 5 of the longest prompt, 10 of a completion


def test_a_start_that_is_refused_leaves_no_settings_to_the_next(swarm: Swarm) -> None:
    """That may train otherwise, since nothing has been trained."""
    data = swarm.folder / "again"
    swarm_dir = DataDir(data).swarm(Invite.decode(swarm.invite).swarm_id)
    message = refused_join(swarm, data, SMALL, model__device="mps", model__mode="lora")
    assert "model.device = 'mps'" in message
    assert swarm_dir.saved_config() is None
    node = swarm.join("again")
    wait_until(lambda: node.step > 0, "it trains", swarm.nodes)
    assert node.stop() == 0
    saved = swarm_dir.config_path.read_bytes()
    refused_join(swarm, data, SMALL, model__device="mps")
    assert swarm_dir.config_path.read_bytes() == saved
    assert len(swarm_dir.runs()) == 1


def test_what_was_joined_is_not_seeded_or_amended(swarm: Swarm, tmp_path: Path) -> None:
    data = tmp_path / "data"
    more = write_prompts(tmp_path / "more.jsonl", {"1+1=": "2"})
    refused_join(swarm, data, SMALL, limits__max_group_size="3")
    for verb in ((), ("--append", str(more)), ("--close",)):
        result = cli("seed", *verb, "--data-dir", str(data), *settings(LOOPBACK))
        assert result.returncode == 77, result.stderr
        assert result.stdout == ""
        assert "was joined, not seeded" in result.stderr


def test_a_swarm_above_this_nodes_limits(swarm: Swarm, tmp_path: Path) -> None:
    message = refused_join(swarm, tmp_path / "data", SMALL, limits__max_group_size="3")
    assert "groups of 4" in message
    assert "limits.max_group_size" in message
    assert "allows 3" in message
