"""Checkpoints as folders, without torch: which there are, whether they are whole, which is best.

Owns: their layout, checksums, what they say of themselves. Does not know: how one is written
(swarm.rl.checkpoint), what the tensors mean.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import DataError
from swarm.paths import listed_checkpoints, parse_json

SCHEMA = "swarm-node/checkpoint/1"

MANIFEST = "checkpoint.json"
TRAINER_TENSORS = "trainer.safetensors"
TRAINER_TOTALS = "trainer.json"
NODE_STATE = "node_state.bin"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def best(folder: Path) -> Path | None:
    """The checkpoint of the highest accuracy, the newest of equals; None where none has one."""
    rated = []
    for step, revision, path in listed_checkpoints(folder):
        try:
            accuracy = read_manifest(path)["accuracy"]
        except DataError:
            continue
        if accuracy is not None:
            rated.append((accuracy, step, revision, path))
    return max(rated)[-1] if rated else None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, which its own checksum covers.

    Raises:
        DataError: missing or damaged.
    """
    try:
        manifest = parse_json((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path / MANIFEST}: cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise DataError(f"{path / MANIFEST}: its schema is not {SCHEMA!r}")
    expected = manifest.pop("sha256", None)
    if expected != digest(manifest):
        raise DataError(f"{path / MANIFEST}: its checksum does not fit")
    return manifest


def check_files(path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare a checkpoint's files with its manifest.

    Raises:
        DataError: one is missing or damaged, or was deleted meanwhile.
    """
    for name, expected in files.items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != expected["size_bytes"]:
                raise DataError(f"{file} has {size} bytes instead of {expected['size_bytes']}")
            if sha256(file) != expected["sha256"]:
                raise DataError(f"{file} is damaged: its checksum does not fit")
        except FileNotFoundError:
            raise DataError(f"{file} is missing") from None
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}") from None


def digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
