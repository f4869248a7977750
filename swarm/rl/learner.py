"""The learner process: `python -m swarm.rl.learner FD`, started by `swarm.learner.process`.

Owns: which message leads to which work on model, engine and trainer, one at a time; that the
process ends when its node does. Does not know: the network, prompts as text, rewards' meaning.

A request is {"id", "op", "arguments"}, its reply {"id", "ok": True, ...} or {"id", "ok": False,
"kind": the exception's class, "error": its text}. Token ids and log-probs are the bytes of
little-endian int32 and float32 arrays. Operations: see `Learner`.
"""

import faulthandler
import gc
import importlib.util
import json
import logging
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from swarm.config import ModelSection, NodeConfig
from swarm.errors import ConfigError, DataError, LearnerError, SwarmError
from swarm.learner import ipc
from swarm.paths import RunDir
from swarm.protocol.rollout import Finish, Rollout

if TYPE_CHECKING:
    from swarm.rl.engine import Engine, SamplingParams
    from swarm.rl.policy import Policy
    from swarm.rl.trainer import Trainer

log = logging.getLogger(__name__)

GREEDY_PROMPTS = 256
"""Prompts decoded together in an evaluation; halved where the memory does not suffice."""

_LENGTHS = ("max_prompt_tokens", "max_completion_tokens")

PARENT_CHECK_S = 5.0
"""How often the process looks whether its parent still is the node that started it."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    config: NodeConfig
    policy: "Policy"
    engine: "Engine"
    trainer: "Trainer"


class Learner:
    """Does what the node asks for. Every public method is an operation.

    Errors that a message can name (files, configuration) are SwarmErrors; all others are bugs or
    the machine's.
    """

    def __init__(self) -> None:
        self._loaded: _Loaded | None = None
        # Completions sampled at a time; None: what the node asks for has always fitted.
        self._max_completions: int | None = None

    def init(
        self,
        *,
        config: Mapping[str, Any],
        run_dir: str,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        temperature: float,
        workload: Mapping[str, int] | None = None,
        resume: str | None = None,
        resume_step: int | None = None,
        training: bool = True,
    ) -> dict[str, Any]:
        """Load the model, and the newest whole checkpoint of the run where there is one.

        Args:
            config: NodeConfig, as JSON has it.
            run_dir: folder of the run; its checkpoints are in checkpoints/.
            vocab_size: number of token ids of the swarm's tokenizer.
            stop_token_ids: of the swarm.
            temperature: that the swarm samples at, and log-probs are taken at.
            workload: fields of swarm.model_memory.Workload, for the memory estimate and vLLM's
                longest sequence; None: without.
            resume: another folder of checkpoints.
            resume_step: load the checkpoint of this step, not the newest; 0: none.
            training: False: only to sample and evaluate; the optimizer's state is not loaded.

        Returns:
            What the model is, `step` and `node_state` (bytes; None at the start of a run).
        """
        import torch

        from swarm.rl import checkpoint
        from swarm.rl.loss import FtisConfig
        from swarm.rl.policy import Policy
        from swarm.rl.trainer import Trainer

        started = time.monotonic()
        if self._loaded is not None:
            self._loaded.engine.close()
        self._loaded = None
        gc.collect()  # a second init must not need memory for two models
        node_config = _parse_config(config)
        model = node_config.model
        if model.threads:
            torch.set_num_threads(model.threads)
        torch.manual_seed(node_config.node.seed)
        folder = Path(resume) if resume else Path(run_dir, "checkpoints")
        found = checkpoint.newest_whole(folder, resume_step)
        if found is None and resume_step:
            raise DataError(f"{folder} holds no whole checkpoint of step {resume_step}")
        node_config, memory = _settle(node_config, workload, {} if found is None else found.terms)
        terms = _terms(node_config)
        if found is not None and {**terms, **found.terms} != terms:
            raise ConfigError(_difference(found.path, {**terms, **found.terms}, terms))
        policy = Policy.load(
            node_config.model,
            node_config.node.seed,
            vocab_size=vocab_size,
            resume=None if found is None else found.path,
        )
        wrong = [token for token in stop_token_ids if not 0 <= token < vocab_size]
        if wrong:
            raise ConfigError(f"stop tokens {wrong} are none of the {vocab_size} token ids")
        if policy.device.type == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
            # With the mode comes filling of new tensors, which costs time and hides nothing here.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property
        if not training:
            policy.model.requires_grad_(False)  # so that nothing is kept for an optimizer
        trainer = Trainer(
            policy,
            node_config.train,
            FtisConfig.from_section(node_config.ftis),
            temperature=temperature,
        )
        if found is not None and training:
            trainer.load_state_dict(*found.trainer_state())
        engine = _engine(node_config, policy, Path(run_dir), workload or {}, temperature)
        self._loaded = _Loaded(node_config, policy, engine, trainer)
        total, trained = policy.count_parameters()
        return {
            "model": type(policy.causal_lm).__name__,
            "parameters": total,
            "trainable": trained,
            "mode": policy.mode,
            "dtype": str(policy.dtype).removeprefix("torch."),
            "device": str(policy.device),
            "step": trainer.steps if found is None else found.step,
            "node_state": None if found is None else found.node_state(),
            "checkpoint": None if found is None else str(found.path),
            "memory_bytes": _memory_bytes(policy),
            "memory_estimate": memory,
            "optimizer": node_config.train.optimizer,
            "gradient_checkpointing": node_config.model.gradient_checkpointing,
            "engine": self._engine_state(),
            "seconds": time.monotonic() - started,
        }

    def sample(
        self,
        *,
        prompts: list[list[int]],
        n: int,
        temperature: float,
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        seeds: list[int],
    ) -> dict[str, Any]:
        """n completions for each prompt."""
        from swarm.rl.engine import SamplingParams

        started = time.monotonic()
        sampling = SamplingParams(temperature, max_new_tokens, tuple(stop_token_ids))
        groups = self._generate(prompts, n, sampling, seeds)
        return {
            "groups": [[_packed(rollout) for rollout in group] for group in groups],
            "policy_step": self._model.trainer.steps,
            "tokens": sum(len(rollout.token_ids) for group in groups for rollout in group),
            "engine": self._engine_state(),
            "seconds": time.monotonic() - started,
        }

    def greedy(
        self, *, prompts: list[list[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> dict[str, Any]:
        """The most probable completion of each prompt."""
        from swarm.rl.engine import SamplingParams

        started = time.monotonic()
        sampling = SamplingParams(1.0, max_new_tokens, tuple(stop_token_ids), greedy=True)
        # Prompts of about the same length together: little padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        completions = [b""] * len(prompts)
        for start in range(0, len(order), GREEDY_PROMPTS):
            chosen = order[start : start + GREEDY_PROMPTS]
            groups = self._generate([prompts[i] for i in chosen], 1, sampling, [0] * len(chosen))
            for i, (rollout,) in zip(chosen, groups, strict=True):
                completions[i] = rollout.token_ids.astype("<i4").tobytes()
        return {"completions": completions, "seconds": time.monotonic() - started}

    def train(self, *, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """One step; the trainer's report as a flat dict.

        Returns also `per_sample`, a dict for each sample of the batch in its order, and the
        `ratio_edges` that belong to it.
        """
        from swarm.rl.sample_report import ratio_edges
        from swarm.rl.trainer import TrainGroup

        trainer, engine = self._model.trainer, self._model.engine
        batch = [
            TrainGroup(
                hash=group["hash"],
                publisher=group["publisher"],
                own=group["own"],
                prompt_ids=tuple(group["prompt_ids"]),
                rollouts=tuple(_unpacked(rollout) for rollout in group["rollouts"]),
                rewards=np.frombuffer(group["rewards"], "<f4"),
            )
            for group in groups
        ]
        engine.sleep()
        report = trainer.step(batch)
        if report.stepped:
            engine.sync()
        return {
            **report.to_dict(),
            "memory_bytes": _memory_bytes(self._model.policy),
            "ratio_edges": ratio_edges(self._model.config.ftis.clip_max),
            "per_sample": [asdict(sample) for sample in report.per_sample],
        }

    def logprobs(
        self, *, prompt_ids: list[list[int]], completions: list[bytes], temperature: float
    ) -> dict[str, Any]:
        """What the model that is trained gives to these completions."""
        import torch

        policy = self._model.policy
        arrays = [np.frombuffer(packed, "<i4") for packed in completions]
        with torch.no_grad():
            values, mask = policy.completion_logprobs(prompt_ids, arrays, temperature)
        rows = [row[live].cpu().numpy() for row, live in zip(values, mask, strict=True)]
        return {"logprobs": [row.astype("<f4").tobytes() for row in rows]}

    def checkpoint(
        self, *, path: str, node_state: bytes, accuracy: float | None = None
    ) -> dict[str, Any]:
        """Write a checkpoint into the folder `path`, and delete what need not be kept there."""
        from swarm.rl import checkpoint

        started = time.monotonic()
        loaded = self._model
        try:
            written = checkpoint.save(
                Path(path),
                loaded.policy,
                loaded.trainer.state_dict(),
                step=loaded.trainer.steps,
                node_state=node_state,
                accuracy=accuracy,
                terms=_terms(loaded.config),
                keep=loaded.config.checkpoint.keep,
            )
        except OSError as error:
            raise LearnerError(f"no checkpoint written in {path}: {error}") from error
        return {"path": str(written), "seconds": time.monotonic() - started}

    def merge(self, *, model: Mapping[str, Any], checkpoint: str, out: str) -> dict[str, Any]:
        """Write the model of an adapter's checkpoint, with the adapter in its weights."""
        from swarm.rl.adapters import export_merged

        section = ModelSection.model_validate_json(json.dumps(model))
        export_merged(section, Path(checkpoint), Path(out))
        return {}

    # -- internals -------------------------------------------------------------------------------

    @property
    def _model(self) -> _Loaded:
        if self._loaded is None:
            raise LearnerError("no model is loaded; the operation init comes first")
        return self._loaded

    def _engine_state(self) -> dict[str, Any]:
        return {**self._model.engine.describe(), "max_completions": self._max_completions}

    def _generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        sampling: "SamplingParams",
        seeds: Sequence[int],
    ) -> list[list[Rollout]]:
        """Sample; where the memory does not suffice, fewer prompts at a time, from then on."""
        import torch

        from swarm.rl.host_memory import one_out_of_memory

        groups: list[list[Rollout]] = []
        while len(groups) < len(prompts):
            done, size = len(groups), len(prompts) - len(groups)
            if self._max_completions is not None:
                size = min(size, max(1, self._max_completions // n))
            part = slice(done, done + size)
            try:
                with one_out_of_memory():
                    groups += self._model.engine.generate(prompts[part], n, sampling, seeds[part])
                continue
            except torch.OutOfMemoryError:
                if size < 2:
                    raise
                self._max_completions = size // 2 * n
            log.warning(
                "out of memory with %d prompts x %d: sampling %d completions at a time from now on",
                size,
                n,
                self._max_completions,
            )
            torch.cuda.empty_cache()  # after the exception, whose traceback holds tensors
        return groups


Operations = Mapping[str, Callable[..., dict[str, Any]]]


def serve(connection: socket.socket, prepare: Callable[[], Operations]) -> None:
    """Answer requests until the connection ends; then end the process, in the middle of work too.

    The request "stop" is answered, and ends the loop.

    Args:
        connection: to the node.
        prepare: makes the operations; it may take its time, requests wait.
    """
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(
        target=_receive_all, args=(connection, requests.put), name="node", daemon=True
    ).start()
    operations = prepare()
    while True:
        request = requests.get()
        answer = ipc.pack({"id": request["id"], **_answer(operations, request)})
        try:
            connection.sendall(answer)
        except OSError as error:
            _end(f"the node does not take the answer: {error}")
        if request["op"] == "stop":
            return


def _answer(operations: Operations, request: Mapping[str, Any]) -> dict[str, Any]:
    name = request["op"]
    if name == "stop":
        return {"ok": True}
    operation = operations.get(name)
    if operation is None:
        return _failure(LearnerError(f"no operation {name!r}; known: {', '.join(operations)}"))
    try:
        return {"ok": True, **operation(**request["arguments"])}
    except SwarmError as error:
        log.error("%s: %s", name, error)
        return _failure(error)
    except Exception as error:  # the outermost boundary: the node decides what becomes of it
        log.exception("%s failed", name)
        return _failure(error)


def _failure(error: Exception) -> dict[str, Any]:
    return {"ok": False, "kind": type(error).__name__, "error": str(error) or repr(error)}


def _receive_all(connection: socket.socket, put: Callable[[dict[str, Any]], None]) -> None:
    """Thread: read requests ahead of the work, so that the end of the node is seen during it."""
    parent = os.getppid()
    while True:
        # A process that the node forked may hold the other end open after the node has died.
        while not select.select([connection], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != parent:
                _end("the node is gone")
        try:
            request = ipc.receive(connection)
        except LearnerError as error:
            _end(str(error))
        if request is None:
            _end("the node has closed the connection")
        put(request)


def _end(reason: str) -> NoReturn:
    log.warning("%s: the learner ends", reason)
    os._exit(0)


def _prepare() -> Operations:
    """Import what takes seconds and every model needs, while the node still does other things."""
    from transformers import (  # noqa: F401 (for what it imports)
        AutoModelForCausalLM,
        DynamicCache,
        GenerationMixin,
        PreTrainedModel,
    )

    from swarm.rl import checkpoint, engine, policy, trainer  # noqa: F401 (for what they import)

    learner = Learner()
    return {
        "init": learner.init,
        "sample": learner.sample,
        "greedy": learner.greedy,
        "train": learner.train,
        "logprobs": learner.logprobs,
        "checkpoint": learner.checkpoint,
        "merge": learner.merge,
    }


def _packed(rollout: Rollout) -> dict[str, Any]:
    return {
        "ids": rollout.token_ids.astype("<i4").tobytes(),
        "logprobs": rollout.logprobs.astype("<f4").tobytes(),
        "finish": int(rollout.finish),
    }


def _unpacked(packed: Mapping[str, Any]) -> Rollout:
    return Rollout(
        token_ids=np.frombuffer(packed["ids"], "<i4"),
        logprobs=np.frombuffer(packed["logprobs"], "<f4"),
        finish=Finish(packed["finish"]),
    )


def _engine(
    config: NodeConfig,
    policy: "Policy",
    run_dir: Path,
    workload: Mapping[str, int],
    temperature: float,
) -> "Engine":
    if config.engine.kind == "transformers":
        from swarm.rl.engine import TransformersEngine

        return TransformersEngine(policy)
    from swarm.rl.drift import ProbedEngine
    from swarm.rl.vllm_engine import VllmEngine, check_temperature

    check_temperature(temperature)
    lengths = [workload[name] for name in _LENGTHS if name in workload]
    engine = VllmEngine(
        policy,
        config.engine,
        run_dir=RunDir(run_dir),
        max_tokens=sum(lengths) if len(lengths) == len(_LENGTHS) else None,
        seed=config.node.seed,
    )
    return ProbedEngine(engine, policy, config.engine.max_drift)


def _parse_config(config: Mapping[str, Any]) -> NodeConfig:
    # Through JSON text: only there may a list stand for a tuple.
    return NodeConfig.model_validate_json(json.dumps(config))


def _settle(
    config: NodeConfig, workload: Mapping[str, int] | None, kept: Mapping[str, Any]
) -> tuple[NodeConfig, dict[str, Any] | None]:
    """Put in what is `auto`, by device and memory, and what a checkpoint was trained with.

    Returns:
        The configuration, and the memory estimate where the workload is known.
    """
    from swarm import model_files, model_memory
    from swarm.rl.device import choose_device, choose_dtype, total_memory

    model = model_files.settle(config.model)
    device = choose_device(model.device)
    precision = model.precision
    if precision == "auto":
        by_device = "bf16" if choose_dtype("auto", device).itemsize == 2 else "fp32"
        precision = kept.get("precision", by_device)
    optimizer = config.train.optimizer
    if optimizer == "auto":
        optimizer = kept.get("optimizer", "auto")
    config = config.model_copy(
        update={
            "model": model.model_copy(update={"precision": precision}),
            "train": config.train.model_copy(update={"optimizer": optimizer}),
        }
    )
    if workload is not None:
        try:
            facts = model_memory.ModelFacts.read(Path(model.path))
        except DataError as error:
            log.warning("no memory estimate: %s", error)
        else:
            plan = model_memory.plan(
                facts,
                config,
                model_memory.Workload(**workload),
                device=device.type,
                total=total_memory(device),
                eight_bit=importlib.util.find_spec("bitsandbytes") is not None,
            )
            (log.info if plan.fits else log.warning)("%s", plan.advice())
            log.info("settings %s", plan.reason)
            estimate = {**plan.estimate.to_dict(), "total": plan.total, "reason": plan.reason}
            return plan.config, estimate | ({} if plan.fits else {"advice": plan.advice()})
    if optimizer == "auto":
        train = config.train.model_copy(update={"optimizer": "adamw"})
        config = config.model_copy(update={"train": train})
    return config, None


def _terms(config: NodeConfig) -> dict[str, Any]:
    """What a run cannot change when it is resumed."""
    model = config.model
    terms: dict[str, Any] = {
        "mode": model.mode, "precision": model.precision, "optimizer": config.train.optimizer,
    }  # fmt: skip
    if model.mode == "lora":
        terms |= {
            "lora_rank": model.lora_rank,
            "lora_alpha": model.lora_alpha,
            "lora_targets": list(model.lora_targets),
        }
    return terms


def _difference(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = "; ".join(
        f"{'train' if key == 'optimizer' else 'model'}.{key}: "
        f"was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    )
    return f"{path} was trained otherwise ({changed}); use the same values, or start a new run"


def _memory_bytes(policy: "Policy") -> int:
    """Memory of this process: the GPU's at its peak, else the resident set now."""
    import psutil
    import torch

    if policy.device.type == "cuda":
        return torch.cuda.max_memory_reserved(policy.device)
    return int(psutil.Process().memory_info().rss)


def main(arguments: Sequence[str], prepare: Callable[[], Operations] = _prepare) -> int:
    """Run as a child of the node; the argument is the number of the inherited socket."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if len(arguments) != 1 or not arguments[0].isdigit():
        log.error("usage: python -m swarm.rl.learner FD; swarm-node starts it")
        return 2
    with socket.socket(fileno=int(arguments[0])) as connection:
        serve(connection, prepare)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
