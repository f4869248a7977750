"""A run's result on the Hugging Face Hub: weights, tokenizer, model card, the run's record.

Owns: the card's text, and what of a run's record goes there. Does not know: which checkpoint, and
which files are the model's (`swarm.export`).

Optimizer and node state stay here, and so do prompts, completions and other members' names: a card
tells what this node did.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.errors import SwarmError

CARD = "README.md"
RECORD = "swarm-run.json"


def card(
    run: Mapping[str, Any],
    step: int,
    evaluations: Sequence[Mapping[str, Any]],
    ledger: Mapping[str, Any] | None,
    *,
    swarm_name: str,
    merged: bool,
) -> str:
    """The model card.

    Args:
        run: run.json.
        step: of the checkpoint that is published.
        evaluations: lines of metrics.jsonl with accuracies.
        ledger: what the node gave and got; None: not known.
        swarm_name: from the manifest.
        merged: the adapter is part of the weights.
    """
    trained = run["trained"]
    settings = run["configs"][run["config"]]
    base = trained["model"]
    hub_id = base if base.count("/") == 1 and not base.startswith(("/", ".", "~")) else ""
    head = ["---", *([f"base_model: {hub_id}"] if hub_id else []), "pipeline_tag: text-generation"]
    adapter = trained["mode"] == "lora" and not merged
    if adapter:
        head.append("library_name: peft")
    head += ["tags: [swarm-node, grpo, f-tis]", "---"]
    shown_base = hub_id or Path(base).name
    what = f"All weights of {shown_base}"
    if trained["mode"] == "lora":
        what = f"A LoRA adapter for {shown_base}"
        what = what if adapter else f"{shown_base} with a LoRA adapter merged into it"
    lines = [
        *head,
        f"# {shown_base}, trained in the swarm {swarm_name}",
        "",
        f"{what}, trained for {step} steps with swarm-node "
        f"{run['versions'].get('swarm-node', '')}: GRPO on samples of this node's own model and of "
        "other members' models, made safe by F-TIS (arXiv:2605.22537).",
        "",
        "| step | " + " | ".join(_sets(evaluations)) + " |",
        "|---|" + "---|" * len(_sets(evaluations)),
        *(
            f"| {point['step']} | "
            + " | ".join(f"{point[n]:.3f}" if n in point else "" for n in _sets(evaluations))
            + " |"
            for point in _first_and_last(evaluations, step)
        ),
        "",
        "Accuracy is the share of prompts answered rightly by greedy decoding.",
        "",
        "| setting | |",
        "|---|---|",
        f"| swarm | `{run['swarm'][:16]}` |",
        f"| importance, filter | {settings['ftis']['importance']}, {settings['ftis']['filter']}, "
        f"g = {settings['ftis']['kl_threshold']:g}, C = {settings['ftis']['clip_max']:g} |",
        f"| learning rate | {settings['train']['learning_rate']:g} |",
        f"| groups a step | {settings['train']['groups_per_step']} |",
    ]
    if ledger is not None and ledger["got"]["update_share"] is not None:
        others = ledger["got"]["update_share"]
        lines.append(f"| samples of other members | {others:.0%} of those trained on |")
    return "\n".join(lines) + "\n"


def upload(
    folder: Path,
    names: Sequence[str],
    card_text: str,
    record: Mapping[str, Any],
    repo_id: str,
    *,
    private: bool,
    message: str,
) -> str:
    """Put files of a model into a repository of the Hub, made where it is missing.

    The Hub's address and token are those of huggingface_hub (HF_ENDPOINT, HF_TOKEN, `hf auth`).

    Args:
        folder: where the files lie.
        names: theirs, relative to the folder and in the repository.
        card_text: README.md.
        record: of the run.
        repo_id: OWNER/NAME.
        private: of a repository that is made.
        message: of the commit.

    Returns:
        The repository's address.

    Raises:
        SwarmError: the Hub refuses, or is not to be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    operations = [CommitOperationAdd(name, str(folder / name)) for name in names] + [
        CommitOperationAdd(CARD, card_text.encode()),
        CommitOperationAdd(RECORD, (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()),
    ]
    api = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.create_commit(repo_id, operations, commit_message=message)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SwarmError(
            f"{repo_id}: the Hub did not take it: {reason}; "
            "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
        ) from None
    return str(url)


def public_record(run: Mapping[str, Any]) -> dict[str, Any]:
    """run.json without what tells of this machine: folders, addresses, names."""
    kept = ("schema", "swarm", "seed", "versions", "revision", "started_s")
    settings = run["configs"][run["config"]]
    sections = ("engine", "train", "ftis", "pool", "eval")
    trained = {**run["trained"], "model": Path(run["trained"]["model"]).name}
    return {
        **{key: run.get(key) for key in kept},
        "trained": trained,
        "config": {name: settings[name] for name in sections if name in settings},
    }


def _sets(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    names = {k for point in evaluations for k in point} - {"step", "time_s", "evaluation"}
    return sorted(names)


def _first_and_last(evaluations: Sequence[Mapping[str, Any]], step: int) -> list[Mapping[str, Any]]:
    until = [point for point in evaluations if point["step"] <= step]
    return until if len(until) < 2 else [until[0], until[-1]]
