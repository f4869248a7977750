"""Text and token ids: a model folder's tokenizer, without torch and transformers.

Owns: reading a tokenizer, its fingerprint, the hashes of token ids, and the plain template. Does
not know: what a manifest asks for, how a template is rendered (swarm.text.template).
"""

import ctypes
import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from swarm.errors import DataError
from swarm.paths import parse_json
from swarm.protocol.prompts import prompt_tokens_sha256 as prompt_hash

__all__ = ["PLAIN_TEMPLATE", "Tokenizer", "prompt_hash", "tokens_sha256"]

PLAIN_TEMPLATE = "{{ system }}{{ prompt }}"
"""The prompt as it is, behind the system text where there is one: for base models."""

FINGERPRINT_PREFIX = b"swarm-node tokenizer 1\0"

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """A tokenizer as a model folder holds it.

    Attributes:
        vocab_size: one above the largest token id.
        eos_token: text of the end-of-sequence token; None: the folder names none.
        chat_template: the folder's own chat template, complete in itself (the special tokens that
            it refers to are set in its first lines); None: it has none.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        eos_token: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        self.eos_token = eos_token
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read tokenizer.json, and the rest from tokenizer_config.json and chat_template.jinja.

        Raises:
            DataError: names the file and what is wrong with it.
        """
        path = folder / _TOKENIZER_FILE
        text = _read(path)
        try:
            tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            raise DataError(f"{path}: no tokenizer of the tokenizers library: {error}") from None
        config_path = folder / _CONFIG_FILE
        config = _read_config(config_path) if config_path.exists() else {}
        eos_token = _token_text(config.get("eos_token"))
        if eos_token is not None and tokenizer.token_to_id(eos_token) is None:
            raise DataError(f"{config_path}: eos_token {eos_token!r} is no token of {path}")
        made = cls(tokenizer, eos_token, _chat_template(folder, config))
        _give_back_memory()
        return made

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens only where the text itself spells them."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids in 0..vocab_size - 1; ids without a token count as nothing."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special)

    def token_to_id(self, token: str) -> int | None:
        """Id of one whole token; None: there is no such token."""
        return self._ids.get(token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`."""
        return None if self.eos_token is None else self._ids[self.eos_token]

    def fingerprint(self) -> str:
        """Hex sha256 over the id-to-token map; equal where token ids mean the same.

        Hashed are the bytes "swarm-node tokenizer 1" and a zero byte, then for every token in
        rising order of id (and of text, should two share one): the id and the length of the
        token's UTF-8 text, both as little-endian u32, and that text.
        """
        state = hashlib.sha256(FINGERPRINT_PREFIX)
        for token, token_id in sorted(self._ids.items(), key=lambda item: (item[1], item[0])):
            text = token.encode()
            state.update(struct.pack("<II", token_id, len(text)) + text)
        return state.hexdigest()


def tokens_sha256(prompt_hashes: Iterable[bytes]) -> str:
    """Hex sha256 over the hashes of all prompts of a set, in order."""
    return hashlib.sha256(b"".join(prompt_hashes)).hexdigest()


def _give_back_memory() -> None:
    """To the system what reading has freed: of 150,000 tokens, 100 MB that malloc would keep."""
    trim = getattr(
        ctypes.CDLL(None), "malloc_trim", None
    )  # glibc's; others give back by themselves
    if trim is not None:
        trim(0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; a model folder holds one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(_read(path))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise DataError(f"{path}: must hold a JSON object, not {type(config).__name__}")
    return config


def _token_text(value: Any) -> str | None:
    """A token as tokenizer_config.json spells it: a text, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The folder's default template, preceded by the special tokens whose names it mentions.

    transformers hands the special tokens to a template as variables; a manifest holds one text.
    """
    path = folder / _TEMPLATE_FILE
    template = _read(path) if path.exists() else config.get("chat_template")
    if isinstance(template, list):
        named = (item for item in template if isinstance(item, dict))
        template = {item.get("name"): item.get("template") for item in named}.get("default")
    if not isinstance(template, str):
        return None
    extra = config.get("extra_special_tokens")
    tokens = {**config, **(extra if isinstance(extra, dict) else {})}
    lines = []
    for name in sorted(tokens):
        text = _token_text(tokens[name]) if name.endswith("_token") else None
        if text is not None and name in template:
            # trim_blocks takes the line break away again
            lines.append(f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}\n")
    return "".join(lines) + template
