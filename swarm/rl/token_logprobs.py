"""Log-probs of given tokens from hidden states, without holding all logits.

Owns: the language model's head (a linear map, then scale and softcap where a model has them), the
softmax's temperature, and the recomputation of logits in the backward pass. Does not know: models,
sequences, padding, or which token follows which (`swarm.rl.policy` does).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 24
"""Logits alive at a time; 64 MiB in float32. Fewer than these are computed at once and kept, which
is faster; more are computed in chunks of rows, and again in the backward pass."""


@dataclass(frozen=True, slots=True)
class Head:
    """From hidden states to logits.

    Attributes:
        weight: (V, H).
        bias: (V,), or None.
        scale: factor of what the linear map gives (Cohere, Granite).
        softcap: c of c * tanh(x / c), after the scale; None: none (Gemma 2).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) in float32, in float64 for float64 inputs."""
        logits = functional.linear(hidden, self.weight, self.bias)
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        return self.adjust(logits)

    def adjust(self, logits: Tensor) -> Tensor:
        """Apply scale and softcap; in place where no gradient is needed."""
        fresh = not logits.requires_grad
        if self.scale != 1.0:
            logits = logits.mul_(self.scale) if fresh else logits * self.scale
        if self.softcap is not None:
            logits = logits.div_(self.softcap) if fresh else logits / self.softcap
            logits = logits.tanh_() if fresh else logits.tanh()
            logits = logits.mul_(self.softcap) if fresh else logits * self.softcap
        return logits

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logits / d (what the linear map gives), from the logits."""
        if self.softcap is None:
            return self.scale
        return (1 - (logits / self.softcap).square_()).mul_(self.scale)


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    temperature: float,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """log_softmax(head(hidden) / temperature) at the targets.

    Args:
        hidden: (M, H), the head's input at each position, of the same dtype as its weight.
        head: what follows.
        targets: (M,) int64, in [0, V).
        temperature: above 0.
        chunk_elements: logits alive at a time.

    Returns:
        (M,) nats, differentiable by hidden, weight and bias; float32 for float32 and shorter
        inputs. The gradient of the weight is accumulated in that dtype, whatever the weight's is.
    """
    vocabulary = head.weight.shape[0]
    if hidden.shape[0] * vocabulary <= chunk_elements:
        logits = scaled_logits(hidden, head, temperature)
        return -functional.cross_entropy(logits, targets, reduction="none")
    rows = max(1, chunk_elements // vocabulary)
    chunked: Any = _ChunkedHead.apply
    result: Tensor = chunked(
        hidden, head.weight, head.bias, head.scale, head.softcap, targets, temperature, rows
    )
    return result


def scaled_logits(hidden: Tensor, head: Head, temperature: float) -> Tensor:
    """Logits (..., V) divided by the temperature, in float32 (float64 for float64 inputs)."""
    logits = head(hidden)
    if temperature == 1.0:
        return logits
    return logits / temperature if logits.requires_grad else logits.div_(temperature)


class _ChunkedHead(torch.autograd.Function):
    """`token_logprobs` by chunks of rows; saves nothing of its own for the backward pass.

    With p = softmax, d logprob / d logits = (onehot - p) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        targets: Tensor,
        temperature: float,
        rows: int,
    ) -> Tensor:
        head, logprobs = Head(weight, bias, scale, softcap), []
        for start in range(0, hidden.shape[0], rows):
            at = slice(start, start + rows)
            logits = scaled_logits(hidden[at], head, temperature)
            logprobs.append(-functional.cross_entropy(logits, targets[at], reduction="none"))
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.shape, ctx.temperature, ctx.rows = (scale, softcap), temperature, rows
        return torch.cat(logprobs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        head = Head(weight, bias, *ctx.shape)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=gradient.dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=gradient.dtype) if needs_bias else None
        for start in range(0, hidden.shape[0], ctx.rows):
            at = slice(start, start + ctx.rows)
            logits = head(hidden[at])
            slope = head.slope(logits)
            d_logits = logits.div_(ctx.temperature).softmax(dim=-1)
            scale = (gradient[at] / ctx.temperature)[:, None]
            d_logits.mul_(-scale)
            d_logits.scatter_add_(-1, targets[at, None], scale)
            if isinstance(slope, Tensor) or slope != 1.0:
                d_logits.mul_(slope)
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0)
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                torch.matmul(d_logits, weight, out=d_hidden[at])
            if d_weight is not None:
                if d_weight.dtype == hidden.dtype:
                    d_weight.addmm_(d_logits.t(), hidden[at])
                else:
                    d_weight += d_logits.t() @ hidden[at]
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 5,
        )
