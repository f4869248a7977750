"""What a published result says, and what stays here."""

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.config import NodeConfig
from swarm.errors import DataError
from swarm.paths import RunDir
from swarm.publish import Result, card, choose, public_record

RUN: dict[str, Any] = {
    "schema": "swarm-node/run/1",
    "swarm": "ab" * 32,
    "peer_id": "12D3KooWMe",
    "trained": {"model": "Qwen/Qwen2.5-1.5B", "mode": "lora"},
    "config": "d1",
    "configs": {"d1": NodeConfig().model_dump(mode="json")},
    "seed": 0,
    "versions": {"swarm-node": "0.1.0"},
    "revision": None,
    "started_s": 1.0,
}
POINTS = [
    {"evaluation": True, "step": step, "time_s": 1.0, "held_out": accuracy}
    for step, accuracy in ((0, 0.1), (25, 0.2), (50, 0.3), (75, 0.9))
]


def checkpoint(run: RunDir, step: int, accuracy: float | None) -> None:
    folder = run.checkpoints_dir / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "checkpoint.json").write_text(json.dumps({"accuracy": accuracy}))


def test_the_best_is_chosen_and_half_written_ones_are_not(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(DataError, match="no whole checkpoint"):
        choose(run)
    for step, accuracy in ((10, 0.5), (20, 0.7), (30, None)):
        checkpoint(run, step, accuracy)
    (run.checkpoints_dir / "step-00000040").mkdir()
    assert choose(run).step == 20
    assert choose(run, 30).step == 30
    with pytest.raises(DataError, match="of step 40"):
        choose(run, 40)


def test_without_accuracy_the_newest_is_chosen(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (10, 30, 20):
        checkpoint(run, step, None)
    assert choose(run).step == 30


def test_the_card_tells_what_was_reached_at_the_published_step() -> None:
    ledger = {"got": {"update_share": 0.25}}
    text = card(RUN, Result(Path("x"), 50, 0.3), POINTS, ledger, swarm_name="gsm8k")
    assert text.startswith("---\nbase_model: Qwen/Qwen2.5-1.5B\n")
    assert "library_name: peft" in text
    assert "| 0 | 0.100 |" in text
    assert "| 50 | 0.300 |" in text
    assert "0.900" not in text
    assert "25% of those trained on" in text
    assert "g = 50, C = 2" in text


def test_a_model_from_a_folder_does_not_tell_where_it_lies() -> None:
    run = {**RUN, "trained": {"model": "/home/ada/models/mine", "mode": "full"}}
    text = card(run, Result(Path("x"), 50, None), [], None, swarm_name="gsm8k")
    assert "base_model" not in text
    assert "# mine, trained in the swarm gsm8k" in text
    for shown in (text, json.dumps(public_record(run))):
        assert "/home/ada" not in shown
        assert "12D3KooWMe" not in shown
    assert public_record(run)["config"]["ftis"]["clip_max"] == 2.0
    assert "network" not in public_record(run)["config"]
