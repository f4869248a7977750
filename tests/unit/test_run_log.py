"""A run's logs: shortened to what they may take, without a line lost that stays of use."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from swarm.node import run_log
from swarm.node.run_log import RunLog
from swarm.paths import RunDir
from swarm.replay.step_log import StepLog

LIMIT = 20_000


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def fill(log: RunLog, steps: range) -> None:
    for step in steps:
        log.step({"step": step, "config": "c" * 64, "groups": []})
        log.metrics({"time_s": 1.0, "step": step, "loss": 0.5})
        if step % 10 == 0:
            log.metrics({"evaluation": True, "step": step, "held_out": step / 1000})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_newest_steps_and_all_evaluations_stay(run_dir: RunDir) -> None:
    log = RunLog(run_dir, LIMIT)
    for start in range(1, 1001, 100):
        fill(log, range(start, start + 100))
        log.shorten()
        for path in (run_dir.steps_path, run_dir.metrics_path):
            assert path.stat().st_size <= LIMIT
    steps = StepLog(run_dir.steps_path).steps
    assert steps == list(range(steps[0], 1001))
    assert len(steps) > 50
    metrics = lines(run_dir.metrics_path)
    evaluated = [line["step"] for line in metrics if "evaluation" in line]
    assert evaluated == list(range(10, 1001, 10))
    trained = [line["step"] for line in metrics if "loss" in line]
    assert trained == list(range(trained[0], 1001))
    assert sorted(path.name for path in run_dir.root.iterdir()) == ["metrics.jsonl", "steps.jsonl"]


def test_a_short_log_is_left_alone(run_dir: RunDir) -> None:
    log = RunLog(run_dir, LIMIT)
    log.shorten()  # there is none yet
    fill(log, range(1, 20))
    before = run_dir.steps_path.read_bytes()
    log.shorten()
    assert run_dir.steps_path.read_bytes() == before


def test_who_reads_the_log_meanwhile_reads_on(run_dir: RunDir) -> None:
    log = RunLog(run_dir, LIMIT)
    fill(log, range(1, 401))
    reader = StepLog(run_dir.steps_path)
    log.shorten()
    assert [reader.read(step).step for step in (1, 200, 400)] == [1, 200, 400]
    assert StepLog(run_dir.steps_path).steps[0] > 200


def test_without_room_for_the_shorter_log_it_stays_long(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = RunLog(run_dir, LIMIT)
    fill(log, range(1, 401))
    before = run_dir.steps_path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_log.shutil, "copyfileobj", full)
    log.shorten()
    assert run_dir.steps_path.read_bytes() == before
    assert "steps.jsonl is not shortened: No space left on device" in caplog.text
    assert sorted(path.name for path in run_dir.root.iterdir()) == ["metrics.jsonl", "steps.jsonl"]
