"""TRL's GRPO loss on a fixed batch, with its backward pass and AdamW; a `measure.Worker`.

Runs under the interpreter of `.venv-peers`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from self_measuring import measured, serve

torch.set_num_threads(1)
_made: dict[str, Any] = {}


def setup(folder: str, dtype: str, batch: dict[str, int]) -> dict[str, Any]:
    """The same model and batch as the product's; no KL penalty, no old log-probs, as there."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)
    )
    words = Tokenizer(models.WordLevel({"a": 0, "<|end|>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", pad_token="<|end|>"
    )
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=batch["rows"],
                num_generations=batch["rows"],
                max_completion_length=batch["completion"],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                beta=0.0,
                loss_type="grpo",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )
    trainer.current_gradient_accumulation_steps = 1
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, 320, (1, batch["prompt"]), generator=generator)
    prompts = prompts.expand(batch["rows"], -1).contiguous()
    completions = torch.randint(5, 320, (batch["rows"], batch["completion"]), generator=generator)
    rewards = torch.arange(batch["rows"], dtype=torch.float32)
    _made["inputs"] = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": (rewards - rewards.mean()) / (rewards.std() + 1e-4),
        "num_items_in_batch": torch.tensor(completions.numel()),
    }
    _made["trainer"], _made["model"] = trainer, trainer.model.train()
    _made["optimizer"] = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    step()
    return {}


def step() -> dict[str, Any]:
    """Forward, backward, gradient clipping, AdamW."""

    def work() -> None:
        value = _made["trainer"]._compute_loss(_made["model"], _made["inputs"])
        value.backward()
        torch.nn.utils.clip_grad_norm_(_made["model"].parameters(), 1.0)
        _made["optimizer"].step()
        _made["optimizer"].zero_grad()
        _made["loss"] = float(value.detach())

    return measured(work)


def loss() -> dict[str, Any]:
    """Of the last step."""
    return {"loss": _made["loss"]}


serve({"setup": setup, "step": step, "loss": loss})
