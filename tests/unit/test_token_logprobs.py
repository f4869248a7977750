"""The chunked head against the plain computation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from swarm.rl import token_logprobs as module
from swarm.rl.token_logprobs import Head, token_logprobs

ROWS, WIDTH, VOCABULARY = 23, 8, 31
CHUNK = 5 * VOCABULARY
"""Five rows at a time: five chunks, the last one shorter."""


def _inputs(dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    return hidden, weight, offset if bias else None, targets


SHAPES = {"plain": (1.0, None), "scaled": (0.25, None), "capped": (1.5, 2.0)}


def _plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits / temperature).log_softmax(-1)[torch.arange(len(targets)), targets]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [CHUNK, 1, module.CHUNK_ELEMENTS])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_plain_computation(
    bias: bool, temperature: float, chunk: int, shape: str
) -> None:
    inputs = _inputs(torch.float64, bias=bias)
    outside = torch.linspace(-1.0, 2.0, ROWS, dtype=torch.float64)
    differentiated = [t for t in inputs[:3] if t is not None]
    expected = _plain(*inputs, temperature, *SHAPES[shape])
    expected_gradients = torch.autograd.grad((expected * outside).sum(), differentiated)
    hidden, weight, offset, targets = inputs
    head = Head(weight, offset, *SHAPES[shape])
    found = token_logprobs(hidden, head, targets, temperature, chunk)
    gradients = torch.autograd.grad((found * outside).sum(), differentiated)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


def test_gradient_of_the_chunked_head_is_that_of_its_value() -> None:
    hidden, weight, bias, targets = _inputs(torch.float64, bias=True)
    hidden, targets = hidden[:4].detach().requires_grad_(), targets[:4]
    torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, Head(w, b, 1.5, 2.0), targets, 0.7, VOCABULARY),
        (hidden, weight, bias),
    )


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets = _inputs(torch.float32, bias=False)
    weight.requires_grad_(False)
    token_logprobs(hidden, Head(weight), targets, 1.0, CHUNK).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_head_gradient_of_bfloat16_weights_is_accumulated_in_float32() -> None:
    """Many chunks that each add little: summed in bfloat16, most of them would be lost."""
    rows = 4096
    generator = torch.Generator().manual_seed(1)
    hidden = torch.rand(rows, 4, generator=generator).bfloat16()
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    token_logprobs(hidden, Head(weight), targets, 1.0, 2 * 2).sum().backward()
    assert weight.grad is not None
    # d logprob / d logits is (1/2, -1/2) at every row.
    exact = 0.5 * hidden.double().sum(0)
    torch.testing.assert_close(weight.grad[0].double(), exact, rtol=5e-3, atol=0.0)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of logits that are computed at a time."""
    seen: list[int] = []
    original: Callable[..., Tensor] = Head.__call__

    def counted(head: Head, hidden: Tensor) -> Tensor:
        logits = original(head, hidden)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(Head, "__call__", counted)
    return seen


def test_no_more_logits_at_a_time_than_asked_for(sizes: list[int]) -> None:
    hidden, weight, _, targets = _inputs(torch.float32, bias=False)
    token_logprobs(hidden, Head(weight), targets, 1.0, CHUNK).sum().backward()
    assert sizes == 2 * [CHUNK, CHUNK, CHUNK, CHUNK, 3 * VOCABULARY]


def test_few_logits_are_computed_once(sizes: list[int]) -> None:
    """A small vocabulary pays nothing for the recomputation."""
    hidden, weight, _, targets = _inputs(torch.float32, bias=False)
    token_logprobs(hidden, Head(weight), targets, 1.0).sum().backward()
    assert sizes == [ROWS * VOCABULARY]
