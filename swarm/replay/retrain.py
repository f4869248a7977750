"""`swarm-node replay`: train again on exactly the groups that a run logged.

Owns: where a replay begins, the batches made again from the log and the kept blobs, the result.
Does not know: how a step is made (the learner's, as in the live run), what the log looks like.

Nothing is written into the run. The replay's own folder is a run folder too: configuration, steps
with their samples, metrics, the last checkpoint; besides them result.json.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm import model_files
from swarm.config import NodeConfig
from swarm.errors import DataError, RemoteProtocolError, UsageError
from swarm.export import held
from swarm.learner.calls import (
    CALL_TIMEOUT_S,
    greedy_arguments,
    greedy_completions,
    init_arguments,
    step_report,
    train_arguments,
)
from swarm.learner.process import LearnerProcess
from swarm.node.prompt_table import PromptTable, RenderedSet, check_tokenizer, render_set
from swarm.node.store import blob_path
from swarm.paths import RunDir, append_json, parse_json, user_path, write_json
from swarm.protocol.charter import Charter
from swarm.protocol.codec import blob_hash, decode_group
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.pool import PooledGroup
from swarm.protocol.verify import codec_limits
from swarm.replay.logged_run import SCHEMA as RUN_SCHEMA
from swarm.replay.logged_run import LoggedRun
from swarm.replay.step_log import LoggedGroup, LoggedStep, step_record
from swarm.rewards.grading import Grader
from swarm.rewards.workers import WorkerPool
from swarm.status import share
from swarm.stored import load_prompt_set
from swarm.terminal import printable
from swarm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SCHEMA = "swarm-node/replay/1"

FIGURES = (
    "step", "stepped", "loss", "samples", "kept", "trained", "foreign_samples", "foreign_trained",
    "dropped_advantage", "dropped_kl", "kl_p50", "ratio_max", "truncated_share", "grad_norm",
)  # fmt: skip
"""Of a step's report, what stands in the result; metrics.jsonl has the rest."""

SHOWN_STEPS = 30
"""Rows of the table at most; the result has every step."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the command line asks for.

    Attributes:
        changes: fields that differ from the run's, `section.key` to text.
        method: name of the method that some of them stand for, for the result.
        start: begin after this step, from its checkpoint; 0: from the model's own weights; None:
            from the first kept checkpoint that steps follow, else from the model's own weights.
        steps: at most so many.
        out: the replay's folder; None: a fresh one beside the run.
        rollouts: folder of the blobs; None: the swarm's.
    """

    changes: Mapping[str, str] = field(default_factory=dict)
    method: str = ""
    start: int | None = None
    steps: int | None = None
    out: Path | None = None
    rollouts: Path | None = None


async def replay(run: LoggedRun, options: ReplayOptions) -> dict[str, Any]:
    """Train again; returns the result, which is also in the replay's folder as result.json.

    Raises:
        UsageError: no such checkpoint, or a folder that cannot be taken.
        ConfigError: a change is wrong, or does not go with the checkpoint.
        DataError: a step, a group, a prompt set or the model is not there any more.
    """
    return await _Replay(run, options).run()


class _Replay:
    def __init__(self, run: LoggedRun, options: ReplayOptions) -> None:
        self._run = run
        self._options = options
        self._charter: Charter = run.charter()
        self._rollouts = options.rollouts or run.dir.swarm_dir.rollouts_dir
        self._start = _start(run, options.start)
        self._numbers = run.steps_after(self._start, options.steps)
        self._configs: dict[str, NodeConfig] = {}
        self._config = self._config_of(run.step(self._numbers[0]))
        self._last_prompt = 0
        self._prompts = PromptTable()
        self._evaluation: dict[str, RenderedSet] = {}

    async def run(self) -> dict[str, Any]:
        run, numbers = self._run, self._numbers
        self._survey()
        folder = model_files.resolve(self._config.model)
        if model_files.digest(folder) != run.record["trained"]["digest"]:
            raise DataError(f"{folder} is not the model any more that the run began with")
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
        check_tokenizer(self._charter.manifest, tokenizer, str(folder))
        self._out = _fresh_folder(run.dir, self._options.out)
        log.info(
            "steps %d to %d of %s, in %s", numbers[0], numbers[-1], run.dir.root, self._out.root
        )
        self._write_record()
        learner = LearnerProcess(self._out.root / "learner.log", threads=self._config.model.threads)
        self._learner = learner
        reward = self._config.reward
        started = time.monotonic()
        checkpoint = ExitStack()
        try:
            resume = self._held_checkpoint(checkpoint)
            async with WorkerPool(reward.workers, reward.timeout_s) as workers:
                self._grader = Grader(workers, tokenizer, self._charter.manifest.reward)
                await learner.start()  # torch loads while the prompts are rendered
                await self._load_prompts(tokenizer, workers)
                await self._init(self._config, resume=str(resume), resume_step=self._start)
                checkpoint.close()
                before = await self._accuracies()
                rows = [await self._step(run.step(number)) for number in numbers]
                after = await self._accuracies()
                written = await self._checkpoint(after.get("held_out"))
        finally:
            checkpoint.close()
            await learner.close()
            self._out.delete_handover()
        result = {
            "schema": SCHEMA,
            "run": str(run.dir.root),
            "out": str(self._out.root),
            "method": self._options.method or None,
            "changes": dict(self._options.changes),
            "from_step": self._start,
            "to_step": numbers[-1],
            "accuracy_before": before,
            "accuracy_after": after,
            "checkpoint": written,
            "same_weights_as_run": _same_weights(
                Path(written), run.dir.checkpoints().get(numbers[-1])
            ),
            "seconds": round(time.monotonic() - started, 2),
            "steps": rows,
        }
        write_json(self._out.root / "result.json", result)
        return result

    def _held_checkpoint(self, stack: ExitStack) -> Path:
        """The folder of the checkpoint to begin with; the run's, of which none is loaded, for 0."""
        if not self._start:
            return self._run.dir.checkpoints_dir
        _, checkpoint = stack.enter_context(held(self._run.dir, self._start))
        return checkpoint.parent

    # -- what is needed --------------------------------------------------------------------------

    def _config_of(self, step: LoggedStep) -> NodeConfig:
        if step.config not in self._configs:
            self._configs[step.config] = self._run.config(step.config, self._options.changes)
        return self._configs[step.config]

    def _survey(self) -> None:
        """Look through all steps, so that what is missing is known before an hour's work."""
        for number in self._numbers:
            step = self._run.step(number)
            self._config_of(step)
            for group in step.groups:
                self._last_prompt = max(self._last_prompt, group.prompt_id)
                if not blob_path(self._rollouts, group.hash).is_file():
                    raise self._gone(number, group)

    def _gone(self, step: int, group: LoggedGroup) -> DataError:
        later = [s for s in self._run.dir.checkpoints() if s >= step]
        instead = f"--from {later[0]} begins after it; " if later else ""
        return DataError(
            f"step {step}: its group {group.hash.hex()} is not in {self._rollouts}. Rollouts "
            f"beyond limits.blob_store_mb (now {self._config.limits.blob_store_mb}) are deleted, "
            f"the oldest first: raise it before a run that is to be replayed. {instead}"
            "--rollouts DIR names a folder with copies"
        )

    async def _load_prompts(self, tokenizer: Tokenizer, workers: WorkerPool) -> None:
        """Render the sets that the steps took prompts from, and the evaluation sets."""
        manifest = self._charter.manifest
        name = self._config.model.path

        async def rendered(ref: PromptSetRef) -> RenderedSet:
            data = load_prompt_set(self._run.dir.swarm_dir, ref)
            return await render_set(data, ref, manifest, tokenizer, name, workers)

        for ref in self._charter.prompt_sets:
            if len(self._prompts) <= self._last_prompt:
                self._prompts.append(await rendered(ref))
        limit = self._config.eval.max_prompts
        for set_name, evaluated in manifest.evaluation_sets.items():
            self._evaluation[set_name] = (await rendered(evaluated)).first(limit)

    def _pooled(self, step: int, logged: LoggedGroup) -> PooledGroup:
        """A group as it was when the run trained on it."""
        path = blob_path(self._rollouts, logged.hash)
        try:
            blob = path.read_bytes()
            if blob_hash(blob) != logged.hash:
                raise DataError(f"step {step}: {path} is damaged: its sha256 is not its name")
            group = decode_group(blob, codec_limits(self._charter))
        except FileNotFoundError:
            raise self._gone(step, logged) from None
        except (OSError, RemoteProtocolError) as error:
            raise DataError(f"step {step}: {path}: {error}") from None
        if (
            group.publisher != logged.publisher
            or group.prompt_id != logged.prompt_id
            or len(group.rollouts) != len(logged.rewards)
        ):
            raise DataError(f"step {step}: {path} is not the group that the log describes")
        if (
            logged.prompt_id >= len(self._prompts)
            or self._prompts.prompt_hash(logged.prompt_id) != group.prompt_sha256
        ):
            raise DataError(
                f"step {step}: prompt {logged.prompt_id} is rendered otherwise than in {path}"
            )
        return PooledGroup(
            hash=logged.hash,
            publisher=logged.publisher,
            own=logged.own,
            group=group,
            rewards=logged.rewards,
            prompt_token_ids=self._prompts.token_ids(logged.prompt_id),
            arrived_s=0.0,
        )

    def _write_record(self) -> None:
        """run.json of the replay."""
        write_json(
            self._out.record_path,
            self._run.record
            | {
                "schema": RUN_SCHEMA,
                "replay_of": str(self._run.dir.root),
                "config": self._config.digest(),
                "configs": {
                    config.digest(): config.model_dump(mode="json")
                    for config in self._configs.values()
                },
                "started_s": time.time(),
            },
        )

    # -- the learner -----------------------------------------------------------------------------

    async def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        return await self._learner.call(op, timeout_s=CALL_TIMEOUT_S, **arguments)

    async def _init(self, config: NodeConfig, **resume: Any) -> None:
        arguments = init_arguments(config, self._charter.manifest, self._out.root)
        await self._call("init", **arguments, **resume)
        self._config = config

    async def _checkpoint(self, accuracy: float | None) -> str:
        answer = await self._call(
            "checkpoint", path=str(self._out.checkpoints_dir), node_state=b"", accuracy=accuracy
        )
        return str(answer["path"])

    async def _step(self, step: LoggedStep) -> dict[str, Any]:
        config = self._config_of(step)
        if _learning(config) != _learning(self._config):
            # The run was stopped here and went on with other settings, from a checkpoint.
            await self._checkpoint(None)
            await self._init(config)
        batch = [self._pooled(step.step, group) for group in step.groups]
        answer = await self._call("train", **train_arguments(batch))
        if answer["step"] != step.step:
            raise DataError(f"the checkpoint led to step {answer['step']} instead of {step.step}")
        now = time.time()
        record = step_record(
            answer,
            batch,
            config=config.digest(),
            amendments=len(self._charter.amendments),
            time_s=now,
        )
        report = step_report(answer)
        append_json(self._out.steps_path, record)
        append_json(self._out.metrics_path, {"time_s": round(now, 3), **report})
        log.info(
            "step %d: loss %.4f, kept %d of %d samples",
            *(report[name] for name in ("step", "loss", "kept", "samples")),
        )
        return {name: report[name] for name in FIGURES} | {
            "kept_share": round(report["kept"] / report["samples"], 6)
        }

    async def _accuracies(self) -> dict[str, float]:
        """Greedy accuracy on each evaluation set."""
        sampling = self._charter.manifest.sampling
        found = {}
        for name, prompts in self._evaluation.items():
            answer = await self._call("greedy", **greedy_arguments(prompts.token_ids, sampling))
            completions = greedy_completions(answer, sampling)
            found[name] = await self._grader.accuracy(prompts.prompts, completions)
        return found


def view(result: Mapping[str, Any]) -> RenderableType:
    """The result as a table."""
    rows = result["steps"]
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column in ("step", "loss", "kept", "foreign", "A <= 0", "KL > g", "KL p50", "ratio max"):
        table.add_column(column, justify="right", no_wrap=True)
    every = -(-len(rows) // SHOWN_STEPS)
    for row in [*rows[:-1:every], rows[-1]]:
        table.add_row(
            str(row["step"]),
            f"{row['loss']:z.5f}",
            f"{row['kept_share']:.1%}",
            f"{row['foreign_trained']} of {row['foreign_samples']}",
            str(row["dropped_advantage"]),
            str(row["dropped_kl"]),
            *("-" if row[k] is None else f"{row[k]:.3g}" for k in ("kl_p50", "ratio_max")),
        )
    before, after = result["accuracy_before"], result["accuracy_after"]
    lines = [
        f"accuracy {name.replace('_', ' ')}: {share(before[name])} -> {share(after[name])}"
        for name in before
    ] or ["accuracy: the swarm has no held-out prompts"]
    kept = np.mean([row["kept_share"] for row in rows])
    lines.append(f"kept {kept:.1%} of the samples")
    same = result["same_weights_as_run"]
    if same is not None:
        lines.append(
            f"weights after step {result['to_step']}: "
            + ("bit by bit those of the run" if same else "not those of the run")
        )
    return Group(table, *(Text(printable(line)) for line in [*lines, f"results: {result['out']}"]))


def _start(run: LoggedRun, asked: int | None) -> int:
    """The step to begin after."""
    kept = list(run.dir.checkpoints())
    if asked is None:
        last = run.log.steps[-1] if run.log.steps else 0
        return next((step for step in kept if step < last), 0)
    if asked and asked not in kept:
        raise UsageError(
            f"--from {asked}: the run keeps no checkpoint of that step; it has "
            f"{', '.join(map(str, kept)) or 'none'}, and 0 begins from the model's own weights "
            "(checkpoint.keep is how many a run keeps)"
        )
    return asked


def _fresh_folder(run_dir: RunDir, asked: Path | None) -> RunDir:
    """Make the replay's folder.

    Raises:
        UsageError: it is in the run, or holds something.
    """
    if asked is None:
        number = 1
        while True:
            try:
                return RunDir.create(run_dir.root.with_name(f"{run_dir.root.name}-replay-{number}"))
            except FileExistsError:  # by another replay, earlier or just now
                number += 1
    root = user_path(asked)
    if root.resolve().is_relative_to(run_dir.root.resolve()):
        raise UsageError(f"--out {root}: that is in the run, which stays as it is")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(f"--out {root}: exists and is not an empty folder")
    root.mkdir(parents=True, exist_ok=True)
    return RunDir(root)


def _learning(config: NodeConfig) -> tuple[Any, ...]:
    """What of a configuration makes a difference to the steps."""
    return config.model, config.train.model_copy(update={"max_steps": 0}), config.ftis


def _same_weights(written: Path, kept: Path | None) -> bool | None:
    """Whether two checkpoints hold the same weights and moments; None: one is missing."""
    if kept is None:
        return None
    try:
        files = [
            parse_json((path / "checkpoint.json").read_text())["files"] for path in (written, kept)
        ]
    except (OSError, ValueError, KeyError):
        return None
    first, second = (
        {name: file["sha256"] for name, file in found.items() if name.endswith(".safetensors")}
        for found in files
    )
    return bool(first == second)
