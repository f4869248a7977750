"""Curves for TensorBoard, read back with its own reader."""

import sys
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.metrics.curves import TensorBoardCurves, scalars

STEP = {"time_s": 1.5, "step": 3, "loss": 0.25, "kl_p50": 2.0, "stepped": True, "entropy": None}
EVALUATION = {"evaluation": True, "time_s": 2.5, "step": 4, "held_out": 0.75}


def test_what_becomes_a_curve() -> None:
    assert scalars(STEP) == {"train/loss": 0.25, "kl/kl_p50": 2.0, "train/stepped": 1.0}
    assert scalars(EVALUATION) == {"accuracy/held_out": 0.75}


def test_event_files_hold_the_points(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    curves = TensorBoardCurves(tmp_path, 2)
    curves.add(STEP)
    curves.add(EVALUATION)
    curves.close()
    (path,) = tmp_path.iterdir()
    events = list(LegacyEventFileLoader(str(path)).Load())
    points = {
        value.tag: (event.step, event.wall_time, value.simple_value)
        for event in events
        for value in event.summary.value
    }
    assert points["train/loss"] == (3, 1.5, 0.25)
    assert points["accuracy/held_out"] == (4, 2.5, 0.75)
    # TensorBoard then hides what an attempt that was cut off wrote for later steps.
    assert [event.step for event in events if event.session_log.status == 1] == [3]


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ConfigError, match=r"swarm-node\[tensorboard\]"):
        TensorBoardCurves(tmp_path, 0)
