"""How AdamW's moments are kept between steps: float32, bfloat16, 8 bits, or in main memory.

Owns: the forms, rounding to them, and what of them a checkpoint holds. Does not know: AdamW.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError

MomentStorage = Literal["adamw", "adamw-bf16", "adamw-8bit", "adamw-offload"]

BLOCK = 256
"""Elements that share one scale in 8 bits."""

MIN_8BIT_ELEMENTS = 4096
"""Smaller parameters (norms, biases) keep float32 moments, as in bitsandbytes."""


class MomentStore(Protocol):
    """One moment of one parameter."""

    def read(self, at: slice) -> Tensor:
        """Float32 on the parameter's device, 1-D, to be changed and written back."""

    def write(self, at: slice, value: Tensor, generator: torch.Generator) -> None:
        """Keep what `read` gave for the same slice, changed."""

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by suffix; to be read, or overwritten in place."""


class Float32Store:
    """As it is."""

    def __init__(self, parameter: nn.Parameter, *, signed: bool) -> None:
        self._values = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)

    def read(self, at: slice) -> Tensor:
        return self._values.view(-1)[at]

    def write(self, at: slice, value: Tensor, generator: torch.Generator) -> None:
        pass  # `read` gave the values themselves

    def tensors(self) -> dict[str, Tensor]:
        return {"": self._values}


class BFloat16Store:
    """Half the size. Rounded at random, up or down in proportion, so that no change is lost."""

    def __init__(self, parameter: nn.Parameter, *, signed: bool) -> None:
        self._values = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False)

    def read(self, at: slice) -> Tensor:
        return self._values.view(-1)[at].float()

    def write(self, at: slice, value: Tensor, generator: torch.Generator) -> None:
        self._values.view(-1)[at] = round_at_random(value, generator)

    def tensors(self) -> dict[str, Tensor]:
        return {"": self._values}


class OffloadedStore:
    """Float32 in main memory; moved slice by slice."""

    def __init__(self, parameter: nn.Parameter, *, signed: bool) -> None:
        self._device = parameter.device
        self._values = torch.zeros(
            parameter.shape, dtype=torch.float32, pin_memory=parameter.device.type == "cuda"
        )

    def read(self, at: slice) -> Tensor:
        return self._values.view(-1)[at].to(self._device, non_blocking=True)

    def write(self, at: slice, value: Tensor, generator: torch.Generator) -> None:
        self._values.view(-1)[at].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        return {"": self._values}


class EightBitStore:
    """A quarter of the size: 8-bit codes with a scale for each block of 256, by bitsandbytes."""

    def __init__(self, parameter: nn.Parameter, *, signed: bool) -> None:
        try:
            from bitsandbytes import functional
        except ImportError:
            raise ConfigError(
                'train.optimizer = "adamw-8bit" needs bitsandbytes: '
                "pip install 'swarm-node[8bit]'"
            ) from None
        self._functional: Any = functional
        device, count = parameter.device, parameter.numel()
        self._code = self._functional.create_dynamic_map(signed=signed).to(device)
        self._codes = torch.zeros(count, dtype=torch.uint8, device=device)
        self._scales = torch.zeros(-(-count // BLOCK), device=device)

    def read(self, at: slice) -> Tensor:
        values: Tensor = self._functional.dequantize_blockwise(
            self._codes[at], absmax=self._scales[_blocks(at)], code=self._code, blocksize=BLOCK
        )
        return values

    def write(self, at: slice, value: Tensor, generator: torch.Generator) -> None:
        codes, state = self._functional.quantize_blockwise(value, code=self._code, blocksize=BLOCK)
        self._codes[at], self._scales[_blocks(at)] = codes, state.absmax

    def tensors(self) -> dict[str, Tensor]:
        return {"": self._codes, "_scale": self._scales}


def _eight_bit(parameter: nn.Parameter, *, signed: bool) -> MomentStore:
    if parameter.numel() < MIN_8BIT_ELEMENTS:
        return Float32Store(parameter, signed=signed)
    return EightBitStore(parameter, signed=signed)


class _Maker(Protocol):
    def __call__(self, parameter: nn.Parameter, *, signed: bool) -> MomentStore: ...


MOMENT_STORES: Mapping[MomentStorage, _Maker] = {
    "adamw": Float32Store,
    "adamw-bf16": BFloat16Store,
    "adamw-8bit": _eight_bit,
    "adamw-offload": OffloadedStore,
}
"""By the names that `train.optimizer` takes."""


def round_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Float32 to one of the two nearest bfloat16, with probabilities whose mean is the value."""
    noise = torch.randint(
        0, 1 << 16, values.shape, dtype=torch.int32, generator=generator, device=values.device
    )
    bits = (values.view(torch.int32) + noise) & -(1 << 16)
    return bits.view(torch.float32).bfloat16()


def _blocks(at: slice) -> slice:
    return slice(at.start // BLOCK, -(-at.stop // BLOCK))
