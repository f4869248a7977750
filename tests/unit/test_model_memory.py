"""The memory estimate, on made-up and tiny models."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.config import ModelSection, NodeConfig, load_config
from swarm.errors import ConfigError, DataError
from swarm.model_memory import ModelFacts, Workload, estimate, plan
from swarm.rl.policy import Policy

GB = 10**9
RTX_4090 = 25_386_352_640
"""Bytes that torch finds on a card of 24 GB."""
GSM8K = Workload(group_size=12, max_prompt_tokens=512, max_completion_tokens=1024)


def _qwen(hidden: int, layers: int, intermediate: int, key_value: int, tied: bool) -> ModelFacts:
    """Qwen2.5's shapes."""
    shapes = {
        "q_proj": (hidden, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden),
        "o_proj": (hidden, hidden), "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate),
    }  # fmt: skip
    matrices = {f"{i}.{n}.weight": shape for i in range(layers) for n, shape in shapes.items()}
    vocabulary = 151_936
    parameters = vocabulary * hidden * (1 if tied else 2) + sum(r * c for r, c in matrices.values())
    return ModelFacts(
        parameters, matrices, hidden, layers, intermediate, hidden, key_value, vocabulary
    )


SMALL = _qwen(1536, 28, 8960, 256, tied=True)
LARGE = _qwen(2048, 36, 11008, 256, tied=True)


def _config(**flags: str) -> NodeConfig:
    settings = {"model.precision": "bf16", **{k.replace("__", "."): v for k, v in flags.items()}}
    return load_config(None, settings, environ={})


def test_sizes_are_those_of_the_models() -> None:
    assert SMALL.parameters == pytest.approx(1.54e9, rel=0.01)
    assert LARGE.parameters == pytest.approx(3.09e9, rel=0.01)
    assert SMALL.adapter_parameters(ModelSection(lora_rank=16)) == pytest.approx(18.5e6, rel=0.01)
    some = ModelSection(lora_rank=16, lora_targets=("q_proj", "v_proj"))
    assert SMALL.adapter_parameters(some) == 28 * 16 * (2 * 1536 + 1536 + 256)


def test_one_and_a_half_billion_in_full_fit_into_a_24_gb_card() -> None:
    """By `auto`, which says what it chose and why."""
    made = plan(SMALL, _config(), GSM8K, device="cuda", total=RTX_4090)
    assert made.fits
    assert made.config.model.gradient_checkpointing == "on"
    assert made.config.train.optimizer == "adamw-bf16"
    assert "train.optimizer=adamw-bf16" in made.reason
    assert "25.4 GB are there" in made.reason
    parts = made.estimate
    assert parts.weights == 2 * SMALL.parameters
    assert parts.optimizer == pytest.approx(6 * SMALL.parameters, rel=0.05)
    assert parts.gradients == 4 * SMALL.parameters
    assert parts.peak <= RTX_4090


def test_plenty_of_memory_changes_nothing() -> None:
    made = plan(SMALL, _config(), GSM8K, device="cuda", total=141 * GB)
    assert (made.config.model.gradient_checkpointing, made.config.train.optimizer) == (
        "off", "adamw",
    )  # fmt: skip
    assert made.reason == "as configured"


def test_vllm_takes_its_share_in_turns_or_for_good_or_elsewhere() -> None:
    def peak(**given: str) -> tuple[int, int, int]:
        config = _config(engine__kind="vllm", train__optimizer="adamw", **given)
        size = estimate(SMALL, config, GSM8K, "cuda", 80 * GB)
        return size.sampling, size.engine, size.peak

    sampling, engine, turns = peak(engine__gpu_memory="0.5")
    assert (sampling, engine) == (40 * GB, 800_000_000)
    sampling, engine, always = peak(engine__gpu_memory="0.5", engine__sleep_level="0")
    assert (sampling, engine) == (0, 40 * GB)
    sampling, engine, elsewhere = peak(engine__device="1")
    assert (sampling, engine) == (0, 0)
    assert elsewhere < turns < always
    config = _config(engine__kind="vllm", engine__sleep_level="0", engine__gpu_memory="0.6")
    with pytest.raises(
        ConfigError, match=r"engine 15\.2 GB.* fit with .*engine\.kind=transformers"
    ):
        plan(SMALL, config, GSM8K, device="cuda", total=RTX_4090)


def test_adapter_on_three_billion_fits_into_24_gb() -> None:
    made = plan(LARGE, _config(model__mode="lora"), GSM8K, device="cuda", total=24 * GB)
    assert made.fits
    assert made.config.train.optimizer == "adamw"
    assert made.estimate.optimizer < GB


def test_what_cannot_fit_is_refused_with_numbers_and_what_would() -> None:
    config = _config(train__optimizer="adamw", model__gradient_checkpointing="on")
    with pytest.raises(ConfigError, match=r"weights 6\.2 GB.*of 24\.0 GB.*model\.mode=lora"):
        plan(LARGE, config, GSM8K, device="cuda", total=24 * GB)


def test_what_may_not_fit_is_tried_with_advice() -> None:
    """Batches can shrink; weights and optimizer cannot."""
    config = _config(train__optimizer="adamw-bf16", model__gradient_checkpointing="off")
    made = plan(SMALL, config, GSM8K, device="cuda", total=24 * GB)
    assert not made.fits
    assert made.estimate.least < 24 * GB
    assert "It would fit with" in made.advice()
    assert "model.gradient_checkpointing=on" in made.advice()


def test_eight_bits_only_where_they_can_be_had() -> None:
    tight = 19 * GB
    config = _config(train__micro_batch_tokens="2048")
    without = plan(SMALL, config, GSM8K, device="cuda", total=tight)
    with_it = plan(SMALL, config, GSM8K, device="cuda", total=tight, eight_bit=True)
    assert without.config.train.optimizer == "adamw-offload"
    assert with_it.config.train.optimizer == "adamw-8bit"


def test_estimate_grows_with_what_costs_memory() -> None:
    def peak(workload: Workload = GSM8K, **flags: str) -> int:
        given = {"train__optimizer": "adamw", "model__gradient_checkpointing": "off", **flags}
        return estimate(SMALL, _config(**given), workload, "cuda").peak

    assert peak(model__gradient_checkpointing="on") < peak()
    assert peak(train__optimizer="adamw-8bit") < peak(train__optimizer="adamw-bf16") < peak()
    assert peak(train__micro_batch_tokens="4096") < peak()
    assert peak(model__precision="fp32") > peak()
    wide = {"engine__prompts_per_call": "256"}
    assert peak(**wide) > peak()
    assert peak(Workload(12, 512, 4096), **wide) > peak(**wide)


def test_facts_of_a_folder_are_the_loaded_models(tiny_folder: Path) -> None:
    facts = ModelFacts.read(tiny_folder)
    policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=0)
    assert facts.parameters == policy.count_parameters()[0]
    assert (facts.hidden, facts.layers, facts.query, facts.key_value) == (32, 2, 32, 16)
    section = ModelSection(path=str(tiny_folder), mode="lora", lora_rank=4)
    lora = Policy.load(section, seed=0)
    assert facts.adapter_parameters(section) == lora.count_parameters()[1]


def test_measured_weights_and_state_are_the_estimated(tiny_folder: Path) -> None:
    """What torch holds after a step, to the byte but for the slices' temporaries."""
    from swarm.rl.optimizer import Optimizer

    facts = ModelFacts.read(tiny_folder)
    for precision, storage in (("fp32", "adamw"), ("bf16", "adamw"), ("bf16", "adamw-bf16")):
        config = _config(model__precision=precision, train__optimizer=storage)
        size = estimate(facts, config, GSM8K, "cpu")
        policy = Policy.load(ModelSection(path=str(tiny_folder), precision=precision), seed=0)
        made = Optimizer(policy.trainable_parameters(), storage=storage)  # type: ignore[arg-type]
        for slot in made._slots.values():
            slot.steps = 1
        state = {k: t for k, t in made.state_dict().items() if not k.startswith("step/")}
        temporaries = 20 * facts.parameters
        assert sum(t.nbytes for t in state.values()) == size.optimizer - temporaries
        assert sum(p.nbytes for p in policy.model.parameters()) == size.weights


@pytest.mark.parametrize("damage", ["config", "header", "length", "none"])
def test_damaged_folders_are_named(tiny_folder: Path, tmp_path: Path, damage: str) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    header: Any = json.dumps({"w": {"shape": [2, 3]}}).encode()
    if damage == "config":
        del config["vocab_size"]
    if damage == "header":
        header = b"{"
    length = 1 << 60 if damage == "length" else len(header)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if damage != "none":
        data = struct.pack("<Q", length) + header
        (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(DataError, match="config.json" if damage == "config" else "safetensors"):
        ModelFacts.read(tmp_path)


def test_torch_is_not_needed() -> None:
    import subprocess
    import sys

    code = "import sys, swarm.model_memory; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "False"
    assert torch.__version__  # here it is
