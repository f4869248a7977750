"""Sampling with the product's engine and with generate(); a `benchmarks.measure.Worker`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.self_measuring import measured, serve
from swarm.rl.engine import SamplingParams, TransformersEngine
from swarm.rl.policy import Policy

torch.set_num_threads(1)
TEMPERATURE = 0.7
_made: dict[str, Any] = {}


def setup(folder: str, dtype: str) -> dict[str, Any]:
    """A model from the seed 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
    ).eval()
    _made["model"] = model
    _made["policy"] = Policy(model, mode="full", source=Path(folder), vocab_size=None)
    _made["seed"] = 0
    return {}


def _prompt(length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(5, 320, length).astype(np.int32)


def _sample(rows: int, prompt: int, new: int) -> list[Any]:
    _made["seed"] += 1
    engine = TransformersEngine(_made["policy"])
    params = SamplingParams(temperature=TEMPERATURE, max_new_tokens=new, stop_token_ids=())
    return engine.generate([_prompt(prompt)], rows, params, [_made["seed"]])[0]


def ours(rows: int, prompt: int, new: int) -> dict[str, Any]:
    """The engine, as a node calls it."""
    return measured(lambda: _sample(rows, prompt, new))


def generate(rows: int, prompt: int, new: int) -> dict[str, Any]:
    """generate(), and the log-probs of what it drew, which training needs."""
    model = _made["model"]
    ids = torch.from_numpy(_prompt(prompt).astype(np.int64))[None]

    def work() -> None:
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                num_return_sequences=rows,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            tokens = output.sequences[:, prompt:]
            torch.stack(
                [
                    score.log_softmax(-1).gather(-1, tokens[:, index, None])[:, 0]
                    for index, score in enumerate(output.scores)
                ],
                dim=1,
            )

    return measured(work)


def agreement(rows: int, prompt: int, new: int) -> dict[str, Any]:
    """The engine's log-probs of its samples beside the trainer's of the same."""
    rollouts = _sample(rows, prompt, new)
    with torch.no_grad():
        scored, mask = _made["policy"].completion_logprobs(
            [_prompt(prompt).tolist()] * rows,
            [rollout.token_ids.tolist() for rollout in rollouts],
            TEMPERATURE,
        )
    sampled = torch.from_numpy(np.stack([rollout.logprobs for rollout in rollouts]))
    ratio = (scored - sampled).double()
    return {
        "max": float(ratio.abs().max()),
        "mean": float(ratio.abs().mean()),
        "k3": float((ratio.exp() - 1 - ratio).sum(dim=1).mean()),
        "tokens": int(mask.sum()),
    }


if __name__ == "__main__":
    serve({"setup": setup, "ours": ours, "generate": generate, "agreement": agreement})
