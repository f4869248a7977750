"""The decoding loop against the plain forward pass, and its random numbers against probability."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import STOP_ID, VOCAB_SIZE, write_qwen2

from swarm.config import ModelSection
from swarm.errors import DataError
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl import engine as module
from swarm.rl.engine import SamplingParams, TransformersEngine
from swarm.rl.policy import Policy

PROMPTS = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
STOPS = (STOP_ID, 3, 4, 5)
"""Several, so that a random model stops now and then."""


@pytest.fixture(scope="module", params=["full", "lora"])
def policy(request: pytest.FixtureRequest, tiny_folder: Path) -> Policy:
    loaded = Policy.load(
        ModelSection(path=str(tiny_folder), mode=request.param, lora_rank=4), seed=3
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in loaded.trainable_parameters().items():
            if "lora_B" in name:
                parameter.copy_(0.03 * torch.randn(parameter.shape, generator=generator))
    return loaded


@pytest.fixture(scope="module")
def engine(policy: Policy) -> TransformersEngine:
    return TransformersEngine(policy)


def _same(first: Rollout, second: Rollout) -> bool:
    return first.finish == second.finish and first.token_ids.tolist() == second.token_ids.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_are_those_of_the_trained_model(
    policy: Policy, engine: TransformersEngine, temperature: float
) -> None:
    """Prefill, cache, padding, compaction and merged adapter change nothing but rounding."""
    sampling = SamplingParams(temperature, 24, STOPS)
    groups = engine.generate(PROMPTS, 16, sampling, seeds=[1, 2, 3])
    rollouts = [rollout for group in groups for rollout in group]
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 5
    prompts = [prompt for prompt in PROMPTS for _ in range(16)]
    with torch.no_grad():
        expected, mask = policy.completion_logprobs(
            prompts, [rollout.token_ids for rollout in rollouts], temperature
        )
    found = torch.from_numpy(np.concatenate([rollout.logprobs for rollout in rollouts]))
    torch.testing.assert_close(found, expected[mask], rtol=0.0, atol=1e-5)


def test_completions_end_with_their_first_stop_token_or_at_the_limit(
    engine: TransformersEngine,
) -> None:
    groups = engine.generate(PROMPTS, 32, SamplingParams(1.0, 6, STOPS), seeds=[1, 2, 3])
    finishes = set()
    for rollout in (rollout for group in groups for rollout in group):
        ids = rollout.token_ids.tolist()
        finishes.add(rollout.finish)
        assert not set(ids[:-1]) & set(STOPS)
        if rollout.finish is Finish.STOP:
            assert ids[-1] in STOPS
        else:
            assert len(ids) == 6
            assert ids[-1] not in STOPS
    assert finishes == {Finish.STOP, Finish.LENGTH}


@pytest.mark.parametrize("n", [1, 8])
def test_what_a_prompt_gets_does_not_depend_on_its_batch(
    engine: TransformersEngine, n: int
) -> None:
    sampling = SamplingParams(1.0, 20, STOPS)
    together = engine.generate(PROMPTS, n, sampling, seeds=[11, 12, 13])
    reverse = engine.generate(PROMPTS[::-1], n, sampling, seeds=[13, 12, 11])[::-1]
    for index, prompt in enumerate(PROMPTS):
        (alone,) = engine.generate([prompt], n, sampling, seeds=[11 + index])
        for other in (together[index], reverse[index]):
            assert all(map(_same, alone, other))
            for a, b in zip(alone, other, strict=True):
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0.0)


def test_compaction_changes_nothing(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(1.0, 20, STOPS)
    compacted = engine.generate(PROMPTS, 8, sampling, seeds=[1, 2, 3])
    monkeypatch.setattr(module, "COMPACT_BELOW", -1.0)
    whole = engine.generate(PROMPTS, 8, sampling, seeds=[1, 2, 3])
    for first, second in zip(compacted, whole, strict=True):
        assert all(map(_same, first, second))


def test_finished_rows_are_dropped(
    policy: Policy, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model sees fewer rows as completions end, and none after the last has ended."""
    rows = []
    original = policy.hidden_states

    def counted(input_ids: torch.Tensor, **arguments: object) -> torch.Tensor:
        rows.append(input_ids.shape[0])
        return original(input_ids, **arguments)

    monkeypatch.setattr(policy, "hidden_states", counted)
    (group,) = engine.generate([[1, 2]], 64, SamplingParams(1.0, 200, STOPS), seeds=[1])
    longest = max(len(rollout.token_ids) for rollout in group)
    assert longest < 200
    assert rows[0] == 1  # the prompt is run once
    assert rows[1] == 64 or rows[1] <= 48
    assert rows[1:] == sorted(rows[1:], reverse=True)
    assert rows[-1] <= 2
    assert len(rows) == longest


def test_seed_decides(engine: TransformersEngine) -> None:
    sampling = SamplingParams(1.0, 20, ())
    first, again, other = (
        engine.generate([[1, 2]], 4, sampling, seeds=[seed])[0] for seed in (1, 1, 2)
    )
    assert all(map(_same, first, again))
    assert not any(map(_same, first, other))
    assert len({tuple(rollout.token_ids.tolist()) for rollout in first}) == 4


def test_global_random_state_is_neither_used_nor_changed(engine: TransformersEngine) -> None:
    sampling = SamplingParams(1.0, 8, ())
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = engine.generate([[1]], 2, sampling, seeds=[5])[0]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert all(map(_same, first, engine.generate([[1]], 2, sampling, seeds=[5])[0]))


def test_greedy_takes_the_most_probable_token(policy: Policy, engine: TransformersEngine) -> None:
    sampling = SamplingParams(1.0, 12, STOPS, greedy=True)
    groups = engine.generate(PROMPTS, 2, sampling, seeds=[0, 0, 0])
    for prompt, (first, second) in zip(PROMPTS, groups, strict=True):
        assert _same(first, second)
        ids = list(prompt)
        for token, logprob in zip(first.token_ids, first.logprobs, strict=True):
            with torch.no_grad():
                logits = policy.model(input_ids=torch.tensor([ids])).logits[0, -1]
            assert int(token) == int(logits.argmax())
            assert float(logprob) == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
            ids.append(int(token))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_with_their_probabilities(
    policy: Policy, engine: TransformersEngine, temperature: float
) -> None:
    """Chi-square over the vocabulary; the seed is fixed, so it cannot fail by chance later."""
    draws = 4000
    (group,) = engine.generate([[1, 2, 3]], draws, SamplingParams(temperature, 1, ()), seeds=[7])
    counts = np.bincount([int(r.token_ids[0]) for r in group], minlength=VOCAB_SIZE)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    expected = draws * (logits / temperature).softmax(-1).double().numpy()
    frequent = expected >= 5
    statistic = float((((counts - expected) ** 2) / expected)[frequent].sum())
    freedom = int(frequent.sum())
    assert freedom >= 4
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_sampling_never_takes_an_impossible_token() -> None:
    """The ends of the unit interval, with impossible tokens at both ends of the vocabulary."""
    logprobs = torch.tensor([[-math.inf, math.log(0.5), -math.inf, math.log(0.5), -math.inf]])
    uniforms = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 1.0 - 2**-53], dtype=torch.float64)
    drawn = module._draw(logprobs.expand(4, 5), uniforms)
    assert drawn.tolist() == [1, 1, 3, 3]


def test_prompts_of_many_lengths_and_no_prompts(engine: TransformersEngine) -> None:
    sampling = SamplingParams(1.0, 3, ())
    assert engine.generate([], 4, sampling, seeds=[]) == []
    prompts = [[1] * length for length in range(1, 12)]
    groups = engine.generate(prompts, 2, sampling, seeds=list(range(11)))
    assert [len(group) for group in groups] == [2] * 11


def test_learned_positions_and_sliding_windows(tmp_path: Path) -> None:
    """Padding on the left must move neither positions nor the window."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.5,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    write_qwen2(
        tmp_path / "sliding", use_sliding_window=True, sliding_window=4, max_window_layers=0
    )
    for name in ("gpt2", "sliding"):
        policy = Policy.load(ModelSection(path=str(tmp_path / name)), seed=0)
        sampling = SamplingParams(1.0, 12, STOPS)
        groups = TransformersEngine(policy).generate(PROMPTS, 6, sampling, seeds=[1, 2, 3])
        rollouts = [rollout for group in groups for rollout in group]
        with torch.no_grad():
            expected, mask = policy.completion_logprobs(
                [p for p in PROMPTS for _ in range(6)], [r.token_ids for r in rollouts], 1.0
            )
        found = torch.from_numpy(np.concatenate([rollout.logprobs for rollout in rollouts]))
        torch.testing.assert_close(found, expected[mask], rtol=0.0, atol=1e-5)


def test_weights_trained_meanwhile_are_sampled_from(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder), mode="lora", lora_rank=4), seed=0)
    engine = TransformersEngine(policy)
    sampling = SamplingParams(1.0, 16, ())
    before = engine.generate([[1, 2]], 4, sampling, seeds=[1])[0]
    logprobs, _ = policy.completion_logprobs([[1, 2]], [[5, 5]], 1.0)
    logprobs.sum().backward()  # training goes on after sampling
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter += 0.1
    after = engine.generate([[1, 2]], 4, sampling, seeds=[1])[0]
    assert not all(map(_same, before, after))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature, 4, ())


def test_completion_must_fit_into_the_context(engine: TransformersEngine) -> None:
    with pytest.raises(DataError, match=r"257 tokens.*256"):
        engine.generate([[1]], 1, SamplingParams(1.0, 256, ()), seeds=[1])
