"""Which prompts can be used, and what becomes of the others.

Owns: what is wrong with a prompt (malformed, repeated, too long, an answer that nothing can match),
gathered so that all of it is said at once. Does not know: where prompts come from, manifests.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm.errors import DataError
from swarm.node.prompt_sources import Sourced
from swarm.node.prompt_table import RenderedSet, render, rewards_of
from swarm.paths import SwarmDir
from swarm.protocol.charter import Charter
from swarm.protocol.manifest import RewardSpec, TemplateSpec
from swarm.protocol.prompts import Prompt, content_digest
from swarm.rewards.reward import Spec
from swarm.rewards.workers import RewardError, WorkerPool
from swarm.stored import load_prompts
from swarm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SHOWN_FAULTS = 10


@dataclass(slots=True)
class Sieve:
    """What cannot be used, to be refused all at once or left out.

    Attributes:
        drop: leave it out.
        faults: where, and why.
    """

    drop: bool = False
    faults: list[tuple[str, str]] = field(default_factory=list)

    def fault(self, where: str, why: str) -> None:
        """Note that one prompt cannot be used."""
        self.faults.append((where, why))

    def settle(self) -> None:
        """Refuse, or say what is left out.

        Raises:
            DataError: something cannot be used, and is not to be left out.
        """
        if not self.faults:
            return
        shown = [f"{where}: {why}" for where, why in self.faults[:SHOWN_FAULTS]]
        if (more := len(self.faults) - len(shown)) > 0:
            shown.append(f"and {more} more")
        if self.drop:
            log.warning("%d prompts left out: %s", len(self.faults), "; ".join(shown))
        elif len(self.faults) == 1:
            raise DataError(f"{shown[0]} (--drop-bad leaves such prompts out)")
        else:
            lines = "\n  ".join(shown)
            raise DataError(
                f"{len(self.faults)} prompts cannot be used (--drop-bad leaves them out):"
                f"\n  {lines}"
            )


def without_repetitions(
    sets: Mapping[str, Sequence[Sourced]], sieve: Sieve, seen: dict[bytes, str]
) -> dict[str, list[Sourced]]:
    """What holds a prompt that no set before, and nothing before in its own, holds too."""
    kept: dict[str, list[Sourced]] = {}
    for name, items in sets.items():
        kept[name] = []
        own: dict[bytes, str] = {}
        for item in items:
            if item.prompt is None:
                sieve.fault(item.where, item.wrong)
                continue
            digest = content_digest(item.prompt)
            if digest in own:
                sieve.fault(item.where, f"the same prompt as in {own[digest]}")
            elif digest in seen and name == "prompts":
                sieve.fault(item.where, f"{_text(item.prompt)} stands in {seen[digest]} too")
            else:
                own[digest] = item.where
                kept[name].append(item)
        seen = {**seen, **{digest: f"the {_TITLES[name]} set, {own[digest]}," for digest in own}}
    return kept


_TITLES = {
    "held_out": "held-out",
    "out_of_distribution": "out-of-distribution",
    "prompts": "training",
}


def digests_of(charter: Charter, swarm_dir: SwarmDir) -> dict[bytes, str]:
    """The prompts that a swarm has: digest of each, and which set it stands in."""
    named = [(f"training set {place}", ref) for place, ref in enumerate(charter.prompt_sets)]
    for name, ref in charter.manifest.evaluation_sets.items():
        named.append((f"{_TITLES[name]} set", ref))
    digests: dict[bytes, str] = {}
    for title, ref in named:
        for prompt in load_prompts(swarm_dir, ref):
            digests.setdefault(content_digest(prompt), f"the swarm's {title}")
    return digests


class Rewards:
    """The swarm's reward, and the prompts' own with every parameter written out."""

    def __init__(self, default: RewardSpec, judges: WorkerPool) -> None:
        self.default = default
        self.judges = judges
        self._complete: dict[str, RewardSpec] = {}

    async def named_by(self, item: Sourced) -> RewardSpec | None:
        """The reward of one prompt; None: the swarm's."""
        own = item.prompt.reward if item.prompt else None
        spec = own or item.reward
        if spec is None:
            return None
        key = json.dumps([spec.name, spec.version, dict(spec.params)], sort_keys=True)
        if key not in self._complete:
            self._complete[key] = await complete(spec, self.judges)
        reward = self._complete[key]
        return None if reward == self.default else reward


@dataclass(frozen=True, slots=True)
class Terms:
    """What prompts are held to."""

    template: TemplateSpec
    max_prompt_tokens: int
    tokenizer: Tokenizer
    workers: WorkerPool
    rewards: Rewards

    async def usable(self, items: Sequence[Sourced], sieve: Sieve) -> RenderedSet:
        """Those prompts whose length and answer are right, rendered."""
        places, prompts = [], []
        for item in items:
            if item.prompt is None:
                continue
            try:
                reward = await self.rewards.named_by(item)
            except RewardError as error:
                sieve.fault(item.where, f"its reward: {error.detail}")
                continue
            places.append(item.where)
            prompts.append(replace(item.prompt, reward=reward))
        rendered = await render(
            prompts, self.template.text, self.template.system, self.tokenizer, self.workers
        )
        faults = await self._answer_faults(prompts)
        kept = []
        for place, (where, prompt, ids) in enumerate(
            zip(places, prompts, rendered.token_ids, strict=True)
        ):
            if not 0 < len(ids) <= self.max_prompt_tokens:
                sieve.fault(
                    where,
                    f"{_text(prompt)} has {len(ids)} tokens; allowed are 1 to "
                    f"{self.max_prompt_tokens} (--max-prompt-tokens)",
                )
            elif faults[place]:
                sieve.fault(
                    where,
                    f"{_text(prompt)}: answer {prompt.answer!r:.80}: {faults[place]} "
                    f"(reward {(prompt.reward or self.rewards.default).name})",
                )
            else:
                kept.append(place)
        return RenderedSet(
            tuple(rendered.prompts[place] for place in kept),
            tuple(rendered.token_ids[place] for place in kept),
            tuple(rendered.hashes[place] for place in kept),
        )

    async def _answer_faults(self, prompts: Sequence[Prompt]) -> list[str]:
        """For each prompt why its answer can never be matched; empty: it can."""
        faults = [""] * len(prompts)
        for reward in rewards_of(prompts, self.rewards.default):
            own = [
                place
                for place, prompt in enumerate(prompts)
                if (prompt.reward or self.rewards.default) == reward
            ]
            answers = [prompts[place].answer for place in own]
            try:
                checked = await self.rewards.judges.check_answers(reward, answers)
            except RewardError as error:
                if reward == self.rewards.default:
                    raise
                checked = [error.detail] * len(own)
            for place, fault in zip(own, checked, strict=True):
                faults[place] = fault
        return faults


async def complete(spec: Spec, judges: WorkerPool) -> RewardSpec:
    """A reward with every parameter written out."""
    params = await judges.complete(spec)
    return RewardSpec(name=spec.name, version=spec.version, params=dict(params))


def _text(prompt: Prompt) -> str:
    """The beginning of a prompt, for messages."""
    return repr(prompt.prompt if prompt.prompt is not None else prompt.messages)[:80]
