"""What a swarm on this machine trains on: the task, and what the command line asks for.

Owns: the built-in task's prompts and settings. Does not know: processes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm import tasks
from swarm.evil.attacks import Attack
from swarm.paths import write_atomic

LOCAL: Mapping[str, str] = {
    "network.host": "127.0.0.1",
    "network.heartbeat_s": "2",
    "network.use_relay": "false",
}
"""How all nodes of a swarm on one machine meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line asks for.

    `nodes` are honest, and `steps` counts those of the slowest of them; `evil` further ones attack.
    """

    nodes: int = 3
    evil: int = 0
    attack: Attack = Attack.POISON
    steps: int | None = None
    seed: int = 0
    method: str = "ftis"
    models: tuple[Path, ...] = ()
    out: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """What a swarm on this machine trains on, and how.

    Attributes:
        name: the swarm's.
        prompts: what `swarm-node seed` reads: prompts, `--held-out` and so on.
        swarm_flags: further flags of `swarm-node seed`.
        settings: of all volunteers.
        lora_settings: besides, of those that train an adapter.
        steps: of the slowest node, where nobody asks for another number.
        eval_every_steps: between evaluations.
        limit_s: a swarm that takes longer is ended with an error.
    """

    name: str
    prompts: Sequence[str]
    swarm_flags: Mapping[str, str]
    settings: Mapping[str, str]
    lora_settings: Mapping[str, str]
    steps: int
    eval_every_steps: int
    limit_s: float


def arithmetic(folder: Path, seed: int) -> Task:
    """The shipped models' task, its prompts written to a folder; measured in docs/RESULTS.md."""
    for name, records in asdict(tasks.arithmetic_prompts(seed)).items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_atomic(folder / f"{name}.jsonl", lines.encode())
    held_out, ood = folder / "held_out.jsonl", folder / "out_of_distribution.jsonl"
    return Task(
        name="arithmetic demo",
        prompts=(str(folder / "train.jsonl"), "--held-out", str(held_out), "--ood", str(ood)),
        swarm_flags={
            "--reward": "number",
            "--group-size": "16",
            "--max-prompt-tokens": "16",
            "--max-completion-tokens": "10",
            "--record-shards": "1",
        },
        settings={
            "model.threads": "1",
            "model.device": "cpu",
            "model.precision": "fp32",
            "engine.prompts_per_call": "8",
            "train.groups_per_step": "16",
            "train.learning_rate": "3.5e-4",
            "eval.max_prompts": "200",
            "checkpoint.every_steps": "100",
        },
        lora_settings={"model.lora_rank": "8", "train.learning_rate": "1.4e-3"},
        steps=150,
        eval_every_steps=25,
        limit_s=1800.0,
    )
