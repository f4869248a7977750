"""LoRA adapters: putting them on a model, reading them, merging them into weights.

Owns: peft's side of them. Does not know: training, where folders come from (swarm.model_files).
"""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from swarm.checkpoint_files import TOKENIZER_FILES
from swarm.config import ModelSection
from swarm.errors import ConfigError, DataError, first_line
from swarm.model_files import ADAPTER_FILE, read_adapter_form


def add(model: Any, section: ModelSection, seed: int, begin: Path | None) -> Any:
    """Put an adapter on a model.

    Args:
        model: a causal language model of transformers.
        section: rank, alpha and targets.
        seed: of its initial weights.
        begin: a folder with an adapter of the same form, whose weights are taken instead.

    Raises:
        ConfigError: a target is none of the model's layers.
        DataError: the folder's adapter is of another form.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    torch.manual_seed(seed)
    config = LoraConfig(
        r=section.lora_rank,
        lora_alpha=section.lora_alpha,
        target_modules=list(section.lora_targets) or "all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft calls some of transformers' functions by names that are being retired.
            warnings.simplefilter("ignore", FutureWarning)
            # Of experts in one tensor, which are not linear layers and stay as they are.
            warnings.filterwarnings(
                "ignore", message=".*_pattern keys did not match", category=RuntimeWarning
            )
            adapted = get_peft_model(model, config)
    except ValueError as error:
        linear = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is nn.Linear}
        raise ConfigError(
            f"model.lora_targets = {list(section.lora_targets)!r}: {first_line(error)} "
            f"Linear layers of this model: {', '.join(sorted(linear))}"
        ) from None
    if begin is None:
        return adapted
    path = begin / ADAPTER_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: not an adapter: {first_line(error)}") from None
    try:
        outcome: Any = set_peft_model_state_dict(adapted, tensors)
    except RuntimeError as error:
        raise DataError(f"{path}: an adapter of another shape: {first_line(error)}") from None
    absent = [key for key in outcome.missing_keys if "lora_" in key]
    if absent or outcome.unexpected_keys:
        raise DataError(
            f"{path}: the adapter of other layers; missing {absent[:3]}, "
            f"not in the model {list(outcome.unexpected_keys)[:3]}"
        )
    return adapted


def merge(model: Any, folder: Path) -> Any:
    """The model with a folder's adapter added to its weights.

    Raises:
        DataError: the adapter is none of this model's.
    """
    form = read_adapter_form(folder)
    section = ModelSection(
        mode="lora", lora_rank=form.rank, lora_alpha=form.alpha, lora_targets=form.targets
    )
    try:
        adapted = add(model, section, 0, folder)
    except ConfigError as error:
        raise DataError(f"{folder}: the adapter of another model: {error}") from None
    return adapted.merge_and_unload()


def export_merged(section: ModelSection, checkpoint: Path, out: Path) -> None:
    """Write a plain model folder: the base model with a checkpoint's adapter in its weights.

    Added up in float32, written in the dtype that the base model's files have.

    Raises:
        DataError: base model or adapter is missing or of another form.
    """
    from swarm.rl.policy import Policy

    exact = section.model_copy(update={"precision": "fp32", "device": "cpu"})
    policy = Policy.load(exact, seed=0, resume=checkpoint)
    model: Any = policy.model.merge_and_unload()
    model.to(_written_dtype(policy.source)).save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, out / name)


def _written_dtype(folder: Path) -> torch.dtype:
    path = next(iter(sorted(folder.glob("*.safetensors"))))
    with safe_open(path, "pt") as opened:
        written: torch.dtype = opened.get_tensor(next(iter(opened.keys()))).dtype
    return written if written in (torch.bfloat16, torch.float16) else torch.float32
