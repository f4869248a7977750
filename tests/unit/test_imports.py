"""The dependency rule: who may import torch and hivemind, and what the processes really load."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def contracts() -> dict[str, list[str]]:
    text = (ROOT / "pyproject.toml").read_text()
    items = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    return {item["name"]: item.get("source_modules", []) for item in items}


def modules() -> set[str]:
    paths = (ROOT / "swarm").iterdir()
    names = {p.stem for p in paths if p.suffix == ".py" or (p / "__init__.py").exists()}
    return {f"swarm.{name}" for name in names - {"__init__"}}


@pytest.mark.parametrize(
    ("contract", "exempt"),
    [
        ("only rl imports torch", {"swarm.rl"}),
        ("only net imports hivemind", {"swarm.net"}),
    ],
)
def test_the_import_rule_covers_every_module(contract: str, exempt: set[str]) -> None:
    assert set(contracts()[contract]) == modules() - exempt


@pytest.mark.parametrize(
    "module", ["swarm.node.volunteer", "swarm.node.organizer", "swarm.node.observe"]
)
def test_the_node_process_loads_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'scipy', 'grpc', 'peft'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
