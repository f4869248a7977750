"""`swarm-node eval`: greedy pass@1 of a model or a checkpoint on a swarm's evaluation sets.

Owns: which model, which prompts, the result. Does not know: how completions are made (a learner
process makes them, in batches) or scored (swarm.rewards).
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm import model_files
from swarm.config import NodeConfig, load_config
from swarm.errors import DataError
from swarm.export import held, run_config
from swarm.intervals import wilson
from swarm.learner.calls import (
    CALL_TIMEOUT_S,
    greedy_arguments,
    greedy_completions,
    init_arguments,
)
from swarm.learner.process import LearnerProcess
from swarm.node.prompt_table import RenderedSet, check_tokenizer, render_set
from swarm.paths import RunDir, SwarmDir
from swarm.protocol.charter import Charter
from swarm.protocol.manifest import PromptSetRef
from swarm.rewards.grading import Grader
from swarm.rewards.workers import WorkerPool
from swarm.stored import load_charter, load_prompt_set
from swarm.text.tokenizer import Tokenizer

SCHEMA = "swarm-node/eval/1"


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What the command line asks for.

    Attributes:
        swarm: whose prompts and terms.
        run: whose checkpoint; None: `changes` name a model.
        step, last: which checkpoint (swarm.export.held).
        changes: `section.key` to text.
        max_prompts: of each set; None: all.
    """

    swarm: SwarmDir
    run: RunDir | None
    step: int | None = None
    last: bool = False
    changes: Mapping[str, str] | None = None
    max_prompts: int | None = None


async def evaluate(options: EvalOptions) -> dict[str, Any]:
    """Decode and score.

    Raises:
        UsageError: no such checkpoint.
        DataError: the swarm has no evaluation sets here, or another tokenizer.
    """
    started = time.monotonic()
    charter = load_charter(options.swarm, options.swarm.swarm_id)
    manifest = charter.manifest
    if not manifest.evaluation_sets:
        raise DataError(f"the swarm {manifest.name!r} has no held-out prompts")
    config = _config(options)
    with contextlib.ExitStack() as stack:
        row, checkpoint = None, None
        if options.run is not None:
            row, checkpoint = stack.enter_context(
                held(options.run, options.step, last=options.last)
            )
        results = await _accuracies(options, charter, config, checkpoint)
    return {
        "schema": SCHEMA,
        "model": config.model.path,
        "checkpoint": None if row is None else row["path"],
        "step": None if row is None else row["step"],
        "swarm": manifest.swarm_id.hex(),
        "sets": results,
        "seconds": round(time.monotonic() - started, 2),
    }


async def _accuracies(
    options: EvalOptions, charter: Charter, config: NodeConfig, checkpoint: Path | None
) -> dict[str, Any]:
    """Of each evaluation set; `checkpoint`: its files' folder; None: the model as it is."""
    manifest = charter.manifest
    model = await asyncio.to_thread(model_files.settle, config.model)
    config = config.model_copy(update={"model": model})
    tokenizer = await asyncio.to_thread(Tokenizer.from_folder, Path(model.path))
    check_tokenizer(manifest, tokenizer, model.path)
    with tempfile.TemporaryDirectory(prefix="swarm-node-eval-") as scratch:
        learner = LearnerProcess(Path(scratch) / "learner.log", threads=model.threads)
        await learner.start()  # torch loads while the prompts are rendered
        try:
            async with WorkerPool(config.reward.workers, config.reward.timeout_s) as workers:
                grader = Grader(workers, tokenizer, manifest.reward)
                rendered = {
                    name: await _rendered(options, ref, charter, tokenizer, model.path, workers)
                    for name, ref in manifest.evaluation_sets.items()
                }
                resume: dict[str, Any] = {}
                if checkpoint is not None:
                    resume = {"resume": str(checkpoint.parent)}
                arguments = init_arguments(config, manifest, Path(scratch)) | resume
                del arguments["workload"]  # of training
                await learner.call("init", timeout_s=CALL_TIMEOUT_S, training=False, **arguments)
                results = {}
                for name, prompts in rendered.items():
                    answer = await learner.call(
                        "greedy",
                        timeout_s=CALL_TIMEOUT_S,
                        **greedy_arguments(prompts.token_ids, manifest.sampling),
                    )
                    completions = greedy_completions(answer, manifest.sampling)
                    share = await grader.accuracy(prompts.prompts, completions)
                    low, high = wilson(share, len(completions))
                    results[name] = {
                        "accuracy": share,
                        "low": round(low, 4),
                        "high": round(high, 4),
                        "prompts": len(completions),
                        "truncated": sum(not finished for _, finished in completions),
                    }
        finally:
            await learner.close()
    return results


def _config(options: EvalOptions) -> NodeConfig:
    """The configuration to load the model with."""
    changes = options.changes or {}
    if options.run is None:
        return load_config(None, changes)
    saved = run_config(options.run).model_dump(mode="json")
    return load_config(None, changes, environ={}, saved=saved)


async def _rendered(
    options: EvalOptions,
    ref: PromptSetRef,
    charter: Charter,
    tokenizer: Tokenizer,
    name: str,
    workers: WorkerPool,
) -> RenderedSet:
    data = load_prompt_set(options.swarm, ref)
    whole = await render_set(data, ref, charter.manifest, tokenizer, name, workers)
    return whole if options.max_prompts is None else whole.first(options.max_prompts)
