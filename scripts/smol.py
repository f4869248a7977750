"""A swarm of two real models on this machine: `make smol`.

SmolLM2-135M-Instruct, all weights, and its cut of 26 layers, with an adapter, learn to add and
subtract numbers of one digit: reasoning-gym's `chain_sum`, in a real swarm over loopback. What it
brings is in docs/RESULTS.md.

    python -m scripts.smol --models build/smollm2 --out build/smol
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.convert_smollm2 import CUT, WHOLE
from swarm.demo.run import run_demo
from swarm.demo.task import DemoOptions, Task
from swarm.errors import SwarmError

TASK = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
HELD_OUT_SEED, OTHER_SEED = 1000, 2000


def chain_sum(_folder: Path, seed: int) -> Task:
    """Sums of two numbers of one digit; out of distribution: of three."""
    other = TASK.replace("terms=2", "terms=3")
    return Task(
        name="chain_sum",
        prompts=(
            f"{TASK}&size=400&seed={seed}",
            "--drop-bad",
            "--held-out",
            f"{TASK}&size=48&seed={HELD_OUT_SEED}",
            "--ood",
            f"{other}&size=24&seed={OTHER_SEED}",
        ),
        swarm_flags={
            "--template": "chat",
            "--system": "Answer with the number alone.",
            "--group-size": "8",
            "--max-prompt-tokens": "64",
            "--max-completion-tokens": "24",
            "--record-shards": "1",
        },
        settings={
            "model.threads": "1",
            "model.device": "cpu",
            "engine.prompts_per_call": "4",
            "train.groups_per_step": "8",
            "train.learning_rate": "1e-5",
            "checkpoint.every_steps": "20",
        },
        lora_settings={"model.lora_rank": "16", "train.learning_rate": "2e-4"},
        steps=30,
        eval_every_steps=10,
        limit_s=3600.0,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="smol", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="of scripts.convert_smollm2")
    parser.add_argument("--steps", type=int, help="of the slower node (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="ftis")
    parser.add_argument("--out", type=Path, help="where results and logs go")
    parser.add_argument("--json", action="store_true", help="the results as JSON on stdout")
    options = parser.parse_args(arguments)
    models = (options.models / WHOLE, options.models / f"{CUT}:lora")
    demo = DemoOptions(
        nodes=2,
        steps=options.steps,
        seed=options.seed,
        method=options.method,
        models=models,
        out=options.out,
        json=options.json,
    )
    try:
        return run_demo(demo, chain_sum)
    except SwarmError as error:
        print(f"smol: {error}", file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    raise SystemExit(main())
