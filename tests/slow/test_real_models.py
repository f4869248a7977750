"""Real models in a real swarm: SmolLM2-135M, whole and cut, learn to add numbers of one digit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.convert_smollm2 import convert

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def test_two_real_models_learn_together(tmp_path: Path) -> None:
    """About six minutes on two idle cores, a download of 93 MB first."""
    convert(tmp_path / "models")
    arguments = ["--models", str(tmp_path / "models"), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.smol", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [node["mode"] for node in result["nodes"]] == ["full", "lora"]
    for node in result["nodes"]:
        # Of 320 samples each; one evaluation on 40 prompts is uncertain by .07, and how far a model
        # comes in 30 steps differs between runs by ten times that.
        first, last = np.mean(node["rewards"][:10]), np.mean(node["rewards"][-10:])
        assert last > first + 0.05, node
        assert node["foreign_samples_trained"] > 0, node
