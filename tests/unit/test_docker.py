"""What docker/ names exists in the package: commands, flags, settings, paths, pages, targets."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import swarm
from swarm.cli.main import _parser
from swarm.config import ENV_PREFIX, load_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
NODES = {k: v for k, v in COMPOSE["services"].items() if k != "prometheus"}
SITE = "/opt/swarm/lib/python3.11/site-packages/"


def instructions(word: str, text: str = DOCKERFILE) -> list[str]:
    """Arguments of each such instruction of the Dockerfile."""
    joined = re.sub(r"\\\n(\s*#[^\n]*\n)*", " ", text)
    return [line[len(word) + 1 :].strip() for line in joined.splitlines() if line.startswith(word)]


def stages() -> dict[str, str]:
    """Name of a stage to its text."""
    parts = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.M)[1:]
    return {re.match(r"FROM \S+ AS (\S+)", part)[1]: part for part in parts}  # type: ignore[index]


def set_by_image() -> dict[str, str]:
    pairs = [shlex.split(line) for line in instructions("ENV")]
    return dict(item.split("=", 1) for words in pairs for item in words)


def commands(service: dict[str, Any]) -> list[list[str]]:
    """The `swarm-node` commands of a service's shell script."""
    script = service["command"][0].replace("$$", "$")
    found = re.findall(r"swarm-node (.*?)(?:>|$)", script)
    return [shlex.split(re.sub(r"\$\(.*?\)", "swarm1x", command)) for command in found]


def test_the_images_run_as_nobody_special_and_keep_the_identity() -> None:
    for name in ("cpu", "gpu"):
        base = stages()["base"] + stages()[name]
        assert instructions("USER", base)[-1] == "10001:10001"
        assert f"COPY --from=build-{name} /opt/swarm /opt/swarm" in base
        assert not re.search(r"build-essential|pip install", base)
    assert "/data" in instructions("VOLUME")
    assert set_by_image()["SWARM_NODE__DATA_DIR"] == "/data"


def test_everything_that_is_fetched_is_pinned() -> None:
    for image in instructions("FROM"):
        source = image.split()[0]
        assert source in stages() or re.search(r":\d+\.\d+\.\d+", source), source
    for line in instructions("RUN"):
        if "pip install" in line:
            assert "--constraint constraints.txt" in line
    assert re.search(r":v\d+\.\d+\.\d+$", COMPOSE["services"]["prometheus"]["image"])


def test_the_settings_exist() -> None:
    for environment in (set_by_image(), *(node["environment"] for node in NODES.values())):
        ours = {k: str(v) for k, v in environment.items() if k.startswith(ENV_PREFIX)}
        assert ours
        load_config(None, {}, environ=ours)


def test_the_health_check_asks_where_the_node_answers() -> None:
    config = load_config(None, {}, environ=set_by_image())
    (check,) = instructions("HEALTHCHECK")
    assert config.metrics.enabled
    assert f"http://127.0.0.1:{config.metrics.port}/livez" in check
    assert json.loads(check[check.index("CMD") + 4 :])[0] == "python"
    assert instructions("EXPOSE") == [str(config.network.port)]


@pytest.mark.parametrize("service", NODES)
def test_the_commands_parse_and_their_files_are_in_the_package(service: str) -> None:
    found = commands(NODES[service])
    assert found
    package = Path(swarm.__file__).parent.parent
    for command in found:
        arguments = _parser().parse_args(command)
        assert callable(arguments.verb)
        for word in command:
            if word.startswith(SITE):
                assert (package / word.removeprefix(SITE) / "tokenizer.json").is_file()


def test_prometheus_is_let_in_under_the_names_that_it_uses() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    targets = job["static_configs"][0]["targets"]
    assert {target.split(":")[0] for target in targets} == set(NODES)
    image = set_by_image()
    for target in targets:
        name, port = target.split(":")
        config = load_config(None, {}, environ=image | NODES[name]["environment"])
        assert config.metrics.port == int(port)
        assert name in config.metrics.allowed_hosts
        assert config.metrics.host == "0.0.0.0"


def test_what_compose_refers_to_exists() -> None:
    for node in NODES.values():
        build = node["build"]
        assert (ROOT / "docker" / build["context"] / build["dockerfile"]).is_file()
        assert build["target"] in stages()
    named = set(COMPOSE["volumes"])
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in named or (ROOT / "docker" / source).is_file()
        assert set(service["networks"]) <= set(COMPOSE["networks"])


def test_the_build_sees_what_it_copies() -> None:
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = [
        words[:-1] for line in instructions("COPY") if "--from" not in (words := line.split())[0]
    ]
    assert {name for names in copied for name in names} == allowed
    assert all((ROOT / name).exists() for name in allowed)
