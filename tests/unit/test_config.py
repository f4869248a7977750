"""node.toml: the example, the precedence of its sources, and what a wrong value gets."""

import re
import tomllib
from pathlib import Path

import msgpack
import pytest
import torch

from swarm.config import METHODS, FtisSection, NodeConfig, Section, load_config, render_example
from swarm.errors import ConfigError, ExitCode

EXAMPLE = Path(__file__).parents[2] / "node.toml.example"


def toml(folder: Path, text: str) -> Path:
    path = folder / "node.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path | None, flags: dict[str, str] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags, environ)
    assert caught.value.exit_code == ExitCode.CONFIG
    return str(caught.value)


def sections() -> list[tuple[str, type[Section]]]:
    return [
        (name, type(getattr(NodeConfig(), name))) for name in NodeConfig.model_fields
    ]  # fmt: skip


# -- the example ---------------------------------------------------------------------------------


def test_the_example_is_what_the_code_writes() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") == render_example()


def test_the_example_names_every_field_and_equals_the_defaults() -> None:
    assert load_config(EXAMPLE, environ={}) == NodeConfig()
    tables = tomllib.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert {name: set(table) for name, table in tables.items()} == {
        name: set(section.model_fields) for name, section in sections()
    }


def test_every_field_and_section_is_described() -> None:
    for name, section in sections():
        assert section.__doc__, name
        for key, field in section.model_fields.items():
            assert field.description, f"{name}.{key}"
            assert f"\n{key} = " in render_example()
    assert all(len(line) <= 100 for line in render_example().splitlines())


# -- precedence ----------------------------------------------------------------------------------


def test_flag_over_environment_over_toml_over_default(tmp_path: Path) -> None:
    path = toml(tmp_path, "[train]\nlearning_rate = 0.1\nbeta1 = 0.1\nbeta2 = 0.1\n")
    environ = {"SWARM_TRAIN__LEARNING_RATE": "0.2", "SWARM_TRAIN__BETA1": "0.2"}
    train = load_config(path, {"train.learning_rate": "0.3"}, environ).train
    assert (train.learning_rate, train.beta1, train.beta2) == (0.3, 0.2, 0.1)
    assert train.weight_decay == NodeConfig().train.weight_decay


def test_saved_values_stand_between_toml_and_default(tmp_path: Path) -> None:
    saved = {"train": {"beta1": 0.5, "beta2": 0.5}, "network": {"announce": ["/ip4/1.2.3.4/tcp/5"]}}
    config = load_config(toml(tmp_path, "[train]\nbeta1 = 0.1\n"), None, {}, saved)
    assert (config.train.beta1, config.train.beta2) == (0.1, 0.5)
    assert config.network.announce == ("/ip4/1.2.3.4/tcp/5",)
    assert saved["train"]["beta1"] == 0.5


def test_a_config_survives_its_own_json() -> None:
    config = load_config(None, {"ftis.kl_threshold_schedule": "[[0, 5.0], [10, 50.0]]"}, {})
    assert load_config(None, None, {}, config.model_dump(mode="json")) == config


def test_values_from_flags_and_environment_are_read_as_their_fields_ask() -> None:
    config = load_config(
        None,
        {
            "model.path": "12",
            "node.name": "true",
            "model.mode": "lora",
            "network.use_relay": "false",
            "network.port": "31337",
            "ftis.kl_threshold_schedule": "[[0, 5], [100, 50.0]]",
            "train.learning_rate": "1",
        },
        {"SWARM_MODEL__LORA_TARGETS": '["q_proj", "v_proj"]', "SWARM_NODE__SEED": "7"},
    )
    assert config.model.path == "12"
    assert config.node.name == "true"
    assert config.model.mode == "lora"
    assert config.network.use_relay is False
    assert config.network.port == 31337
    assert config.ftis.kl_threshold_schedule == ((0, 5.0), (100, 50.0))
    assert config.train.learning_rate == 1.0
    assert config.model.lora_targets == ("q_proj", "v_proj")
    assert config.node.seed == 7


def test_other_variables_of_the_environment_are_left_alone() -> None:
    environ = {"SWARM_DEBUG": "1", "SWARMS__X": "1", "PATH": "/bin", "MY_SWARM_NODE__NAME": "x"}
    assert load_config(None, None, environ) == NodeConfig()


def test_the_environment_is_the_process_s_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_NODE__SEED", "9")
    assert load_config(None).node.seed == 9


# -- what is wrong is named ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[train]\nlearning_rte = 1e-6\n",
            "{path}: no field 'train.learning_rte'; known: groups_per_step, max_steps, ",
        ),
        ("[trian]\nbeta1 = 0.5\n", "{path}: no section 'trian'; known: node, network, limits, "),
        ("[trian]\n", "{path}: no section 'trian'; known: node, "),
        ("seed = 1\n", "{path}: 'seed' stands outside a section; put it under one of node, "),
        (
            '[network]\nport = "80"\n',
            "{path}: network.port = '80': Input should be a valid integer (default: 0)",
        ),
        (
            "[network]\nport = true\n",
            "{path}: network.port = True: Input should be a valid integer (default: 0)",
        ),
        (
            "[network]\nport = 65536\n",
            "{path}: network.port = 65536: Input should be less than or equal to 65535",
        ),
        (
            "[network]\nuse_relay = 1\n",
            "{path}: network.use_relay = 1: Input should be a valid boolean (default: true)",
        ),
        (
            '[network]\nhost = "localhost"\n',
            "{path}: network.host = 'localhost': must be an IPv4 address of this machine, or ",
        ),
        (
            '[network]\nannounce = "/ip4/1.2.3.4/tcp/5"\n',
            "{path}: network.announce = '/ip4/1.2.3.4/tcp/5': Input should be a valid array",
        ),
        (
            '[network]\nannounce = ["1.2.3.4:5"]\n',
            "{path}: network.announce.0 = '1.2.3.4:5': String should match pattern '^/(ip4|ip6|",
        ),
        (
            '[network]\nbootstrap = ["/ip4/1.2.3.4/tcp/5"]\n',
            "{path}: network.bootstrap.0 = '/ip4/1.2.3.4/tcp/5': String should match pattern",
        ),
        (
            '[model]\nmode = "qlora"\n',
            "{path}: model.mode = 'qlora': Input should be 'full' or 'lora' (default: \"full\")",
        ),
        (
            "[train]\nlearning_rate = nan\n",
            "{path}: train.learning_rate = nan: Input should be a finite number",
        ),
        (
            "[train]\nmax_steps = 1.5\n",
            "{path}: train.max_steps = 1.5: Input should be a valid integer",
        ),
        (
            "[node]\nname = 2024-01-01\n[train]\nbeta1 = 2024-01-01\n",
            "{path}: train.beta1 = '2024-01-01': Input should be a valid number",
        ),
        (
            '[node]\nname = "a\\u001b[31m"\n',
            "{path}: node.name = 'a\\x1b[31m': String should match pattern",
        ),
        (
            "[ftis]\nkl_threshold_schedule = [[1, 5.0]]\n",
            "{path}: ftis.kl_threshold_schedule = [[1, 5.0]]: steps must rise and begin with 0, "
            "e.g. [[0, 5.0], [100, 50.0]] (default: [])",
        ),
    ],
)
def test_a_wrong_file_names_source_field_value_and_remedy(
    text: str, says: str, tmp_path: Path
) -> None:
    path = toml(tmp_path, text)
    assert refused(path).startswith(says.format(path=path))


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    path = toml(tmp_path, "[train]\nbeta1 = 1.0\nbeta3 = 0.5\n[eval]\nmax_prompts = 0\n")
    lines = refused(path).splitlines()
    assert [line.split(":")[1].split("=")[0].strip() for line in lines] == [
        "train.beta1",
        "no field 'train.beta3'; known",
        "eval.max_prompts",
    ]


def test_the_source_is_the_one_that_won(tmp_path: Path) -> None:
    path = toml(tmp_path, "[network]\nport = 1\n")
    message = refused(path, None, SWARM_NETWORK__PORT="-1")
    assert message.startswith("environment variable SWARM_NETWORK__PORT: network.port = -1: ")
    message = refused(path, {"network.port": "x"}, SWARM_NETWORK__PORT="-1")
    assert message.startswith("command line: network.port = 'x': ")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("SWARM_NODES__NAME", "no section 'nodes'; known: node, "),
        ("SWARM_NODE__NMAE", "no field 'node.nmae'; known: name, "),
        ("SWARM_NODE__NAME__X", "no field 'node.name__x'; known: name, "),
        ("SWARM___", "no section ''; known: node, "),
    ],
)
def test_a_variable_that_sets_nothing_is_refused(name: str, says: str) -> None:
    assert refused(None, None, **{name: "x"}).startswith(f"environment variable {name}: {says}")


def test_text_that_only_begins_as_a_value_is_no_value() -> None:
    message = refused(None, {"network.port": "1\nextra = 2"})
    assert "Input should be a valid integer" in message


def test_text_that_is_not_utf8_is_named() -> None:
    message = refused(None, None, SWARM_MODEL__PATH="/models/\udce9")
    assert message.startswith("environment variable SWARM_MODEL__PATH: model.path = ")
    assert message.endswith("not valid UTF-8")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    assert refused(absent).startswith(f"{absent}: no such file; ")
    assert refused(tmp_path).startswith(f"{tmp_path}: cannot be read: ")
    broken = toml(tmp_path, "[train\n")
    assert refused(broken).startswith(f"{broken}: not valid TOML: ")
    assert "line 1" in refused(broken)
    (tmp_path / "latin.toml").write_bytes(b"[node]\nname = '\xe9'\n")
    assert "cannot be read" in refused(tmp_path / "latin.toml")


# -- the schedule, the methods, the digest -------------------------------------------------------


@pytest.mark.parametrize("good", [(), ((0, 5.0),), ((0, 5.0), (100, 50.0))])
def test_schedules_that_rise_from_0_are_taken(good: tuple[tuple[int, float], ...]) -> None:
    assert FtisSection(kl_threshold_schedule=good).kl_threshold_schedule == good


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("[[5, 1.0]]", "steps must rise and begin with 0"),
        ("[[0, 1.0], [0, 2.0]]", "steps must rise and begin with 0"),
        ("[[0, 1.0], [9, 2.0], [5, 3.0]]", "steps must rise and begin with 0"),
        ("[[0, 0.0]]", "every threshold must be above 0"),
        ("[[0, 1.0], [5, -1.0]]", "every threshold must be above 0"),
        ("[[0]]", "Field required"),
        ("[[0, 1.0, 2.0]]", "at most 2 items"),
        ("[0, 1.0]", "valid array"),
        ("5.0", "valid array"),
    ],
)
def test_other_schedules_are_refused(bad: str, says: str) -> None:
    message = refused(None, {"ftis.kl_threshold_schedule": bad})
    assert message.startswith("command line: ftis.kl_threshold_schedule")
    assert says in message


@pytest.mark.parametrize(
    ("field", "value", "largest", "above"),
    [
        ("train.max_steps", "{}", str(2**63 - 1), str(2**63)),
        ("ftis.kl_threshold_schedule", "[[0,1],[{},2]]", str(2**63 - 1), str(2**63)),
        ("ftis.clip_max", "{}", "3.4e+38", "1e39"),
        ("ftis.kl_threshold_schedule", "[[0,{}]]", "3.4e+38", "1e39"),
    ],
)
def test_numbers_too_large_for_the_learner(
    field: str, value: str, largest: str, above: str
) -> None:
    taken = load_config(None, {field: value.format(largest)}, {})
    msgpack.packb(taken.model_dump(mode="json"))
    torch.ones(1).clamp(max=taken.ftis.clip_max)
    message = refused(None, {field: value.format(above)})
    assert field in message
    assert f"at most {largest}" in message


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_configuration(method: str) -> None:
    ftis = load_config(None, METHODS[method], {}).ftis
    assert {f"ftis.{key}": getattr(ftis, key) for key in ("importance", "filter")} == METHODS[
        method
    ]


def test_sections_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        NodeConfig().train.beta1 = 0.5  # type: ignore[misc]  # what is tested


def test_the_digest_tells_values_apart_and_nothing_else(tmp_path: Path) -> None:
    path = toml(tmp_path, "[train]\nbeta1 = 0.9\n")
    assert load_config(path, None, {}).digest() == NodeConfig().digest()
    assert load_config(None, {"train.beta1": "0.8"}, {}).digest() != NodeConfig().digest()
    reread = NodeConfig.model_validate(NodeConfig().model_dump(mode="json"))
    assert reread.digest() == NodeConfig().digest()
    assert len(NodeConfig().digest()) == 64


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"ftis.importance": "none", "ftis.importance_level": "sequence"},
            'command line: section [ftis]: importance_level "sequence" needs',
        ),
        (
            {"train.schedule": "cosine", "train.warmup_steps": "10", "train.schedule_steps": "10"},
            'command line: section [train]: schedule "cosine" needs schedule_steps above',
        ),
    ],
)
def test_fields_that_do_not_fit_together_are_named(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(None, flags, environ={})


def test_settings_saved_by_another_version_are_left_out_if_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = {"train": {"learning_rate": 0.5, "gone": 1}, "gone": {"x": 1}}
    config = load_config(None, saved=saved)
    assert config.train.learning_rate == 0.5
    assert "train.gone" in caplog.text
    assert "gone.x" in caplog.text
    with pytest.raises(ConfigError, match="values of the last start"):
        load_config(None, saved={"train": {"learning_rate": -1.0}})
