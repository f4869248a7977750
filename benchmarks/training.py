"""Rows of the training step: against TRL's loss on the same batch, and memory of log-probs.

Owns: the models' shapes, the batch, the rounds. Does not know: what runs in the two children,
`benchmarks/training_child.py` and `benchmarks/peers/trl_step.py`.

The model of 135M parameters has SmolLM2's shape and random weights, which take as long as trained
ones. Full fine-tuning, one thread, AdamW's step included.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, NotMeasuredError, Row, Worker, interleave, peers_python
from benchmarks.measure import ratio as paired
from swarm.config import NodeConfig
from swarm.model_memory import ModelFacts, Workload, estimate

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""SmolLM2-135M's config.json, so far as it says how much there is to compute."""
TINY = {
    **SMOLLM2,
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = {"rows": 8, "prompt": 32, "completion": 64}
TINY_NAME = "tiny model, 0.9M parameters"
CHILD = (sys.executable, "-m", "benchmarks.training_child")
VOCABULARY = 151_936
"""Of Qwen2.5."""


def rows(quick: bool) -> list[Row]:
    """Steps of both models in both precisions, then the memory of log-probs."""
    cases = [(TINY_NAME, TINY, "float32", 2 if quick else 15)]
    if not quick:
        cases += [
            ("135M parameters, fp32", SMOLLM2, "float32", 5),
            ("135M parameters, bf16", SMOLLM2, "bfloat16", 5),
        ]
    result = []
    for name, config, dtype, rounds in cases:
        result += _step_rows(name, config, dtype, rounds)
    return [*result, *_memory_rows(quick)]


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A model folder's config.json; the children make the weights from a seed."""
    (folder / "config.json").write_text(json.dumps(config))


def _step_rows(name: str, config: dict[str, Any], dtype: str, rounds: int) -> list[Row]:
    batch = BATCH
    tokens = batch["rows"] * (batch["prompt"] + batch["completion"])
    how = (
        f"batch of {batch['rows']} x ({batch['prompt']} + {batch['completion']}) tokens, CPU time "
        f"of one thread, {rounds} interleaved steps, each in its own process"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), config)
        with Worker(CHILD) as ours:
            setup = {"folder": folder, "dtype": dtype, "batch": batch}
            ours.call(op="setup", **setup)
            try:
                with Worker(
                    [peers_python(), str(ROOT / "benchmarks" / "peers" / "trl_step.py")]
                ) as trl:
                    trl.call(op="setup", **setup)
                    found, peak_mb = _compare(name, {"ours": ours, "trl": trl}, rounds, tokens, how)
            except NotMeasuredError as error:
                how = f"{how}; no peer: {error}"
                found, peak_mb = _compare(name, {"ours": ours}, rounds, tokens, how)
    # A tiny model's step fits into what malloc keeps.
    return found[:1] if config is TINY else [*found, _estimate_row(name, config, dtype, peak_mb)]


def _compare(
    name: str, workers: dict[str, Worker], rounds: int, tokens: int, how: str
) -> tuple[list[Row], float]:
    """Rows of speed and memory, and the highest resident memory of ours, MB."""
    rises: dict[str, list[float]] = {which: [] for which in workers}
    tops: dict[str, list[float]] = {which: [] for which in workers}

    def step(which: str) -> float:
        taken = workers[which].call(op="step")
        rises[which].append(taken["rise_bytes"] / 1e6)
        tops[which].append(taken["peak_bytes"] / 1e6)
        return float(taken["cpu_s"])

    candidates = {which: (lambda which=which: step(which)) for which in workers}
    found = interleave(candidates, rounds)
    faster = paired(found["trl"], found["ours"]) if "trl" in found else None
    peaks = {which: max(values[1:]) for which, values in rises.items()}
    share = peaks["ours"] / peaks["trl"] if peaks.get("trl") else None
    losses = {which: workers[which].call(op="loss")["loss"] for which in workers}
    speed, memory = [
        Row(
            what=f"training step, {name}",
            unit="tokens/s",
            ours=tokens / found["ours"].median,
            peer=tokens / found["trl"].median if "trl" in found else None,
            peer_name="TRL 1.16 GRPOTrainer's loss",
            ratio=faster,
            ratio_of="ours / peer",
            aim=">= 1.1",
            met=None if faster is None else faster >= 1.1,
            cause="At tiny size transformers' Python for each layer, which both run, is the most.",
            how=how,
            details={"losses": losses, **{k: v.summary() for k, v in found.items()}},
        ),
        Row(
            what=f"memory of a training step above its start, {name}",
            unit="MB",
            ours=peaks["ours"],
            peer=peaks.get("trl"),
            peer_name="TRL 1.16 GRPOTrainer's loss",
            ratio=share,
            ratio_of="ours / peer",
            aim="<= 0.7",
            met=None if share is None else share <= 0.7,
            cause="Gradients of bf16 weights are summed in fp32, 4 bytes a parameter and not 2, "
            "so that no small one is lost.",
            how="the same steps: highest resident memory in a step, above that before it",
        ),
    ]
    return [speed, memory], max(tops["ours"])


def _estimate_row(name: str, model: dict[str, Any], dtype: str, peak_mb: float) -> Row:
    head_size = model["hidden_size"] // model["num_attention_heads"]
    shape = ModelFacts.of_shape(
        hidden=model["hidden_size"],
        layers=model["num_hidden_layers"],
        intermediate=model["intermediate_size"],
        query=model["hidden_size"],
        key_value=head_size * model["num_key_value_heads"],
        vocabulary=model["vocab_size"],
        tied=model["tie_word_embeddings"],
    )
    config = NodeConfig.model_validate(
        {
            "model": {"precision": "bf16" if dtype == "bfloat16" else "fp32"},
            "train": {"groups_per_step": 1, "optimizer": "adamw"},
            "engine": {"prompts_per_call": 1},
        }
    )
    workload = Workload(BATCH["rows"], BATCH["prompt"], BATCH["completion"])
    told_mb = estimate(shape, config, workload, "cpu").peak / 1e6
    return Row(
        what=f"memory of a process that trains, {name}",
        unit="MB",
        ours=peak_mb,
        limit=told_mb,
        limit_name="estimated before the model is loaded",
        ratio=peak_mb / told_mb,
        ratio_of="measured / estimate",
        aim="0.6 to 1",
        met=0.6 <= peak_mb / told_mb <= 1.0,
        cause="An estimate that is too low lets a node start that ends without memory.",
        how="the same steps: highest resident memory of the whole process",
    )


def _memory_rows(quick: bool) -> list[Row]:
    """The rise of resident memory, forward and backward, by vocabulary."""
    shape = {"hidden": 64 if quick else 256, "tokens": 512}
    sizes = (32_768,) if quick else (VOCABULARY // 4, VOCABULARY)
    result = []
    rises = {}
    with Worker(CHILD) as worker:
        for size in sizes:
            for way in ("chunked", "full"):
                taken = worker.call(op="head", way=way, vocabulary=size, **shape)
                rises[way, size] = taken["rise_bytes"] / 1e6
            ours, full = rises["chunked", size], rises["full", size]
            result.append(
                Row(
                    what=f"memory of log-probs and their gradients, vocabulary {size:,}",
                    unit="MB",
                    ours=ours,
                    peer=full,
                    peer_name="full logits, log_softmax, gather",
                    ratio=ours / full,
                    ratio_of="ours / peer",
                    how=f"{shape['tokens']} tokens, hidden size {shape['hidden']}, fp32: rise of "
                    "resident memory, the head's gradient "
                    f"({size * shape['hidden'] * 4 / 1e6:.0f} MB) included",
                )
            )
        if not quick:
            double = {**shape, "tokens": 2 * shape["tokens"]}
            more = worker.call(op="head", way="chunked", vocabulary=VOCABULARY, **double)
            growth = more["rise_bytes"] / 1e6 - rises["chunked", VOCABULARY]
            logits = VOCABULARY * shape["tokens"] * 4 / 1e6
            result.append(
                Row(
                    what=f"memory that {shape['tokens']} more tokens take, "
                    f"vocabulary {VOCABULARY:,}",
                    unit="MB",
                    ours=growth,
                    peer=logits,
                    peer_name="their logits, once",
                    ratio=growth / logits,
                    ratio_of="ours / peer",
                    aim="flat: <= 0.1",
                    met=growth / logits <= 0.1,
                    how="as above",
                )
            )
    return result
