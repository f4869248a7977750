"""What must hold of F-TIS wherever it is run: it learns from another model's samples, and without
importance weights and filter the same samples ruin the learner."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ftis_report import accuracy, node_mean

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def run_cells(out: Path, pattern: str, *options: str) -> str:
    """Run the benchmark as its users do; returns what it printed."""
    command = [sys.executable, "-m", "benchmarks.ftis", "--out", str(out), "--cells", pattern]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load(out: Path, cell: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "cells" / f"{cell}.json").read_text())
    return result


def test_ftis_learns_where_nois_collapses(tmp_path: Path) -> None:
    """The stress setting, one seed; about two CPU minutes."""
    run_cells(tmp_path, "^size/stress/(ftis|nois)/", "--seeds", "0")
    ftis = load(tmp_path, "size/stress/ftis/seed0")
    nois = load(tmp_path, "size/stress/nois/seed0")
    measure = "in_distribution"
    for node in range(2):
        assert accuracy(ftis, node, measure) > accuracy(ftis, node, measure, 0)
    assert node_mean(ftis, measure) - node_mean(nois, measure) > 0.2


def test_the_command_runs_cells_reports_and_goes_on(tmp_path: Path) -> None:
    short = ["--set", "steps=1", "groups=2", "group_size=2"]
    arguments = ("^lora/gentle/(ftis|tis)/", "--full", "--seeds", "0", "--jobs", "1", *short)
    assert "2 of 2 cells to run" in run_cells(tmp_path, *arguments)
    assert "## lora/gentle" in (tmp_path / "results.md").read_text()
    nodes = load(tmp_path, "lora/gentle/ftis/seed0")["nodes"]
    assert nodes[0]["trained_parameters"] == nodes[0]["parameters"]
    assert nodes[1]["trained_parameters"] < nodes[0]["parameters"] / 4
    (tmp_path / "cells" / "lora" / "gentle" / "ftis" / "seed0.json").unlink()
    assert "1 of 2 cells to run" in run_cells(tmp_path, *arguments)
    nowhere = ["--models", "nowhere", "--seeds", "0", "--jobs", "1", "--cells", "/nois/"]
    failing = subprocess.run(
        [sys.executable, "-m", "benchmarks.ftis", "--out", str(tmp_path), *nowhere],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert failing.returncode == 1
    missing = ROOT / "nowhere"
    assert f"models/paper/nois/seed0: model folder {missing} does not exist" in failing.stderr
    assert "Traceback" not in failing.stderr
