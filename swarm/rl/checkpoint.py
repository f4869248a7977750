"""Checkpoints on disk: a model folder, the trainer's state and the node's, whole or not at all.

Owns: their layout, atomic writing, checksums, which are kept. Does not know: what the trainer's
tensors or the node's bytes mean. No file of it can hold code: safetensors, JSON, and bytes.

    <folder>/step-00000050/
        config.json, model.safetensors | adapter_config.json, adapter_model.safetensors
        tokenizer.json, ...     copied from the model that training began with
        trainer.safetensors     optimizer state
        trainer.json            the trainer's totals
        node_state.bin          what the node passed
        checkpoint.json         written last: step, accuracy, size and sha256 of every file
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm.checkpoint_files import (
    MANIFEST,
    NODE_STATE,
    SCHEMA,
    TOKENIZER_FILES,
    TRAINER_TENSORS,
    TRAINER_TOTALS,
    best,
    check_files,
    digest,
    read_manifest,
    sha256,
)
from swarm.errors import DataError
from swarm.paths import doomed, doomed_left, listed_checkpoints, parse_json
from swarm.rl.policy import Policy

log = logging.getLogger(__name__)

_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was found whole.

    Attributes:
        path: its folder.
        step: batches trained on.
        accuracy: held-out accuracy in [0, 1], where it was known.
        terms: what `save` was given: how the model was trained, to be compared on resuming.
    """

    path: Path
    step: int
    accuracy: float | None
    terms: dict[str, Any]

    def node_state(self) -> bytes:
        return (self.path / NODE_STATE).read_bytes()

    def trainer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and totals.

        Raises:
            DataError: not what `save` writes.
        """
        try:
            totals = parse_json((self.path / TRAINER_TOTALS).read_text())
            return load_file(self.path / TRAINER_TENSORS), totals
        except (OSError, ValueError, SafetensorError) as error:
            raise DataError(f"{self.path}: trainer state cannot be read: {error}") from None


def save(
    folder: Path,
    policy: Policy,
    trainer_state: tuple[Mapping[str, Tensor], Mapping[str, Any]],
    *,
    step: int,
    node_state: bytes,
    accuracy: float | None,
    terms: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write one, then delete those that are neither among the newest `keep` nor the best.

    Returns:
        The folder of the checkpoint, which is on the disk in full.

    Raises:
        OSError: the disk is full, or the folder cannot be written. Nothing is left half-written
            under a name that `newest_whole` looks at.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in (*folder.glob(f"{_TEMPORARY}*"), *doomed_left(folder)):
        shutil.rmtree(left_over, ignore_errors=True)
    revisions = [revision for number, revision, _ in listed_checkpoints(folder) if number == step]
    name = f"step-{step:08d}" + (f".{max(revisions) + 1}" if revisions else "")
    temporary = folder / f"{_TEMPORARY}{name}"
    temporary.mkdir()
    try:
        policy.save(temporary)
        for file in TOKENIZER_FILES:
            if (policy.source / file).is_file():
                shutil.copyfile(policy.source / file, temporary / file)
        tensors, totals = trainer_state
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()},
            temporary / TRAINER_TENSORS,
        )
        (temporary / TRAINER_TOTALS).write_text(json.dumps(dict(totals)))
        (temporary / NODE_STATE).write_bytes(node_state)
        _write_manifest(temporary, step, accuracy, terms)
        for path in [*temporary.rglob("*"), temporary]:
            _fsync(path)
        temporary.rename(folder / name)
        _fsync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _prune(folder, keep)
    return folder / name


def newest_whole(folder: Path, step: int | None = None) -> Checkpoint | None:
    """The newest checkpoint in which every file is as it was written; None where there is none.

    Args:
        folder: of checkpoints.
        step: only those of this step count.
    """
    for number, _, path in sorted(listed_checkpoints(folder), reverse=True):
        if step is not None and number != step:
            continue
        try:
            manifest = read_manifest(path)
            check_files(path, manifest["files"])
        except DataError as error:
            log.error("checkpoint skipped: %s", error)
            continue
        return Checkpoint(path, manifest["step"], manifest["accuracy"], manifest["terms"])
    return None


def _prune(folder: Path, keep: int) -> None:
    newest_first = [path for _, _, path in sorted(listed_checkpoints(folder), reverse=True)]
    kept = {*newest_first[:keep], best(folder)}
    for path in newest_first:
        if path not in kept:
            shutil.rmtree(doomed(path), ignore_errors=True)


def _write_manifest(
    path: Path, step: int, accuracy: float | None, terms: Mapping[str, Any]
) -> None:
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "accuracy": accuracy,
        "created_s": round(time.time(), 3),
        "terms": dict(terms),
        "files": {
            file.relative_to(path).as_posix(): {
                "size_bytes": file.stat().st_size,
                "sha256": sha256(file),
            }
            for file in sorted(path.rglob("*"))
            if file.is_file()
        },
    }
    manifest["sha256"] = digest(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2))


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
