"""Listing checkpoints, and exporting one so that plain transformers loads it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import STOP_ID

from swarm import checkpoint_files
from swarm.cli.main import main
from swarm.config import ModelSection, NodeConfig
from swarm.errors import UsageError
from swarm.export import choose, export, held, kept
from swarm.paths import DataDir, RunDir
from swarm.rl import checkpoint
from swarm.rl.policy import Policy

IDS = torch.tensor([[1, 2, 3, STOP_ID]])


def _policy(folder: Path, mode: str) -> Policy:
    """One that training has changed."""
    policy = Policy.load(ModelSection(path=str(folder), mode=mode, lora_rank=3), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return policy


@pytest.fixture(params=["full", "lora"])
def run(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> tuple[RunDir, Policy]:
    """A run with checkpoints of steps 1 to 3, the second the best."""
    policy = _policy(tiny_folder, request.param)
    run_dir = RunDir.create(tmp_path / "swarms" / "ab" / "runs" / "0001")
    config = NodeConfig(
        model=ModelSection(path=str(tiny_folder), mode=request.param, lora_rank=3, threads=1)
    )
    record = {"config": "d", "configs": {"d": config.model_dump(mode="json")}}
    run_dir.record_path.write_text(json.dumps(record))
    for step, accuracy in ((1, 0.25), (2, 0.75), (3, 0.5)):
        checkpoint.save(
            run_dir.checkpoints_dir, policy, ({"exp_avg/a": torch.ones(2)}, {"step": step}),
            step=step, node_state=b"x", accuracy=accuracy, terms={"mode": request.param}, keep=9,
        )  # fmt: skip
    return run_dir, policy


def _cli(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def test_list_names_step_accuracy_size_and_the_best(
    run: tuple[RunDir, Policy], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, _ = run
    (run_dir.checkpoints_dir / "step-00000003" / "node_state.bin").write_bytes(b"damaged")
    assert _cli("checkpoint", "list", run_dir.root, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["schema"] == "swarm-node/checkpoints/1"
    rows = result["checkpoints"]
    assert [(r["step"], r["accuracy"], r["best"]) for r in rows] == [
        (1, 0.25, False), (2, 0.75, True), (3, None, False),
    ]  # fmt: skip
    assert "node_state.bin" in rows[2]["problem"]
    size = sum(f.stat().st_size for f in Path(rows[0]["path"]).iterdir())
    assert rows[0]["bytes"] == size - (Path(rows[0]["path"]) / "checkpoint.json").stat().st_size
    assert _cli("checkpoint", "list", run_dir.root) == 0
    assert "step       2  accuracy 0.750" in capsys.readouterr().out


def test_checkpoints_that_are_deleted_while_they_are_read(
    run: tuple[RunDir, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node that trains writes newer ones, and keeps some."""
    run_dir, _ = run
    sha256 = checkpoint_files.sha256
    first, second, third = run_dir.checkpoints().values()

    def deletes_and_reads(path: Path) -> str:
        if path.parent != third:
            shutil.rmtree(path.parent)
        return sha256(path)

    monkeypatch.setattr(checkpoint_files, "sha256", deletes_and_reads)
    assert [row["step"] for row in kept(run_dir)] == [3]
    assert not first.exists()
    assert not second.exists()


def test_the_best_is_chosen_unless_another_is_named(run: tuple[RunDir, Policy]) -> None:
    run_dir, _ = run
    assert choose(run_dir, None)["step"] == 2
    assert choose(run_dir, None, last=True)["step"] == 3
    assert choose(run_dir, 1)["step"] == 1
    with pytest.raises(UsageError, match="whole ones: 1, 2, 3"):
        choose(run_dir, 7)
    shutil.rmtree(run_dir.checkpoints_dir)
    assert kept(run_dir) == []
    with pytest.raises(UsageError, match="none"):
        choose(run_dir, None)


def test_without_accuracy_the_newest_is_chosen(run: tuple[RunDir, Policy]) -> None:
    run_dir, policy = run
    shutil.rmtree(run_dir.checkpoints_dir)
    for step in (10, 30, 20):
        checkpoint.save(
            run_dir.checkpoints_dir, policy, ({}, {"step": step}),
            step=step, node_state=b"x", accuracy=None, terms={}, keep=9,
        )  # fmt: skip
    (run_dir.checkpoints_dir / "step-00000040").mkdir()  # as one that is half deleted
    assert choose(run_dir, None)["step"] == 30
    with pytest.raises(UsageError, match="whole ones: 10, 20, 30"):
        choose(run_dir, 40)


def test_exported_folder_is_a_model_of_transformers(
    run: tuple[RunDir, Policy], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the weights of the run, merged where an adapter was trained."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, policy = run
    out = tmp_path / "exported"
    assert _cli("checkpoint", "export", run_dir.root, "--out", out, "--merge") == 0
    assert capsys.readouterr().out.strip() == str(out)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"trainer.safetensors", "node_state.bin", "checkpoint.json"}
    plain = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        expected = policy.logits(policy.hidden_states(IDS), 1.0)
        found = plain(input_ids=IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(out)("12+3").input_ids) == 4
    assert _cli("checkpoint", "export", run_dir.root, "--out", out) == 2
    assert "exists already" in capsys.readouterr().err


def test_adapter_is_exported_as_it_is_without_merge(
    run: tuple[RunDir, Policy], tmp_path: Path, tiny_folder: Path
) -> None:
    run_dir, policy = run
    out = tmp_path / "exported"
    assert _cli("checkpoint", "export", run_dir.root, "--step", 1, "--out", out) == 0
    if policy.mode == "full":
        assert (out / "model.safetensors").is_file()
        return
    section = ModelSection(path=str(tiny_folder), mode="lora", adapter=str(out))
    again = Policy.load(section, seed=5)
    expected = policy.hidden_states(IDS)
    torch.testing.assert_close(again.hidden_states(IDS), expected, rtol=1e-5, atol=1e-5)


def test_what_is_read_stays_whole_whatever_the_node_deletes(
    run: tuple[RunDir, Policy], tmp_path: Path
) -> None:
    """A node that trains deletes checkpoints while one is exported, evaluated or uploaded."""
    run_dir, _ = run
    with held(run_dir, None) as (row, folder):
        shutil.rmtree(row["path"])
        export(run_dir, folder, tmp_path / "out", merge=False)
        assert checkpoint.newest_whole(folder.parent) is not None
    assert row["step"] == 2
    assert not folder.exists()


def test_one_that_is_deleted_before_it_is_held_gives_way_to_the_next(
    run: tuple[RunDir, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, _ = run
    link = os.link

    def deleted(source: str, target: str) -> None:
        if "step-00000002" in source:
            shutil.rmtree(Path(source).parent)
        link(source, target)

    monkeypatch.setattr(os, "link", deleted)
    with held(run_dir, None) as (row, _):
        assert row["step"] == 3


def test_without_hard_links_the_files_are_copied(
    run: tuple[RunDir, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: str, target: str) -> None:
        raise PermissionError(source)

    monkeypatch.setattr(os, "link", no_links)
    with held(run[0], 1) as (_, folder):
        assert checkpoint.newest_whole(folder.parent) is not None


def test_what_a_killed_reader_held_goes_when_a_node_starts(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    run_dir = RunDir.create(tmp_path / "swarms" / "ab" / "runs" / "0001")
    left = run_dir.root / ".reading-x.4194305.tmp"  # above Linux's highest pid
    (left / "step-00000002").mkdir(parents=True)
    with data_dir.locked():
        pass
    assert not left.exists()
