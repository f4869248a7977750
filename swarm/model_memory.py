"""How much memory a model takes to train and sample, before it is loaded, without torch.

Owns: the estimate, from config.json and the headers of the weight files; which settings would fit.
Does not know: what a device has free (the caller says), or how the settings are obeyed (swarm.rl).

The estimate is of peaks. What it cannot know (fragmentation, kernels' workspaces) is in a margin of
a tenth on activations and cache, and a fixed sum for libraries.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self

from swarm.config import ModelSection, NodeConfig
from swarm.errors import MALFORMED, ConfigError, DataError
from swarm.paths import parse_json

MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""

LIBRARY_BYTES = {"cuda": 800_000_000, "mps": 800_000_000, "cpu": 600_000_000}
"""CUDA's context and kernels; on a CPU, torch, transformers and peft themselves."""

HEAD_BYTES = 3 * (64 << 20)
"""Logits of one chunk of the head, with their gradient (swarm.rl.token_logprobs)."""

UPDATE_BYTES = 5 * (64 << 20)
"""Temporaries of one slice of the optimizer's update (swarm.rl.optimizer)."""

MOMENT_BYTES: Mapping[str, float] = {
    "adamw": 8.0, "adamw-bf16": 4.0, "adamw-8bit": 2.04, "adamw-offload": 0.0,
}  # fmt: skip
"""A trained parameter's moments on the device."""

VLLM_CACHE_BYTES = 1 << 30
"""Of vLLM on a CPU (swarm.rl.vllm_engine)."""

MARGIN = 1.1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's sizes.

    Attributes:
        parameters: numbers in the weight files, a tied head not counted twice.
        matrices: (rows, columns) of its linear layers by name, head and embedding left out.
        hidden, layers, intermediate, query, key_value, vocabulary: widths; query is heads times
            their size, key_value the same of the key heads.
    """

    parameters: int
    matrices: Mapping[str, tuple[int, int]]
    hidden: int
    layers: int
    intermediate: int
    query: int
    key_value: int
    vocabulary: int

    @classmethod
    def of_shape(
        cls,
        hidden: int,
        layers: int,
        intermediate: int,
        query: int,
        key_value: int,
        vocabulary: int,
        *,
        tied: bool = True,
    ) -> Self:
        """Of a decoder with gated MLPs, as Llama's and Qwen's; norms and biases are left out."""
        one_layer = {
            "q_proj": (query, hidden), "k_proj": (key_value, hidden), "v_proj": (key_value, hidden),
            "o_proj": (hidden, query), "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden), "down_proj": (hidden, intermediate),
        }  # fmt: skip
        matrices = {
            f"{layer}.{name}.weight": shape
            for layer in range(layers)
            for name, shape in one_layer.items()
        }
        ends = (1 if tied else 2) * vocabulary * hidden
        return cls(
            parameters=ends + sum(rows * columns for rows, columns in matrices.values()),
            matrices=matrices,
            hidden=hidden,
            layers=layers,
            intermediate=intermediate,
            query=query,
            key_value=key_value,
            vocabulary=vocabulary,
        )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From a Hugging Face model folder.

        Raises:
            DataError: a file is missing or damaged, or the configuration lacks a size.
        """
        path = folder / "config.json"
        try:
            config = parse_json(path.read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            hidden = int(_first(config, "hidden_size", "n_embd"))
            heads = int(_first(config, "num_attention_heads", "n_head"))
            key_heads = int(config.get("num_key_value_heads") or heads)
            head_size = int(config.get("head_dim") or hidden // heads)
            layers = int(_first(config, "num_hidden_layers", "n_layer"))
            vocabulary = int(config["vocab_size"])
            intermediate = int(
                config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
            )
        except MALFORMED as error:
            raise DataError(f"{path}: the model's sizes cannot be read: {error!r}") from None
        shapes = dict(_weights(folder))
        tied = config.get("tie_word_embeddings", False)
        ends = {name for name, shape in shapes.items() if len(shape) == 2 and vocabulary in shape}
        matrices = {n: (s[0], s[1]) for n, s in shapes.items() if len(s) == 2 and n not in ends}
        heads_too_many = [n for n in ends if n.startswith("lm_head")] if tied else []
        return cls(
            parameters=sum(prod(s) for n, s in shapes.items() if n not in heads_too_many),
            matrices=matrices,
            hidden=hidden,
            layers=layers,
            intermediate=intermediate,
            query=heads * head_size,
            key_value=key_heads * head_size,
            vocabulary=vocabulary,
        )

    def adapter_parameters(self, model: ModelSection) -> int:
        """Numbers in an adapter of this form."""
        return sum(
            model.lora_rank * (rows + columns)
            for name, (rows, columns) in self.matrices.items()
            if not model.lora_targets
            or name.removesuffix(".weight").rpartition(".")[2] in model.lora_targets
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """What a swarm asks of a node: completions a prompt, their and the prompts' longest, tokens."""

    group_size: int
    max_prompt_tokens: int
    max_completion_tokens: int

    @property
    def max_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_completion_tokens


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on the device, by what takes them. Training and sampling take turns.

    Attributes:
        libraries, weights, optimizer: there all the time; optimizer: masters and moments.
        gradients, activations: in a training step, the head's logits among the activations.
        sampling: cache and logits of one call; vLLM's share while it is awake.
        engine: what vLLM's process holds all the time.
    """

    libraries: int
    weights: int
    optimizer: int
    gradients: int
    activations: int
    sampling: int
    engine: int = 0

    @property
    def least(self) -> int:
        """What no smaller batch saves."""
        return self._held + self.gradients

    @property
    def peak(self) -> int:
        return self._held + max(self.gradients + self.activations, self.sampling)

    @property
    def _held(self) -> int:
        return self.libraries + self.weights + self.optimizer + self.engine

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "peak": self.peak}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Settings, with nothing left `auto`, and why.

    Attributes:
        config: the configuration with the settings put in.
        estimate: of these.
        total: bytes that the device has.
        reason: why they are what they are, for people.
        others: further settings that would fit, as `section.key=value`, with their peaks.
    """

    config: NodeConfig
    estimate: MemoryEstimate
    total: int
    reason: str
    others: tuple[tuple[str, int], ...] = field(default=())

    @property
    def fits(self) -> bool:
        return self.estimate.peak <= self.total

    def advice(self) -> str:
        """One line of numbers, and what would fit where this does not."""
        parts = {**asdict(self.estimate), "peak": self.estimate.peak}
        text = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)
        text = f"estimated memory: {text} of {gigabytes(self.total)} there"
        if self.fits:
            return text
        if not self.others:
            return text + "; no setting of this model fits, take a smaller one"
        would = "; or ".join(f"{setting} ({gigabytes(peak)})" for setting, peak in self.others)
        return f"{text}. It would fit with {would}"


def gigabytes(size: float) -> str:
    """Bytes in GB (10^9)."""
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.0f} MB"


def estimate(
    facts: ModelFacts, config: NodeConfig, workload: Workload, device: str, total: int = 0
) -> MemoryEstimate:
    """What a configuration takes.

    Args:
        config: precision and optimizer are not `auto` (`plan` settles them); gradient
            checkpointing `auto` counts as off.
        device: "cuda", "mps" or "cpu".
        total: bytes that it has, of which vLLM takes a share.
    """
    model, train = config.model, config.train
    width = 2 if model.precision == "bf16" else 4
    adapter = facts.adapter_parameters(model) if model.mode == "lora" else 0
    trained = adapter or facts.parameters
    moments = MOMENT_BYTES[train.optimizer]
    if device != "cuda" and train.optimizer == "adamw-offload":
        moments = MOMENT_BYTES["adamw"]  # the device's memory is the main memory
    masters = 2 * trained if width == 2 and not adapter else 0

    batch = train.groups_per_step * workload.group_size * workload.max_tokens
    tokens = max(min(train.micro_batch_tokens, batch), workload.max_tokens)
    # Kept for the backward pass: the linear layers' inputs and outputs, and in float32 the norms'.
    one_layer = (
        width * (6 * facts.hidden + 2 * facts.query + 2 * facts.key_value + 4 * facts.intermediate)
        + 16 * facts.hidden
    )
    layers = (
        one_layer + facts.layers * facts.hidden * width
        if model.gradient_checkpointing == "on"
        else one_layer * facts.layers
    )
    head = 0 if adapter else 4 * facts.vocabulary * facts.hidden
    activations = int(MARGIN * tokens * (layers + 3 * facts.hidden * width)) + HEAD_BYTES + head

    sampling, engine = _sampling(facts, config, workload, device, total)
    return MemoryEstimate(
        libraries=LIBRARY_BYTES[device],
        weights=width * facts.parameters + 4 * adapter,
        optimizer=int(moments * trained) + masters + min(UPDATE_BYTES, 20 * trained),
        gradients=4 * trained,
        activations=activations,
        sampling=sampling,
        engine=engine,
    )


def _sampling(
    facts: ModelFacts, config: NodeConfig, workload: Workload, device: str, total: int
) -> tuple[int, int]:
    """What sampling takes in turns with the training, and what it holds all the time."""
    width = 2 if config.model.precision == "bf16" else 4
    engine = config.engine
    if engine.kind == "vllm":
        if engine.device:
            return 0, 0
        if device != "cuda":
            return 0, LIBRARY_BYTES[device] + width * facts.parameters + VLLM_CACHE_BYTES
        share = int(engine.gpu_memory * total)
        return (share, LIBRARY_BYTES[device]) if engine.sleep_level else (0, share)
    adapted = config.model.mode == "lora"
    rows = engine.prompts_per_call * workload.group_size
    cache = rows * workload.max_tokens * facts.layers * 2 * facts.key_value * width
    logits = rows * facts.vocabulary * 20  # float32 logits and probabilities, float64 sums
    merged = 4 * sum(r * c for r, c in facts.matrices.values()) if adapted and width == 4 else 0
    merged = merged if merged <= 1 << 30 else 0  # swarm.rl.policy.MERGE_LIMIT_BYTES
    return int(MARGIN * cache) + logits + merged, 0


def plan(
    facts: ModelFacts,
    config: NodeConfig,
    workload: Workload,
    *,
    device: str,
    total: int,
    eight_bit: bool = False,
) -> MemoryPlan:
    """Settle what is `auto`: the first settings that fit, the best ones first.

    Args:
        config: its precision is not `auto`.
        total: bytes that the device has.
        eight_bit: bitsandbytes is installed.

    Raises:
        ConfigError: even the parts that no smaller batch saves are more than there is.
    """
    choices = list(_settings(config, device, eight_bit))
    sized = [(c, estimate(facts, c, workload, device, total)) for c in choices]
    chosen, size = next(
        (found for found in sized if found[1].peak <= total),
        min(sized, key=lambda found: found[1].peak),
    )
    first = sized[0][1]
    if chosen == choices[0]:
        reason = "as configured"
    else:
        reason = (
            f"{_difference(choices[0], chosen)}, because {gigabytes(first.peak)} would be needed "
            f"otherwise and {gigabytes(total)} are there"
        )
    others = (
        ()
        if size.peak <= total
        else tuple(_alternatives(facts, config, workload, device, total, eight_bit))
    )
    made = MemoryPlan(chosen, size, total, reason, others)
    if size.least > total:
        raise ConfigError(f"{config.model.path}: does not fit into memory. {made.advice()}")
    return made


def _settings(config: NodeConfig, device: str, eight_bit: bool) -> Iterator[NodeConfig]:
    """What `auto` may stand for, the fastest and most exact first."""
    checkpointing, optimizer = config.model.gradient_checkpointing, config.train.optimizer
    optimizers: list[str] = [optimizer]
    if optimizer == "auto":
        optimizers = ["adamw", "adamw-bf16"]
        if device == "cuda":
            optimizers += ["adamw-8bit", "adamw-offload"] if eight_bit else ["adamw-offload"]
    for name in optimizers:
        for switch in ["off", "on"] if checkpointing == "auto" else [checkpointing]:
            yield _with(config, {"model.gradient_checkpointing": switch, "train.optimizer": name})


def _alternatives(
    facts: ModelFacts,
    config: NodeConfig,
    workload: Workload,
    device: str,
    total: int,
    eight_bit: bool,
) -> Iterator[tuple[str, int]]:
    """Changes that would make it fit, each alone with the best `auto` settings."""
    least = {
        "model.gradient_checkpointing": "auto", "train.optimizer": "auto",
    }  # fmt: skip
    smaller: dict[str, Any] = {
        "train.micro_batch_tokens": max(64, workload.max_tokens), "engine.prompts_per_call": 1,
    }  # fmt: skip
    if config.engine.kind == "vllm":
        smaller["engine.kind"] = "transformers"
    changes: list[dict[str, Any]] = [
        least,
        least | smaller,
        least | smaller | {"model.precision": "bf16"},
        least | smaller | {"model.mode": "lora"},
        least | smaller | {"model.mode": "lora", "model.precision": "bf16"},
    ]
    for change in changes:
        for settings in _settings(_with(config, change), device, eight_bit):
            peak = estimate(facts, settings, workload, device, total).peak
            if peak <= total:
                yield _difference(config, settings), peak
                break


def _with(config: NodeConfig, changes: Mapping[str, Any]) -> NodeConfig:
    """A copy with `section.key` changed."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={
            name: getattr(config, name).model_copy(update=values)
            for name, values in sections.items()
        }
    )


def _difference(before: NodeConfig, after: NodeConfig) -> str:
    """What of the settings differs, as `--set` takes it."""
    old, new = before.model_dump(), after.model_dump()
    return " ".join(
        f"{section}.{key}={value}"
        for section, values in new.items()
        for key, value in values.items()
        if old[section][key] != value
    )


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return (
        next(config[name] for name in names if config.get(name))
        if any(config.get(name) for name in names)
        else config[names[0]]
    )


def _weights(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor in the weight files."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise DataError(f"{folder}: no weights in safetensors format")
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MAX_HEADER_BYTES:
                    raise ValueError(f"a header of {length} bytes")
                header = parse_json(file.read(length))
            for name, tensor in header.items():
                if name != "__metadata__":
                    yield name, [int(size) for size in tensor["shape"]]
        except (*MALFORMED, struct.error) as error:
            raise DataError(f"{path}: its header cannot be read: {error!r}") from None
