"""Which models fit: by the same estimate that a node makes before it loads one."""

import itertools
import re

import pytest

from swarm.cli.invite import _taken
from swarm.model_memory import Workload
from swarm.node.fitting import FAMILIES, Room, candidates

GSM8K = Workload(group_size=12, max_prompt_tokens=256, max_completion_tokens=512)

# As published on the models' pages, in billions.
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 0.494, "Qwen/Qwen2.5-1.5B": 1.54, "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.61, "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02, "Qwen/Qwen3-8B": 8.19, "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21, "meta-llama/Llama-3.1-8B": 8.03,
    "HuggingFaceTB/SmolLM2-135M": 0.135, "HuggingFaceTB/SmolLM2-360M": 0.362,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71,
}  # fmt: skip


def test_shapes_have_the_parameters_that_the_models_have() -> None:
    shown = {name: facts.parameters / 1e9 for of in FAMILIES.values() for name, facts in of.items()}
    assert shown == pytest.approx(PARAMETERS, rel=0.01)


def fits(room: Room) -> dict[str, tuple[bool, bool]]:
    return {
        found["name"].rpartition("-")[2]: (
            found["full_bytes"] <= room.memory_bytes,
            found["lora_bytes"] <= room.memory_bytes,
        )
        for found in candidates(151_665, GSM8K, room)
    }


def test_what_fits_into_a_gpu() -> None:
    assert fits(Room("GPU", 24e9)) == {
        "0.5B": (True, True), "1.5B": (True, True), "3B": (False, True), "7B": (False, True),
    }  # fmt: skip
    assert fits(Room("GPU", 8e9))["7B"] == (False, False)
    assert fits(Room("GPU", 141e9))["7B"] == (True, True)


@pytest.mark.parametrize("where", ["GPU", "memory"])
def test_a_larger_model_longer_completions_and_full_training_take_more(where: str) -> None:
    room, long = Room(where, 80e9), Workload(12, 256, 8192)
    found = candidates(151_665, GSM8K, room)
    for smaller, larger in itertools.pairwise(found):
        assert smaller["full_bytes"] < larger["full_bytes"]
    for short, longer in zip(found, candidates(151_665, long, room), strict=True):
        assert short["lora_bytes"] < longer["lora_bytes"] < longer["full_bytes"]


def test_a_family_that_is_not_known() -> None:
    assert candidates(24, GSM8K, Room("memory", 16e9)) == []


def test_what_is_shown() -> None:
    (model,) = [m for m in candidates(151_665, GSM8K, Room("GPU", 8e9)) if "3B" in m["name"]]
    text = _taken(model, {"where": "GPU", "memory_bytes": 8e9})
    size = r"from \S+ GB( \(too large\))?"
    assert re.fullmatch(rf"full {size}, LoRA {size} of 8\.0 GB GPU here", text)
    assert "(too large), LoRA" in text
