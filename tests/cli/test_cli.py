"""The command line as a user meets it: answers, messages, exit codes; never a traceback."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from answers import refused, some_invite

from swarm.config import METHODS
from swarm.protocol.identity import Identity

SMALL = Path(__file__).parents[2] / "swarm" / "models" / "arith-small"


def swarm_node(
    *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SWARM_")}
    return subprocess.run(
        [sys.executable, "-m", "swarm.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**clean, **(env or {})},
    )


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(9)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_help_lists_every_verb() -> None:
    result = swarm_node("--help")
    assert result.returncode == 0
    for verb in ("init", "join", "seed", "status", "invite", "stop", "replay", "demo"):
        assert verb in result.stdout


@pytest.mark.parametrize("verb", ["join", "demo", "replay"])
def test_help_lists_every_method(verb: str) -> None:
    words = swarm_node(verb, "--help").stdout.replace(",", " ").split()
    assert set(METHODS) <= set(words)


def test_unknown_verb(data_dir: Path) -> None:
    refused(swarm_node("traim"), 2, "traim", "join")


def test_status_without_a_node(data_dir: Path) -> None:
    refused(
        swarm_node("status", "--data-dir", str(data_dir)), 3, "no node is running", str(data_dir)
    )


def test_join_without_ever_having_joined(data_dir: Path) -> None:
    refused(swarm_node("join", "--data-dir", str(data_dir)), 2, "invite")


def test_messages_without_a_chat_template(data_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    result = swarm_node("seed", str(path), "--tokenizer", str(SMALL), "--data-dir", str(data_dir))
    refused(result, 78, "chat template", "--template FILE")
    assert "plain" not in result.stderr  # it takes no messages


def test_damaged_invite(data_dir: Path) -> None:
    invite = some_invite()
    damaged = invite[:-3] + ("x" if invite[-3] != "x" else "y") + invite[-2:]
    refused(swarm_node("join", damaged, "--data-dir", str(data_dir)), 2, "checksum")


def test_no_model_named(data_dir: Path) -> None:
    refused(swarm_node("join", some_invite(), "--data-dir", str(data_dir)), 78, "model.path")


def test_model_folder_missing(data_dir: Path, tmp_path: Path) -> None:
    result = swarm_node(
        "join", some_invite(), "--model", str(tmp_path / "nowhere"), "--data-dir", str(data_dir)
    )
    refused(result, 78, str(tmp_path / "nowhere"))


def test_unreachable_swarm_with_fail_fast(data_dir: Path) -> None:
    result = swarm_node(
        "join", some_invite(), "--model", str(SMALL), "--data-dir", str(data_dir),
        "--fail-fast", "--host", "127.0.0.1", "--set", "network.use_relay=false",
    )  # fmt: skip
    refused(result, 69, "/ip4/127.0.0.1/tcp/9", "no member")


def test_wrong_setting_names_field_value_and_source(data_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[train]\nlearning_rate = 'fast'\n")
    result = swarm_node("join", some_invite(), "--config", str(path), "--data-dir", str(data_dir))
    refused(result, 78, str(path), "train.learning_rate", "fast")


def test_unknown_setting(data_dir: Path) -> None:
    result = swarm_node("join", some_invite(), "--data-dir", str(data_dir), "--set", "train.lr=1")
    refused(result, 78, "train.lr", "learning_rate")


def test_seed_without_a_file(data_dir: Path, tmp_path: Path) -> None:
    result = swarm_node(
        "seed", str(tmp_path / "none.jsonl"), "--tokenizer", str(SMALL),
        "--data-dir", str(data_dir),
    )  # fmt: skip
    refused(result, 78, "none.jsonl")


def test_seed_with_a_malformed_line(data_dir: Path, prompts: Path) -> None:
    prompts.write_text(prompts.read_text() + '{"prompt": "1+1="\n')
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir)
    )
    refused(result, 78, f"{prompts}:82")


def test_seed_with_an_empty_file(data_dir: Path, prompts: Path) -> None:
    prompts.write_text("")
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir)
    )
    refused(result, 78, str(prompts), "no prompts")


def test_seed_with_an_answer_that_the_reward_cannot_match(data_dir: Path, prompts: Path) -> None:
    prompts.write_text('{"prompt": "1+1=", "answer": "two"}\n')
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir),
        "--held-out-fraction", "0",
    )  # fmt: skip
    refused(result, 78, "1+1=", "two")


def test_seed_with_an_unknown_reward(data_dir: Path, prompts: Path) -> None:
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir),
        "--reward", "vibes",
    )  # fmt: skip
    assert result.returncode != 0
    assert "vibes" in result.stderr
    assert "number" in result.stderr
    assert "Traceback" not in result.stderr


def test_seed_with_bounds_that_no_manifest_has(data_dir: Path, prompts: Path) -> None:
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir),
        "--group-size", "1",
    )  # fmt: skip
    refused(result, 2, "--group-size 1")


def test_held_out_prompts_that_are_trained_on(data_dir: Path, prompts: Path) -> None:
    result = swarm_node(
        "seed", str(prompts), "--held-out", str(prompts), "--tokenizer", str(SMALL),
        "--data-dir", str(data_dir),
    )  # fmt: skip
    refused(result, 78, "held-out", str(prompts))


def test_out_of_distribution_prompts_that_are_trained_on(data_dir: Path, prompts: Path) -> None:
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir),
        "--ood", str(prompts),
    )  # fmt: skip
    refused(result, 78, str(prompts), "0+0=")


def test_port_in_use(data_dir: Path, prompts: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = swarm_node(
            "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir),
            "--host", "127.0.0.1", "--port", str(port),
        )  # fmt: skip
    assert result.returncode == 75, result.stderr
    assert str(port) in result.stderr
    assert "Traceback" not in result.stderr


def test_amendment_without_a_swarm(data_dir: Path) -> None:
    refused(swarm_node("seed", "--close", "--data-dir", str(data_dir)), 2, "no swarm was seeded")


def test_close_at_no_time(data_dir: Path) -> None:
    refused(
        swarm_node("seed", "--close", "soon", "--data-dir", str(data_dir)), 2, "soon", "ISO 8601"
    )


def test_replay_without_a_run(data_dir: Path, tmp_path: Path) -> None:
    refused(swarm_node("replay", "--data-dir", str(data_dir)), 2, str(data_dir), "RUN")
    refused(swarm_node("replay", str(tmp_path)), 78, str(tmp_path), "run.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "ppo"), ("ppo", "ftis")),
        (("--set", "ftis"), ("--set ftis",)),
        (("--from", "-1"), ("--from -1",)),
        (("--what-if", "g=1", "--method", "nois"), ("--what-if", "--method")),
    ],
)
def test_replay_of_nonsense(
    arguments: tuple[str, ...], words: tuple[str, ...], data_dir: Path
) -> None:
    refused(swarm_node("replay", *arguments, "--data-dir", str(data_dir)), 2, *words)


def test_init_writes_a_config_that_loads_and_never_overwrites(data_dir: Path) -> None:
    first = swarm_node("init", "--data-dir", str(data_dir))
    assert first.returncode == 0, first.stderr
    assert "12D3Koo" in first.stdout
    # The configuration is fine, and means the data directory that it lies in.
    result = swarm_node("join", "--config", str(data_dir / "node.toml"))
    refused(result, 2, "invite", str(data_dir))
    refused(swarm_node("init", "--data-dir", str(data_dir)), 78, "exists already")


def test_a_damaged_identity_is_refused(data_dir: Path, prompts: Path) -> None:
    data_dir.mkdir()
    (data_dir / "identity.key").write_bytes(b"not a key")
    (data_dir / "identity.key").chmod(0o400)
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(SMALL), "--data-dir", str(data_dir)
    )
    refused(result, 77, "identity.key")


def test_tokenizer_folder_without_a_tokenizer(
    data_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    result = swarm_node(
        "seed", str(prompts), "--tokenizer", str(folder), "--data-dir", str(data_dir)
    )
    refused(result, 78, "tokenizer.json")


@pytest.mark.parametrize("arguments", [("--help",), ("status",)])
def test_quick_verbs_import_neither_torch_nor_hivemind(
    arguments: tuple[str, ...], data_dir: Path
) -> None:
    code = (
        "import sys\n"
        "from swarm.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'hivemind', 'numpy', 'peft'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "SWARM_NODE__DATA_DIR": str(data_dir)},
    )
    assert result.returncode == 0, result.stderr


def test_console_script_is_installed() -> None:
    assert shutil.which("swarm-node", path=str(Path(sys.executable).parent))


def test_versions_for_people_and_programs(data_dir: Path) -> None:
    shown = json.loads(swarm_node("version", "--json").stdout)
    assert shown["schema"] == "swarm-node/version/1"
    lines = [f"{name} {number}" for name, number in shown["versions"].items()]
    assert sorted(lines) == sorted(swarm_node("version").stdout.splitlines())
    assert {"swarm-node", "python", "torch", "hivemind"} <= shown["versions"].keys()


def test_doctor_names_what_is_wrong_with_the_configuration(data_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[train]\nlearning_rate = 'fast'\n")
    result = swarm_node(
        "doctor", "--config", str(path), "--offline", "--json", "--data-dir", str(data_dir)
    )
    assert result.returncode == 78, result.stderr
    report = json.loads(result.stdout)
    assert report["schema"] == "swarm-node/doctor/1"
    (wrong,) = [f for f in report["findings"] if f["verdict"] == "failed"]
    assert wrong["check"] == "configuration"
    assert "train.learning_rate" in wrong["figure"]


def test_ledger_before_any_swarm(data_dir: Path) -> None:
    refused(swarm_node("ledger", "--data-dir", str(data_dir)), 2, str(data_dir))


def test_identity_goes_from_one_data_directory_to_another(data_dir: Path, tmp_path: Path) -> None:
    backup, other = tmp_path / "backup.key", tmp_path / "other"
    refused(swarm_node("identity", "show", "--data-dir", str(data_dir)), 77, "identity.key")
    peer_id = Identity.load_or_create(data_dir / "identity.key").peer_id
    shown = swarm_node("identity", "show", "--json", "--data-dir", str(data_dir))
    assert json.loads(shown.stdout)["peer_id"] == peer_id
    assert (
        swarm_node("identity", "export", str(backup), "--data-dir", str(data_dir)).returncode == 0
    )
    assert backup.stat().st_mode & 0o777 == 0o400
    refused(
        swarm_node("identity", "export", str(backup), "--data-dir", str(data_dir)), 77, "exists"
    )
    taken = swarm_node("identity", "import", str(backup), "--data-dir", str(other))
    assert peer_id in taken.stdout, taken.stderr
    Identity.load_or_create(tmp_path / "third" / "identity.key")
    refused(
        swarm_node("identity", "import", str(backup), "--data-dir", str(tmp_path / "third")),
        77, "already",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (("rollouts", "list"), 2, "no swarm has been joined"),
        (("leave",), 2, "no swarm has been joined"),
        (("logs",), 78, "node.log"),
        (("logs", "--learner"), 78, "no run"),
        (("pause",), 3, "no node is running"),
        (("resume",), 3, "no node is running"),
        (("invite",), 3, "no node is running"),
        (("invite", "show", "swarm1nonsense"), 2, "invite"),
        (("service",), 2, "service install"),
        (("service", "install"), 2, "no swarm has been joined"),
    ],
)
def test_verbs_without_what_they_need(
    arguments: tuple[str, ...], code: int, word: str, data_dir: Path
) -> None:
    env = {"SWARM_NODE__DATA_DIR": str(data_dir)}
    refused(swarm_node(*arguments, env=env), code, word)


def test_logs_are_shown_without_what_a_terminal_would_obey(data_dir: Path) -> None:
    (data_dir / "logs").mkdir(parents=True)
    (data_dir / "logs" / "node.log").write_text("one\ntwo \x1b[2J\nthree\n")
    result = swarm_node("logs", "-n", "2", "--data-dir", str(data_dir))
    assert result.stdout == "two \\x1b[2J\nthree\n"


def test_service_install_writes_a_unit_once(data_dir: Path, tmp_path: Path) -> None:
    data_dir.mkdir()
    (data_dir / "current").write_text("ab" * 32)
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    first = swarm_node("service", "install", "--data-dir", str(data_dir), env=env)
    assert "systemctl --user enable --now swarm-node.service" in first.stdout, first.stderr
    unit = tmp_path / "config" / "systemd" / "user" / "swarm-node.service"
    assert str(data_dir) in unit.read_text()
    again = swarm_node("service", "install", "--run", "seed", "--data-dir", str(data_dir), env=env)
    refused(again, 78, "--force")
