"""A model folder's tokenizer, its fingerprint, and the hashes of token ids."""

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from swarm.errors import DataError
from swarm.text.tokenizer import Tokenizer, prompt_hash, tokens_sha256

WORDS = {"<unk>": 0, "one": 1, "two": 2, "\u00e9t\u00e9": 3, "<eos>": 7}


def word_level(words: dict[str, int] = WORDS) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


BYTES = Tokenizer(byte_level())


def folder_with(
    folder: Path, tokenizer: tokenizers.Tokenizer | None = None, config: Any = None
) -> Path:
    (tokenizer or word_level()).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


# -- reading a folder ----------------------------------------------------------------------------


def test_a_folder_is_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, config={"eos_token": "<eos>"}))
    assert tokenizer.vocab_size == 8  # ids reach 7, though there are five tokens
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<eos>", 7)
    assert tokenizer.chat_template is None
    assert tokenizer.token_to_id("two") == 2
    assert tokenizer.token_to_id("three") is None


def test_a_folder_without_a_config_has_no_eos_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (None, None)


def test_tokens_may_be_objects(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "<eos>", "lstrip": False}}
    assert Tokenizer.from_folder(folder_with(tmp_path, config=config)).eos_token == "<eos>"


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        Tokenizer.from_folder(folder)
    return str(caught.value)


def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path) -> None:
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    assert refused(tmp_path).startswith(f"{path}: no such file")
    path.write_text("{}")
    assert refused(tmp_path).startswith(f"{path}: no tokenizer of the tokenizers library: ")
    path.write_bytes(b"\xff")
    assert refused(tmp_path).startswith(f"{path}: cannot be read: ")
    folder_with(tmp_path, config={"eos_token": "</s>"})
    assert refused(tmp_path) == f"{config}: eos_token '</s>' is no token of {path}"
    config.write_text("{")
    assert refused(tmp_path).startswith(f"{config}: not valid JSON: ")
    config.write_text("[" * 100_000)
    assert refused(tmp_path).startswith(f"{config}: not valid JSON: ")
    config.write_text("[]")
    assert refused(tmp_path) == f"{config}: must hold a JSON object, not list"
    config.unlink()
    (tmp_path / "chat_template.jinja").mkdir()
    assert refused(tmp_path).startswith(f"{tmp_path / 'chat_template.jinja'}: cannot be read: ")


def test_special_tokens_are_set_in_the_chat_template_that_mentions_them(tmp_path: Path) -> None:
    config = {
        "eos_token": "<eos>",
        "bos_token": {"content": '"\\\n\u00e9'},
        "pad_token": "<eos>",
        "unk_token": None,
        "extra_special_tokens": {"image_token": "<image>"},
        "chat_template": "{{ bos_token }}{{ image_token }}{{ unk_token }}",
    }
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, config=config))
    assert tokenizer.chat_template == (
        '{% set bos_token = "\\"\\\\\\n\u00e9" %}\n'
        '{% set image_token = "<image>" %}\n'
        "{{ bos_token }}{{ image_token }}{{ unk_token }}"
    )


@pytest.mark.parametrize("template", [None, 5, [], [{"name": "tool_use", "template": "x"}], ["x"]])
def test_no_usable_template_is_none(template: Any, tmp_path: Path) -> None:
    folder_with(tmp_path, config={"chat_template": template})
    assert Tokenizer.from_folder(tmp_path).chat_template is None


# -- text and token ids --------------------------------------------------------------------------


def test_nothing_is_added_padded_or_cut() -> None:
    library = word_level()
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 7)]
    )
    library.enable_padding(length=9, pad_id=1)
    library.enable_truncation(2)
    tokenizer = Tokenizer(library)
    assert tokenizer.encode("one two one <eos>") == [1, 2, 1, 7]
    assert tokenizer.encode("") == []


def test_decoding_leaves_special_tokens_out_unless_asked() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("ab<eos>")
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "ab<eos>"
    assert tokenizer.decode([]) == ""


def test_ids_without_a_token_decode_to_nothing() -> None:
    assert Tokenizer(word_level()).decode([1, 5, 6, 2]) == "one two"


@given(st.text(max_size=60))
def test_bytes_come_back_as_they_went(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text), skip_special=False) == text


@given(st.lists(st.integers(0, 256), max_size=60))
def test_any_ids_decode_to_text(ids: list[int]) -> None:
    BYTES.decode(ids).encode("utf-8")


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    folder = folder_with(tmp_path, byte_level(), config)
    theirs = AutoTokenizer.from_pretrained(folder)
    mine = Tokenizer.from_folder(folder)
    for text in ("2 + 3 = 5", "  \u00e9\U0001f600\n\n", "a<eos>b", ""):
        ids = mine.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert mine.vocab_size == len(theirs)
    assert mine.eos_token_id == theirs.eos_token_id


# -- hashes --------------------------------------------------------------------------------------


def test_the_fingerprint_is_over_the_documented_bytes() -> None:
    expected = hashlib.sha256(
        b"swarm-node tokenizer 1\0"
        b"\0\0\0\0\5\0\0\0<unk>"
        b"\1\0\0\0\3\0\0\0one"
        b"\2\0\0\0\3\0\0\0two"
        b"\3\0\0\0\5\0\0\0\xc3\xa9t\xc3\xa9"
        b"\7\0\0\0\5\0\0\0<eos>"
    ).hexdigest()
    assert Tokenizer(word_level()).fingerprint() == expected


def test_the_fingerprint_is_of_the_ids_alone() -> None:
    reference = Tokenizer(word_level()).fingerprint()
    backwards = dict(reversed(WORDS.items()))
    assert Tokenizer(word_level(backwards), "<eos>", "template").fingerprint() == reference
    for other in (
        {**WORDS, "one": 2, "two": 1},
        {**WORDS, "three": 4},
        {**WORDS, "two": 4},
        {key: value for key, value in WORDS.items() if key != "two"},
    ):
        assert Tokenizer(word_level(other)).fingerprint() != reference


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 2**31 - 1]])
def test_a_prompt_s_hash_is_over_little_endian_int32(ids: list[int]) -> None:
    expected = hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).digest()
    assert prompt_hash(ids) == expected
    assert prompt_hash(np.array(ids, dtype=np.int32)) == expected
    assert prompt_hash(np.array(ids, dtype=">i8")) == expected


def test_a_set_s_hash_is_over_its_prompts_hashes() -> None:
    hashes = [prompt_hash([1]), prompt_hash([2, 3])]
    assert tokens_sha256(iter(hashes)) == hashlib.sha256(hashes[0] + hashes[1]).hexdigest()
    assert tokens_sha256(hashes) != tokens_sha256(reversed(hashes))


def test_no_heavy_import() -> None:
    script = (
        "import sys, swarm.text.tokenizer, swarm.text.template, swarm.rewards.workers\n"
        "print([m for m in ('torch', 'transformers', 'hivemind') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
