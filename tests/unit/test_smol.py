"""`make smol`'s command line; that the models learn is tests/slow/test_real_models.py's."""

from pathlib import Path

import pytest

from scripts import smol
from swarm.demo.task import DemoOptions


def test_what_is_asked_for_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[DemoOptions] = []

    def run_demo(options: DemoOptions, _task: object) -> int:
        taken.append(options)
        return 0

    monkeypatch.setattr(smol, "run_demo", run_demo)
    out = tmp_path / "out"
    flags = ["--steps", "5", "--seed", "3", "--method", "nois", "--out", str(out), "--json"]
    assert smol.main(["--models", str(tmp_path), *flags]) == 0
    assert taken == [
        DemoOptions(
            nodes=2,
            steps=5,
            seed=3,
            method="nois",
            models=(tmp_path / smol.WHOLE, tmp_path / f"{smol.CUT}:lora"),
            out=out,
            json=True,
        )
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [(["--steps", "0"], "--steps 0: at least 1"), ([], "no model folder")],
)
def test_what_cannot_be_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    assert smol.main(["--models", str(tmp_path), "--out", str(tmp_path / "out"), *flags]) != 0
    said = capsys.readouterr().err
    assert problem in said
    assert said.startswith("smol: ")
