"""Input that no verb can use: one line that names it, the right exit code, nothing written.

The verbs run in this process; tests/cli/test_cli.py meets the command line as a user does.
"""

import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from answers import refused, some_invite

from swarm.cli.main import main
from swarm.cli.output import out
from swarm.config import load_config
from swarm.errors import DataError
from swarm.paths import DataDir, RunDir

SMALL = Path(__file__).parents[2] / "swarm" / "models" / "arith-small"


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Ask = Callable[..., Ended]


@pytest.fixture
def asked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs `swarm-node ARGUMENTS`."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def ask(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        for handler in [h for h in root.handlers if h not in handlers]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
        return Ended(int(str(end.value.code)), *capsys.readouterr())

    return ask


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(30)))
    return path


LONG = "a" * 300
NO_DATA_DIRS = ["/dev/null", "/dev/null/x", "/proc/x", f"/tmp/{LONG}", "~nosuchuser/x"]


@pytest.mark.parametrize("place", NO_DATA_DIRS)
def test_a_data_directory_that_cannot_be(asked: Ask, place: str) -> None:
    result = asked("join", some_invite(), "--model", str(SMALL), "--data-dir", place)
    refused(result, 78, LONG if LONG in place else place)


@pytest.mark.parametrize(
    "verb",
    [("status", "--data-dir"), ("init", "--data-dir"), ("replay", "--set"), ("bugreport", "--out")],
)
def test_an_argument_that_is_no_utf8(asked: Ask, verb: tuple[str, ...]) -> None:
    refused(asked(*verb, os.fsdecode(b"/tmp/\xff")), 78, "UTF-8", r"\udcff")


def test_a_runtime_folder_with_too_long_a_path(
    asked: Ask, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("b" * 120)
    temporary.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    refused(asked("status", "--data-dir", str(data_dir)), 3, "too long")


@pytest.mark.parametrize("value", ["[" * 3000, "1" + "0" * 5000, "1\n2"])
def test_a_setting_that_is_no_toml(asked: Ask, data_dir: Path, tmp_path: Path, value: str) -> None:
    flag = f"train.max_steps={value}"
    refused(asked("join", some_invite(), "--set", flag), 78, "train.max_steps")
    path = tmp_path / "node.toml"
    path.write_text(f"[train]\nmax_steps = {value}\n")
    refused(asked("join", some_invite(), "--config", str(path)), 78, str(path))


def test_a_path_with_a_zero_byte(asked: Ask, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text('[node]\ndata_dir = "a\\u0000b"\n')
    refused(asked("join", some_invite(), "--config", str(path)), 78, "zero byte")


@pytest.mark.parametrize("model", ["~nosuchuser/m", f"/tmp/{LONG}"])
def test_a_model_folder_that_cannot_be(asked: Ask, data_dir: Path, model: str) -> None:
    result = asked("join", some_invite(), "--model", model, "--data-dir", str(data_dir))
    refused(result, 78, model)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"train": 3}', b"\xff\xfe", b"[" * 9000])
def test_the_settings_of_the_last_start_are_damaged(
    asked: Ask, data_dir: Path, damage: bytes
) -> None:
    swarm_dir = DataDir(data_dir).swarm(bytes(32))
    swarm_dir.root.mkdir(parents=True)
    swarm_dir.config_path.write_bytes(damage)
    result = asked("join", some_invite(), "--data-dir", str(data_dir))
    refused(result, 78, str(swarm_dir.config_path), "damaged")


def test_the_doctor_names_damaged_settings(asked: Ask, data_dir: Path) -> None:
    place = DataDir(data_dir)
    place.create()
    place.current = bytes(32)
    path = place.swarm(bytes(32)).config_path
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    result = asked("doctor", "--offline", "--json", "--data-dir", str(data_dir))
    last = json.loads(result.stdout)["findings"][-1]
    assert (last["check"], last["verdict"], result.returncode) == ("configuration", "failed", 78)
    assert f"{path}: damaged" in last["figure"]


@pytest.mark.parametrize(
    "verb",
    [
        ("identity", "export", "~nosuchuser/key"),
        ("identity", "import", "~nosuchuser/key"),
        ("members", "add", "--file", "~nosuchuser/ids"),
        ("publish", "me/model", "--run", "~nosuchuser/run"),
        ("replay", "~nosuchuser/run"),
    ],
)
def test_a_file_in_nobodys_home(asked: Ask, data_dir: Path, verb: tuple[str, ...]) -> None:
    refused(asked(*verb, "--data-dir", str(data_dir)), 78, "~nosuchuser/")


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"abcd", b""])
def test_the_note_of_the_current_swarm_is_damaged(
    asked: Ask, data_dir: Path, damage: bytes
) -> None:
    data_dir.mkdir()
    (data_dir / "current").write_bytes(damage)
    refused(asked("join", "--data-dir", str(data_dir)), 2, "invite")
    refused(asked("seed", "--data-dir", str(data_dir)), 2, "no swarm")


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x92\xc4"])
def test_the_charter_is_damaged(asked: Ask, data_dir: Path, prompts: Path, damage: bytes) -> None:
    place = DataDir(data_dir)
    place.create()
    place.current = bytes(32)
    path = place.swarm(bytes(32)).charter_path
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    seed = ("seed", str(prompts), "--tokenizer", str(SMALL))
    readers = (("members",), ("rollouts", "list"), ("eval", str(SMALL)))
    for verb in (("seed",), ("seed", "--close"), seed, *readers):
        refused(asked(*verb, "--data-dir", str(data_dir)), 78, str(path), "damaged")


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("--held-out-fraction", "nan", 2),
        ("--held-out-fraction", "-1", 2),
        ("--held-out-fraction", "1", 2),
        ("--temperature", "nan", 2),
        ("--group-size", "9" * 30, 2),
        ("--template", os.devnull, 2),
    ],
)
def test_seed_options_that_are_no_numbers(
    asked: Ask, data_dir: Path, prompts: Path, option: str, value: str, code: int
) -> None:
    result = asked(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir), option, value
    )
    refused(result, code)


def test_a_template_that_is_no_text(
    asked: Ask, data_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template"
    template.write_bytes(b"\xff\xfe")
    result = asked(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir),
        "--template", str(template),
    )  # fmt: skip
    refused(result, 78, str(template))


def test_a_running_node_keeps_its_swarm(asked: Ask, data_dir: Path, prompts: Path) -> None:
    held = DataDir(data_dir)
    with held.locked():
        held.current = bytes(32)
        result = asked("seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir))
        refused(result, 75, str(os.getpid()))
        assert held.current == bytes(32)


@pytest.mark.parametrize("when", ["0001-01-01", "1900-01-01", "soon"])
def test_closing_at_no_time(asked: Ask, data_dir: Path, when: str) -> None:
    refused(asked("seed", "--close", when, "--data-dir", str(data_dir)), 2, when)


@pytest.mark.parametrize("value", ["nan", "0", "-1", "inf", "soon"])
def test_no_time_to_wait(asked: Ask, data_dir: Path, value: str) -> None:
    for verb in (("status", some_invite()), ("stop",)):
        refused(asked(*verb, "--timeout", value, "--data-dir", str(data_dir)), 2, "--timeout")


@pytest.mark.parametrize(
    ("option", "value"), [("--nodes", "0"), ("--nodes", "9999"), ("--seed", "-5"), ("--steps", "0")]
)
def test_a_demo_out_of_bounds(asked: Ask, tmp_path: Path, option: str, value: str) -> None:
    refused(asked("demo", "--out", str(tmp_path / "out"), option, value), 2, option, value)
    assert not (tmp_path / "out").exists()


def test_a_demo_folder_that_cannot_be(asked: Ask) -> None:
    refused(asked("demo", "--out", "/dev/null"), 78, "/dev/null")


@pytest.mark.parametrize("value", ["-1", "0", "nan", "9" * 30, "\x1b[31m"])
@pytest.mark.parametrize(
    "verb",
    [
        ("rollouts", "list", "--limit"),
        ("rollouts", "verify", "--limit"),
        ("logs", "-n"),
        ("eval", "--max-prompts"),
        ("replay", "--steps"),
        ("seed", "x.jsonl", "--check-prompts"),
    ],
)
def test_how_many(asked: Ask, data_dir: Path, verb: tuple[str, ...], value: str) -> None:
    result = asked(*verb, value, "--data-dir", str(data_dir))
    if value.isdigit() and int(value):  # as many as there are; here is nothing at all
        assert result.returncode in (2, 78)
        assert "at least" not in result.stderr
    else:
        refused(result, 2, "at least 1")
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    "verb", [("checkpoint", "list"), ("checkpoint", "export", "--out", "x"), ("replay",)]
)
def test_a_folder_that_is_no_run(asked: Ask, tmp_path: Path, verb: tuple[str, ...]) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        refused(asked(*verb, str(folder)), 78, str(folder), "is no run")


def test_a_name_on_stdout_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out("exported to /tmp/\x1b[31m\nagain")
    assert capsys.readouterr().out == "exported to /tmp/\\x1b[31m\nagain\n"


@pytest.mark.parametrize("verb", [("peers", "ban"), ("peers", "unban"), ("members", "add")])
def test_what_is_no_peer_id(asked: Ask, data_dir: Path, verb: tuple[str, ...]) -> None:
    refused(asked(*verb, "ada", "--data-dir", str(data_dir)), 2, "'ada'", "like 12D3Koo")
    assert not data_dir.exists()


@pytest.mark.parametrize(
    "words",
    [
        ("rollouts", "{}"),
        ("rollouts", "{}", "list"),
        ("rollouts", "list", "{}"),
        ("identity", "{}"),
        ("identity", "{}", "show"),
        ("checkpoint", "{}", "list"),
        ("service", "{}", "install"),
    ],
)
def test_the_data_directory_may_stand_before_a_verbs_part(
    asked: Ask, data_dir: Path, words: tuple[str, ...]
) -> None:
    """A verb that has parts takes `--data-dir` as every other one does."""
    place = words.index("{}")
    named = (*words[:place], "--data-dir", str(data_dir), *words[place + 1 :])
    result = asked(*named)
    assert str(data_dir) in result.stderr, result.stderr


@pytest.mark.parametrize("verb", [("init",), ("stop",), ("identity", "show"), ("leave",)])
def test_an_empty_data_directory_is_not_the_default_one(asked: Ask, verb: tuple[str, ...]) -> None:
    """As in `--data-dir "$DIR"`, with no such variable."""
    refused(asked(*verb, "--data-dir", ""), 2, "--data-dir", "empty")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--group-size", "3", "--reward", "exact"), "--reward, --group-size: only with PROMPTS"),
        (("--min-version", "0.0.2", "--temperature", "0.5"), "--temperature: only with PROMPTS"),
        (("--append", "more.jsonl", "--seed", "3"), "--seed: only with PROMPTS"),
        ((some_invite(), "--held-out-fraction", "0"), "--held-out-fraction: only with PROMPTS"),
    ],
)
def test_terms_of_a_swarm_that_was_made_do_not_change_in_silence(
    asked: Ask, data_dir: Path, flags: tuple[str, ...], named: str
) -> None:
    refused(asked("seed", *flags, "--data-dir", str(data_dir)), 2, named)


def test_a_demo_goes_into_a_folder_of_its_own(asked: Ask, tmp_path: Path) -> None:
    (tmp_path / "organizer").mkdir()
    refused(asked("demo", "--nodes", "1", "--out", str(tmp_path)), 2, "holds an earlier demo")


def test_init_writes_what_join_reads(
    asked: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a folder with characters that JSON and TOML escape differently, and of `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    data_dir = tmp_path / 'emo\U0001f600 \x7f"\\'
    assert asked("init", "--data-dir", str(data_dir), "--config=~/node.toml").returncode == 0
    assert load_config(tmp_path / "node.toml").node.data_dir == str(data_dir)


@pytest.mark.parametrize("record", [{"trained": []}, {"trained": {}, "configs": []}, {"schema": 5}])
def test_a_record_of_a_run_that_is_none_is_named(tmp_path: Path, record: dict[str, Any]) -> None:
    run_dir = RunDir.create(tmp_path / "runs" / "0001")
    run_dir.record_path.write_text(json.dumps(record))
    if "trained" in record:
        with pytest.raises(DataError, match=r"run\.json: damaged: no record of a run"):
            run_dir.record()
    else:
        assert run_dir.record() == record  # of another version
