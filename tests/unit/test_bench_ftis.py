"""The F-TIS benchmark: the round, resuming, and what is made of results."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import ftis, ftis_lab, ftis_report
from benchmarks.ftis_lab import Cell, Member, Method, Prompts, Sampled, Setting, Task, run_cell
from swarm.config import METHODS
from swarm.errors import ConfigError, DataError
from swarm.protocol.prompts import Prompt
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.loss import FtisConfig

TINY = Setting("tiny", 1e-3, steps=2, groups=4, group_size=4, evaluate_every=1)
PROMPTS = Prompts(
    train=[Prompt(f"1{i}+2{i}=", None, str(30 + 2 * i)) for i in range(5)],
    held_out=[Prompt("41+12=", None, "53")],
    out_of_distribution=[Prompt("1+2+3=", None, "6")],
)


def cell(method: Method = ftis.FTIS, *, setting: Setting = TINY, seed: int = 0) -> Cell:
    return Cell("size", ftis.SIZE, setting, method, seed)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run_cell(cell(), PROMPTS)


def test_a_cell_reports_every_evaluation_and_every_step(result: dict[str, Any]) -> None:
    assert [node["name"] for node in result["nodes"]] == ["small", "large"]
    for node in result["nodes"]:
        assert [e["step"] for e in node["evaluations"]] == [0, 1, 2]
        assert all(0 <= e["out_of_distribution"] <= 1 for e in node["evaluations"])
        assert {len(values) for values in node["steps"].values()} == {2}
        shares = [node["steps"][f"{name}_share"] for name in ("trained", "dropped_advantage")]
        assert all(0 <= share <= 1 for values in shares for share in values)
    small, large = (node["parameters"] for node in result["nodes"])
    assert small < large
    assert {"sampling", "training", "evaluation"} <= set(result["cpu_s"])


def test_the_same_cell_gives_the_same_result(result: dict[str, Any]) -> None:
    again = run_cell(cell(), PROMPTS)
    assert again["nodes"] == result["nodes"]
    other = run_cell(cell(seed=1), PROMPTS)
    assert other["nodes"][0]["steps"]["entropy"] != result["nodes"][0]["steps"]["entropy"]


def test_methods_meet_the_same_prompts_and_first_samples(result: dict[str, Any]) -> None:
    nois = run_cell(cell(ftis.method("nois")), PROMPTS)
    for ours, theirs in zip(result["nodes"], nois["nodes"], strict=True):
        assert ours["evaluations"][0] == theirs["evaluations"][0]
        assert ours["steps"]["entropy"][0] == theirs["steps"]["entropy"][0]


@pytest.mark.parametrize("sharing", ["alone-seen", "alone-generated", "vertical", "horizontal"])
def test_who_samples_what_and_who_trains_on_what(
    sharing: ftis_lab.Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[str, int, int]] = []
    trained: list[tuple[str, list[tuple[str, bool, int]]]] = []

    class EnoughError(RuntimeError):
        pass

    def sample(node: ftis_lab.Node, tasks: Any, n: int, seeds: Any) -> list[Sampled]:
        sampled.extend((node.name, place, n) for place, _ in tasks)
        assert len(set(seeds)) == len(tasks)
        return [one_sampled(place, node.name, n) for place, _ in tasks]

    def train(node: ftis_lab.Node, groups: Any) -> None:
        trained.append((node.name, [(g.publisher, g.own, len(g.rewards)) for g in groups]))
        if node.name == "large":
            raise EnoughError

    monkeypatch.setattr(ftis_lab.Node, "sample", sample)
    monkeypatch.setattr(ftis_lab.Node, "train", train)
    with pytest.raises(EnoughError):
        run_cell(cell(Method("x", FtisConfig(), sharing=sharing)), PROMPTS)
    places = {
        "alone-seen": ([0, 1, 2, 3], [0, 1, 2, 3], 4),
        "alone-generated": ([0, 2], [1, 3], 4),
        "vertical": ([0, 2], [1, 3], 4),
        "horizontal": ([0, 1, 2, 3], [0, 1, 2, 3], 2),
    }[sharing]
    assert sampled == [
        (name, place, places[2])
        for name, own in zip(("small", "large"), places[:2], strict=True)
        for place in own
    ]
    diets = {
        "alone-seen": ([("small", True, 4)] * 4, [("large", True, 4)] * 4),
        "alone-generated": ([("small", True, 4)] * 2, [("large", True, 4)] * 2),
        "vertical": (
            [("small", True, 4), ("large", False, 4)] * 2,
            [("small", False, 4), ("large", True, 4)] * 2,
        ),
        "horizontal": ([("pool", False, 4)] * 4, [("pool", False, 4)] * 4),
    }[sharing]
    assert trained == [("small", diets[0]), ("large", diets[1])]


def one_sampled(place: int, publisher: str, n: int) -> Sampled:
    rollout = Rollout(np.array([1], np.int32), np.array([-1.0], np.float32), Finish.STOP)
    task = Task(f"prompt {place}", (3, 4), "7")
    return Sampled(place, publisher, task, (rollout,) * n, np.zeros(n, np.float32))


def test_stale_samples_come_from_an_earlier_policy() -> None:
    setting = Setting("tiny", 1e-3, steps=3, groups=4, group_size=8, evaluate_every=3)
    method = Method("tis", FtisConfig(filter="none"), sharing="alone-seen")
    fresh = run_cell(cell(method, setting=setting), PROMPTS)
    stale = run_cell(
        cell(Method("tis", method.ftis, "alone-seen", staleness=1), setting=setting), PROMPTS
    )
    for now, late in zip(fresh["nodes"], stale["nodes"], strict=True):
        # One's own fresh samples are on-policy; a step later they no longer are.
        assert max(now["steps"]["ratio_max"]) == pytest.approx(1, abs=1e-3)
        assert late["steps"]["ratio_max"][0] == pytest.approx(1, abs=1e-3)
        assert max(late["steps"]["ratio_max"]) > 1.01
        assert len(late["steps"]["reward"]) == 3


def test_members_must_share_a_tokenizer_and_a_group_must_split_evenly(tmp_path: Path) -> None:
    odd = Setting("odd", 1e-3, steps=1, groups=2, group_size=3)
    horizontal = Method("x", FtisConfig(), sharing="horizontal")
    with pytest.raises(ConfigError, match="group size 3 is no multiple of 2"):
        run_cell(cell(horizontal, setting=odd), PROMPTS)
    folder = tmp_path / "other"
    folder.mkdir()
    for file in Path(ftis.SIZE[0].model).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words["+"], words["-"] = words["-"], words["+"]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    members = (ftis.SIZE[0], Member("other", str(folder)))
    with pytest.raises(ConfigError, match="their tokenizers differ"):
        run_cell(Cell("size", members, TINY, ftis.FTIS, 0), PROMPTS)
    few = Prompts(train=PROMPTS.train[:3], held_out=PROMPTS.held_out)
    with pytest.raises(DataError, match="3 prompts to train on; a round takes 4"):
        run_cell(cell(), few)


def test_the_methods_are_the_commands_own() -> None:
    assert [m.name for m in ftis.COMPARED][2:] == list(METHODS)
    assert ftis.method("nois").ftis == FtisConfig(importance="none", filter="none")
    assert ftis.method("f-vis").ftis == FtisConfig(importance="vanilla", filter="or")
    assert ftis.FTIS.ftis == FtisConfig()


def test_every_cell_of_the_plan_has_its_own_id(tmp_path: Path) -> None:
    for arguments, count in (([], 54), (["--quick"], 6), (["--models", "a", "b:lora"], 27)):
        cells, _ = ftis.plan(ftis.parse([*arguments, "--out", str(tmp_path)]))
        assert len({one.id for one in cells}) == len(cells) == count
    cells, made = ftis.plan(ftis.parse(["--full", "--out", str(tmp_path)]))
    assert len({one.id for one in cells}) == len(cells)
    assert {one.pair for one in cells} == {"size", "expertise", "lora"}
    assert {path.name for path in made} == {
        f"{name}-seed{seed}" for name in ftis.EXPERTS for seed in ftis.SEEDS
    }


def test_the_expertise_pair_is_made_from_the_seed(tmp_path: Path) -> None:
    cells, made = ftis.plan(ftis.parse(["--full", "--seeds", "3", "--out", str(tmp_path)]))
    members = next(one.members for one in cells if one.pair == "expertise")
    assert [Path(member.model) for member in members] == list(made)
    adder, subtractor = made.values()
    assert adder.seed == subtractor.seed == 3
    assert adder.mix["add"] > adder.mix["sub"]
    assert subtractor.mix["sub"] > subtractor.mix["add"]
    untrained = dataclasses.replace(adder, max_steps=1)
    ftis.make_model(Path(members[0].model), untrained)
    one = Cell("x", (ftis.SIZE[0], members[0]), dataclasses.replace(TINY, steps=1), ftis.FTIS, 3)
    assert run_cell(one, PROMPTS)["nodes"][1]["name"] == "adder"


def test_options_change_settings_and_models() -> None:
    options = ftis.parse(
        ["--models", "org/a", "b:lora", "--seeds", "7", "--set", "steps=3", "learning_rate=2e-6"]
    )
    one = ftis.plan(options)[0][0]
    assert (one.setting.steps, one.setting.learning_rate, one.seed) == (3, 2e-6, 7)
    assert [(m.name, m.model, m.mode) for m in one.members] == [
        ("a", "org/a", "full"),
        ("b-lora", "b", "lora"),
    ]


@pytest.mark.parametrize("wrong", ["steps", "pace=3", "steps=few", "name=x"])
def test_a_wrong_setting_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ftis.parse(["--set", wrong])
    assert wrong in capsys.readouterr().err


def test_a_rerun_skips_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["steps=1", "groups=2", "group_size=2", "evaluate_every=1"]
    options = ftis.parse(
        ["--quick", "--out", str(tmp_path), "--cells", "/(nois|ftis)/", "--set", *small]
    )
    monkeypatch.setattr(ftis, "_prompts", lambda _: PROMPTS)
    chosen = [one for one in ftis.plan(options)[0] if options.cells.search(one.id)]
    assert len(chosen) == 2
    for one in chosen:
        assert ftis.finished(tmp_path, one, PROMPTS) is None
        ftis.run_and_write(tmp_path, one, PROMPTS)
        assert ftis.finished(tmp_path, one, PROMPTS) is not None
    assert ftis.run(options) == 0
    assert "0 of 2 cells to run" in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["tables"]["size/stress"]) == {"nois", "ftis"}
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["size-stress-accuracy.png", "size-stress-training.png"]

    other = ftis.parse(["--quick", "--out", str(tmp_path), "--set", *small, "learning_rate=1e-4"])
    assert all(ftis.finished(tmp_path, one, PROMPTS) is None for one in ftis.plan(other)[0])
    fewer = Prompts(PROMPTS.train, PROMPTS.held_out)
    assert all(ftis.finished(tmp_path, one, fewer) is None for one in chosen)


def invented(method: str, seed: int, ends: tuple[float, float], study: str = "") -> dict[str, Any]:
    """A result with chosen final accuracies; both nodes start at .5."""
    nodes = [
        {
            "name": name,
            "parameters": 1000,
            "trained_parameters": 1000,
            "evaluations": [
                {"step": 0, "in_distribution": 0.5, "out_of_distribution": 0.25},
                {"step": 2, "in_distribution": end, "out_of_distribution": end / 2},
            ],
            "steps": {
                **{column: [0.25, None, 0.75] for column, _ in ftis_report.COLUMNS},
                "entropy": [1.0, 0.5, 0.25],
            },
        }
        for name, end in zip(("small", "large"), ends, strict=True)
    ]
    described = cell(Method(method, FtisConfig()), seed=seed)
    return {
        "cell": {
            "pair": "size",
            "seed": seed,
            "setting": {"name": "tiny", "learning_rate": 0.001, "steps": 2, "groups": 4}
            | {"group_size": described.setting.group_size},
            "method": {"name": method, "study": study},
        },
        "nodes": nodes,
        "cpu_s": {"loading": 100.0, "sampling": 1.0, "training": 2.0},
    }


def test_the_table_holds_means_spreads_and_paired_differences() -> None:
    results = [
        invented("nois", 0, (0.1, 0.2)),
        invented("nois", 1, (0.3, 0.2)),
        invented("ftis", 0, (0.7, 0.8)),
        invented("ftis", 1, (0.72, 0.9)),
    ]
    text = ftis_report.render_markdown(results, {"cores": 2})
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "|" in line}
    assert "| start | 2 | 0.500 ± 0.000 | 0.500 ± 0.000 | 0.250 ± 0.000" in rows["start"]
    assert "| nois | 2 | 0.200 ± 0.141 | 0.200 ± 0.000 | 0.100 ± 0.071" in rows["nois"]
    assert "degrades or collapses" in rows["nois"]
    assert "| ftis | 2 | 0.710 ± 0.014 | 0.850 ± 0.071 |" in rows["ftis"]
    assert "| 3 |" in rows["ftis"]  # CPU seconds, without loading
    # .75 - .15 and .81 - .25, by seed
    assert rows["ftis - nois"] == "| ftis - nois | 2 | +0.580 ± 0.028 | +0.290 ± 0.014 |"
    assert "ftis - ftis" not in text
    single = ftis_report.render_markdown(results[2:3], {})
    assert "| ftis | 1 | 0.700 | 0.800 | 0.350 | 0.400 |" in single


def test_a_study_has_a_table_of_its_own_beside_what_it_varies() -> None:
    results = [invented("ftis", 0, (0.7, 0.8)), invented("ftis-c1", 0, (0.6, 0.8), "C")]
    main, study = ftis_report.render_markdown(results, {}).split("## size/tiny/C")
    assert "ftis-c1" not in main
    assert "| ftis | 1 | 0.700" in study
    assert "| ftis-c1 | 1 | 0.600" in study
    assert "| ftis - ftis-c1 | 1 | +0.050 |" in study


def test_a_table_without_out_of_distribution_prompts() -> None:
    result = copy.deepcopy(invented("ftis", 0, (0.7, 0.8)))
    for node in result["nodes"]:
        for evaluation in node["evaluations"]:
            del evaluation["out_of_distribution"]
    text = ftis_report.render_markdown([result], {})
    assert "small, in" in text
    assert "small, out" not in text


def test_curves_take_the_median_and_leave_gaps() -> None:
    run = [*([1.0] * 9), 100.0, *([None] * 10), 5.0]
    values = ftis_report.binned([run, run])
    assert values[0] == 1.0
    assert np.isnan(values[1])
    assert values[2] == 5.0
