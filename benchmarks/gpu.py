"""What only a GPU shows: `python -m benchmarks.gpu`, under eight minutes, without downloads.

Owns: the cases, their time limit, the report. Each case is a learner with a configuration of its
own, in a process of its own, driven as a node drives it: load, sample, train, sample again, on a
model with Qwen2.5-0.5B's shape and weights from a seed. Does not know: how a learner does it.

Reported are the peak of the memory in use beside the estimate that a node makes before it loads,
tokens a second, and how far the engine's log-probs are from the trainer's; `--device cpu --quick`
goes through the same code with a tiny model, to see that it runs. Cases whose packages are missing
(vllm, bitsandbytes) say so.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from benchmarks.measure import ROOT, machine
from benchmarks.training import SMOLLM2, TINY
from swarm.paths import write_json

SCHEMA = "swarm-bench-gpu/1"
DEFAULT_OUT = Path("build") / "bench-gpu.json"
LIMIT_S = 480.0

QWEN = {
    **SMOLLM2,
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The shape of Qwen2.5-0.5B, but for the biases of its attention."""

WORKLOAD = {"group_size": 12, "max_prompt_tokens": 256, "max_completion_tokens": 256}
QUICK_WORKLOAD = {"group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 8}
TEMPERATURE = 1.0
STEPS = 3

CASES: dict[str, dict[str, str]] = {
    "full, bf16": {"model.precision": "bf16"},
    "full, fp32": {"model.precision": "fp32"},
    "full, bf16, moments in bf16": {"model.precision": "bf16", "train.optimizer": "adamw-bf16"},
    "full, bf16, moments in 8 bits": {"model.precision": "bf16", "train.optimizer": "adamw-8bit"},
    "full, bf16, moments in main memory": {
        "model.precision": "bf16",
        "train.optimizer": "adamw-offload",
    },
    "full, bf16, gradient checkpointing": {
        "model.precision": "bf16",
        "model.gradient_checkpointing": "on",
    },
    "LoRA, bf16": {"model.precision": "bf16", "model.mode": "lora"},
    "full, bf16, vLLM asleep in training": {"model.precision": "bf16", "engine.kind": "vllm"},
    "LoRA, bf16, vLLM": {
        "model.precision": "bf16",
        "model.mode": "lora",
        "engine.kind": "vllm",
    },
}
"""Name to settings of node.toml; the first ones tell most, should the time run out."""

NEEDS = {"vllm": "vllm", "adamw-8bit": "bitsandbytes"}
"""Setting to the package that it takes."""


def device_name(device: str) -> str | None:
    """What it runs on; None: this torch can use no such device."""
    import torch

    if device == "cpu":
        return "cpu"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def run_case(name: str, device: str, quick: bool) -> dict[str, Any]:
    """One learner's life; runs in a process of its own."""
    from swarm.config import load_config
    from swarm.rl.learner import Learner

    workload = QUICK_WORKLOAD if quick else WORKLOAD
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        _write_model(folder, TINY if quick else QWEN)
        settings = {
            "model.path": str(folder),
            "model.device": device,
            "train.learning_rate": "1e-6",
            "train.groups_per_step": "4",
            "train.log_samples": "false",
            "ftis.filter": "none",
            **CASES[name],
        }
        config = load_config(None, settings, environ={})
        learner = Learner()
        started = time.monotonic()
        model = learner.init(
            config=config.model_dump(mode="json"),
            run_dir=str(Path(temporary) / "run"),
            vocab_size=TINY["vocab_size"] if quick else QWEN["vocab_size"],
            stop_token_ids=[0],
            temperature=TEMPERATURE,
            workload=workload,
        )
        load_s = time.monotonic() - started
        with _Memory(device) as memory:
            turns = [_turn(learner, seed, workload) for seed in range(1 if quick else STEPS)]
        last = turns[-1]
        return {
            "load_s": round(load_s, 1),
            "optimizer": model["optimizer"],
            "estimate": model["memory_estimate"],
            "peak_bytes": memory.peak_bytes,
            "sampled_tokens_per_s": round(last["sampled"] / last["sample_s"]),
            "trained_tokens_per_s": round(last["trained"] / last["train_s"]),
            "logprob_difference": last["difference"],
            "loss": last["loss"],
            "engine": last["engine"],
            "turns": turns,
        }


class _Memory:
    """The most memory in use meanwhile: of the whole GPU, as vLLM runs in a process of its own, or
    of this process."""

    def __init__(self, device: str) -> None:
        self.peak_bytes = 0
        self._device = device
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, self._used())
            if self._done.wait(0.02):
                return

    def _used(self) -> int:
        if self._device == "cpu":
            return int(psutil.Process().memory_info().rss)
        import torch

        free, total = torch.cuda.mem_get_info()
        return total - free


def _turn(learner: Any, seed: int, workload: dict[str, int]) -> dict[str, Any]:
    """Sample a batch, score it, train on it."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(5, 300, workload["max_prompt_tokens"]).tolist() for _ in range(4)]
    sampled = learner.sample(
        prompts=prompts,
        n=workload["group_size"],
        temperature=TEMPERATURE,
        max_new_tokens=workload["max_completion_tokens"],
        stop_token_ids=[0],
        seeds=list(range(4 * seed, 4 * seed + 4)),
    )
    rewards = np.arange(workload["group_size"], dtype="<f4").tobytes()
    groups = [
        {
            "hash": bytes([index]) * 32,
            "publisher": "me",
            "own": True,
            "prompt_ids": prompt,
            "rollouts": rollouts,
            "rewards": rewards,
        }
        for index, (prompt, rollouts) in enumerate(zip(prompts, sampled["groups"], strict=True))
    ]
    difference = _difference(learner, prompts[0], sampled["groups"][0][:2])
    started = time.monotonic()
    report = learner.train(groups=groups)
    took_s = time.monotonic() - started
    return {
        "sampled": sampled["tokens"],
        "sample_s": sampled["seconds"],
        "trained": sampled["tokens"] + sum(map(len, prompts)) * workload["group_size"],
        "train_s": took_s,
        "loss": report["loss"],
        "difference": difference,
        "engine": sampled["engine"],
    }


def _difference(
    learner: Any, prompt: list[int], rollouts: list[dict[str, Any]]
) -> dict[str, float]:
    """Of a group's log-probs, the engine's and the trainer's: nats a token, largest and mean."""
    import torch

    ids = [np.frombuffer(rollout["ids"], "<i4").tolist() for rollout in rollouts]
    with torch.no_grad():
        policy = learner._model.policy
        scored, mask = policy.completion_logprobs([prompt] * len(ids), ids, TEMPERATURE)
    sampled = np.concatenate([np.frombuffer(r["logprobs"], "<f4") for r in rollouts])
    apart = np.abs(scored[mask].float().cpu().numpy() - sampled)
    return {"max": float(apart.max()), "mean": float(apart.mean())}


def _write_model(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(**{k: v for k, v in shape.items() if k not in ("architectures",)})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def missing(name: str) -> str:
    """The package that a case needs and that is not installed; empty: none."""
    needed = [package for setting, package in NEEDS.items() if setting in CASES[name].values()]
    return next((package for package in needed if find_spec(package) is None), "")


def run(options: argparse.Namespace) -> int:
    """Run all cases, each in a process; 1 where one failed, 3 where none could be run."""
    device = device_name(options.device)
    if device is None:
        print("unrun: this torch can use no NVIDIA GPU; --device cpu --quick rehearses", flush=True)
        return 3
    deadline = time.monotonic() + LIMIT_S
    results: dict[str, Any] = {}
    for name in options.only or CASES:
        if package := missing(name):
            results[name] = {"unrun": f"{package} is not installed"}
        elif (left := deadline - time.monotonic()) < 20.0:
            results[name] = {"unrun": f"the {LIMIT_S:.0f} s were over"}
        else:
            results[name] = _in_child(name, options, left)
        print(f"{name}: {_line(results[name])}", flush=True)
    report = {
        "schema": SCHEMA,
        "device": device,
        "quick": options.quick,
        "machine": machine(),
        "cases": results,
    }
    write_json(options.out, report)
    print(options.out)
    return 1 if any("failed" in result for result in results.values()) else 0


def _in_child(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", options.device, "--case", name]
    try:
        done = subprocess.run(
            [*command, *["--quick"] * options.quick],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return {"unrun": "cut at the time limit"}
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _line(result: dict[str, Any]) -> str:
    if "peak_bytes" not in result:
        return "; ".join(f"{key}: {value}" for key, value in result.items())
    apart = result["logprob_difference"]
    return (
        f"peak {result['peak_bytes'] / 1e9:.2f} GB, "
        f"sampled {result['sampled_tokens_per_s']} and trained {result['trained_tokens_per_s']} "
        f"tokens/s, log-probs of engine and trainer differ by {apart['max']:.1e} nats at most"
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one step each")
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse()
    if chosen.case is None:
        sys.exit(run(chosen))
    print(json.dumps(run_case(chosen.case, chosen.device, chosen.quick)))
