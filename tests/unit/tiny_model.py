"""Tiny random models with a 20-character tokenizer, as Hugging Face folders, for tests."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

ALPHABET = "0123456789+-*=;(). "
"""Characters with ids 0 to 18; STOP follows."""
STOP = "<|end|>"
STOP_ID = len(ALPHABET)
VOCAB_SIZE = STOP_ID + 1


def write_tokenizer(folder: Path) -> None:
    """One token per character, and the stop token."""
    vocabulary = {token: i for i, token in enumerate([*ALPHABET, STOP])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([STOP])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": STOP}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_qwen2(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random Qwen2, 32 wide, 2 layers, of float32 weights, large enough to have opinions.

    Args:
        changes: of the model's configuration.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": STOP_ID,
            "pad_token_id": STOP_ID,
            **changes,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder
