"""What every engine must do, held against the plain forward pass of the model.

The vLLM half needs an interpreter with vLLM, named by TEST_VLLM_PYTHON: `make test-vllm` makes one.
"""

import functools
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import STOP_ID, VOCAB_SIZE, write_qwen2

from swarm.config import EngineSection, ModelSection
from swarm.errors import DataError
from swarm.paths import RunDir
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.drift import LIMITS, ProbedEngine, measure
from swarm.rl.engine import Engine, SamplingParams, TransformersEngine
from swarm.rl.policy import Policy
from swarm.rl.vllm_engine import VllmEngine

PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
STOPS = (STOP_ID, 3, 4, 5)
"""Several, so that a random model stops now and then."""

needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        "TEST_VLLM_PYTHON" not in os.environ, reason="TEST_VLLM_PYTHON names no interpreter"
    ),
]

Make = Callable[[Policy], Engine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With more rows than the tokenizer has ids, as real models have."""
    return write_qwen2(
        tmp_path_factory.mktemp("models") / "padded",
        vocab_size=VOCAB_SIZE + 7,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.12,
    )


def load(folder: Path, mode: str, precision: str = "fp32") -> Policy:
    section = ModelSection(
        path=str(folder), mode=mode, precision=precision, lora_rank=4, device="cpu"
    )
    policy = Policy.load(section, seed=3, vocab_size=VOCAB_SIZE)
    change(policy, seed=5)
    return policy


def change(policy: Policy, seed: int) -> None:
    """As training would, but further."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += (0.02 * noise).to(parameter.dtype)


@pytest.fixture(
    scope="module",
    params=["transformers", pytest.param("vllm", marks=needs_vllm)],
)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Starts an engine of the kind under test."""

    def start(policy: Policy) -> Engine:
        if request.param == "transformers":
            return TransformersEngine(policy)
        section = EngineSection(kind="vllm", python=os.environ["TEST_VLLM_PYTHON"])
        return VllmEngine(
            policy,
            section,
            run_dir=RunDir(tmp_path_factory.mktemp("run")),
            max_tokens=200,
            seed=1,
        )

    return start


@pytest.fixture(scope="module", params=["full", "lora"])
def policy(request: pytest.FixtureRequest, folder: Path) -> Policy:
    return load(folder, request.param)


@pytest.fixture(scope="module")
def engine(make: Make, policy: Policy) -> Iterator[Engine]:
    started = make(policy)
    yield started
    started.close()


def flat(groups: list[list[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def texts(group: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in group]


def largest_difference(policy: Policy, groups: list[list[Rollout]], temperature: float) -> float:
    prompts = [prompt for prompt, group in zip(PROMPTS, groups, strict=True) for _ in group]
    return measure(policy, prompts, flat(groups), temperature).largest


def forward(policy: Policy, ids: list[int]) -> torch.Tensor:
    """Logits (VOCAB_SIZE,) of the token after these, by the model's own forward."""
    with torch.no_grad():
        return policy.model(input_ids=torch.tensor([ids])).logits[0, -1, :VOCAB_SIZE].float()


def test_greedy_takes_the_most_probable_token(policy: Policy, engine: Engine) -> None:
    sampling = SamplingParams(1.0, 12, STOPS, greedy=True)
    for prompt, (rollout,) in zip(
        PROMPTS, engine.generate(PROMPTS, 1, sampling, [0, 0, 0]), strict=True
    ):
        ids = list(prompt)
        for token, logprob in zip(rollout.token_ids, rollout.logprobs, strict=True):
            logits = forward(policy, ids)
            assert int(token) == int(logits.argmax())
            assert float(logprob) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-4)
            ids.append(int(token))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_of_the_distribution_drawn_from(
    policy: Policy, engine: Engine, temperature: float
) -> None:
    groups = engine.generate(PROMPTS, 8, SamplingParams(temperature, 24, STOPS), [1, 2, 3])
    assert largest_difference(policy, groups, temperature) < 1e-4
    assert largest_difference(policy, groups, 0.8 * temperature) > 0.05


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_with_their_probabilities(
    policy: Policy, engine: Engine, temperature: float
) -> None:
    """Chi-square over the vocabulary; the seed is fixed, so it cannot fail by chance later."""
    draws = 1500
    (group,) = engine.generate([[1, 2, 3]], draws, SamplingParams(temperature, 1, ()), [7])
    counts = np.bincount([int(r.token_ids[0]) for r in group], minlength=VOCAB_SIZE)
    probabilities = (forward(policy, [1, 2, 3]) / temperature).softmax(-1)
    expected = draws * probabilities.double().numpy()
    frequent = expected >= 5
    statistic = float((((counts - expected) ** 2) / expected)[frequent].sum())
    freedom = int(frequent.sum())
    assert freedom >= 4
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_completions_end_with_their_first_stop_token_or_at_the_limit(engine: Engine) -> None:
    finishes = set()
    for rollout in flat(engine.generate(PROMPTS, 16, SamplingParams(1.0, 6, STOPS), [1, 2, 3])):
        ids = rollout.token_ids.tolist()
        finishes.add(rollout.finish)
        assert not set(ids[:-1]) & set(STOPS)
        if rollout.finish is Finish.STOP:
            assert ids[-1] in STOPS
        else:
            assert len(ids) == 6
            assert ids[-1] not in STOPS
    assert finishes == {Finish.STOP, Finish.LENGTH}


def test_the_models_own_end_ends_nothing_unless_the_swarm_says_so(engine: Engine) -> None:
    groups = engine.generate(PROMPTS, 16, SamplingParams(1.5, 12, ()), [1, 2, 3])
    assert all(len(rollout.token_ids) == 12 for rollout in flat(groups))
    assert any(STOP_ID in rollout.token_ids[:-1] for rollout in flat(groups))


def test_ids_beyond_the_vocabulary_have_no_probability(policy: Policy, engine: Engine) -> None:
    """The higher the temperature, the more the seven would take; vLLM has none above 2."""
    groups = engine.generate(PROMPTS, 32, SamplingParams(2.0, 12, ()), [1, 2, 3])
    assert max(int(rollout.token_ids.max()) for rollout in flat(groups)) < VOCAB_SIZE
    assert largest_difference(policy, groups, 2.0) < 1e-4


def test_seed_decides(engine: Engine) -> None:
    sampling = SamplingParams(1.0, 20, ())
    first, again, other = (engine.generate([[1, 2]], 4, sampling, [s])[0] for s in (1, 1, 2))
    assert texts(first) == texts(again)
    assert not {tuple(t) for t in texts(first)} & {tuple(t) for t in texts(other)}
    assert len({tuple(t) for t in texts(first)}) == 4


def test_what_a_prompt_gets_does_not_depend_on_its_batch(engine: Engine) -> None:
    sampling = SamplingParams(1.0, 20, STOPS)
    together = engine.generate(PROMPTS, 4, sampling, [11, 12, 13])
    reverse = engine.generate(PROMPTS[::-1], 4, sampling, [13, 12, 11])[::-1]
    for index, prompt in enumerate(PROMPTS):
        (alone,) = engine.generate([prompt], 4, sampling, [11 + index])
        assert texts(alone) == texts(together[index]) == texts(reverse[index])


@pytest.mark.parametrize(
    ("prompts", "n", "seeds", "message"),
    [
        ([[1]], 0, [1], "n = 0"),
        ([[1]], 1, [1, 2], "2 seeds"),
        ([[]], 1, [1], "prompt 0"),
        ([[VOCAB_SIZE]], 1, [1], f"ids 0 to {VOCAB_SIZE - 1}"),
    ],
)
def test_requests_that_make_no_sense(
    engine: Engine, prompts: list[list[int]], n: int, seeds: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, n, SamplingParams(1.0, 4, ()), seeds)


def test_no_prompts_and_no_room(engine: Engine) -> None:
    assert engine.generate([], 2, SamplingParams(1.0, 4, ()), []) == []
    with pytest.raises(DataError, match=r"257 tokens.*256"):
        engine.generate([[1]], 1, SamplingParams(1.0, 256, ()), [1])


def test_new_weights_are_sampled_from(policy: Policy, engine: Engine) -> None:
    """Twice: a first change may take another way than a second. Last, for it changes the policy.

    The prompts are longer than a block of vLLM's cache, and the same each time.
    """
    sampling = SamplingParams(1.0, 40, ())
    prompts = [(prompt * 40)[:140] for prompt in PROMPTS]
    for seed in (21, 22):
        before = engine.generate(prompts, 4, sampling, [1, 2, 3])
        change(policy, seed)
        engine.sync()
        after = engine.generate(prompts, 4, sampling, [1, 2, 3])
        repeated = [prompt for prompt in prompts for _ in range(4)]
        assert measure(policy, repeated, flat(after), 1.0).largest < 1e-4
        assert measure(policy, repeated, flat(before), 1.0).mean > 10 * LIMITS[torch.float32]


@pytest.mark.parametrize("policy", ["lora"], indirect=True)
def test_it_begins_anew_after_a_death(policy: Policy, engine: Engine) -> None:
    """With the weights of now, not with those that it was started with."""
    sampling = SamplingParams(1.0, 20, STOPS)
    before = engine.generate(PROMPTS, 4, sampling, [1, 2, 3])
    if isinstance(engine, VllmEngine):
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
    else:
        engine.restart()
    after = engine.generate(PROMPTS, 4, sampling, [1, 2, 3])
    assert [texts(group) for group in before] == [texts(group) for group in after]
    assert largest_difference(policy, after, 1.0) < 1e-4


Call = Callable[..., dict[str, Any]]
Fault = Callable[[Call, str, dict[str, Any]], dict[str, Any]]


def stale_weights(call: Call, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {} if op == "reload" else call(op, **arguments)


def stale_cache(call: Call, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {} if op == "forget" else call(op, **arguments)


def stale_adapter(call: Call, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if op == "adapt":  # new files under the number that vLLM has
        arguments = {**arguments, "number": arguments["number"] - 1}
    return call(op, **arguments)


FAULTS = {"full": (stale_weights, stale_cache), "lora": (stale_adapter,)}
"""vLLM keeps the caches of adapters apart by their numbers."""


# The other engine has no copies that could be old.
@pytest.mark.parametrize("make", [pytest.param("vllm", marks=needs_vllm)], indirect=True)
def test_what_stays_the_old_one_is_detected(
    policy: Policy, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of vLLM's silent faults, put in on purpose, is found by the probe that nodes run."""
    probed = ProbedEngine(engine, policy)
    # Longer than a block of the prefix cache; what is asked for is the same before and after.
    asked = ([(prompt * 40)[:140] for prompt in PROMPTS], 2, SamplingParams(1.0, 24, ()), [1, 2, 3])
    probed.generate(*asked)
    call: Call = engine._call
    found = []

    def mend() -> None:  # a new start would too, but takes long
        found.append(probed.drift)
        monkeypatch.setattr(engine, "_call", call)
        engine.sync()

    monkeypatch.setattr(engine, "restart", mend)
    for number, fault in enumerate(FAULTS[policy.mode]):
        monkeypatch.setattr(engine, "_call", functools.partial(broken, call, fault))
        change(policy, seed=70 + number)
        probed.sync()
        probed.generate(*asked)
        assert len(found) == number + 1, fault.__name__
        assert found[-1] is not None
        assert found[-1].mean > probed.limit
        assert probed.drift is not None
        assert probed.drift.largest < 1e-4


def broken(call: Call, fault: Fault, op: str, **arguments: Any) -> dict[str, Any]:
    return fault(call, op, arguments)


def test_bfloat16_differs_no_more_than_its_rounding(make: Make, folder: Path) -> None:
    policy = load(folder, "full", "bf16")
    engine = make(policy)
    try:
        for seed in (None, 31):
            if seed is not None:
                change(policy, seed)
                engine.sync()
            groups = engine.generate(PROMPTS, 16, SamplingParams(0.9, 40, ()), [1, 2, 3])
            prompts = [prompt for prompt in PROMPTS for _ in range(16)]
            drift = measure(policy, prompts, flat(groups), 0.9)
            assert drift.mean < LIMITS[torch.bfloat16] / 2
            assert {rollout.logprobs.dtype for rollout in flat(groups)} == {np.dtype("float32")}
    finally:
        engine.close()
