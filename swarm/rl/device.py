"""Which device a model is trained on, and in which precision.

Owns: choosing them, and that an NVIDIA GPU which this torch cannot use is an error that names the
fix instead of a run on the CPU that nobody asked for. Does not know: models.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from swarm.errors import ConfigError

log = logging.getLogger(__name__)

NVIDIA_PROC = Path("/proc/driver/nvidia/gpus")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Of a container."""

GET_TORCH = "see https://pytorch.org/get-started/locally"


def nvidia_gpus(proc: Path = NVIDIA_PROC) -> list[str]:
    """Names of the NVIDIA GPUs that the driver knows, whatever torch can do with them."""
    found = []
    for path in sorted(proc.glob("*/information")):
        lines = path.read_text(errors="replace").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    if found:
        return found
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    return [line.partition(":")[2].partition("(")[0].strip() for line in lines if "GPU" in line]


def choose_device(wanted: str, gpus: Callable[[], Sequence[str]] = nvidia_gpus) -> torch.device:
    """The device that `model.device` stands for.

    Args:
        wanted: "auto", "cpu", "mps", "cuda" or "cuda:<number>".
        gpus: names of the NVIDIA GPUs there are.

    Raises:
        ConfigError: it is not there, or torch cannot use it; says what to do.
    """
    kind, _, number = wanted.partition(":")
    if kind in ("auto", "cuda"):
        if torch.cuda.is_available():
            return _cuda(int(number or 0))
        _refuse_unusable(gpus)
        if kind == "cuda":
            raise ConfigError(
                f"model.device = {wanted!r}: torch {torch.__version__} finds none here; "
                "use 'auto' or 'cpu', or install a torch build for it"
            )
    if kind in ("auto", "mps"):
        if torch.backends.mps.is_available():
            return torch.device("mps")
        if kind == "mps":
            raise ConfigError(
                "model.device = 'mps': this torch finds no Apple GPU; use 'auto' or 'cpu'"
            )
    return torch.device("cpu")


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What `model.precision` stands for on a device."""
    if precision == "auto":
        on_cuda = device.type == "cuda"
        fast = on_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def total_memory(device: torch.device) -> int:
    """Bytes that the device has altogether, whatever of them is in use now."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    total = psutil.virtual_memory().total
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        limit = ""
    return min(int(total), int(limit)) if limit.isdigit() else int(total)


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a torch built for these architectures runs on a GPU of this compute capability.

    Args:
        capability: major and minor, e.g. (8, 9).
        architectures: as torch.cuda.get_arch_list() gives them: "sm_86" is machine code, for the
            same major and a minor from it on; "compute_90" is compiled on any later GPU.
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
    return False


def _cuda(index: int) -> torch.device:
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"model.device = 'cuda:{index}': there are {count} GPUs, from cuda:0 on")
    capability = torch.cuda.get_device_capability(index)
    architectures = torch.cuda.get_arch_list()
    if architectures and not has_kernels(capability, architectures):
        raise ConfigError(
            f"{torch.cuda.get_device_name(index)} is sm_{capability[0]}{capability[1]}; torch "
            f"{torch.__version__} is built for {', '.join(architectures)}. Install a torch build "
            f"for this GPU ({GET_TORCH}), or set model.device = 'cpu'"
        )
    if count > 1:
        log.info(
            "cuda:%d of %d GPUs: a node trains on one; for the others start a node each, with its "
            "own --data-dir and model.device = 'cuda:N'",
            index,
            count,
        )
    return torch.device("cuda", index)


def _refuse_unusable(gpus: Callable[[], Sequence[str]]) -> None:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return  # hidden on purpose
    found = gpus()
    if not found:
        return
    if torch.version.cuda is None:
        cause = f"torch {torch.__version__} is a build without CUDA: install one with it"
    else:
        cause = (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use it, most often "
            "because the driver is older: update the driver, or install torch for an older CUDA"
        )
    raise ConfigError(
        f"this machine has an NVIDIA GPU ({found[0]}), but {cause} ({GET_TORCH}). "
        "To train on the CPU all the same: model.device = 'cpu'"
    )
