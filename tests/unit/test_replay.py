"""What a replay needs, where it begins, and what it says when something is missing."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from swarm import model_files
from swarm.config import ModelSection, NodeConfig
from swarm.errors import ConfigError, DataError, UsageError
from swarm.paths import DataDir, RunDir
from swarm.protocol.charter import Charter
from swarm.protocol.codec import blob_hash, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest
from swarm.protocol.prompts import Prompt, encode_prompt_set, prompt_set_ref, prompt_tokens_sha256
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.replay.logged_run import LoggedRun
from swarm.replay.retrain import FIGURES, ReplayOptions, _fresh_folder, _Replay, replay, view

MODEL = Path(__file__).parents[2] / "swarm" / "models" / "arith-small"
IDENTITY = Identity(bytes(32))
STEPS = 6
PROMPT_IDS = np.array([3, 4, 5], np.int32)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run of six steps on one group each, with checkpoints of steps 2 and 4 (empty folders)."""
    prompts = encode_prompt_set([Prompt("1+1=", None, "2")])
    manifest = Manifest.model_validate(
        {
            "name": "Sums",
            "created_s": 1_700_000_000.0,
            "organizers": (IDENTITY.peer_id,),
            "prompts": prompt_set_ref(prompts, [prompt_tokens_sha256(PROMPT_IDS)]).model_dump(),
            "template": {"text": "{{ prompt }}"},
            "tokenizer": {"fingerprint": "ef" * 32, "vocab_size": 10, "name": "tiny"},
            "sampling": {
                "temperature": 1.0,
                "group_size": 2,
                "max_prompt_tokens": 8,
                "max_completion_tokens": 8,
                "stop_token_ids": (0,),
            },
            "reward": {"name": "exact"},
        }
    )
    swarm_dir = DataDir(tmp_path / "data").swarm(manifest.swarm_id)
    run_dir = swarm_dir.new_run()
    swarm_dir.charter_path.write_bytes(Charter(manifest, ()).to_bytes())
    swarm_dir.rollouts_dir.mkdir()
    config = NodeConfig(model=ModelSection(path=str(MODEL)))
    record = {
        "schema": "swarm-node/run/1",
        "swarm": manifest.swarm_id.hex(),
        "trained": {"digest": model_files.digest(MODEL)},
        "configs": {config.digest(): config.model_dump(mode="json")},
    }
    run_dir.record_path.write_text(json.dumps(record))
    for step in range(1, STEPS + 1):
        blob = encode_group(_group(manifest, step), IDENTITY)
        (swarm_dir.rollouts_dir / f"{blob_hash(blob).hex()}.blob").write_bytes(blob)
        logged = {
            "hash": blob_hash(blob).hex(),
            "publisher": IDENTITY.peer_id,
            "own": True,
            "epoch": step,
            "prompt_id": 0,
            "rewards": [1.0, 0.0],
        }
        _add(run_dir, {"step": step, "config": config.digest(), "groups": [logged]})
    for step in (2, 4):
        (run_dir.checkpoints_dir / f"step-{step:08d}").mkdir(parents=True)
    return run_dir


def _group(manifest: Manifest, epoch: int) -> RolloutGroup:
    rollout = Rollout(np.array([1, 0], np.int32), np.array([-0.5, -0.5], np.float32), Finish.STOP)
    return RolloutGroup(
        swarm_id=manifest.swarm_id,
        publisher=IDENTITY.peer_id,
        epoch=epoch,
        prompt_id=0,
        prompt_sha256=prompt_tokens_sha256(PROMPT_IDS),
        policy_step=0,
        created_ms=0,
        temperature=1.0,
        rollouts=(rollout, rollout),
        claimed_rewards=np.zeros(2, np.float32),
    )


def _add(run_dir: RunDir, record: dict[str, Any]) -> None:
    with run_dir.steps_path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _lines(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.steps_path.read_text().splitlines()]


def _blob(run_dir: RunDir, step: int) -> Path:
    digest = _lines(run_dir)[step - 1]["groups"][0]["hash"]
    return run_dir.swarm_dir.rollouts_dir / f"{digest}.blob"


def prepared(run_dir: RunDir, **options: Any) -> _Replay:
    return _Replay(LoggedRun(run_dir), ReplayOptions(**options))


# -- where it begins -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "options", "expected"),
    [
        ([2, 4], {}, (2, [3, 4, 5, 6])),
        ([6], {}, (0, [1, 2, 3, 4, 5, 6])),  # nothing follows the only checkpoint
        ([], {}, (0, [1, 2, 3, 4, 5, 6])),
        ([2, 4], {"start": 4, "steps": 1}, (4, [5])),
        ([2, 4], {"start": 0, "steps": 2}, (0, [1, 2])),
    ],
)
def test_first_step(
    kept: list[int], options: dict[str, Any], expected: tuple[int, list[int]], run_dir: RunDir
) -> None:
    shutil.rmtree(run_dir.checkpoints_dir)
    for step in kept:
        (run_dir.checkpoints_dir / f"step-{step:08d}").mkdir(parents=True)
    found = prepared(run_dir, **options)
    assert (found._start, found._numbers) == expected


def test_checkpoint_that_was_not_kept(run_dir: RunDir) -> None:
    with pytest.raises(UsageError, match=r"--from 3: .* it has 2, 4, and 0 begins"):
        prepared(run_dir, start=3)


def test_newest_revision_of_a_checkpoint(run_dir: RunDir) -> None:
    again = run_dir.checkpoints_dir / "step-00000002.1"
    again.mkdir()
    (run_dir.checkpoints_dir / ".writing-step-00000006").mkdir()
    assert list(run_dir.checkpoints()) == [2, 4]
    assert run_dir.checkpoints()[2] == again


def test_no_steps_after_the_start(run_dir: RunDir) -> None:
    (run_dir.checkpoints_dir / "step-00000006").mkdir()
    with pytest.raises(DataError, match="no steps after step 6; the last one is 6"):
        prepared(run_dir, start=6)


def test_a_gap_in_the_log(run_dir: RunDir) -> None:
    lines = run_dir.steps_path.read_text().splitlines(keepends=True)
    run_dir.steps_path.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(DataError, match=r"steps\.jsonl: step 3 is missing"):
        prepared(run_dir)
    assert prepared(run_dir, start=4)._numbers == [5, 6]


# -- what is missing -------------------------------------------------------------------------------


async def refused(run_dir: RunDir, **options: Any) -> str:
    before = sorted(run_dir.root.parent.rglob("*"))
    with pytest.raises((DataError, UsageError, ConfigError)) as error:
        await replay(LoggedRun(run_dir), ReplayOptions(**options))
    assert sorted(run_dir.root.parent.rglob("*")) == before  # nothing was made for it
    return str(error.value)


async def test_a_group_that_is_gone(run_dir: RunDir) -> None:
    path = _blob(run_dir, 4)
    path.unlink()
    message = await refused(run_dir)
    assert message.startswith(f"step 4: its group {path.stem} is not in {path.parent}")
    assert "limits.blob_store_mb (now 2048)" in message
    assert "--from 4 begins after it" in message
    assert "--rollouts DIR" in message
    (run_dir.checkpoints_dir / "step-00000004").rmdir()
    assert "--from" not in await refused(run_dir)


async def test_groups_kept_elsewhere(run_dir: RunDir, tmp_path: Path) -> None:
    archive = run_dir.swarm_dir.rollouts_dir.rename(tmp_path / "archive")
    assert "--rollouts DIR" in await refused(run_dir)
    message = await refused(run_dir, rollouts=archive)
    assert "tokenizer mismatch" in message  # of this test's made-up swarm: so the groups are there


def test_a_group_as_it_was(run_dir: RunDir) -> None:
    made = prepared(run_dir)
    logged = made._run.step(3).groups[0]
    with pytest.raises(DataError, match="step 3: prompt 0 is rendered otherwise"):
        made._pooled(3, logged)
    _render(made, PROMPT_IDS)
    item = made._pooled(3, logged)
    assert (item.hash, item.publisher, item.own) == (logged.hash, IDENTITY.peer_id, True)
    assert item.group.epoch == 3
    assert item.rewards.tolist() == [1.0, 0.0]
    assert item.prompt_token_ids.tolist() == PROMPT_IDS.tolist()


def _render(made: _Replay, token_ids: np.ndarray) -> None:
    from swarm.node.prompt_table import RenderedSet

    prompt = Prompt("1+1=", None, "2")
    hashes = (prompt_tokens_sha256(token_ids),)
    made._prompts.append(RenderedSet((prompt,), (token_ids,), hashes))


def test_a_prompt_rendered_otherwise(run_dir: RunDir) -> None:
    made = prepared(run_dir)
    _render(made, PROMPT_IDS[:2])
    with pytest.raises(DataError, match="step 3: prompt 0 is rendered otherwise"):
        made._pooled(3, made._run.step(3).groups[0])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\0"), "is damaged"),
        (lambda path: path.unlink(), "is not in"),
    ],
)
def test_a_group_that_is_spoilt(spoil: Callable[[Path], Any], reason: str, run_dir: RunDir) -> None:
    made = prepared(run_dir)
    _render(made, PROMPT_IDS)
    spoil(_blob(run_dir, 3))
    with pytest.raises(DataError, match=f"step 3: .*{reason}"):
        made._pooled(3, made._run.step(3).groups[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("publisher", "12D3KooWother"), ("prompt_id", 1), ("rewards", [1.0, 0.0, 0.0])],
)
def test_a_group_that_the_log_describes_otherwise(field: str, value: Any, run_dir: RunDir) -> None:
    lines = _lines(run_dir)
    lines[2]["groups"][0][field] = value
    run_dir.steps_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = prepared(run_dir)
    _render(made, PROMPT_IDS)
    with pytest.raises(DataError, match=r"step 3: .* is not the group that the log describes"):
        made._pooled(3, made._run.step(3).groups[0])


async def test_a_model_that_changed(run_dir: RunDir) -> None:
    record = json.loads(run_dir.record_path.read_text())
    record["trained"]["digest"] = hashlib.sha256(b"another").hexdigest()
    run_dir.record_path.write_text(json.dumps(record))
    assert f"{MODEL} is not the model any more" in await refused(run_dir)


def test_a_configuration_that_run_json_does_not_know(run_dir: RunDir) -> None:
    record = json.loads(run_dir.record_path.read_text())
    run_dir.record_path.write_text(json.dumps(record | {"configs": {}}))
    with pytest.raises(DataError, match=r"run\.json: the configuration .* is not in it"):
        prepared(run_dir)


def test_a_change_that_is_wrong(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"ftis\.filter = 'xor'"):
        prepared(run_dir, changes={"ftis.filter": "xor"})


def test_a_folder_that_is_no_run(tmp_path: Path, run_dir: RunDir) -> None:
    with pytest.raises(DataError, match=f"{tmp_path} is no run"):
        LoggedRun(RunDir(tmp_path))
    run_dir.swarm_dir.charter_path.unlink()
    with pytest.raises(DataError, match=r"charter\.bin: cannot be read"):
        prepared(run_dir)


# -- what it makes ---------------------------------------------------------------------------------


async def test_folders_that_are_not_taken(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.replay.retrain.check_tokenizer", lambda *_: None)
    message = await refused(run_dir, out=run_dir.root / "replay")
    assert "in the run, which stays as it is" in message
    message = await refused(run_dir, out=run_dir.swarm_dir.rollouts_dir)
    assert "not an empty folder" in message


def test_result_as_a_table() -> None:
    row = dict.fromkeys(FIGURES, 0) | {"kl_p50": None, "ratio_max": 1.25, "kept_share": 0.5}
    result = {
        "steps": [row | {"step": step} for step in range(1, 101)],
        "accuracy_before": {"held_out": 0.25},
        "accuracy_after": {"held_out": 0.5},
        "same_weights_as_run": False,
        "to_step": 100,
        "out": "/somewhere",
    }
    console = Console(width=120)
    with console.capture() as capture:
        console.print(view(result))
    lines = capture.get().splitlines()
    assert "accuracy held out: 0.250 -> 0.500" in [line.strip() for line in lines]
    assert "weights after step 100: not those of the run" in [line.strip() for line in lines]
    steps = [int(line.split()[0]) for line in lines if line.split()[:1][0].isdigit()]
    assert steps[0] == 1
    assert steps[-1] == 100
    assert len(steps) <= 31


def test_replays_that_begin_at_once_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "0001")
    monkeypatch.setattr(Path, "exists", lambda _: False)  # the other one makes it just then
    folders = [_fresh_folder(run_dir, None).root.name for _ in range(3)]
    assert folders == ["0001-replay-1", "0001-replay-2", "0001-replay-3"]
