"""A short soak, and that its report would tell."""

import hashlib
from pathlib import Path

import pytest
from examined import Growth, faulty_files
from soak import as_text, soak

from swarm.paths import DataDir


def test_damaged_and_left_over_files_are_found(tmp_path: Path) -> None:
    rollouts = tmp_path / "swarms" / ("ab" * 32) / "rollouts"
    rollouts.mkdir(parents=True)
    whole = hashlib.sha256(b"whole").hexdigest()
    (rollouts / f"{whole}.blob").write_bytes(b"whole")
    (rollouts / f"{'0' * 64}.blob").write_bytes(b"half")
    (rollouts / f"{'1' * 64}.draft").write_bytes(b"half")
    run = rollouts.parent / "runs" / "0001"
    run.mkdir(parents=True)
    (run / "steps.jsonl").write_text('{"step": 1}\n{"step": 2, "gro')
    found = "\n".join(faulty_files(DataDir(tmp_path)))
    assert whole not in found
    for named in ("0" * 64, "1" * 64, "steps.jsonl:2", "charter.bin"):
        assert named in found


def test_growth_is_seen() -> None:
    growth = Growth()
    growth.lives["node", 1, 0.0] = [(s, 100_000_000 + s * 1000, 20 + s // 60) for s in range(600)]
    growth.lives["node", 2, 0.0] = [(s, 100_000_000, 20) for s in range(60)]
    row = growth.report(long_s=300.0)["node"]
    assert (row["lives"], row["long_lives"]) == (2, 1)
    assert row["worst_mb_per_hour"] == pytest.approx(3.6)
    assert row["worst_descriptors_per_hour"] == pytest.approx(60, rel=0.05)


@pytest.mark.slow
def test_two_minutes_of_faults(tmp_path: Path) -> None:
    report = soak(tmp_path, 2.0, 3, 1, print)
    assert report["passed"], as_text(report)
    assert sum(report["faults"].values()) >= 5
    assert report["evil"]["messages"] > 50
    assert report["growth"]["node"]["most_descriptors"] < 100
