"""The product's training step and its log-probs; a `benchmarks.measure.Worker`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.self_measuring import measured, serve
from swarm.config import TrainSection
from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.loss import FtisConfig
from swarm.rl.policy import Policy
from swarm.rl.token_logprobs import Head, token_logprobs
from swarm.rl.trainer import Trainer, TrainGroup

torch.set_num_threads(1)
_made: dict[str, Any] = {}


def setup(folder: str, dtype: str, batch: dict[str, int]) -> dict[str, Any]:
    """A model from the seed 0, and one group of rollouts with unequal rewards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
    )
    policy = Policy(model, mode="full", source=Path(folder), vocab_size=None)
    section = TrainSection(learning_rate=1e-6, micro_batch_tokens=1 << 16, log_samples=False)
    # Of a group every sample is trained on, as TRL trains on all of a batch.
    _made["trainer"] = Trainer(policy, section, FtisConfig(filter="none"))
    rng = np.random.default_rng(0)
    prompt = rng.integers(5, 320, batch["prompt"])
    rewards = np.arange(batch["rows"], dtype=np.float32)
    completions = rng.integers(5, 320, (batch["rows"], batch["completion"])).astype(np.int32)
    surprise = np.full(batch["completion"], -float(np.log(policy.vocab_size)), np.float32)
    _made["group"] = TrainGroup(
        hash=bytes(32),
        publisher="me",
        own=True,
        prompt_ids=prompt.astype(np.int32),
        rollouts=tuple(Rollout(ids, surprise, Finish.LENGTH) for ids in completions),
        rewards=rewards,
    )
    step()  # AdamW's state is made in the first one
    return {}


def step() -> dict[str, Any]:
    """One whole step: judge, forward, backward, AdamW, report."""
    return measured(lambda: _made.update(report=_made["trainer"].step([_made["group"]])))


def loss() -> dict[str, Any]:
    """Of the last step."""
    return {"loss": _made["report"].loss}


def head(way: str, vocabulary: int, hidden: int, tokens: int) -> dict[str, Any]:
    """Log-probs of some tokens and their gradients, from hidden states on."""
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, hidden).mul_(0.02).requires_grad_()
    states = torch.randn(tokens, hidden).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))

    def work() -> None:
        if way == "chunked":
            logprobs = token_logprobs(states, Head(weight), targets, 1.0)
        else:
            logits = torch.nn.functional.linear(states, weight)
            logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
        logprobs.sum().backward()  # type: ignore[no-untyped-call]

    return measured(work)


if __name__ == "__main__":
    serve({"setup": setup, "step": step, "loss": loss, "head": head})
