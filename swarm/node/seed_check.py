"""`swarm-node seed --check MODEL`: would this model learn anything from these prompts?

Owns: a few groups sampled and scored as a volunteer would, and what they say about the swarm. Does
not know: how a swarm is made; nothing is founded, stored or trained.
"""

import logging
import random
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm import model_files
from swarm.config import NodeConfig
from swarm.learner.calls import CALL_TIMEOUT_S, init_arguments, sample_arguments, sampled
from swarm.learner.process import LearnerProcess
from swarm.node.genesis import Genesis
from swarm.node.prompt_table import RenderedSet, check_tokenizer
from swarm.protocol.prompts import Prompt
from swarm.protocol.rollout import Finish, Rollout
from swarm.rewards.grading import Grader
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SCHEMA = "swarm-node/seed-check/1"
DEFAULT_PROMPTS = 50
SHARED_WORDS = 13
"""So many words in a row, in two prompts, and one is taken to be made of the other."""

SHOWN_REWARDS = 8
FEW_MIXED = 0.2
MANY_TRUNCATED = 0.2

# Signs of arithmetic count as words: 3+4 is not 3-4.
_WORD = re.compile(r"\w+|[-+*/^=<>%]")


async def check(genesis: Genesis, config: NodeConfig, prompts: int) -> dict[str, Any]:
    """Sample and score some training prompts.

    Args:
        genesis: of the swarm that would be seeded.
        config: of the node that samples; `model.path` names the model.
        prompts: how many.

    Returns:
        What `--json` prints.

    Raises:
        ConfigError, DataError, LearnerError: there is no such model, its tokenizer is another, or
            it cannot be run here.
    """
    # An adapter that does nothing yet needs no memory for gradients of all weights.
    model = config.model.model_copy(update={"mode": "lora"})
    folder = model_files.resolve(model)
    tokenizer = Tokenizer.from_folder(folder)
    check_tokenizer(genesis.manifest, tokenizer, config.model.path)
    model = model.model_copy(update={"path": str(folder)})
    resolved = config.model_copy(update={"model": model})
    chosen = _chosen(genesis.rendered["prompts"], prompts)
    with tempfile.TemporaryDirectory(prefix="swarm-check-") as name:
        learner = LearnerProcess(Path(name, "learner.log"), threads=model.threads)
        reward = config.reward
        try:
            async with WorkerPool(reward.workers, reward.timeout_s) as workers:
                await learner.start()
                groups, rate = await _sample(genesis, resolved, learner, chosen, Path(name))
                grader = Grader(workers, tokenizer, genesis.manifest.reward)
                rewards = await _scored(grader, chosen, groups)
        finally:
            await learner.close()
    return {
        "schema": SCHEMA,
        "swarm_name": genesis.manifest.name,
        "model": config.model.path,
        "prompts_left_out": genesis.left_out,
        "prompts_in_sets": {name: len(item.prompts) for name, item in genesis.rendered.items()},
        "tokens_per_s": round(rate, 1),
        "overlap": _overlaps(genesis.rendered),
        **figures(groups, rewards, genesis.manifest.sampling.max_completion_tokens),
    }


def figures(
    groups: Sequence[Sequence[Rollout]],
    rewards: Sequence[np.ndarray | None],
    max_completion_tokens: int,
) -> dict[str, Any]:
    """What sampled groups and their rewards say.

    Args:
        groups: completions of each prompt.
        rewards: float32 (G,) of each; None: could not be scored.
        max_completion_tokens: the swarm's limit.
    """
    rollouts = [rollout for group in groups for rollout in group]
    lengths = np.array([len(rollout.token_ids) for rollout in rollouts])
    truncated = float(np.mean([rollout.finish is Finish.LENGTH for rollout in rollouts]))
    scored = [group for group in rewards if group is not None]
    values = np.concatenate(scored) if scored else np.zeros(0, np.float32)
    highest, lowest = (values.max(), values.min()) if len(values) else (0.0, 0.0)
    if highest == lowest:  # all alike: all right, or none
        lowest, highest = min(lowest, 0.0), max(highest, np.finfo(np.float32).tiny)
    mixed = [bool(group.min() < group.max()) for group in scored]
    common = Counter(np.round(values, 3).tolist()).most_common(SHOWN_REWARDS)
    found: dict[str, Any] = {
        "groups": len(groups),
        "completions": len(rollouts),
        "groups_without_rewards": len(groups) - len(scored),
        "reward_mean": round(float(values.mean()), 4) if len(values) else None,
        "reward_shares": {f"{value:g}": round(n / len(values), 4) for value, n in sorted(common)},
        "groups_mixed": _share(mixed),
        "groups_all_highest": _share(
            [not m and bool(g[0] == highest) for m, g in zip(mixed, scored, strict=True)]
        ),
        "groups_all_lowest": _share(
            [not m and bool(g[0] == lowest) for m, g in zip(mixed, scored, strict=True)]
        ),
        "truncated": round(truncated, 4),
        "completion_tokens_mean": round(float(lengths.mean()), 1),
        "completion_tokens_p95": int(np.quantile(lengths, 0.95)),
        "max_completion_tokens": max_completion_tokens,
    }
    return {**found, "advice": _advice(found)}


def overlap(training: Iterable[Prompt], evaluation: Sequence[Prompt]) -> dict[str, int]:
    """How many evaluation prompts training prompts give away.

    Returns:
        `same_words`: equal but for case, blanks and punctuation; `shared_run`: SHARED_WORDS words
        in a row in common, those included.
    """
    words = [_words(prompt) for prompt in evaluation]
    runs: dict[tuple[str, ...], set[int]] = {}
    for place, own in enumerate(words):
        for run in _runs(own):
            runs.setdefault(run, set()).add(place)
    whole = {own: place for place, own in enumerate(words)}
    same: set[int] = set()
    shared: set[int] = set()
    for prompt in training:
        own = _words(prompt)
        if own in whole:
            same.add(whole[own])
        for run in _runs(own):
            shared |= runs.get(run, set())
    return {"prompts": len(words), "same_words": len(same), "shared_run": len(shared | same)}


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    shares = ", ".join(f"{value}: {share:.0%}" for value, share in result["reward_shares"].items())
    shown = [
        f"{result['groups']} prompts, {result['completions']} completions of {result['model']}, "
        f"{result['tokens_per_s']:g} tokens/s",
        f"reward         mean {result['reward_mean']}; {shares}",
        f"mixed groups   {result['groups_mixed']:.0%} (only these teach; "
        f"{result['groups_all_highest']:.0%} all at the highest reward, "
        f"{result['groups_all_lowest']:.0%} all at the lowest)",
        f"truncated      {result['truncated']:.0%} at {result['max_completion_tokens']} tokens; "
        f"mean {result['completion_tokens_mean']:g}, 95 % below {result['completion_tokens_p95']}",
    ]
    if result["groups_without_rewards"]:
        shown.append(f"not scored     {result['groups_without_rewards']} groups")
    for name, found in result["overlap"].items():
        shown.append(
            f"{name.replace('_', '-'):14} {found['prompts']} prompts; of training prompts, "
            f"{found['same_words']} have the words, {found['shared_run']} {SHARED_WORDS} in a row"
        )
    if result["prompts_left_out"]:
        shown.append(f"left out       {result['prompts_left_out']} prompts that cannot be used")
    return shown + [f"advice         {text}" for text in result["advice"]]


def _advice(found: Mapping[str, Any]) -> list[str]:
    advice = []
    if found["truncated"] > MANY_TRUNCATED:
        advice.append(
            "many completions are cut: raise --max-completion-tokens, or see that the model stops "
            "(--stop, --template)"
        )
    if found["groups_mixed"] < FEW_MIXED:
        if found["groups_all_lowest"] > found["groups_all_highest"]:
            advice.append(
                "most groups get nothing, so there is little to learn from: easier prompts, "
                "another template, system text or reward, a larger --group-size, a stronger model"
            )
        else:
            advice.append("most groups are all right already: harder prompts")
    if found["groups_without_rewards"]:
        advice.append("some groups could not be scored: see the messages above")
    return advice


async def _sample(
    genesis: Genesis,
    config: NodeConfig,
    learner: LearnerProcess,
    chosen: RenderedSet,
    folder: Path,
) -> tuple[list[tuple[Rollout, ...]], float]:
    """A group for each prompt, and tokens per second."""
    manifest = genesis.manifest
    arguments = init_arguments(config, manifest, folder)
    await learner.call("init", timeout_s=CALL_TIMEOUT_S, **arguments)
    groups: list[tuple[Rollout, ...]] = []
    tokens, seconds = 0, 0.0
    size = config.engine.prompts_per_call
    for start in range(0, len(chosen.prompts), size):
        some = chosen.token_ids[start : start + size]
        answer = await learner.call(
            "sample",
            timeout_s=CALL_TIMEOUT_S,
            **sample_arguments(some, range(start, start + len(some)), manifest.sampling),
        )
        groups += sampled(answer)
        tokens += answer["tokens"]
        seconds += answer["seconds"]
        log.info("sampled %d of %d prompts", len(groups), len(chosen.prompts))
    return groups, tokens / max(seconds, 1e-6)


async def _scored(
    grader: Grader, chosen: RenderedSet, groups: Sequence[Sequence[Rollout]]
) -> list[np.ndarray | None]:
    return [
        await grader.group_rewards(prompt, group)
        for prompt, group in zip(chosen.prompts, groups, strict=True)
    ]


def _chosen(rendered: RenderedSet, count: int) -> RenderedSet:
    """Some prompts of a set, the same ones each time."""
    total = len(rendered.prompts)
    places = sorted(random.Random(0).sample(range(total), min(count, total)))
    return RenderedSet(
        tuple(rendered.prompts[place] for place in places),
        tuple(rendered.token_ids[place] for place in places),
        tuple(rendered.hashes[place] for place in places),
    )


def _overlaps(rendered: Mapping[str, RenderedSet]) -> dict[str, dict[str, int]]:
    return {
        name: overlap(rendered["prompts"].prompts, rendered[name].prompts)
        for name in ("held_out", "out_of_distribution")
        if name in rendered and rendered[name].prompts
    }


def _words(prompt: Prompt) -> tuple[str, ...]:
    texts = [prompt.prompt or ""]
    if prompt.messages is not None:
        texts = [message["content"] for message in prompt.messages]
    return tuple(_WORD.findall("\n".join(texts).casefold()))


def _runs(words: Sequence[str]) -> Iterable[tuple[str, ...]]:
    for start in range(len(words) - SHARED_WORDS + 1):
        yield tuple(words[start : start + SHARED_WORDS])


def _share(flags: Sequence[bool]) -> float:
    return round(sum(flags) / len(flags), 4) if flags else 0.0
