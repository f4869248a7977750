"""Which well-known models have a swarm's tokenizer, and would fit into this machine.

Owns: a short list of families by the size of their vocabulary, with the models' shapes.
Does not know: a model's real tokenizer; `swarm-node doctor --model` compares that. How much memory
a shape takes: swarm.model_memory.
"""

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

import psutil

from swarm.config import NodeConfig
from swarm.model_memory import ModelFacts, Workload, estimate

_model = ModelFacts.of_shape

FAMILIES: dict[int, dict[str, ModelFacts]] = {
    151_665: {
        "Qwen/Qwen2.5-0.5B": _model(896, 24, 4864, 896, 128, 151_936),
        "Qwen/Qwen2.5-1.5B": _model(1536, 28, 8960, 1536, 256, 151_936),
        "Qwen/Qwen2.5-3B": _model(2048, 36, 11_008, 2048, 256, 151_936),
        "Qwen/Qwen2.5-7B": _model(3584, 28, 18_944, 3584, 512, 152_064, tied=False),
    },
    151_669: {
        "Qwen/Qwen3-0.6B": _model(1024, 28, 3072, 2048, 1024, 151_936),
        "Qwen/Qwen3-1.7B": _model(2048, 28, 6144, 2048, 1024, 151_936),
        "Qwen/Qwen3-4B": _model(2560, 36, 9728, 4096, 1024, 151_936),
        "Qwen/Qwen3-8B": _model(4096, 36, 12_288, 4096, 1024, 151_936, tied=False),
    },
    128_256: {
        "meta-llama/Llama-3.2-1B": _model(2048, 16, 8192, 2048, 512, 128_256),
        "meta-llama/Llama-3.2-3B": _model(3072, 28, 8192, 3072, 1024, 128_256),
        "meta-llama/Llama-3.1-8B": _model(4096, 32, 14_336, 4096, 1024, 128_256, tied=False),
    },
    49_152: {
        "HuggingFaceTB/SmolLM2-135M": _model(576, 30, 1536, 576, 192, 49_152),
        "HuggingFaceTB/SmolLM2-360M": _model(960, 32, 2560, 960, 320, 49_152),
        "HuggingFaceTB/SmolLM2-1.7B": _model(2048, 24, 8192, 2048, 2048, 49_152),
    },
}
"""Vocabulary (one above the largest token id) to models, their shapes as published."""


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


def candidates(vocab_size: int, workload: Workload, room: Room) -> list[dict[str, Any]]:
    """Known models of a family, and what each takes; empty for a family that is not known.

    Returns:
        For each its name, its parameters in billions, and for the modes full and LoRA the bytes
        that the most frugal settings take which a node chooses or advises (swarm.model_memory).
    """
    return [
        {
            "name": name,
            "parameters_b": round(facts.parameters / 1e9, 3),
            "full_bytes": _least(facts, "full", workload, room),
            "lora_bytes": _least(facts, "lora", workload, room),
        }
        for name, facts in FAMILIES.get(vocab_size, {}).items()
    ]


def _least(facts: ModelFacts, mode: str, workload: Workload, room: Room) -> int:
    on_gpu = room.where == "GPU"
    config = NodeConfig.model_validate(
        {
            "model": {
                "mode": mode,
                "precision": "bf16" if on_gpu else "fp32",
                "gradient_checkpointing": "on",
            },
            "train": {
                "optimizer": "adamw-offload" if on_gpu else "adamw-bf16",
                "micro_batch_tokens": max(64, workload.max_tokens),
            },
            "engine": {"prompts_per_call": 1},
        }
    )
    return estimate(facts, config, workload, "cuda" if on_gpu else "cpu").peak
