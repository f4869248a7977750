"""The optimizer against torch's AdamW, and bfloat16 weights against float32 ones."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.errors import ConfigError, DataError
from swarm.rl import moments, optimizer
from swarm.rl.moments import MomentStorage, round_at_random
from swarm.rl.optimizer import Optimizer, join, split

STORAGES: tuple[MomentStorage, ...] = ("adamw", "adamw-bf16", "adamw-8bit", "adamw-offload")
SHAPES = {"matrix": (90, 70), "norm": (70,), "scalar": ()}
OPTIONS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95}
LEARNING_RATE = 1e-6


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, the last one shorter, as large models have them."""
    monkeypatch.setattr(optimizer, "SLICE", 8 * moments.BLOCK)


def _parameters(dtype: torch.dtype, seed: int = 0) -> dict[str, nn.Parameter]:
    """The same values whatever the dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype))
        for name, shape in SHAPES.items()
    }


def _gradients(seed: int = 1) -> Iterator[dict[str, Tensor]]:
    """Of about the same direction in each step, in values that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)
    constant = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    while True:
        yield {
            name: (value + 0.5 * torch.randn(value.shape, generator=generator)).bfloat16()
            for name, value in constant.items()
        }


def _backward(parameters: dict[str, nn.Parameter], gradients: dict[str, Tensor]) -> None:
    """Give the parameters these gradients the way a backward pass does."""
    loss = sum((p * gradients[name].to(p.dtype)).sum() for name, p in parameters.items())
    loss.backward()  # type: ignore[union-attr]


def _train(
    parameters: dict[str, nn.Parameter], made: Optimizer, steps: int, rate: float = LEARNING_RATE
) -> None:
    for _, gradients in zip(range(steps), _gradients(), strict=False):
        made.clear()
        _backward(parameters, gradients)
        made.step(rate)


def _torch_adamw(parameters: dict[str, nn.Parameter], decay: float = 0.0) -> Any:
    groups = [
        {"params": [p], "weight_decay": decay if p.dim() >= 2 else 0.0} for p in parameters.values()
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=False)


def _masters(made: Optimizer) -> dict[str, Tensor]:
    return {
        name: slot.master(slice(0, slot.parameter.numel())).clone()
        for name, slot in made._slots.items()
    }


def _movement(after: dict[str, Tensor]) -> Tensor:
    before = _parameters(torch.float32)
    return torch.cat([(after[name] - before[name].detach().flatten()) for name in before])


def _torch_movement(dtype: torch.dtype, steps: int, rate: float = LEARNING_RATE) -> Tensor:
    """How torch's own AdamW moves weights of a dtype."""
    parameters = _parameters(dtype)
    theirs = torch.optim.AdamW(
        parameters.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    for _, gradients in zip(range(steps), _gradients(), strict=False):
        theirs.zero_grad()
        _backward(parameters, gradients)
        theirs.step()
    return _movement({name: p.detach().float().flatten() for name, p in parameters.items()})


def test_float32_is_torchs_adamw_to_the_bit() -> None:
    ours, theirs = _parameters(torch.float32), _parameters(torch.float32)
    made, reference = Optimizer(ours, weight_decay=0.1, **OPTIONS), _torch_adamw(theirs, 0.1)
    for _, gradients in zip(range(20), _gradients(), strict=False):
        for parameters in (ours, theirs):
            for parameter in parameters.values():
                parameter.grad = None
            _backward(parameters, gradients)
        made.step(LEARNING_RATE)
        reference.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    state = made.state_dict()
    for name, parameter in theirs.items():
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[f"{kind}/{name}"], reference.state[parameter][kind])


def test_a_hundred_bfloat16_steps_add_up_to_the_float32_result() -> None:
    """Exactly, while plain bfloat16 does not move at all."""
    expected = _torch_movement(torch.float32, 100)
    parameters = _parameters(torch.bfloat16)
    made = Optimizer(parameters, **OPTIONS)
    _train(parameters, made, 100)
    found = _movement(_masters(made))
    assert torch.equal(found, expected)
    assert float(expected.abs().mean()) > 30 * LEARNING_RATE
    for name, master in _masters(made).items():
        assert torch.equal(parameters[name].detach().flatten(), master.bfloat16())
    # What it would be otherwise: nearly every weight stays where it was.
    plain = _torch_movement(torch.bfloat16, 100)
    moved = plain.abs() > 0.5 * expected.abs()
    assert float(moved.float().mean()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("storage", "tolerance"), [
    ("adamw-bf16", 0.02), ("adamw-8bit", 0.06), ("adamw-offload", 0.0),
])  # fmt: skip
def test_smaller_moments_lead_to_nearly_the_same_weights(
    storage: MomentStorage, tolerance: float, dtype: torch.dtype
) -> None:
    expected = _torch_movement(torch.float32, 100)
    parameters = _parameters(dtype)
    made = Optimizer(parameters, storage=storage, **OPTIONS)
    _train(parameters, made, 100)
    found = _movement(_masters(made))
    assert float((found - expected).norm() / expected.norm()) <= tolerance
    exact = sum(p.numel() for p in parameters.values()) * 8
    state = made.state_dict()
    size = sum(t.nbytes for key, t in state.items() if key.startswith("exp_avg"))
    share = {"adamw-bf16": 0.5, "adamw-8bit": 0.27, "adamw-offload": 1.0}[storage]
    assert size <= exact * share + 8 * 71  # norm and scalar


def test_slowly_changing_second_moment_is_not_stuck_in_bfloat16() -> None:
    """With beta2 = 0.999 it changes by less than bfloat16's spacing in a step."""
    found = {}
    for storage in ("adamw", "adamw-bf16"):
        parameter = nn.Parameter(torch.zeros(4096))
        made = Optimizer({"p": parameter}, storage=storage, beta2=0.999)  # type: ignore[arg-type]
        for step in range(400):
            parameter.grad = torch.full((4096,), 1.0 if step < 50 else 1e-3)
            made.step(1e-3)
        found[storage] = made.state_dict()["exp_avg_sq/p"].float().mean()
    torch.testing.assert_close(found["adamw-bf16"], found["adamw"], rtol=0.02, atol=0.0)


def test_gradients_of_micro_batches_are_summed_in_float32() -> None:
    """In bfloat16, the hundred small ones would vanish beside the large one."""
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    made = Optimizer({"p": parameter}, **OPTIONS)
    (parameter * 64.0).sum().backward()
    for _ in range(100):
        (parameter * 0.125).sum().backward()
    assert parameter.grad is None
    assert made.clip(1e9) == pytest.approx(76.5 * math.sqrt(8), rel=1e-6)
    made.clear()
    assert made.clip(1e9) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_to_the_norm_of_all_together(dtype: torch.dtype) -> None:
    parameters = _parameters(dtype)
    made = Optimizer(parameters, **OPTIONS)
    gradients = next(_gradients())
    _backward(parameters, gradients)
    norm = math.sqrt(sum(float(g.float().pow(2).sum()) for g in gradients.values()))
    assert made.clip(1.0) == pytest.approx(norm, rel=1e-5)
    assert made.clip(1.0) == pytest.approx(1.0, rel=1e-4)
    _backward(parameters, {name: torch.full_like(g, math.inf) for name, g in gradients.items()})
    assert not math.isfinite(made.clip(1.0))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_bit_exactly_from_its_state(
    storage: MomentStorage, dtype: torch.dtype
) -> None:
    straight = _parameters(dtype)
    made = Optimizer(straight, storage=storage, weight_decay=0.1, **OPTIONS)
    _train(straight, made, 5, 1e-3)
    state = {key: tensor.clone() for key, tensor in made.state_dict().items()}
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    other = Optimizer(resumed, storage=storage, weight_decay=0.1, **OPTIONS)
    other.load_state_dict(state)
    for parameters, each in ((straight, made), (resumed, other)):
        _train(parameters, each, 3, 1e-3)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    first, second = made.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    before = {key: tensor.clone() for key, tensor in first.items()}
    _train(resumed, other, 1)
    assert all(torch.equal(before[key], made.state_dict()[key]) for key in before)


def test_state_of_another_storage_or_precision_is_refused() -> None:
    parameters = _parameters(torch.float32)
    made = Optimizer(parameters, **OPTIONS)
    _train(parameters, made, 1)
    for other in (
        Optimizer(_parameters(torch.float32), storage="adamw-bf16"),
        Optimizer(_parameters(torch.bfloat16)),
    ):
        with pytest.raises(DataError, match=r"matrix has exp_avg .*model\.precision or train"):
            other.load_state_dict(made.state_dict())


def test_parameters_of_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"w is torch\.float16"):
        Optimizer({"w": nn.Parameter(torch.zeros(2, dtype=torch.float16))})


def test_a_float32_is_taken_apart_and_put_together_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator).to(torch.int32)
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1e-39])
    values = torch.cat([bits.view(torch.float32), edges])
    values = values[torch.isfinite(values)]
    weight, low = split(values)
    assert torch.equal(join(weight, low).view(torch.int32), values.view(torch.int32))
    ties = low == -(1 << 15)  # torch rounds those to even
    assert torch.equal(weight[~ties], values.bfloat16()[~ties])


def test_rounding_at_random_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.full((100_000,), 1.0 + 0.3 / 128)
    rounded = round_at_random(value, generator).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 1 / 128}
    assert float(rounded.double().mean()) == pytest.approx(float(value[0]), abs=6e-5)
    exact = torch.tensor([0.0, -1.5, 3.0])
    assert torch.equal(round_at_random(exact, generator).float(), exact)
