"""The recipes load, take the memory that they say, and render prompts as they should."""

import re
from pathlib import Path

import pytest

from swarm.config import load_config
from swarm.model_memory import Workload, estimate, gigabytes
from swarm.node.fitting import FAMILIES
from tests.documented import ROOT

GSM8K = ROOT / "recipes" / "gsm8k"
PAGE = (GSM8K / "README.md").read_text()
SETTINGS = sorted(GSM8K.glob("*.toml"))
QWEN = next(family for family in FAMILIES.values() if "Qwen/Qwen2.5-3B" in family)


def flag(name: str) -> int:
    """A number in the organizer's command."""
    found = re.search(rf"--{name} (\d+)", PAGE)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_the_settings_load_and_fit_where_they_say(path: Path) -> None:
    config = load_config(path, {}, environ={})
    workload = Workload(
        flag("group-size"), flag("max-prompt-tokens"), flag("max-completion-tokens")
    )
    row = re.search(rf"\]\({re.escape(path.name)}\) \| (\d+) GB \| ([\d.]+ GB) \|", PAGE)
    assert row is not None, f"{path.name} is not in the table"
    total = int(row[1]) * 10**9
    peak = estimate(QWEN[config.model.path], config, workload, "cuda", total).peak
    assert row[2] == gigabytes(peak)
    assert peak < total
    assert config.ftis.kl_threshold == 50.0
    assert config.ftis.clip_max == 2.0
    assert config.train.max_steps == 50


def test_there_is_a_recipe_for_each_size_and_mode() -> None:
    names = {path.stem for path in SETTINGS}
    sizes, modes = ("1.5b", "3b"), ("full", "lora")
    assert names == {f"qwen2.5-{size}-{mode}" for size in sizes for mode in modes}


def test_the_template_asks_for_what_the_rewards_read() -> None:
    text = (GSM8K / "prompt.jinja").read_text()
    assert r"\boxed{}" in text
    assert "{{ prompt }}" in text
