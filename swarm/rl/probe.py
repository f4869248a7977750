"""What torch finds on this machine, as JSON: `python -m swarm.rl.probe`.

Owns: the one question whether this torch computes on the device that the learner would use. Run in
a process of its own by `swarm-node doctor`, so that a library that crashes takes nothing along.
"""

import json
import sys
import time
from typing import Any

import torch


def probe(kind: str) -> dict[str, Any]:
    """Device, its memory, and a small computation on it.

    Args:
        kind: "auto", "cpu", "cuda" or "mps", as model.device.
    """
    found: dict[str, Any] = {"torch": torch.__version__, "cuda_build": torch.version.cuda}
    if torch.version.hip:
        found["hip_build"] = torch.version.hip
    mps = torch.backends.mps.is_available()
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    found["device"] = kind
    try:
        if kind == "cuda":
            found |= _cuda()
        started = time.perf_counter()
        found["result"] = _compute(torch.device(kind))
        found["seconds"] = round(time.perf_counter() - started, 3)
    except (RuntimeError, AssertionError) as error:
        found["error"] = str(error).strip().splitlines()[0]
    return found


def _cuda() -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return {
        "name": torch.cuda.get_device_name(),
        "count": torch.cuda.device_count(),
        "architecture": f"sm_{major}{minor}",
        "built_for": torch.cuda.get_arch_list(),
        "memory_free_bytes": free_bytes,
        "memory_total_bytes": total_bytes,
        "bfloat16": torch.cuda.is_bf16_supported(),
    }


def _compute(device: torch.device) -> float:
    """A product, a softmax and their gradient; 1.0 where the device computes rightly."""
    x = torch.eye(64, device=device, requires_grad=True)
    total = ((x @ x).softmax(dim=-1).sum() / 64).sum()
    torch.autograd.backward(total)
    if x.grad is None or not bool(torch.isfinite(x.grad).all()):
        raise RuntimeError("the gradient of a small product is not finite")
    return float(total)


if __name__ == "__main__":
    json.dump(probe(sys.argv[1] if len(sys.argv) > 1 else "auto"), sys.stdout)
