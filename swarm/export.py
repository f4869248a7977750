"""Checkpoints for people: what a run keeps, and one of them as a plain Hugging Face folder.

Owns: choosing a checkpoint, holding it while it is read, copying it, having an adapter merged.
Does not know: tensors (a learner process merges).
"""

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm import checkpoint_files as files
from swarm.config import NodeConfig, load_config
from swarm.errors import DataError, UsageError
from swarm.learner.calls import CALL_TIMEOUT_S
from swarm.learner.process import LearnerProcess
from swarm.paths import RunDir, draft_folder, listed_checkpoints

SCHEMA = "swarm-node/checkpoints/1"

NOT_OF_THE_MODEL = frozenset(
    {files.MANIFEST, files.TRAINER_TENSORS, files.TRAINER_TOTALS, files.NODE_STATE}
)


def kept(run: RunDir) -> list[dict[str, Any]]:
    """The run's checkpoints, oldest first: step, accuracy, size, whether it is whole, and best."""
    best = files.best(run.checkpoints_dir)
    found = []
    for step, _, path in sorted(listed_checkpoints(run.checkpoints_dir)):
        row: dict[str, Any] = {"step": step, "path": str(path), "best": path == best}
        try:
            manifest = files.read_manifest(path)
            files.check_files(path, manifest["files"])
        except DataError as error:
            if path.exists():  # else the node that trains has deleted it meanwhile
                found.append(row | {"accuracy": None, "bytes": 0, "problem": str(error)})
            continue
        size = sum(file["size_bytes"] for file in manifest["files"].values())
        row |= {"accuracy": manifest["accuracy"], "bytes": size, "created_s": manifest["created_s"]}
        found.append(row | {"problem": None})
    return found


def choose(run: RunDir, step: int | None, *, last: bool = False) -> dict[str, Any]:
    """The checkpoint of a step; the last; else the best by held-out accuracy, or the last.

    Raises:
        UsageError: there is no whole one that fits.
    """
    whole = [row for row in kept(run) if row["problem"] is None]
    asked = [row for row in whole if row["step"] == step] if step is not None else whole
    if not asked:
        steps = ", ".join(str(row["step"]) for row in whole) or "none"
        raise UsageError(f"{run.checkpoints_dir}: no such checkpoint; whole ones: {steps}")
    best = [] if last or step is not None else [row for row in asked if row["best"]]
    return (best or asked)[-1]


@contextmanager
def held(
    run: RunDir, step: int | None, *, last: bool = False
) -> Iterator[tuple[dict[str, Any], Path]]:
    """The checkpoint of `choose`, for as long as it is read: the node that runs may delete it.

    Yields:
        Its row of `kept`, and a folder with its files, which is alone in its parent.

    Raises:
        UsageError: as `choose`.
    """
    try:
        place = draft_folder(run.root, "reading")
    except OSError:  # where nothing can be written, nothing is deleted either
        row = choose(run, step, last=last)
        yield row, Path(row["path"])
        return
    try:
        row = _link_chosen(run, step, last, place)
        yield row, place / Path(row["path"]).name
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _link_chosen(run: RunDir, step: int | None, last: bool, place: Path) -> dict[str, Any]:
    while True:
        row = choose(run, step, last=last)
        source = Path(row["path"])
        try:
            shutil.copytree(source, place / source.name, copy_function=_link)
            files.check_files(place / source.name, files.read_manifest(source)["files"])
        except (OSError, DataError):
            if source.is_dir():
                raise
            shutil.rmtree(place / source.name, ignore_errors=True)  # deleted just now
        else:
            return row


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links; of a file that is gone, this fails too
        shutil.copyfile(source, target)


def model_part(checkpoint: Path) -> list[str]:
    """Names of a checkpoint's files that are the model's: weights or adapter, tokenizer, config.

    Raises:
        DataError: a file is damaged.
    """
    manifest = files.read_manifest(checkpoint)
    files.check_files(checkpoint, manifest["files"])
    return sorted(set(manifest["files"]) - NOT_OF_THE_MODEL)


def run_config(run: RunDir) -> NodeConfig:
    """The configuration that a run was last started with.

    Raises:
        DataError: it has none.
    """
    record = run.record()
    try:
        saved = record["configs"][record["config"]]  # type: ignore[index]
    except (KeyError, TypeError):
        raise DataError(f"{run.root} is no run: it holds no run.json with configurations") from None
    return load_config(None, {}, environ={}, saved=saved)


def export(run: RunDir, checkpoint: Path, out: Path, *, merge: bool) -> None:
    """Write a checkpoint's model to a new folder, whole or not at all.

    Args:
        checkpoint: one of the run's, held.
        out: must not exist.
        merge: add a LoRA adapter to its model's weights; without effect on full training.

    Raises:
        UsageError: the folder exists.
        DataError: a file is damaged.
    """
    if out.exists():
        raise UsageError(f"--out {out}: exists already; name a new folder")
    names = model_part(checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".writing-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        if merge and files.read_manifest(checkpoint)["terms"].get("mode") == "lora":
            asyncio.run(_merge(run, checkpoint, temporary))
        else:
            temporary.mkdir()
            for name in names:
                target = temporary / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(checkpoint / name, target)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


async def _merge(run: RunDir, checkpoint: Path, out: Path) -> None:
    config = run_config(run)
    learner = LearnerProcess(run.root / "export.log", threads=config.model.threads)
    await learner.start()
    try:
        await learner.call(
            "merge",
            timeout_s=CALL_TIMEOUT_S,
            model=config.model.model_dump(mode="json"),
            checkpoint=str(checkpoint),
            out=str(out),
        )
    finally:
        await learner.close()
