"""Checkpoints: written whole or not at all, damaged ones passed over, the right ones kept."""

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swarm.checkpoint_files import check_files, read_manifest
from swarm.config import ModelSection
from swarm.errors import DataError
from swarm.paths import listed_checkpoints
from swarm.rl import checkpoint
from swarm.rl.policy import Policy

STATE = {"exp_avg/a": torch.arange(6.0).reshape(2, 3), "step/a": torch.tensor(4.0)}
TOTALS = {"step": 4, "optimizer_steps": 3}
TERMS = {"mode": "full"}


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Policy:
    return Policy.load(ModelSection(path=str(tiny_folder)), seed=0)


@pytest.fixture
def save(policy: Policy, tmp_path: Path) -> Callable[..., Path]:
    def save(step: int, accuracy: float | None = None, keep: int = 2, **changes: Any) -> Path:
        arguments = {"node_state": f"state {step}".encode(), "terms": TERMS, **changes}
        return checkpoint.save(
            tmp_path, policy, (STATE, TOTALS), step=step, accuracy=accuracy, keep=keep, **arguments
        )

    return save


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back(save: Callable[..., Path], tmp_path: Path, policy: Policy) -> None:
    path = save(7, accuracy=0.25, node_state=b"\x00\xff")
    found = checkpoint.newest_whole(tmp_path)
    assert found == checkpoint.Checkpoint(path, 7, 0.25, TERMS)
    assert found is not None
    assert found.node_state() == b"\x00\xff"
    tensors, totals = found.trainer_state()
    assert totals == TOTALS
    assert tensors.keys() == STATE.keys()
    assert all(torch.equal(tensors[name], STATE[name]) for name in STATE)
    weights = load_file(path / "model.safetensors")
    expected = policy.model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_folder_is_a_model_with_its_tokenizer(save: Callable[..., Path], tiny_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = save(1)
    assert (path / "tokenizer.json").read_bytes() == (tiny_folder / "tokenizer.json").read_bytes()
    ids = AutoTokenizer.from_pretrained(path)("12+3", return_tensors="pt").input_ids
    assert AutoModelForCausalLM.from_pretrained(path)(input_ids=ids).logits.shape == (1, 4, 20)


def test_adapter_folder(tiny_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(path=str(tiny_folder), mode="lora", lora_rank=2)
    policy = Policy.load(section, seed=0)
    path = checkpoint.save(
        tmp_path, policy, (STATE, TOTALS), step=1, node_state=b"", accuracy=None, terms={}, keep=1
    )
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {*_names(path)}
    assert "model.safetensors" not in _names(path)
    assert checkpoint.newest_whole(tmp_path) is not None


def test_nothing_that_can_hold_code(save: Callable[..., Path]) -> None:
    suffixes = {path.suffix for path in save(1).rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".bin"}
    assert [path.name for path in save(2).glob("*.bin")] == [checkpoint.NODE_STATE]


def test_checkpoint_of_a_certain_step(save: Callable[..., Path], tmp_path: Path) -> None:
    first, _, again = save(1, keep=9), save(2, keep=9), save(1, keep=9)
    assert first != again
    found = checkpoint.newest_whole(tmp_path, 1)
    assert found is not None
    assert found.path == again
    _flip_a_bit(again / "model.safetensors")
    found = checkpoint.newest_whole(tmp_path, 1)
    assert found is not None
    assert found.path == first
    assert checkpoint.newest_whole(tmp_path, 3) is None


def test_empty_and_absent_folders(tmp_path: Path) -> None:
    assert checkpoint.newest_whole(tmp_path) is None
    assert checkpoint.newest_whole(tmp_path / "nowhere") is None
    assert checkpoint.best(tmp_path / "nowhere") is None


# -- damage ----------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "config.json",
        "trainer.safetensors",
        "trainer.json",
        "node_state.bin",
        "tokenizer.json",
        "checkpoint.json",
    ],
)
@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, Path.unlink])
def test_damaged_checkpoint_is_passed_over(
    save: Callable[..., Path],
    tmp_path: Path,
    damage: Callable[[Path], None],
    file: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    older, newer = save(1), save(2)
    damage(newer / file)
    with caplog.at_level(logging.ERROR):
        found = checkpoint.newest_whole(tmp_path)
    assert found is not None
    assert found.path == older
    (record,) = caplog.records
    assert str(newer) in record.getMessage()
    assert file in record.getMessage()


def test_no_whole_checkpoint(save: Callable[..., Path], tmp_path: Path) -> None:
    _truncate(save(1) / "node_state.bin")
    assert checkpoint.newest_whole(tmp_path) is None


def test_changed_number_in_the_manifest_is_noticed(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    path = save(1, accuracy=0.5) / checkpoint.MANIFEST
    path.write_text(path.read_text().replace("0.5", "0.9"))
    assert checkpoint.best(tmp_path) is None
    assert checkpoint.newest_whole(tmp_path) is None


def test_trainer_state_that_is_none(save: Callable[..., Path], tmp_path: Path) -> None:
    path = save(1)
    found = checkpoint.newest_whole(tmp_path)
    assert found is not None
    _truncate(path / checkpoint.TRAINER_TENSORS)
    with pytest.raises(DataError, match="trainer state"):
        found.trainer_state()


@pytest.mark.parametrize("stage", ["_fsync", "_write_manifest", "save_file"])
def test_full_disk_leaves_nothing_behind(
    save: Callable[..., Path], tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(1)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, stage, fail)
    with pytest.raises(OSError, match="No space"):
        save(2)
    assert _names(tmp_path) == ["step-00000001"]


def test_left_over_of_a_killed_process(save: Callable[..., Path], tmp_path: Path) -> None:
    """It is no checkpoint, and the next one to be written removes it."""
    left_over = tmp_path / ".writing-step-00000003"
    left_over.mkdir()
    (left_over / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest_whole(tmp_path) is None
    save(3)
    assert _names(tmp_path) == ["step-00000003"]


def test_kill_while_one_is_deleted(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment, each folder with a checkpoint's name is a whole one."""
    save(1)
    save(2)

    class Killed(BaseException): ...

    def deletes_a_file_and_dies(path: Path, **_: object) -> None:
        next(path.glob("*.safetensors")).unlink()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", deletes_a_file_and_dies)
        with pytest.raises(Killed):
            save(3)
    listed = [path for _, _, path in listed_checkpoints(tmp_path)]
    assert sorted(path.name for path in listed) == ["step-00000002", "step-00000003"]
    for path in listed:
        check_files(path, read_manifest(path)["files"])
    assert len(list(tmp_path.iterdir())) == 3
    save(4)
    assert _names(tmp_path) == ["step-00000003", "step-00000004"]


def test_files_are_on_the_disk_before_the_name(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    original = checkpoint._fsync

    def fsync(path: Path) -> None:
        assert (tmp_path / "step-00000001").exists() == (path == tmp_path)
        synced.append(path)
        original(path)

    monkeypatch.setattr(checkpoint, "_fsync", fsync)
    path = save(1)
    names = {p.name for p in synced}
    assert {p.name for p in path.iterdir()} <= names
    assert synced[-2:] == [tmp_path / ".writing-step-00000001", tmp_path]


# -- which are kept --------------------------------------------------------------------------------


def test_newest_and_best_are_kept(save: Callable[..., Path], tmp_path: Path) -> None:
    for step, accuracy in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.6)):
        save(step, accuracy)
    assert _names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    assert checkpoint.best(tmp_path) == tmp_path / "step-00000002"
    save(6, 0.9)  # as good, and newer
    assert _names(tmp_path) == ["step-00000005", "step-00000006"]


def test_same_step_again_takes_the_place_of_the_first(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    save(5, node_state=b"first")
    again = save(5, node_state=b"second")
    assert again.name == "step-00000005.1"
    found = checkpoint.newest_whole(tmp_path)
    assert found is not None
    assert found.node_state() == b"second"
    assert save(5, keep=1).name == "step-00000005.2"
    assert _names(tmp_path) == ["step-00000005.2"]


def test_steps_are_ordered_as_numbers(save: Callable[..., Path], tmp_path: Path) -> None:
    save(99_999_999)
    newest = save(100_000_000)
    found = checkpoint.newest_whole(tmp_path)
    assert found is not None
    assert found.path == newest


def test_manifest_names_every_file(save: Callable[..., Path]) -> None:
    path = save(1)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    assert sorted(manifest["files"]) == sorted(set(_names(path)) - {checkpoint.MANIFEST})
