"""Loading models, and completion log-probs against the plain computation over all logits."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import STOP_ID, VOCAB_SIZE, write_qwen2
from torch import Tensor, nn

from swarm.config import ModelSection
from swarm.errors import ConfigError, DataError
from swarm.model_files import context_tokens
from swarm.model_memory import ModelFacts
from swarm.rl import policy as module
from swarm.rl import token_logprobs
from swarm.rl.policy import Policy

PROMPTS = [[1, 2, 3, 4, 5], [7], [3, 3], [9, 8, 7, 6, 5, 4]]
COMPLETIONS = [[5, 6, STOP_ID], [1, 2, 3, 4, 5, 6, 7], [0], [2, 2]]


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "untied"
    return write_qwen2(folder, seed=1, tie_word_embeddings=False)


@pytest.fixture(params=["tied", "untied", "lora"])
def policy(request: pytest.FixtureRequest, tiny_folder: Path, untied_folder: Path) -> Policy:
    folder = untied_folder if request.param == "untied" else tiny_folder
    mode = "lora" if request.param == "lora" else "full"
    loaded = Policy.load(ModelSection(path=str(folder), mode=mode, lora_rank=4), seed=3)
    _disturb(loaded)
    return loaded


@pytest.fixture(params=["at once", "chunked"])
def chunking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "chunked":
        monkeypatch.setattr(
            module,
            "token_logprobs",
            lambda *arguments: token_logprobs.token_logprobs(*arguments, 3 * VOCAB_SIZE),
        )


def _disturb(policy: Policy, scale: float = 0.1) -> None:
    """An adapter begins as zero; make it do something."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            if "lora_B" in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def _full_logits(policy: Policy, temperature: float, side: str) -> Tensor:
    """(N, T) log-probs from one forward pass over all positions, padded on the given side."""
    rows = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    width = max(map(len, rows))
    before = [width - len(row) if side == "left" else 0 for row in rows]
    ids = torch.zeros((len(rows), width), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (row, start) in enumerate(zip(rows, before, strict=True)):
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = policy.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    result = torch.zeros((len(rows), max(map(len, COMPLETIONS))))
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        start = before[i] + len(prompt) - 1
        own = (logits[i, start : start + len(completion)].float() / temperature).log_softmax(-1)
        result[i, : len(completion)] = own.gather(-1, torch.tensor(completion)[:, None])[:, 0]
    return result


@pytest.mark.usefixtures("chunking")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_gradients_equal_those_of_all_logits(
    policy: Policy, side: str, temperature: float
) -> None:
    weights = torch.linspace(-1, 2, 28).reshape(4, 7)
    parameters = policy.trainable_parameters()
    expected = _full_logits(policy, temperature, side)
    wanted = torch.autograd.grad((expected * weights).sum(), list(parameters.values()))
    found, mask = policy.completion_logprobs(PROMPTS, COMPLETIONS, temperature)
    assert found.dtype == torch.float32
    assert mask.tolist() == [[t < len(c) for t in range(7)] for c in COMPLETIONS]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad((found * weights).sum(), list(parameters.values()))
    for name, gradient, want in zip(parameters, gradients, wanted, strict=True):
        torch.testing.assert_close(
            gradient, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()), msg=name
        )
    assert any(float(want.abs().max()) > 1e-3 for want in wanted)


def test_padding_has_logprob_zero_and_no_influence(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=0)
    together, _ = policy.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        alone, _ = policy.completion_logprobs([prompt], [completion], 1.0)
        torch.testing.assert_close(together[i, : len(completion)], alone[0], rtol=1e-5, atol=1e-5)
        assert together[i, len(completion) :].tolist() == [0.0] * (7 - len(completion))


def test_arrays_are_taken_as_they_come_over_the_wire(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=0)
    packed = [np.frombuffer(np.array(c, "<i4").tobytes(), "<i4") for c in COMPLETIONS]
    found, _ = policy.completion_logprobs(PROMPTS, packed, 1.0)
    expected, _ = policy.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    assert torch.equal(found, expected)


def test_token_ids_beyond_the_tokenizer_have_no_probability(tmp_path: Path) -> None:
    """Models pad their embedding; those rows belong to no token."""
    folder = write_qwen2(tmp_path, vocab_size=VOCAB_SIZE + 12)
    padded = Policy.load(ModelSection(path=str(folder)), seed=0, vocab_size=VOCAB_SIZE)
    hidden = padded.hidden_states(torch.tensor([[1, 2, 3]]))
    assert padded.logits(hidden, 1.0).shape == (1, 3, VOCAB_SIZE)
    with torch.no_grad():
        everything = [
            padded.completion_logprobs([[1]], [[t]], 1.0)[0].exp() for t in range(VOCAB_SIZE)
        ]
    assert float(sum(everything)) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(ValueError, match=f"ids 0 to {VOCAB_SIZE - 1}"):
        padded.completion_logprobs([[1]], [[VOCAB_SIZE]], 1.0)
    with pytest.raises(DataError, match=f"has {VOCAB_SIZE + 12} token ids.*{VOCAB_SIZE + 13}"):
        Policy.load(ModelSection(path=str(folder)), seed=0, vocab_size=VOCAB_SIZE + 13)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[1]], [[1], [2]], "1 and 2"),
        ([], [], "0 and 0"),
        ([[1], []], [[1], [1]], "prompt 1"),
        ([[1]], [[]], "completion 0"),
        ([[-1]], [[1]], "-1"),
    ],
)
def test_sequences_that_cannot_be_scored(
    tiny_folder: Path, prompts: list[list[int]], completions: list[list[int]], message: str
) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=0)
    with pytest.raises(ValueError, match=message):
        policy.completion_logprobs(prompts, completions, 1.0)


def test_sequence_longer_than_the_context_is_refused(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=0)
    policy.completion_logprobs([[1] * 200], [[1] * 56], 1.0)
    with pytest.raises(DataError, match=r"257 tokens.*256"):
        policy.completion_logprobs([[1] * 200], [[1] * 57], 1.0)


# -- what is trained -------------------------------------------------------------------------------


def test_adapter_goes_on_all_linear_layers_but_the_head(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder), mode="lora", lora_rank=4), seed=0)
    adapted = {re.search(r"(\w+)_proj", name)[1] for name in policy.trainable_parameters()}
    assert adapted == {*"qkvo", "gate", "up", "down"}
    total, trained = policy.count_parameters()
    assert trained == sum(p.numel() for p in policy.trainable_parameters().values())
    assert (
        total
        == trained + Policy.load(ModelSection(path=str(tiny_folder)), seed=0).count_parameters()[0]
    )


def test_adapter_depends_on_the_seed_only(tiny_folder: Path) -> None:
    section = ModelSection(path=str(tiny_folder), mode="lora")
    first, again, other = (
        Policy.load(section, seed=seed).trainable_parameters() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_named_targets_only(tiny_folder: Path) -> None:
    section = ModelSection(path=str(tiny_folder), mode="lora", lora_targets=("v_proj",))
    assert all("v_proj" in name for name in Policy.load(section, seed=0).trainable_parameters())


def test_unknown_target_is_refused_with_the_layers_there_are(tiny_folder: Path) -> None:
    section = ModelSection(path=str(tiny_folder), mode="lora", lora_targets=("qkv",))
    with pytest.raises(ConfigError, match=r"model\.lora_targets = \['qkv'\].*q_proj"):
        Policy.load(section, seed=0)


def test_adapted_head_is_refused(untied_folder: Path) -> None:
    section = ModelSection(path=str(untied_folder), mode="lora", lora_targets=("lm_head",))
    with pytest.raises(ConfigError, match="head"):
        Policy.load(section, seed=0)


def test_merged_layers_compute_the_same_and_go_away(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder), mode="lora", lora_rank=4), seed=0)
    _disturb(policy)
    ids = torch.tensor([[1, 2, 3, 4]])
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    apart = policy.hidden_states(ids)
    with policy.merged():
        assert not any("lora" in type(m).__module__ for m in policy.causal_lm.modules())
        together = policy.hidden_states(ids)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    after = policy.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(policy.hidden_states(ids), apart)


def test_short_weights_are_not_merged(tiny_folder: Path) -> None:
    section = ModelSection(path=str(tiny_folder), mode="lora", precision="bf16")
    policy = Policy.load(section, seed=0)
    with policy.merged():
        assert any("lora" in type(m).__module__ for m in policy.causal_lm.modules())


def test_dropout_is_off(tmp_path: Path) -> None:
    folder = write_qwen2(tmp_path, attention_dropout=0.5)
    policy = Policy.load(ModelSection(path=str(folder)), seed=0)
    first, _ = policy.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    second, _ = policy.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    assert torch.equal(first, second)


def test_bfloat16_gives_float32_logprobs(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder), precision="bf16"), seed=0)
    exact = Policy.load(ModelSection(path=str(tiny_folder), precision="fp32"), seed=0)
    found, _ = policy.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    expected, _ = exact.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    assert policy.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert 0.0 < float((found - expected).abs().mean().detach()) < 0.2


# -- saving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_saved_weights_come_back_to_the_bit(tiny_folder: Path, tmp_path: Path, mode: str) -> None:
    section = ModelSection(path=str(tiny_folder), mode=mode, lora_rank=4)
    policy = Policy.load(section, seed=0)
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter += 0.01
    policy.save(tmp_path)
    again = Policy.load(section, seed=9, resume=tmp_path)
    expected, found = policy.model.state_dict(), again.model.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert again.source == policy.source


def test_saved_folder_is_one_of_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=0)
    policy.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    expected = policy.logits(policy.hidden_states(ids), 1.0)
    assert torch.equal(plain(input_ids=ids).logits, expected)


def test_adapter_of_another_rank_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    section = ModelSection(path=str(tiny_folder), mode="lora", lora_rank=4)
    Policy.load(section, seed=0).save(tmp_path)
    with pytest.raises(DataError, match="adapter of another shape"):
        Policy.load(section.model_copy(update={"lora_rank": 8}), seed=0, resume=tmp_path)


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_training_begins_with_an_existing_adapter(
    tiny_folder: Path, tmp_path: Path, mode: str
) -> None:
    """In its own form, or merged into the weights."""
    trained = Policy.load(ModelSection(path=str(tiny_folder), mode="lora", lora_rank=3), seed=0)
    _disturb(trained)
    trained.save(tmp_path)
    section = ModelSection(path=str(tiny_folder), mode=mode, adapter=str(tmp_path))
    begun = Policy.load(section, seed=9)
    expected, _ = trained.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    found, _ = begun.completion_logprobs(PROMPTS, COMPLETIONS, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert any("lora" in type(m).__module__ for m in begun.causal_lm.modules()) == (mode == "lora")
    plain, _ = Policy.load(ModelSection(path=str(tiny_folder)), seed=0).completion_logprobs(
        PROMPTS, COMPLETIONS, 1.0
    )
    assert not torch.allclose(plain, expected, atol=1e-2)


@pytest.mark.parametrize(
    "change", [{"use_dora": True}, {"bias": "all"}, {"peft_type": "LOHA"}, {"target_modules": ".*"}]
)
def test_adapters_of_other_kinds_are_refused(
    tiny_folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    Policy.load(ModelSection(path=str(tiny_folder), mode="lora"), seed=0).save(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    section = ModelSection(path=str(tiny_folder), mode="lora", adapter=str(tmp_path))
    with pytest.raises(DataError, match=rf"plain LoRA.*{next(iter(change))}"):
        Policy.load(section, seed=0)


# -- models that would be computed wrongly ---------------------------------------------------------


def _save(model: Any, folder: Path) -> ModelSection:
    model.save_pretrained(folder)
    return ModelSection(path=str(folder))


_SMALL = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _minicpm3() -> Any:
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

    return MiniCPM3ForCausalLM(MiniCPM3Config(**{**_SMALL, "num_key_value_heads": 2}))


def test_hidden_states_changed_before_the_head_are_refused(tmp_path: Path) -> None:
    section = _save(_minicpm3(), tmp_path)
    with pytest.raises(ConfigError, match="changes the hidden states before its head"):
        Policy.load(section, seed=0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_logits_changed_after_the_head_are_refused(tiny_folder: Path, dtype: str) -> None:
    """By something that no known name in the configuration stands for."""
    policy = Policy.load(ModelSection(path=str(tiny_folder), precision=dtype), seed=0)
    forward = policy.model.forward

    def changed(**arguments: Any) -> Any:
        output = forward(**arguments)
        output.logits = output.logits * 1.1
        return output

    policy.model.forward = changed
    with pytest.raises(ConfigError, match="changes the logits after its head"):
        Policy(policy.model, mode="full", source=tiny_folder, vocab_size=None)


def test_attention_that_leaves_out_the_models_softcap_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    section = _save(Gemma2ForCausalLM(Gemma2Config(**_SMALL)), tmp_path)
    assert Policy.load(section, seed=0).config._attn_implementation == "eager"
    with pytest.raises((ConfigError, DataError), match=r"sdpa|scaled_dot_product"):
        Policy.load(section.model_copy(update={"attention": "sdpa"}), seed=0)


def test_model_without_a_plain_head_is_refused(tmp_path: Path) -> None:
    """BERT's head transforms the hidden states first."""
    from transformers import BertConfig, BertLMHeadModel

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = BertConfig(**{n: _SMALL[n] for n in names}, num_attention_heads=2, is_decoder=True)
    with pytest.raises(ConfigError, match="changes the hidden states before its head"):
        Policy.load(_save(BertLMHeadModel(config), tmp_path), seed=0)


def test_model_that_sees_later_tokens_is_refused(tiny_folder: Path) -> None:
    policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=0)
    for layer in policy.causal_lm.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ConfigError, match="attends to later tokens"):
        Policy(policy.model, mode="full", source=tiny_folder, vocab_size=None)


def test_other_architectures_are_taken(tmp_path: Path) -> None:
    """Learned positions, a head in another place, Conv1D in place of linear layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    section = _save(GPT2LMHeadModel(config), tmp_path)
    policy = Policy.load(section, seed=0)
    found, _ = policy.completion_logprobs([[1, 2]], [[3, 4]], 1.0)
    logits = policy.model(input_ids=torch.tensor([[1, 2, 3]])).logits.log_softmax(-1)
    torch.testing.assert_close(found[0], torch.stack([logits[0, 1, 3], logits[0, 2, 4]]))


# -- files and configuration -----------------------------------------------------------------------


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "copy")


def _load(folder: Path, **changes: Any) -> Policy:
    return Policy.load(ModelSection(path=str(folder), **changes), seed=0)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        _load(tmp_path / "nowhere")


def test_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"copy: no model\.safetensors"):
        _load(copy)


def test_pickled_weights_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(DataError, match=r"pytorch_model\.bin, which can hold code"):
        _load(copy)


def test_missing_shard(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(DataError, match=r"missing: model-00002-of-00002\.safetensors"):
        _load(copy)
    index.write_text("{}")
    with pytest.raises(DataError, match="not a weight index"):
        _load(copy)


def test_truncated_weights(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="copy: cannot be loaded"):
        _load(copy)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_attention_heads": 7}, "copy: cannot be loaded"),
        ({"vocab_size": "x"}, "copy: cannot be loaded"),
        ({"hidden_size": -4}, "copy: cannot be loaded"),
        ({"hidden_size": 4}, "other shapes than config.json says"),
        ({"num_attention_heads": 0}, "copy: cannot be loaded"),
        ({"hidden_act": "nosuch"}, "copy: cannot be loaded"),
    ],
)
def test_a_configuration_that_no_model_has(copy: Path, change: dict[str, Any], says: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DataError, match=says):
        _load(copy)


def test_a_configuration_that_is_no_object(copy: Path) -> None:
    (copy / "config.json").write_text("[]")
    with pytest.raises(DataError, match="copy: cannot be loaded"):
        _load(copy)
    with pytest.raises(DataError, match=r"config\.json: the model's sizes"):
        ModelFacts.read(copy)
    with pytest.raises(DataError, match=r"config\.json: cannot be read: no JSON object"):
        context_tokens(copy)


def test_weights_that_are_no_numbers(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="computes NaN"):
        _load(copy)


def test_missing_tensor(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"not in the files: model\.layers\.1\.mlp\.up_proj"):
        _load(copy)


def test_unknown_architecture(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "homemade", "architectures": ["HomemadeLM"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="homemade"):
        _load(copy)


def test_code_in_the_folder_is_not_run(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "model_type": "homemade",
        "auto_map": {
            "AutoConfig": "code.HomemadeConfig",
            "AutoModelForCausalLM": "code.HomemadeLM",
        },
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "code.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\n")
    with pytest.raises(DataError):
        _load(copy)
    assert not (copy / "ran").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_absent_device(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.device = 'cuda'"):
        _load(tiny_folder, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_on_the_cpu_is_float32(tiny_folder: Path) -> None:
    policy = _load(tiny_folder)
    assert (policy.device.type, policy.dtype) == ("cpu", torch.float32)
    assert all(isinstance(p, nn.Parameter) for p in policy.trainable_parameters().values())
