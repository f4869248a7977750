"""Which well-known models have a swarm's tokenizer, and would fit into this machine.

Owns: a short list of families by the size of their vocabulary, and a rule of thumb for memory.
Does not know: a model's real tokenizer; `swarm-node doctor --model` compares that.
"""

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import psutil

FULL_BYTES = 16.0
"""A parameter in full training: weight, gradient, AdamW's moments, activations beside them."""

LORA_BYTES = 3.0
"""A parameter of a frozen base in bfloat16, adapter and activations beside it."""

FAMILIES: dict[int, tuple[tuple[str, float], ...]] = {
    151_665: (
        ("Qwen/Qwen2.5-0.5B", 0.49),
        ("Qwen/Qwen2.5-1.5B", 1.54),
        ("Qwen/Qwen2.5-3B", 3.09),
        ("Qwen/Qwen2.5-7B", 7.61),
    ),
    151_669: (
        ("Qwen/Qwen3-0.6B", 0.6),
        ("Qwen/Qwen3-1.7B", 1.72),
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen3-8B", 8.19),
    ),
    128_256: (
        ("meta-llama/Llama-3.2-1B", 1.24),
        ("meta-llama/Llama-3.2-3B", 3.21),
        ("meta-llama/Llama-3.1-8B", 8.03),
    ),
    49_152: (
        ("HuggingFaceTB/SmolLM2-135M", 0.135),
        ("HuggingFaceTB/SmolLM2-360M", 0.362),
        ("HuggingFaceTB/SmolLM2-1.7B", 1.71),
    ),
}
"""Vocabulary (one above the largest token id) to models and their parameters in billions."""


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that a learner can have, in bytes, and where."""

    where: str
    memory_bytes: float


def memory_for_learner() -> Room:
    """The first NVIDIA GPU's memory by its driver's tool, else this machine's."""
    listed = driver_says("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    if listed and listed[0].isdigit():
        return Room("GPU", float(listed[0]) * 2**20)
    return Room("memory", float(psutil.virtual_memory().total))


def driver_says(*arguments: str) -> list[str]:
    """Lines that `nvidia-smi` answers; none where there is no such GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listed = subprocess.run(
            [tool, *arguments], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines()]


def candidates(vocab_size: int, room: Room) -> list[dict[str, Any]]:
    """Known models of a family, and whether each fits; empty for a family that is not known."""
    return [
        {
            "name": name,
            "parameters_b": billions,
            "full": billions * 1e9 * FULL_BYTES <= room.memory_bytes,
            "lora": billions * 1e9 * LORA_BYTES <= room.memory_bytes,
        }
        for name, billions in FAMILIES.get(vocab_size, ())
    ]
