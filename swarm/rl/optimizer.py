"""AdamW that loses no update, whatever the weights' dtype, and keeps its state as small as asked.

Owns: gradients summed in float32, their norm and clipping, AdamW's formula, the masters of bfloat16
weights, and AdamW's moments. Does not know: losses, batches, learning-rate schedules, files.

At a learning rate of 1e-6 an update is far below half a unit in the last place of a bfloat16
weight, so plain bfloat16 loses it. Here a bfloat16 weight has the lower half of its float32 master
beside it (`split`): the master is exact, for 2 bytes more than the weight, and the weight that the
model computes with is the master, rounded.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError, DataError
from swarm.rl.moments import MOMENT_STORES, MomentStorage, MomentStore

SLICE = 1 << 24
"""Elements updated at a time, whole quantized blocks; it bounds the temporaries, 64 MiB each."""

EPSILON = 1e-8


class Optimizer:
    """AdamW over named parameters. Weight decay goes on matrices only.

    The formula and the order of its operations are those of `torch.optim.AdamW` without foreach and
    fusing: float32 weights with float32 moments come out the same to the bit.

    Args:
        parameters: to train, float32 or bfloat16, by stable names.
        storage: how the moments are kept.
        weight_decay: of parameters with two or more dimensions.

    Raises:
        ConfigError: a parameter of another dtype, or what the storage needs is not installed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        storage: MomentStorage = "adamw",
        beta1: float = 0.9,
        beta2: float = 0.999,
        weight_decay: float = 0.0,
    ) -> None:
        self._beta1 = beta1
        self._beta2 = beta2
        self._slots = {
            name: _Slot.of(name, parameter, storage, weight_decay)
            for name, parameter in parameters.items()
        }

    def clear(self) -> None:
        """Forget the gradients."""
        for slot in self._slots.values():
            slot.parameter.grad = None
            slot.gradient = None

    def clip(self, max_norm: float) -> float:
        """Scale all gradients down to a norm of `max_norm` together.

        Returns:
            Their norm before; not finite where one of them is not; 0 without any.
        """
        gradients = [g for slot in self._slots.values() if (g := slot.collected) is not None]
        if not gradients:
            return 0.0
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return float(norm)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient."""
        for slot in self._slots.values():
            gradient = slot.collected
            if gradient is None:
                continue
            slot.steps += 1
            correction = 1 - self._beta1**slot.steps
            root = math.sqrt(1 - self._beta2**slot.steps)
            flat, generator = gradient.reshape(-1), slot.generator()
            for at in _slices(slot.parameter.numel()):
                grad, weight = flat[at], slot.master(at)
                if slot.weight_decay:
                    weight.mul_(1 - learning_rate * slot.weight_decay)
                first, second = slot.first.read(at), slot.second.read(at)
                first.lerp_(grad, 1 - self._beta1)
                second.mul_(self._beta2).addcmul_(grad, grad, value=1 - self._beta2)
                denominator = (second.sqrt() / root).add_(EPSILON)
                weight.addcdiv_(first, denominator, value=-learning_rate / correction)
                slot.first.write(at, first, generator)
                slot.second.write(at, second, generator)
                slot.set_master(at, weight)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything but the weights, named "<kind>/<parameter>".

        Not copies: write them before the next step. Parameters that were never updated have none.
        """
        return {
            f"{kind}/{name}": tensor
            for name, slot in self._slots.items()
            if slot.steps
            for kind, tensor in slot.state().items()
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from what `state_dict` returned; the weights must be those of then.

        Raises:
            DataError: the state belongs to other parameters or another storage, or is incomplete.
                Nothing was changed then.
        """
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            by_name.setdefault(name, {})[kind] = tensor
        others = sorted(by_name.keys() - self._slots.keys())
        if others:
            raise DataError(f"trainer state: no parameter for {others[:3]}; another model's?")
        for name, found in by_name.items():
            expected = self._slots[name].state()
            if _forms(found) != _forms(expected):
                raise DataError(
                    f"trainer state: {name} has {_forms(found)}, expected {_forms(expected)}; was "
                    "it written with another model.precision or train.optimizer?"
                )
        for name, slot in self._slots.items():
            slot.load(by_name.get(name, {}))


@dataclass(slots=True, eq=False)
class _Slot:
    """One parameter, with its gradient and state."""

    name: str
    parameter: nn.Parameter
    weight_decay: float
    first: MomentStore
    second: MomentStore
    low: Tensor | None
    """The master's lower half, int16, in the parameter's shape; None for float32 weights."""
    steps: int = 0
    gradient: Tensor | None = None
    """Of bfloat16 weights, in float32."""

    @classmethod
    def of(
        cls, name: str, parameter: nn.Parameter, storage: MomentStorage, weight_decay: float
    ) -> "_Slot":
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(
                f"{name} is {parameter.dtype}; float32 and bfloat16 can be trained "
                "(model.precision)"
            )
        make = MOMENT_STORES[storage]
        short = parameter.dtype == torch.bfloat16
        slot = cls(
            name,
            parameter,
            weight_decay if parameter.dim() >= 2 else 0.0,
            make(parameter, signed=True),
            make(parameter, signed=False),
            torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False) if short else None,
        )
        if short:
            register: Any = parameter.register_post_accumulate_grad_hook
            register(slot._collect)
        return slot

    def _collect(self, parameter: Tensor) -> None:
        """Add a micro-batch's gradient to the sum, in float32, and let go of it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self.gradient is None:
            self.gradient = gradient.float()
        else:
            self.gradient += gradient

    @property
    def collected(self) -> Tensor | None:
        """The sum of the gradients since `clear`, float32."""
        return self.parameter.grad if self.low is None else self.gradient

    def master(self, at: slice) -> Tensor:
        """Weights in float32; of float32 parameters the weights themselves."""
        weight = self.parameter.detach().view(-1)[at]
        return weight if self.low is None else join(weight, self.low.view(-1)[at])

    def set_master(self, at: slice, master: Tensor) -> None:
        if self.low is not None:
            weight, low = split(master)
            self.parameter.detach().view(-1)[at] = weight
            self.low.view(-1)[at] = low

    def generator(self) -> torch.Generator:
        """Random numbers that follow from the parameter's name and the number of its updates."""
        seed = hashlib.sha256(f"{self.name} {self.steps}".encode()).digest()[:7]
        return torch.Generator(self.parameter.device).manual_seed(int.from_bytes(seed, "big"))

    def state(self) -> dict[str, Tensor]:
        named = {"step": torch.tensor(float(self.steps))}
        named |= {f"exp_avg{suffix}": t for suffix, t in self.first.tensors().items()}
        named |= {f"exp_avg_sq{suffix}": t for suffix, t in self.second.tensors().items()}
        return named if self.low is None else named | {"low": self.low}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state in this slot's form; an empty one stands for no updates yet."""
        own = self.state()
        for kind, tensor in own.items():
            if kind != "step":
                tensor.copy_(tensors[kind]) if tensors else tensor.zero_()
        self.steps = int(tensors["step"]) if tensors else 0


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """float32 as bfloat16, rounded to the nearest, and what is missing from it.

    Args:
        master: float32, finite.

    Returns:
        bfloat16 and int16 of the same shape: the float32's bits are the bfloat16's, followed by 16
        zeros, plus the int16.
    """
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """The float32 that `split` took apart, to the bit."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, SLICE):
        yield slice(start, min(start + SLICE, count))


def _forms(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(
        f"{kind} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for kind, t in sorted(tensors.items())
    )
