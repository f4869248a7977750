"""Make the small models that ship with the package: seeded, supervised warm starts.

Each recipe is a Llama of 0.1 to 0.3 million parameters with a character-level tokenizer, trained
on worked arithmetic problems of the train split until it solves a part of them. A worked answer
is either the plain result (`46`) or the result's digits from the last to the first, then the
result (`64;46`), which is the easier way: a left-to-right model gets the carries in the order in
which they arise. A warm start mixes both, so that there is something to find out in training.

    python scripts/make_models.py                 # remake swarm/models
    python scripts/make_models.py arith-large --mix add=3,sub=1 --seed 5 --out /tmp/models
"""

import argparse
import dataclasses
import hashlib
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from swarm.tasks import (
    IN_DISTRIBUTION,
    OUT_OF_DISTRIBUTION,
    Operation,
    Problem,
    Split,
    all_problems,
    draw,
)

MODELS = Path(__file__).resolve().parent.parent / "swarm" / "models"
METADATA = "warm_start.json"

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ALPHABET = "0123456789+-=;"
VOCABULARY = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET])}

MAX_COMPLETION_TOKENS = 8
"""`891;198` and the end token."""

MAX_POSITIONS = 64

BATCH = 128
LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
CHECK_EVERY_STEPS = 20
CHECK_SAMPLES = 400
REPORT_SAMPLES = 400


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One model: its shape and its warm start."""

    name: str
    width: int
    layers: int
    heads: int
    intermediate: int
    mix: Mapping[str, float]
    """Weights of the operations in a batch."""
    reversed_share: float
    """Share of worked answers that write the reversed digits first."""
    target: float
    """Sampled accuracy on the train split, mean over `target_operations`, at which to stop."""
    target_operations: tuple[str, ...] = IN_DISTRIBUTION
    seed: int = 0
    max_steps: int = 3000


RECIPES = (
    Recipe(
        name="arith-small",
        width=64,
        layers=2,
        heads=4,
        intermediate=168,
        mix={"add": 1.0, "sub": 1.0, "add3": 0.5, "addsub": 0.5},
        reversed_share=0.5,
        target=0.30,
    ),
    Recipe(
        name="arith-large",
        width=96,
        layers=3,
        heads=6,
        intermediate=224,
        mix={"add": 1.0, "sub": 1.0, "add3": 0.5, "addsub": 0.5},
        reversed_share=0.5,
        target=0.30,
    ),
    Recipe(
        name="arith-large-sub",
        width=96,
        layers=3,
        heads=6,
        intermediate=224,
        mix={"add": 1.0, "sub": 2.0, "add3": 0.5, "addsub": 0.5},
        reversed_share=0.7,
        target=0.30,
    ),
)


def save_tokenizer(folder: Path) -> None:
    """Write the shared tokenizer: one token a character, nothing added before or after."""
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
        },
    )


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """A fresh model with seeded weights, float32."""
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=recipe.width,
            intermediate_size=recipe.intermediate,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=MAX_POSITIONS,
            initializer_range=0.1,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=VOCABULARY[EOS],
            pad_token_id=VOCABULARY[PAD],
        )
    )
    return model.train()


def worked_answer(problem: Problem, reverse_first: bool) -> str:
    """What a warm start learns to write after the prompt, without the end token."""
    answer = str(problem.value)
    return f"{answer[::-1]};{answer}" if reverse_first else answer


def encode(text: str) -> list[int]:
    """Token ids of a text of the alphabet."""
    return [VOCABULARY[character] for character in text]


def warm_start(recipe: Recipe) -> tuple[LlamaForCausalLM, int]:
    """Train a fresh model until its sampled accuracy reaches the recipe's target.

    Returns:
        The model and the number of steps.
    """
    model = build_model(recipe)
    rng = random.Random(recipe.seed)
    pools = {name: all_problems(_operation(name), "train") for name in recipe.mix}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        names = rng.choices(list(recipe.mix), list(recipe.mix.values()), k=BATCH)
        problems = [rng.choice(pools[name]) for name in names]
        ids, labels = _supervised_batch(problems, recipe.reversed_share, rng)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY_STEPS == 0:
            sampled = [
                accuracy(model, _sample_of(name, "train", CHECK_SAMPLES, step), seed=step)
                for name in recipe.target_operations
            ]
            if sum(sampled) / len(sampled) >= recipe.target:
                return model, step
    return model, recipe.max_steps


def accuracy(model: LlamaForCausalLM, problems: Sequence[Problem], seed: int | None) -> float:
    """Share of problems whose completion ends in time and whose last number is the answer.

    Args:
        model: the model.
        problems: problems with prompts of equal length.
        seed: of sampling at temperature 1; None decodes greedily.
    """
    prompts = torch.tensor([encode(problem.prompt) for problem in problems])
    rows = _complete(model, prompts, seed).tolist()
    right = 0
    for row, problem in zip(rows, problems, strict=True):
        if VOCABULARY[EOS] in row:
            written = row[: row.index(VOCABULARY[EOS])]
            text = "".join(ALPHABET[i - 3] if i >= 3 else " " for i in written)
            right += text.rpartition(";")[2] == str(problem.value)
    return right / len(problems)


@torch.inference_mode()
def _complete(model: LlamaForCausalLM, ids: Tensor, seed: int | None) -> Tensor:
    """Completions (N, MAX_COMPLETION_TOKENS) int64 of equally long prompts (N, P) int64."""
    generator = torch.Generator().manual_seed(seed or 0)
    length = ids.shape[1]
    for _ in range(MAX_COMPLETION_TOKENS):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        if seed is None:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, chosen], 1)
    return ids[:, length:]


def _supervised_batch(
    problems: Sequence[Problem], reversed_share: float, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, both (N, T) int64; -100 in the labels: no loss (prompt, padding)."""
    rows, labels = [], []
    for problem in problems:
        prompt = encode(problem.prompt)
        worked = encode(worked_answer(problem, rng.random() < reversed_share))
        rows.append([*prompt, *worked, VOCABULARY[EOS]])
        labels.append([-100] * len(prompt) + rows[-1][len(prompt) :])
    width = max(map(len, rows))
    padded = [row + [VOCABULARY[PAD]] * (width - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([row + [-100] * (width - len(row)) for row in labels])


def _operation(name: str) -> Operation:
    for known in (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION):
        if name == known:
            return known
    raise SystemExit(f"no operation {name!r}; known: {IN_DISTRIBUTION + OUT_OF_DISTRIBUTION}")


def _sample_of(name: str, split: Split, count: int, seed: int) -> list[Problem]:
    """At most `count` problems of one operation."""
    operation = _operation(name)
    return draw([operation], split, min(count, len(all_problems(operation, split))), seed)


def save(model: LlamaForCausalLM, recipe: Recipe, steps: int, folder: Path) -> dict[str, object]:
    """Write model, tokenizer and metadata; returns the metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    model.eval()
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(folder)
    operations = (*IN_DISTRIBUTION, *OUT_OF_DISTRIBUTION)
    metadata: dict[str, object] = {
        "recipe": dataclasses.asdict(recipe),
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "greedy_held_out": {
            name: round(accuracy(model, _sample_of(name, "held_out", REPORT_SAMPLES, 0), None), 4)
            for name in operations
        },
        "sampled_train": {
            name: round(accuracy(model, _sample_of(name, "train", REPORT_SAMPLES, 0), 1), 4)
            for name in operations
        },
        "torch": torch.__version__,
    }
    _write_json(folder / METADATA, metadata)
    return metadata


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _mix(text: str) -> dict[str, float]:
    parts = (part.partition("=") for part in text.split(","))
    return {_operation(name): float(weight) for name, _, weight in parts}


def main() -> None:
    """Command line."""
    names = [recipe.name for recipe in RECIPES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all")
    parser.add_argument("--out", type=Path, default=MODELS, help="folder of the model folders")
    parser.add_argument("--seed", type=int, help="in place of the recipes' own")
    parser.add_argument("--mix", type=_mix, help="e.g. add=3,sub=1: weights of the operations")
    parser.add_argument("--reversed-share", type=float, help="share of reversed worked answers")
    parser.add_argument("--target", type=float, help="sampled accuracy at which to stop")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    changes = {
        key: value
        for key in ("seed", "mix", "reversed_share", "target")
        if (value := getattr(arguments, key)) is not None
    }
    for recipe in RECIPES:
        if not arguments.names or recipe.name in arguments.names:
            started = time.monotonic()
            changed = dataclasses.replace(recipe, **changes)
            model, steps = warm_start(changed)
            metadata = save(model, changed, steps, arguments.out / recipe.name)
            print(
                f"{recipe.name}: {steps} steps, {metadata['parameters']} parameters, "
                f"greedy held-out {metadata['greedy_held_out']}, "
                f"sampled train {metadata['sampled_train']}, "
                f"{math.ceil(time.monotonic() - started)} s"
            )


if __name__ == "__main__":
    main()
