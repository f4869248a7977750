"""Samples with vLLM, in a process of its own.

Owns: which weights vLLM has, how it gets new ones, when it sleeps, and that it is started again
after a death. Does not know: the process's messages (`swarm.rl.vllm_process`), what a file of
weights holds (`swarm.rl.weight_export`), text, rewards.

Full training: the policy is written to files and vLLM reloads them. LoRA: only the adapter is, and
vLLM gets it under a number that it has not seen, since it keeps an adapter whose number it knows.
After either, what its prefix cache holds was computed by other weights, and is dropped. Files are
in memory (/dev/shm) where there is room, and deleted once they are loaded.
"""

import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swarm.config import EngineSection
from swarm.errors import ConfigError
from swarm.paths import RunDir
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.engine import SamplingParams, check_request
from swarm.rl.policy import Policy, TokenIds
from swarm.rl.vllm_process import VllmFailedError, VllmProcess
from swarm.rl.weight_export import delete_weights, export_model

log = logging.getLogger(__name__)

ROOM = 2.0
"""Files go to shared memory where so many times the policy's size is free."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM takes one of these as the largest rank."""

MAX_TEMPERATURE = 2.0
"""vLLM draws at no higher one."""

MAX_SEQUENCES = 256
"""Completions that vLLM decodes at a time; the others wait for their turn."""

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is its own already
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of the child, always."""

DEFAULTS: Mapping[str, str] = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Of the child, where this process's environment does not say otherwise."""


class VllmEngine:
    """See `swarm.rl.engine.Engine`.

    Args:
        policy: whose weights are sampled from.
        section: interpreter, device, memory, sleep level.
        run_dir: the child's log is in it, and its files where memory has no room.
        max_tokens: longest prompt and completion together; None: the model's context.
        seed: of vLLM; completions have seeds of their own.

    Raises:
        ConfigError: there is no vLLM, or the model is adapted where vLLM cannot adapt it.
        LearnerError: vLLM does not start with this model.

    Attributes:
        syncs: how often vLLM was given weights: with each start, and for each change.
        restarts: how often it was started again.
    """

    def __init__(
        self,
        policy: Policy,
        section: EngineSection,
        *,
        run_dir: RunDir,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        self._policy = policy
        self._section = section
        self._log_path = run_dir.root / "engine.log"
        self._max_tokens = max_tokens
        self._seed = seed
        self._files = _place_for_files(policy, run_dir)
        shares = policy.device.type == "cuda" and not section.device
        self._sleep_level = section.sleep_level if shares else 0
        if policy.mode == "lora":
            # A base model that was dropped would have to be written anew at each waking.
            self._sleep_level = min(self._sleep_level, 1)
        self._process: VllmProcess | None = None
        self._asleep = False
        self._stale = False
        self._adapters = 0
        self._version = ""
        self._sync_seconds = 0.0
        self.syncs = 0
        self.restarts = 0
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the running child."""
        return None if self._process is None else self._process.pid

    def generate(
        self,
        prompts: Sequence[TokenIds],
        n: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> list[list[Rollout]]:
        """See `Engine.generate`."""
        checked = check_request(self._policy, prompts, n, sampling, len(seeds))
        check_temperature(sampling.temperature)
        if not checked:
            return []
        arguments = {
            "prompts": [ids.astype("<i4").tobytes() for ids in checked],
            "n": n,
            "seeds": [int(seed) for seed in seeds],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "greedy": sampling.greedy,
        }
        try:
            answer = self._generate(arguments)
        except VllmFailedError as error:
            log.warning("%s; starting vLLM again", error)
            self.restart()
            answer = self._generate(arguments)
        return [
            [
                Rollout(
                    token_ids=np.frombuffer(ids, "<i4"),
                    logprobs=np.frombuffer(logprobs, "<f4"),
                    finish=Finish(finish),
                )
                for ids, logprobs, finish in group
            ]
            for group in answer["groups"]
        ]

    def sync(self) -> None:
        """See `Engine.sync`; the weights travel when they are next sampled from."""
        self._stale = True

    def sleep(self) -> None:
        """See `Engine.sleep`: only on a GPU that it shares with the training."""
        if self._sleep_level and not self._asleep and self._process is not None:
            try:
                self._call("sleep", level=self._sleep_level)
            except VllmFailedError as error:
                log.warning("%s; starting it again when it is needed", error)
                self._process = None
                return
            self._asleep = True
            self._stale |= self._sleep_level == 2

    def restart(self) -> None:
        """See `Engine.restart`."""
        self._end_process()
        self.restarts += 1
        self._start()

    def close(self) -> None:
        """See `Engine.close`."""
        self._end_process()
        shutil.rmtree(self._files, ignore_errors=True)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "vllm",
            "version": self._version,
            "syncs": self.syncs,
            "sync_seconds": round(self._sync_seconds, 3),
            "restarts": self.restarts,
        }

    # -- internals -------------------------------------------------------------------------------

    def _generate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self.restart()
        if self._asleep:
            torch.cuda.empty_cache()
            self._call("wake", what="weights")
        if self._stale:
            self._hand_over_weights()
        if self._asleep:
            self._call("wake", what="kv_cache")
            self._asleep = False
        return self._call("generate", **arguments)

    def _start(self) -> None:
        started = time.monotonic()
        # It imports its libraries while the weights are written.
        self._process = VllmProcess(self._section.python, self._log_path, self._environment())
        self._asleep = False
        model = self._fresh(self._files / "model")
        export_model(self._policy, model)
        self._version = self._call("load", arguments=self._arguments(model))["version"]
        delete_weights(model)
        self._stale = self._policy.mode == "lora"
        self.syncs += 1
        log.info("vLLM %s ready after %.1f s", self._version, time.monotonic() - started)

    def _hand_over_weights(self) -> None:
        started = time.monotonic()
        if self._policy.mode == "lora":
            self._adapters += 1
            folder = self._fresh(self._files / f"adapter-{self._adapters}")
            self._policy.save(folder)
            self._call("adapt", path=str(folder), number=self._adapters)
            shutil.rmtree(folder)
        else:
            folder = self._files / "model"
            export_model(self._policy, folder)
            self._call("reload", path=str(folder))
            delete_weights(folder)
        self._call("forget")
        self._stale = False
        self.syncs += 1
        self._sync_seconds = time.monotonic() - started

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        if self._process is None:
            raise VllmFailedError(f"{op}: vLLM is not running")
        return self._process.call(op, **arguments)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    @staticmethod
    def _fresh(folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        return folder

    def _environment(self) -> dict[str, str]:
        changes = {key: os.environ.get(key, value) for key, value in DEFAULTS.items()}
        changes |= ENVIRONMENT
        if self._policy.device.type == "cpu":
            changes["OMP_NUM_THREADS"] = str(torch.get_num_threads())
            changes["TORCHDYNAMO_DISABLE"] = "1"
        if self._section.device:
            changes["CUDA_VISIBLE_DEVICES"] = self._section.device
        elif self._policy.device.index:  # vLLM takes the first that it sees
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            number = self._policy.device.index
            changes["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
        return changes

    def _arguments(self, model: Path) -> dict[str, Any]:
        """Of `vllm.LLM`."""
        policy, section = self._policy, self._section
        limit = policy.max_tokens
        wanted = [tokens for tokens in (self._max_tokens, limit) if tokens is not None]
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": str(policy.dtype).removeprefix("torch."),
            "seed": self._seed,
            "max_model_len": min(wanted) if wanted else None,
            "max_num_seqs": MAX_SEQUENCES,
            "enforce_eager": section.eager or policy.device.type == "cpu",
            "logprobs_mode": "processed_logprobs",  # of the distribution drawn from
            "generation_config": "vllm",  # nothing of the model's own habits of sampling
            "load_format": "safetensors",
            "trust_remote_code": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "distributed_executor_backend": "uni",
        }
        if policy.device.type == "cuda":
            arguments |= {
                "gpu_memory_utilization": section.gpu_memory,
                "enable_sleep_mode": self._sleep_level > 0,
            }
        if policy.mode == "lora":
            arguments |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": _lora_rank(policy),
            }
        return arguments


def check_temperature(temperature: float) -> None:
    """Refuse what vLLM would.

    Raises:
        ConfigError: the temperature is too high.
    """
    if temperature > MAX_TEMPERATURE:
        raise ConfigError(
            f"the swarm samples at temperature {temperature:g}, vLLM at {MAX_TEMPERATURE:g} at "
            "most; use engine.kind = 'transformers'"
        )


def _lora_rank(policy: Policy) -> int:
    rank = max(config.r for config in policy.model.peft_config.values())
    try:
        return next(allowed for allowed in LORA_RANKS if allowed >= rank)
    except StopIteration:
        raise ConfigError(
            f"model.lora_rank = {rank}: vLLM takes at most {LORA_RANKS[-1]}; "
            "or use engine.kind = 'transformers'"
        ) from None


def _place_for_files(policy: Policy, run_dir: RunDir) -> Path:
    """Where weights are handed over; the same for each start in a run, so that nothing piles up."""
    size = sum(parameter.nbytes for parameter in policy.causal_lm.parameters())
    run_dir.delete_handover()
    memory, disk = run_dir.handover_dirs
    if memory.parent.is_dir() and shutil.disk_usage(memory.parent).free > ROOM * size:
        try:
            memory.mkdir(mode=0o700)
        except OSError as error:
            log.info("weights go to vLLM through %s: %s", disk, error)
        else:
            return memory
    return disk
