"""The swarm's prompts as this node's tokenizer renders them.

Owns: rendering and tokenizing prompt sets, and the check that this node's tokenizer is the swarm's.
Does not know: where the sets come from, what is done with the prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from swarm.config import LimitsSection
from swarm.errors import ConfigError, DataError, RemoteProtocolError
from swarm.protocol.manifest import Manifest, PromptSetRef, RewardSpec
from swarm.protocol.prompts import Prompt, decode_prompt_set
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import Tokenizer, prompt_hash, tokens_sha256


@dataclass(frozen=True, slots=True)
class RenderedSet:
    """One prompt set: prompts, their token ids (int32 arrays), and the hashes of those."""

    prompts: tuple[Prompt, ...]
    token_ids: tuple[np.ndarray, ...]
    hashes: tuple[bytes, ...]

    def first(self, count: int) -> Self:
        """The set's first prompts only."""
        return type(self)(self.prompts[:count], self.token_ids[:count], self.hashes[:count])


class PromptTable:
    """Training prompts of all sets in order; the index is the prompt id."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self._token_ids: list[np.ndarray] = []
        self.hashes: list[bytes] = []

    def __len__(self) -> int:
        return len(self.prompts)

    def append(self, rendered: RenderedSet) -> None:
        """Add a set behind those that are there."""
        self.prompts.extend(rendered.prompts)
        self._token_ids.extend(rendered.token_ids)
        self.hashes.extend(rendered.hashes)

    def token_ids(self, prompt_id: int) -> np.ndarray:
        """Token ids of a prompt, int32 (L,)."""
        return self._token_ids[prompt_id]

    def prompt_hash(self, prompt_id: int) -> bytes:
        """sha256 over the prompt's token ids as little-endian int32."""
        return self.hashes[prompt_id]


async def render(
    prompts: Sequence[Prompt],
    manifest_template: str,
    system: str,
    tokenizer: Tokenizer,
    workers: WorkerPool,
) -> RenderedSet:
    """Render and tokenize prompts.

    Raises:
        DataError: the template fails, or takes too long.
    """
    texts = await workers.render(manifest_template, system, prompts)
    token_ids = tuple(np.asarray(tokenizer.encode(text), dtype=np.int32) for text in texts)
    return RenderedSet(tuple(prompts), token_ids, tuple(prompt_hash(ids) for ids in token_ids))


def rewards_of(prompts: Sequence[Prompt], default: RewardSpec) -> list[RewardSpec]:
    """The different rewards that these prompts are scored with."""
    return list({r.model_dump_json(): r for r in (p.reward or default for p in prompts)}.values())


async def render_set(
    data: bytes,
    ref: PromptSetRef,
    manifest: Manifest,
    tokenizer: Tokenizer,
    name: str,
    workers: WorkerPool,
    *,
    context: int | None = None,
) -> RenderedSet:
    """Render a set of the swarm; check that its token ids are the organizer's, and its rewards.

    Args:
        data: the set's bytes.
        ref: how the swarm's terms name the set.
        manifest: template, tokenizer, limits and reward.
        tokenizer: of the model.
        name: of the model, for messages.
        workers: render.
        context: tokens of the model's longest sequence; None: no limit.

    Raises:
        DataError: `data` is not the set; the token ids differ, although the vocabularies agree; or
            a prompt is longer than the manifest allows, or with its completion than the model's
            context.
        RewardError: a reward that the set asks for is not to be had here; says what to install.
    """
    try:
        prompts = decode_prompt_set(data, ref)
    except RemoteProtocolError as error:
        raise DataError(f"prompt set {ref.sha256[:16]} cannot be used: {error}") from None
    for reward in rewards_of(prompts, manifest.reward):
        await workers.complete(reward)
    rendered = await render(
        prompts, manifest.template.text, manifest.template.system, tokenizer, workers
    )
    mine = tokens_sha256(rendered.hashes)
    if mine != ref.tokens_sha256:
        raise DataError(
            f"tokenizer mismatch: the model {name!r} splits the swarm's prompts otherwise than "
            f"{manifest.tokenizer.name!r} does, with the same vocabulary: token hash {mine[:16]} "
            f"of prompt set {ref.sha256[:16]}, expected {ref.tokens_sha256[:16]}; "
            "join with a model of that family"
        )
    longest = max(len(ids) for ids in rendered.token_ids)
    if longest > manifest.sampling.max_prompt_tokens:
        raise DataError(
            f"prompt set {ref.sha256[:16]} holds a prompt of {longest} tokens; the manifest's "
            f"limit is {manifest.sampling.max_prompt_tokens}"
        )
    completion = manifest.sampling.max_completion_tokens
    if context is not None and longest + completion > context:
        raise DataError(
            f"the model {name!r} has a context of {context} tokens (max_position_embeddings); the "
            f"swarm {manifest.name!r} has prompts of up to {longest} tokens and completions of up "
            f"to {completion}; join with a model of a context of {longest + completion} or more, "
            "or a swarm with a smaller --max-completion-tokens"
        )
    return rendered


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, name: str) -> None:
    """Refuse a tokenizer whose vocabulary is not the swarm's.

    Raises:
        DataError: names both tokenizers.
    """
    mine = tokenizer.fingerprint()
    if mine != manifest.tokenizer.fingerprint:
        raise DataError(
            f"tokenizer mismatch: that of {name!r} has fingerprint {mine[:16]} with "
            f"{tokenizer.vocab_size} tokens, the swarm uses {manifest.tokenizer.name!r} with "
            f"fingerprint {manifest.tokenizer.fingerprint[:16]} and "
            f"{manifest.tokenizer.vocab_size} tokens; give a model or tokenizer of that family"
        )


def check_limits(manifest: Manifest, sets: Sequence[PromptSetRef], limits: LimitsSection) -> None:
    """Refuse a swarm that asks for more than this node allows.

    Raises:
        ConfigError: names the manifest's value and the limit to raise.
    """
    sampling = manifest.sampling
    total_mb = sum(ref.size_bytes for ref in sets) / 1e6
    for what, value, field, limit in (
        (
            "prompts of up to",
            sampling.max_prompt_tokens,
            "max_prompt_tokens",
            limits.max_prompt_tokens,
        ),
        (
            "completions of up to",
            sampling.max_completion_tokens,
            "max_completion_tokens",
            limits.max_completion_tokens,
        ),
        ("groups of", sampling.group_size, "max_group_size", limits.max_group_size),
        ("MB of prompts:", total_mb, "max_download_mb", limits.max_download_mb),
    ):
        if value > limit:
            raise ConfigError(
                f"the swarm {manifest.name!r} asks for {what} {value:g}; this node allows {limit}. "
                f"Raise limits.{field} in node.toml if you agree"
            )
