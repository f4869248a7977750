"""node.toml: what a volunteer decides about their own node, with bounds and defaults.

Owns: the fields, their meaning and limits, and the precedence
flag > environment (SWARM_<SECTION>__<KEY>) > node.toml > default.
Does not know: what the swarm trains on (that is the manifest's, swarm.protocol.manifest).
"""

import hashlib
import ipaddress
import json
import logging
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from swarm.errors import ConfigError

log = logging.getLogger(__name__)

ENV_PREFIX = "SWARM_"

METHODS: Mapping[str, Mapping[str, str]] = {
    "nois": {"ftis.importance": "none", "ftis.filter": "none"},
    "vis": {"ftis.importance": "vanilla", "ftis.filter": "none"},
    "tis": {"ftis.importance": "truncated", "ftis.filter": "none"},
    "f-nois": {"ftis.importance": "none", "ftis.filter": "or"},
    "f-vis": {"ftis.importance": "vanilla", "ftis.filter": "or"},
    "ftis": {"ftis.importance": "truncated", "ftis.filter": "or"},
    "ftis-and": {"ftis.importance": "truncated", "ftis.filter": "and"},
}
"""The paper's names for combinations of importance weight and filter, as `--method` takes them."""

MAX_INTEGER = 2**63 - 1
MAX_FLOAT = 3.4e38

Positive = Annotated[int, Field(ge=1)]
Multiaddress = Annotated[
    str, Field(max_length=256, pattern=r"^/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/\S+$")
]
MemberAddress = Annotated[
    str, Field(max_length=256, pattern=r"^/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/\S+/p2p/\w+$")
]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]


def _flat(value: Any) -> Iterator[Any]:
    """The values in nested tuples, or the value itself."""
    if isinstance(value, tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


class Section(BaseModel):
    """Base of every section: immutable, unknown fields refused, no silent type conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _has_room(cls, value: Any) -> Any:
        """Settings go to the learner in integers of 64 bits, and meet tensors in float32."""
        for item in _flat(value):
            largest = MAX_INTEGER if isinstance(item, int) else MAX_FLOAT
            if isinstance(item, int | float) and item > largest:
                raise ValueError(f"must be at most {largest}")
        return value


class NodeSection(Section):
    """Who this node is and where it keeps its things."""

    name: Annotated[str, Field(max_length=64, pattern=r"^[\w .-]*$")] = Field(
        default="",
        description="Name shown to others in `swarm-node status`; empty: the host's name.",
    )
    invite: Annotated[str, Field(max_length=8192)] = Field(
        default="", description="Invite of the swarm to join, for `join --config` without one."
    )
    data_dir: str = Field(
        default="",
        description="Identity, prompts, rollouts, checkpoints, logs. Empty: "
        "$XDG_DATA_HOME/swarm-node.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="Seed of sampling and of LoRA's initial weights."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="What goes to the log file and to stderr.",
    )


class NetworkSection(Section):
    """How this node is reached and how it reaches others."""

    host: str = Field(default="0.0.0.0", description="IPv4 address to listen on.")
    port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        default=0, description="TCP port to listen on; 0: the last one used, or a free one."
    )
    announce: tuple[Multiaddress, ...] = Field(
        default=(),
        description="Addresses under which others reach this node when they differ from the "
        "listening one, e.g. ['/ip4/203.0.113.7/tcp/31337'].",
    )
    bootstrap: tuple[MemberAddress, ...] = Field(
        default=(),
        description="Further members' addresses, beside the invite's and those seen before.",
    )
    use_relay: bool = Field(
        default=True, description="Be reachable through other members when behind a NAT."
    )
    heartbeat_s: Annotated[float, Field(ge=1.0, le=30.0)] = Field(
        default=15.0,
        description="Seconds between heartbeats; a member counts as gone after 60 s without.",
    )
    fetch_streams: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="Downloads at once."
    )
    serve_streams: Annotated[int, Field(ge=1, le=256)] = Field(
        default=16, description="Uploads at once."
    )

    follow_bans: bool = Field(
        default=True,
        description="Keep out whom the swarm's organizers advise against; `swarm-node peers unban` "
        "makes exceptions.",
    )

    @field_validator("host")
    @classmethod
    def _is_ipv4(cls, host: str) -> str:
        return _ipv4(host)


class LimitsSection(Section):
    """Ceilings that hold whatever a manifest says; a swarm that asks for more is refused."""

    max_prompt_tokens: Positive = Field(default=4096, description="Tokens of one rendered prompt.")
    max_completion_tokens: Positive = Field(default=8192, description="Tokens of one completion.")
    max_group_size: Annotated[int, Field(ge=2, le=4096)] = Field(
        default=128, description="Completions per prompt."
    )
    max_download_mb: Positive = Field(
        default=512, description="Size of a swarm's prompt sets together, in MB (10^6 bytes)."
    )
    upload_mb_per_s: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="Upload rate in MB/s; 0: no limit."
    )
    blob_store_mb: Positive = Field(
        default=2048, description="Disk for rollouts, in MB; the oldest are deleted first."
    )
    run_log_mb: Positive = Field(
        default=1024,
        description="Disk for each of a run's logs of its steps, in MB; the oldest lines are "
        "dropped first, those of evaluations never.",
    )
    call_timeout_s: Seconds = Field(
        default=3600.0,
        description="For one thing that the learner does: loading the model, sampling, a step. One "
        "that takes longer hangs: its stacks are written to its log, and it is started again.",
    )
    min_free_mb: Annotated[int, Field(ge=0)] = Field(
        default=256,
        description="Nothing that training can do without is written when less than this would "
        "stay free on the disk, in MB.",
    )


class ModelSection(Section):
    """The model that this node trains."""

    path: str = Field(
        default="",
        description="A Hugging Face model folder, or a Hub id such as 'Qwen/Qwen2.5-1.5B'.",
    )
    revision: str = Field(
        default="",
        description="Revision of a Hub id: a commit, tag or branch; empty: the default branch. The "
        "commit that was loaded stands in the run's record.",
    )
    token_file: str = Field(
        default="",
        description="File that holds a Hub token, for private and gated models; empty: the one of "
        "`hf auth login`, if any.",
    )
    adapter: str = Field(
        default="",
        description="A LoRA adapter to begin with, a folder or a Hub id: trained on with mode lora "
        "(rank, alpha and targets are its own), merged into the weights with mode full.",
    )
    adapter_revision: str = Field(default="", description="Revision of the adapter's Hub id.")
    mode: Literal["full", "lora"] = Field(
        default="full", description="Train all weights, or an adapter."
    )
    lora_rank: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=16, description="Rank of the adapter."
    )
    lora_alpha: Annotated[float, Field(gt=0.0)] = Field(
        default=32.0, description="Scale of the adapter."
    )
    lora_targets: tuple[str, ...] = Field(
        default=(),
        description="Names of the layers to adapt; empty: all linear layers but the head.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="Of the weights. auto: bf16 where the device computes in it fast, else fp32. "
        "With bf16, training in full keeps the lower half of each weight's fp32 value beside it "
        "and sums gradients in fp32, so that no update is lost; adapters are fp32.",
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$")] = Field(
        default="auto",
        description="auto: cuda, else mps, else cpu. One GPU per node: 'cuda:1' takes the second.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        default="auto", description="Attention implementation of transformers."
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Compute activations again in the backward pass instead of keeping them: "
        "slower by about a quarter, much smaller. auto: where the memory does not suffice without.",
    )
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="CPU threads of the learner; 0: torch's default."
    )


class EngineSection(Section):
    """What samples the completions."""

    kind: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="Sampling engine: transformers in the learner itself, or vllm in a process of "
        "its own (pip install 'swarm-node[vllm]').",
    )
    python: str = Field(
        default="",
        description="Python interpreter of an environment that has vLLM; empty: this one.",
    )
    device: Annotated[str, Field(max_length=64, pattern=r"^[\w.:/-]*$")] = Field(
        default="",
        description="GPU of vLLM alone, as CUDA_VISIBLE_DEVICES names it, e.g. '1'. Empty: the "
        "model's, which both share in turns.",
    )
    gpu_memory: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.4, description="Share of the GPU's memory that vLLM takes while it samples."
    )
    sleep_level: Annotated[int, Field(ge=0, le=2)] = Field(
        default=1,
        description="What vLLM gives up of a shared GPU while the model trains: 0: nothing; "
        "1: its cache, and its weights go to main memory; 2: both (with LoRA as 1).",
    )
    eager: bool = Field(
        default=False,
        description="vLLM without compiled graphs: starts sooner, samples slower.",
    )
    max_drift: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0,
        description="Nats by which vLLM's log-probs may differ from the trained model's on "
        "average; above it training pauses. 0: 0.001 in float32, 0.1 in bfloat16.",
    )
    prompts_per_call: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=4, description="Prompts sampled together, each with a whole group of completions."
    )


class TrainSection(Section):
    """The optimizer and its steps."""

    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=8, description="Groups (prompts) in one training batch."
    )
    max_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Stop training after so many steps, go on serving; 0: no limit."
    )
    learning_rate: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=1e-6, description="Peak learning rate of AdamW."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Steps over which the learning rate rises linearly to its peak."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate falls after the warm-up."
    )
    schedule_steps: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Steps, the warm-up included, after which the learning rate has reached its "
        "floor. Steps without a signal do not count.",
    )
    schedule_floor: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.1, description="Share of the peak that the learning rate falls to."
    )
    optimizer: Literal["auto", "adamw", "adamw-bf16", "adamw-8bit", "adamw-offload"] = Field(
        default="auto",
        description="AdamW with its moments in fp32 (8 bytes a parameter), bf16 (4, rounded "
        "stochastically), 8 bits (2, by bitsandbytes: the extra `8bit`), or fp32 in main memory. "
        "auto: fp32, or the first of the others with which the memory suffices.",
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.9, description="AdamW's beta 1."
    )
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.95, description="AdamW's beta 2."
    )
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        default=0.0, description="AdamW's weight decay, on matrices only."
    )
    max_grad_norm: Annotated[float, Field(gt=0.0)] = Field(
        default=1.0, description="Gradients are scaled down to this norm."
    )
    inner_updates: Annotated[int, Field(ge=1, le=16)] = Field(
        default=1,
        description="Optimizer updates per batch; weights and filter stay frozen over them.",
    )
    micro_batch_tokens: Annotated[int, Field(ge=64)] = Field(
        default=16_384, description="Tokens, padding included, in one forward and backward pass."
    )
    drop_duplicates: bool = Field(
        default=False,
        description="In other nodes' groups, leave out of the loss what repeats an earlier "
        "completion of the group token by token.",
    )
    max_advantage: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0,
        description="Advantages of other nodes' samples above this count as this; 0: no limit.",
    )
    log_samples: bool = Field(
        default=True,
        description="Log what became of every sample, for `swarm-node replay --what-if`: some "
        "50 bytes a sample.",
    )

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Self:
        if self.schedule != "constant" and self.schedule_steps <= self.warmup_steps:
            raise ValueError(
                f'schedule "{self.schedule}" needs schedule_steps above warmup_steps '
                f"({self.warmup_steps})"
            )
        return self


class FtisSection(Section):
    """The loss: importance weights and the sample filter (docs/ARCHITECTURE.md, 'The loss')."""

    importance: Literal["none", "vanilla", "truncated"] = Field(
        default="truncated", description="Weight of off-policy tokens: NoIS, VIS or TIS."
    )
    importance_level: Literal["token", "sequence"] = Field(
        default="token", description="One truncated weight per token, or one per completion."
    )
    filter: Literal["none", "or", "and"] = Field(
        default="or",
        description="Which samples are dropped: none; advantage <= 0 or KL > threshold; "
        "advantage < 0 and KL > threshold.",
    )
    filter_scope: Literal["all", "peers"] = Field(
        default="all", description="Filter all samples, or only those of other nodes."
    )
    kl_estimator: Literal["grpo", "k3", "k1", "reverse"] = Field(
        default="grpo", description="Estimator of the divergence from the sampling policy."
    )
    kl_threshold: Annotated[float, Field(gt=0.0)] = Field(
        default=50.0, description="Threshold g of the filter, in nats per completion."
    )
    kl_threshold_schedule: tuple[tuple[int, float], ...] = Field(
        default=(),
        description="[[step, g], ...]: g from that step on, in place of kl_threshold; "
        "steps rising, the first one 0.",
    )
    clip_max: Annotated[float, Field(ge=1.0)] = Field(
        default=2.0, description="Truncation C of the importance weights."
    )
    epsilon: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.2, description="Clipping range of the inner ratio."
    )
    mask_truncated: bool = Field(
        default=False, description="Leave completions cut at the length limit out of the loss."
    )

    @model_validator(mode="after")
    def _level_has_a_weight(self) -> Self:
        if self.importance_level == "sequence" and self.importance != "truncated":
            raise ValueError('importance_level "sequence" needs importance "truncated"')
        return self

    @field_validator("kl_threshold_schedule")
    @classmethod
    def _schedule_rises(
        cls, schedule: tuple[tuple[int, float], ...]
    ) -> tuple[tuple[int, float], ...]:
        steps = [step for step, _ in schedule]
        if steps and (steps[0] != 0 or steps != sorted(set(steps))):
            raise ValueError("steps must rise and begin with 0, e.g. [[0, 5.0], [100, 50.0]]")
        if any(g <= 0 for _, g in schedule):
            raise ValueError("every threshold must be above 0")
        return schedule


class PoolSection(Section):
    """Which groups are trained on, and how old they may be."""

    max_age_s: Annotated[float, Field(gt=0.0)] = Field(
        default=60.0,
        description="Groups older than this and than max_age_steps own steps are dropped.",
    )
    max_age_steps: Annotated[float, Field(gt=0.0)] = Field(
        default=3.0, description="Age limit in durations of this node's own step."
    )
    max_peer_share: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.5,
        description="Part of a batch that one peer may have at most, however few peers there are; "
        "one group it may always have.",
    )


class EvalSection(Section):
    """Evaluation on the held-out prompts: greedy decoding, one completion each."""

    every_steps: Annotated[int, Field(ge=0)] = Field(
        default=25, description="Steps between evaluations; 0: only at the start and the end."
    )
    max_prompts: Positive = Field(
        default=200, description="Held-out prompts used, from the first on."
    )


class CheckpointSection(Section):
    """Checkpoints of weights, optimizer and position."""

    every_steps: Positive = Field(default=50, description="Steps between checkpoints.")
    keep: Annotated[int, Field(ge=1, le=100)] = Field(
        default=2,
        description="Newest checkpoints kept; the best by held-out accuracy is kept besides.",
    )


class RewardSection(Section):
    """The worker processes that compute rewards."""

    workers: Annotated[int, Field(ge=1, le=64)] = Field(default=1, description="Worker processes.")
    timeout_s: Seconds = Field(
        default=10.0, description="Time for one group; after it the worker is killed."
    )


class MetricsSection(Section):
    """Figures for other programs: Prometheus, health probes, TensorBoard."""

    enabled: bool = Field(
        default=False, description="Serve /metrics, /livez and /readyz over HTTP."
    )
    host: str = Field(
        default="127.0.0.1",
        description="IPv4 address to serve them on. Whoever reaches it may read them.",
    )
    port: Annotated[int, Field(ge=0, le=65_535)] = Field(
        default=9797, description="TCP port to serve them on; 0: any (status shows which)."
    )
    allowed_hosts: tuple[
        Annotated[str, Field(max_length=253, pattern=r"^[A-Za-z0-9_.-]+$")], ...
    ] = Field(
        default=(),
        description="Names besides localhost by which Prometheus calls this machine; a request "
        "with another Host header is refused.",
    )
    tensorboard: bool = Field(
        default=False,
        description="Write TensorBoard event files into the run's folder, beside metrics.jsonl; "
        "needs the extra 'tensorboard'.",
    )

    @field_validator("host")
    @classmethod
    def _is_ipv4(cls, host: str) -> str:
        return _ipv4(host)


class NodeConfig(Section):
    """The whole of node.toml."""

    node: NodeSection = NodeSection()
    network: NetworkSection = NetworkSection()
    limits: LimitsSection = LimitsSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    train: TrainSection = TrainSection()
    ftis: FtisSection = FtisSection()
    pool: PoolSection = PoolSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    reward: RewardSection = RewardSection()
    metrics: MetricsSection = MetricsSection()

    def digest(self) -> str:
        """Hex sha256 over the canonical JSON of all resolved values."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def load_config(
    path: Path | None,
    flags: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    saved: Mapping[str, Mapping[str, Any]] | None = None,
) -> NodeConfig:
    """Resolve the configuration from all its sources.

    Args:
        path: node.toml, or None.
        flags: `section.key` to text, from the command line; values as in TOML, bare words allowed.
        environ: the environment; None: os.environ.
        saved: values of an earlier start, in place of the defaults; those of settings that this
            version does not have are left out.

    Raises:
        ConfigError: names the source, the field, the value and what would be right.
    """
    values: dict[str, dict[str, Any]] = {}
    origin: dict[str, str] = {}

    def put(source: str, section: str, table: Mapping[str, Any]) -> None:
        values.setdefault(section, {}).update(table)
        origin.update({f"{section}.{key}": source for key in table})
        origin.setdefault(section, source)

    for section, table in (saved or {}).items():
        if known := _known(section, table):
            put("values of the last start", section, known)
    if path is not None:
        for section, table in _read_toml(path).items():
            if not isinstance(table, dict):
                raise ConfigError(
                    f"{path}: {section!r} stands outside a section; "
                    f"put it under one of {_list(NodeConfig.model_fields)}"
                )
            put(str(path), section, table)
    env = os.environ if environ is None else environ
    for name, text in sorted(env.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
            source = f"environment variable {name}"
            put(source, section, {key: _parse_value(source, section, key, text)})
    for dotted, text in (flags or {}).items():
        section, _, key = dotted.partition(".")
        put("command line", section, {key: _parse_value("command line", section, key, text)})
    try:
        # As JSON, since in strict mode only there a list is a tuple; no date is a setting.
        return NodeConfig.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin)) from None


def _known(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """What another version of the program saved, without what this one does not have."""
    field = NodeConfig.model_fields.get(section)
    settings = getattr(field.annotation, "model_fields", {}) if field else {}
    if unknown := table.keys() - settings.keys():
        names = ", ".join(f"{section}.{key}" for key in sorted(unknown))
        log.warning("settings of the last start that this version does not have: %s", names)
    return {key: value for key, value in table.items() if key in settings}


def render_example() -> str:
    """The text of node.toml.example: every field with its description and its default."""
    lines = [
        "# Configuration of one swarm-node. Every field is shown with its default value.",
        "# Precedence: command line, then SWARM_<SECTION>__<KEY>, then this file, then default.",
    ]
    for name in NodeConfig.model_fields:
        section = _section(name)
        lines += ["", f"# {(section.__doc__ or '').strip().splitlines()[0]}", f"[{name}]"]
        for key, item in section.model_fields.items():
            lines += [*_wrap(item.description or ""), f"{key} = {_toml(item.default)}"]
    return "\n".join(lines) + "\n"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; `swarm-node init` writes one with all the defaults"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, a list in a list ...
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _parse_value(source: str, section: str, key: str, text: str) -> Any:
    """Read a flag's or variable's text as TOML where that is not a string field."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{source}: {section}.{key} = {text!r}: not valid UTF-8") from None
    field = _section(section).model_fields.get(key) if section in NodeConfig.model_fields else None
    if field is not None and isinstance(field.default, str):
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _ipv4(host: str) -> str:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        raise ValueError("must be an IPv4 address of this machine, or 0.0.0.0 for all") from None
    return host


def _section(name: str) -> type[Section]:
    section = NodeConfig.model_fields[name].annotation
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise TypeError(f"section {name} must be a subclass of Section")
    return section


def _explain(error: ValidationError, origin: Mapping[str, str]) -> str:
    """One line per fault: source, field, value, and what would be right."""
    messages = []
    for item in error.errors():
        section, *rest = (str(part) for part in item["loc"])
        source = origin[".".join([section, *rest[:1]])]
        field = ".".join([section, *rest])
        if item["type"] == "extra_forbidden":
            known = _section(section).model_fields if rest else NodeConfig.model_fields
            what = "field" if rest else "section"
            messages.append(f"{source}: no {what} {field!r}; known: {_list(known)}")
            continue
        reason = item["msg"].removeprefix("Value error, ")
        if not rest:  # of a rule over several fields
            messages.append(f"{source}: section [{section}]: {reason}")
        else:
            default = _toml(_section(section).model_fields[rest[0]].default)
            messages.append(f"{source}: {field} = {item['input']!r}: {reason} (default: {default})")
    return "\n".join(messages)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _wrap(text: str, width: int = 96) -> list[str]:
    lines, line = [], "#"
    for word in text.split():
        if len(line) + 1 + len(word) > width:
            lines.append(line)
            line = "#"
        line += f" {word}"
    return [*lines, line]


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
