"""What a node says to its learner and hears from it, in its own terms.

Owns: the arguments and answers of the learner's operations (swarm.rl.learner.Learner) as groups,
prompts and manifest. Does not know: when which is called; the process (swarm.learner.process).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm.config import NodeConfig
from swarm.protocol.manifest import Manifest, SamplingSpec
from swarm.protocol.pool import PooledGroup
from swarm.protocol.rollout import Finish, Rollout

CALL_TIMEOUT_S = 3600.0
"""Longest time that one call to the learner may take before it counts as hung."""

Completion = tuple[np.ndarray, bool]
"""Token ids, int32 (L,), and whether it ended by itself and not at the length limit."""


def init_arguments(config: NodeConfig, manifest: Manifest, run_dir: Path) -> dict[str, Any]:
    """Of "init": load the model for a swarm, `config.model.path` being a folder."""
    return {
        "config": config.model_dump(mode="json"),
        "run_dir": str(run_dir),
        "vocab_size": manifest.tokenizer.vocab_size,
        "stop_token_ids": list(manifest.sampling.stop_token_ids),
        "temperature": manifest.sampling.temperature,
        "workload": {
            "group_size": manifest.sampling.group_size,
            "max_prompt_tokens": manifest.sampling.max_prompt_tokens,
            "max_completion_tokens": manifest.sampling.max_completion_tokens,
        },
    }


def sample_arguments(
    prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: SamplingSpec
) -> dict[str, Any]:
    """Of "sample": a group of completions for each prompt."""
    return {
        "prompts": [ids.tolist() for ids in prompts],
        "n": sampling.group_size,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_completion_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "seeds": list(seeds),
    }


def sampled(answer: Mapping[str, Any]) -> list[tuple[Rollout, ...]]:
    """From "sample": the groups, in the order of the prompts."""
    return [
        tuple(
            Rollout(
                token_ids=np.frombuffer(item["ids"], "<i4"),
                logprobs=np.frombuffer(item["logprobs"], "<f4"),
                finish=Finish(item["finish"]),
            )
            for item in group
        )
        for group in answer["groups"]
    ]


def train_arguments(batch: Sequence[PooledGroup]) -> dict[str, Any]:
    """Of "train": one step on these groups."""
    return {
        "groups": [
            {
                "hash": item.hash,
                "publisher": item.publisher,
                "own": item.own,
                "prompt_ids": item.prompt_token_ids.tolist(),
                "rollouts": [
                    {
                        "ids": rollout.token_ids.astype("<i4").tobytes(),
                        "logprobs": rollout.logprobs.astype("<f4").tobytes(),
                        "finish": int(rollout.finish),
                    }
                    for rollout in item.group.rollouts
                ],
                "rewards": item.rewards.astype("<f4").tobytes(),
            }
            for item in batch
        ]
    }


def step_report(answer: Mapping[str, Any]) -> dict[str, Any]:
    """From "train": the trainer's report, without the single samples."""
    others = ("id", "ok", "ratio_edges", "per_sample")
    return {key: value for key, value in answer.items() if key not in others}


def greedy_arguments(prompts: Sequence[np.ndarray], sampling: SamplingSpec) -> dict[str, Any]:
    """Of "greedy": the most probable completion of each prompt."""
    return {
        "prompts": [ids.tolist() for ids in prompts],
        "max_new_tokens": sampling.max_completion_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


def greedy_completions(answer: Mapping[str, Any], sampling: SamplingSpec) -> list[Completion]:
    """From "greedy", in the order of the prompts."""
    stops = set(sampling.stop_token_ids)
    arrays = [np.frombuffer(packed, "<i4") for packed in answer["completions"]]
    return [(ids, bool(len(ids)) and int(ids[-1]) in stops) for ids in arrays]
