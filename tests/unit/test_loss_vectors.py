"""Every case of an independent float64 reference: advantages, KL, filter, weights, loss, gradient.

In the file null stands for NaN.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.rl.advantages import group_advantages, valid_samples
from swarm.rl.loss import FtisConfig, LossOutput, ftis_loss

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "vectors" / "ftis.json").read_text()
)


def test_file_covers_every_method() -> None:
    methods = {(c["config"]["importance"], c["config"]["filter"]) for c in CASES}
    assert len(CASES) == 25
    assert len(methods) == 9


def run(case: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, LossOutput, Tensor]:
    policy = numbers(case["policy_logprobs"], dtype).requires_grad_()
    sampling = numbers(case["sampling_logprobs"], dtype)
    mask = torch.tensor(case["completion_mask"], dtype=torch.bool)
    advantages = group_advantages(
        numbers(case["rewards"], dtype),
        torch.tensor(case["group_ids"]),
        valid_samples(sampling, mask),
    )
    output = ftis_loss(
        policy,
        sampling,
        mask,
        advantages,
        FtisConfig(**case["config"]),
        own=torch.tensor(case["own"]),
    )
    output.loss.backward()
    assert policy.grad is not None
    return advantages, output, policy.grad


def numbers(values: Any, dtype: torch.dtype) -> Tensor:
    def known(x: Any) -> Any:
        if isinstance(x, list):
            return [known(y) for y in x]
        return math.nan if x is None else x

    return torch.tensor(known(values), dtype=dtype)


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_case(case: dict[str, Any], dtype: torch.dtype) -> None:
    advantages, output, grad = run(case, dtype)
    exact = dtype == torch.float64
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if exact else {"rtol": 2e-6, "atol": 2e-6}
    grad_tolerance = {"rtol": 1e-6, "atol": 1e-6} if exact else {"rtol": 1e-5, "atol": 1e-5}
    expected = case["expected"]

    def close(got: Tensor, name: str, limits: dict[str, float]) -> None:
        torch.testing.assert_close(
            got.detach(),
            numbers(expected[name], dtype),
            equal_nan=True,
            **limits,
            msg=lambda text: f"{name}: {text}",
        )

    close(advantages, "advantages", tolerance)
    close(output.kl, "kl", tolerance)
    close(output.is_weight, "is_weight", tolerance)
    close(output.loss, "loss", tolerance)
    close(grad, "grad", grad_tolerance)
    assert output.keep.tolist() == expected["keep"]
