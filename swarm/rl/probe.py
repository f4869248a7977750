"""What torch finds on this machine, as JSON: `python -m swarm.rl.probe`.

Owns: the one question whether this torch computes on the device that the learner would use. Run in
a process of its own by `swarm-node doctor`, so that a library that crashes takes nothing along.
"""

import json
import sys
import time
from typing import Any

import torch

from swarm.errors import ConfigError
from swarm.rl.device import choose_device, choose_dtype, total_memory


def probe(wanted: str) -> dict[str, Any]:
    """Device, its memory, and a small computation on it.

    Args:
        wanted: as model.device.
    """
    found: dict[str, Any] = {"torch": torch.__version__, "cuda_build": torch.version.cuda}
    try:
        device = choose_device(wanted)
        found["device"] = device.type
        found["memory_total_bytes"] = total_memory(device)
        found["bfloat16"] = choose_dtype("auto", device) is torch.bfloat16
        if device.type == "cuda":
            found |= _cuda(device)
        started = time.perf_counter()
        found["result"] = _compute(device)
        found["seconds"] = round(time.perf_counter() - started, 3)
    except (ConfigError, RuntimeError, AssertionError) as error:
        found["error"] = str(error).strip().splitlines()[0]
    return found


def _cuda(device: torch.device) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "architecture": f"sm_{major}{minor}",
        "built_for": torch.cuda.get_arch_list(),
        "memory_free_bytes": torch.cuda.mem_get_info(device)[0],
    }


def _compute(device: torch.device) -> float:
    """A product, a softmax and their gradient; 1.0 where the device computes rightly."""
    x = torch.eye(64, device=device, requires_grad=True)
    total = ((x @ x).softmax(dim=-1).sum() / 64).sum()
    torch.autograd.backward(total)
    if x.grad is None or not bool(torch.isfinite(x.grad).all()):
        raise RuntimeError("the gradient of a small product is not finite")
    return float(total.detach())


if __name__ == "__main__":
    json.dump(probe(sys.argv[1] if len(sys.argv) > 1 else "auto"), sys.stdout)
