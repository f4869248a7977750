"""The benchmarks run, in their shortest form, and the report says what the result says."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu, suite
from benchmarks.measure import Row, Timing, interleave, ratio
from benchmarks.report import render


def options(out: Path, *arguments: str) -> list[str]:
    return [*arguments, "--out", str(out), "--report", str(out / "r"), "--history", str(out / "h")]


@pytest.mark.parametrize("group", suite.GROUPS)
def test_every_group_runs_in_its_quick_form(group: str, tmp_path: Path) -> None:
    code = suite.run(suite.parse(options(tmp_path, "--quick", "--only", group)))
    result = json.loads((tmp_path / "results.json").read_bytes())
    found = result["groups"][group]
    assert (code, found["error"]) == (0, "")
    assert any(row["ours"] is not None for row in found["rows"])
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert all(row["what"] in text and row["how"] in text for row in found["rows"])
    assert not (tmp_path / "h").exists()  # a quick run leaves no trace outside of its folder


def test_the_gpu_benchmark_rehearses_without_one(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    chosen = ["full, bf16", "LoRA, bf16"]
    arguments = ["--device", "cpu", "--quick", "--out", str(out), "--only", *chosen]
    assert gpu.run(gpu.parse(arguments)) == 0
    cases = json.loads(out.read_bytes())["cases"]
    assert cases.keys() == set(chosen)
    for found in cases.values():
        assert found["sampled_tokens_per_s"] > 0
        assert found["trained_tokens_per_s"] > 0
        assert found["logprob_difference"]["max"] < 0.5
        assert found["peak_bytes"] > 0


def test_only_one_group_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "GROUPS", {"one": "First", "two": "Second"})
    calls: list[str] = []

    def measure(name: str, quick: bool) -> dict[str, object]:
        calls.append(name)
        row = Row(what=f"row of {name}", unit="ms", ours=float(len(calls)), how="counted")
        return {
            "title": name,
            "machine": suite.machine(),
            "seconds": 0.0,
            "error": "",
            "rows": [row.to_json()],
        }

    monkeypatch.setattr(suite, "measure", measure)
    assert suite.run(suite.parse(options(tmp_path))) == 0
    assert suite.run(suite.parse(options(tmp_path, "--only", "one"))) == 0
    groups = json.loads((tmp_path / "results.json").read_bytes())["groups"]
    assert [groups[name]["rows"][0]["ours"] for name in ("one", "two")] == [3.0, 2.0]
    lines = [json.loads(line) for line in (tmp_path / "h").read_text().splitlines()]
    assert [sorted(line["figures"]) for line in lines] == [["one", "two"], ["one"]]
    assert lines[1]["figures"]["one"] == {"row of one": [3.0, "ms", None]}
    text = (tmp_path / "r").read_text()
    assert "row of one | 3 ms" in text
    assert "row of two | 2 ms" in text


def test_candidates_take_turns_and_ratios_pair_the_rounds() -> None:
    order: list[str] = []
    slow = iter([9.0, 2.0, 4.0, 60.0])
    fast = iter([9.0, 1.0, 1.0, 20.0])

    def one() -> float:
        order.append("slow")
        return next(slow)

    def two() -> float:
        order.append("fast")
        return next(fast)

    found = interleave({"slow": one, "fast": two}, 3)
    assert found["slow"] == Timing((2.0, 4.0, 60.0))
    assert ratio(found["slow"], found["fast"]) == 3.0  # of 2, 4, 3: not 4 / 1
    assert order[2:] == ["slow", "fast", "fast", "slow", "slow", "fast"]


def test_the_report_names_what_is_short_of_its_aim() -> None:
    good = Row(what="good", unit="s", ours=1.5, how="x", aim="< 2 s", met=True)
    bad = Row(
        cause="Slow.",
        what="bad",
        unit="s",
        ours=2.5,
        how="y",
        ratio=0.25,
        ratio_of="a / b",
        aim="> 1",
        met=False,
    )
    group = {
        "title": "Both",
        "machine": {**suite.machine(), "cores": 2, "load_at_start": 7.5},
        "error": "",
        "rows": [good.to_json(), bad.to_json()],
    }
    text = render({"quick": False, "groups": {"g": group}})
    assert "| good | 1.5 s |  |  |  | < 2 s: yes | x |" in text
    assert "| bad | 2.5 s |  |  | 0.25 (a / b) | > 1: **no** | y |" in text
    assert text.partition("## Not reached")[2].strip() == "- **bad**, > 1. Slow."
    assert "Other work shared the cores" in text
