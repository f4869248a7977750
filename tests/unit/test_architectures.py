"""Architectures of transformers, tiny and random: log-probs, gradients, sampling, checkpointing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from swarm.config import ModelSection
from swarm.rl import policy as module
from swarm.rl import token_logprobs
from swarm.rl.engine import SamplingParams, TransformersEngine
from swarm.rl.policy import Policy

VOCABULARY = 24
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7], [8, 9, 10, 11]]
STOPS = (3, 4)

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = {"sliding_window": 5}  # shorter than prompt and completion
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "gemma2": ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0, **WINDOW}),
    "gemma3": ("Gemma3", {"head_dim": 8, "final_logit_softcapping": 2.0, **WINDOW}),
    "mistral": ("Mistral", WINDOW),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {"logits_scaling": 8.0, "residual_multiplier": 0.5}),
    "cohere": ("Cohere", {"logit_scale": 0.0625}),
    "cohere2": ("Cohere2", {"logit_scale": 0.25, **WINDOW}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "gpt-neox": ("GPTNeoX", {}),
}
TIED = {"llama-tied", "qwen2", "gemma2", "gemma3", "cohere", "cohere2", "smollm3"}


def _make(name: str) -> Any:
    kind, changes = ARCHITECTURES[name]
    options = {**COMMON, **changes}
    if kind == "GPTNeoX":
        del options["num_key_value_heads"]
    if kind == "Gemma3":
        config = transformers.Gemma3TextConfig(**options)
    else:
        config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    _make(request.param).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["full", "lora"])
def policy(request: pytest.FixtureRequest, folder: Path) -> Policy:
    section = ModelSection(path=str(folder), mode=request.param, lora_rank=2, precision="fp32")
    loaded = Policy.load(section, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in loaded.trainable_parameters().items():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return loaded


def _one_by_one(policy: Policy, prompts: Any, completions: Any, temperature: float) -> list[Tensor]:
    """Log-probs by the whole model's own forward, each sequence alone and without a cache."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0].float()
        own = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        found.append(own.gather(-1, torch.tensor([*completion])[:, None])[:, 0])
    return found


COMPLETIONS = [[5, 6, 3], [1, 2, 3, 4, 5, 6, 7, 8], [0]]


def test_logprobs_and_gradients_are_the_models_own(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[..., Tensor] = token_logprobs.token_logprobs
    by_fives = 5 * VOCABULARY  # so that the head's recomputation is at work
    monkeypatch.setattr(module, "token_logprobs", lambda *arguments: original(*arguments, by_fives))
    parameters = policy.trainable_parameters()
    weights = torch.linspace(-1, 2, 12)
    expected = torch.cat(_one_by_one(policy, PROMPTS, COMPLETIONS, 0.8))
    wanted = torch.autograd.grad(
        (expected * weights).sum(), list(parameters.values()), allow_unused=True
    )
    values, mask = policy.completion_logprobs(PROMPTS, COMPLETIONS, 0.8)
    torch.testing.assert_close(values[mask], expected, rtol=1e-4, atol=2e-5)
    gradients = torch.autograd.grad(
        (values[mask] * weights).sum(), list(parameters.values()), allow_unused=True
    )
    for name, gradient, want in zip(parameters, gradients, wanted, strict=True):
        assert (gradient is None) == (want is None), name
        if gradient is not None and want is not None:
            tolerance = 1e-3 * max(float(want.abs().max()), 1e-3)
            torch.testing.assert_close(gradient, want, rtol=1e-3, atol=tolerance, msg=name)
    assert any(want is not None and float(want.abs().max()) > 1e-3 for want in wanted)


def test_sampled_logprobs_are_those_of_the_trained_model(policy: Policy) -> None:
    """Through cache, padding, compaction, sliding windows and a merged adapter."""
    groups = TransformersEngine(policy).generate(
        PROMPTS, 8, SamplingParams(0.8, 12, STOPS), seeds=[1, 2, 3]
    )
    rollouts = [rollout for group in groups for rollout in group]
    assert len({len(rollout.token_ids) for rollout in rollouts}) > 3
    prompts = [prompt for prompt in PROMPTS for _ in range(8)]
    completions = [rollout.token_ids.tolist() for rollout in rollouts]
    sampled = np.concatenate([rollout.logprobs for rollout in rollouts])
    with torch.no_grad():
        values, mask = policy.completion_logprobs(prompts, completions, 0.8)
        own = torch.cat(_one_by_one(policy, prompts, completions, 0.8)).numpy()
    np.testing.assert_allclose(sampled, values[mask].numpy(), rtol=0, atol=5e-5)
    np.testing.assert_allclose(sampled, own, rtol=0, atol=5e-5)


def test_heads_are_tied_as_their_models_say(folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(folder), precision="fp32"), seed=0)
    embedding = policy.causal_lm.get_input_embeddings().weight
    head = policy.causal_lm.get_output_embeddings().weight
    assert (embedding is head) == (folder.name in TIED)


def test_gradients_with_checkpointing_are_the_same_to_the_bit(folder: Path) -> None:
    found = {}
    for switch in ("off", "on"):
        section = ModelSection(path=str(folder), precision="fp32", gradient_checkpointing=switch)  # type: ignore[arg-type]
        policy = Policy.load(section, seed=0)
        values, mask = policy.completion_logprobs(PROMPTS, COMPLETIONS, 0.8)
        values[mask].sum().backward()
        parameters = policy.trainable_parameters()
        found[switch] = {k: p.grad for k, p in parameters.items() if p.grad is not None}
    assert found["off"].keys() == found["on"].keys()
    assert all(torch.equal(found["off"][name], found["on"][name]) for name in found["off"])
