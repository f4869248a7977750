"""From prompts and options to a swarm: the manifest and the prompt sets that it names.

Owns: what the manifest says, and the files of a swarm that begins. Does not know: where prompts
come from (swarm.node.prompt_sources), which can be used (swarm.node.prompt_sieve), torch; an
organizer needs no model, only the tokenizer's files.
"""

import json
import logging
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from swarm import model_files
from swarm.errors import DataError, UsageError
from swarm.node import prompt_sources
from swarm.node.prompt_sieve import Rewards, Sieve, Terms, complete, digests_of, without_repetitions
from swarm.node.prompt_sources import Sourced
from swarm.node.prompt_table import RenderedSet, check_tokenizer
from swarm.paths import DataDir, SwarmDir, write_atomic
from swarm.protocol.charter import Charter
from swarm.protocol.manifest import (
    Manifest,
    PromptSetRef,
    SamplingSpec,
    TemplateSpec,
    TokenizerSpec,
)
from swarm.protocol.prompts import (
    Prompt,
    encode_prompt_set,
    prompt_set_ref,
)
from swarm.rewards import combined
from swarm.rewards.reward import PlainSpec
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import PLAIN_TEMPLATE, Tokenizer

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DEFAULT_REWARD = "number"
RENDER_TIMEOUT_S = 120.0
REWARD_TIMEOUT_S = 10.0
"""Time that a reward's parameters may take to be tried out: reward.timeout_s as it is shipped."""


@dataclass(frozen=True, slots=True)
class SeedOptions:
    """What the organizer decides; everything else is derived from the prompts.

    Attributes:
        prompts: sources (swarm.node.prompt_sources).
        source_options: options of sources that name none.
        reward: empty: the sources' own where they agree, else `number`.
        drop_bad: leave out what cannot be used, and say so, in place of refusing it all.
        co_organizers: peer ids of those who may amend the swarm besides.
    """

    prompts: tuple[str, ...]
    tokenizer: Path
    name: str = ""
    source_options: Mapping[str, str] = field(default_factory=dict)
    drop_bad: bool = False
    held_out: str | None = None
    held_out_fraction: float = 0.1
    out_of_distribution: str | None = None
    template: str = "auto"
    system: str = ""
    reward: str = ""
    reward_params: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    temperature: float = 1.0
    group_size: int = 8
    max_prompt_tokens: int = 1024
    max_completion_tokens: int = 512
    stop: tuple[str, ...] = ()
    record_shards: int = 4
    co_organizers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Genesis:
    """A manifest and the prompt sets that it names, by hex hash.

    Attributes:
        rendered: of the sets `prompts`, `held_out`, `out_of_distribution`, those that there are.
        left_out: how many prompts could not be used.
    """

    manifest: Manifest
    sets: dict[str, bytes]
    rendered: dict[str, RenderedSet]
    left_out: int


def split_held_out(
    prompts: Sequence[Sourced], fraction: float
) -> tuple[list[Sourced], list[Sourced]]:
    """Split by a hash of the prompt's text, so that the same prompt always falls on one side.

    crc32, since a linear function of the text would correlate with the answers.
    """
    training: list[Sourced] = []
    held_out: list[Sourced] = []
    for item in prompts:
        prompt = item.prompt
        if prompt is None:
            training.append(item)
            continue
        key = prompt.prompt if prompt.prompt is not None else json.dumps(prompt.messages)
        share = zlib.crc32(key.encode()) / 2**32
        (held_out if share < fraction else training).append(item)
    return training, held_out


async def make_genesis(options: SeedOptions, organizer: str, created_s: float) -> Genesis:
    """Read and check all files, render every prompt, and make the manifest.

    Raises:
        DataError, UsageError: name the file, line or option, and what would be right.
    """
    try:
        return await _make_genesis(options, organizer, created_s)
    except ValidationError as error:
        faults = "; ".join(
            f"{_flag(str(item['loc'][-1]))} {item['input']!r:.80}: {item['msg']}"
            for item in error.errors()
        )
        raise UsageError(faults) from None


async def _make_genesis(options: SeedOptions, organizer: str, created_s: float) -> Genesis:
    if not 0 <= options.held_out_fraction < 1:
        raise UsageError(
            f"--held-out-fraction {options.held_out_fraction}: from 0 to below 1, e.g. 0.1"
        )
    tokenizer = Tokenizer.from_folder(options.tokenizer)
    sieve = Sieve(options.drop_bad)
    sourced = _read_sets(options)
    kept = without_repetitions(sourced, sieve, {})
    if not kept["prompts"]:
        sieve.settle()
        raise DataError(f"{', '.join(options.prompts)}: holds no prompts to train on")
    everything = [item.prompt for items in kept.values() for item in items if item.prompt]
    template = _template(options, tokenizer, everything)
    shared = _shared_reward(options, [item for items in kept.values() for item in items])
    if shared is not None:
        kept = {name: [replace(item, reward=None) for item in kept[name]] for name in kept}
    default = shared or combined.parse(options.reward or DEFAULT_REWARD, options.reward_params)
    sets: dict[str, bytes] = {}
    rendered: dict[str, RenderedSet] = {}
    refs: dict[str, PromptSetRef] = {}
    async with (
        WorkerPool(1, RENDER_TIMEOUT_S) as workers,
        WorkerPool(1, REWARD_TIMEOUT_S) as judges,
    ):
        rewards = Rewards(await complete(default, judges), judges)
        terms = Terms(template, options.max_prompt_tokens, tokenizer, workers, rewards)
        for name, items in kept.items():
            rendered[name] = await terms.usable(items, sieve)
    sieve.settle()
    for name, rendered_set in rendered.items():
        if rendered_set.prompts:
            data = encode_prompt_set(rendered_set.prompts)
            refs[name] = prompt_set_ref(data, rendered_set.hashes)
            sets[refs[name].sha256] = data
    if "prompts" not in refs:
        raise DataError(f"{', '.join(options.prompts)}: no prompt is left")
    _warn(options, refs)
    title = options.name or prompt_sources.title(options.prompts)
    manifest = Manifest(
        name=re.sub("[^A-Za-z0-9 ._-]", "_", title)[:64],
        created_s=created_s,
        organizers=tuple(dict.fromkeys((organizer, *options.co_organizers))),
        prompts=refs["prompts"],
        held_out=refs.get("held_out"),
        out_of_distribution=refs.get("out_of_distribution"),
        template=template,
        tokenizer=TokenizerSpec(
            fingerprint=tokenizer.fingerprint(),
            vocab_size=tokenizer.vocab_size,
            name=options.tokenizer.name,
        ),
        sampling=SamplingSpec(
            temperature=options.temperature,
            group_size=options.group_size,
            max_prompt_tokens=options.max_prompt_tokens,
            max_completion_tokens=options.max_completion_tokens,
            stop_token_ids=_stop_ids(options, tokenizer),
        ),
        reward=rewards.default,
        record_shards=options.record_shards,
    )
    return Genesis(manifest, sets, rendered, len(sieve.faults))


def store_genesis(genesis: Genesis, options: SeedOptions, data_dir: DataDir) -> SwarmDir:
    """Write charter, prompt sets and the tokenizer's files where the node finds them."""
    swarm_dir = data_dir.swarm(genesis.manifest.swarm_id)
    for sha256, data in genesis.sets.items():
        write_atomic(swarm_dir.prompt_set_path(sha256), data)
    store_tokenizer(options.tokenizer, swarm_dir)
    write_atomic(swarm_dir.charter_path, Charter.from_genesis(genesis.manifest).to_bytes())
    data_dir.current = genesis.manifest.swarm_id
    return swarm_dir


def store_tokenizer(folder: Path, swarm_dir: SwarmDir) -> None:
    """Keep a tokenizer's files for prompts that are appended later."""
    for name in TOKENIZER_FILES:
        if (folder / name).is_file():
            write_atomic(swarm_dir.tokenizer_dir / name, (folder / name).read_bytes())


async def append_set(
    charter: Charter, swarm_dir: SwarmDir, sources: Sequence[str], *, drop_bad: bool = False
) -> PromptSetRef:
    """Read and check further prompts, and store them as a set of the swarm.

    Raises:
        DataError, UsageError: as `make_genesis`; also for prompts that the swarm has already.
    """
    manifest = charter.manifest
    if not swarm_dir.tokenizer_dir.is_dir():
        raise UsageError(
            "to append prompts, an organizer who did not found the swarm gives its tokenizer once: "
            f"--tokenizer DIR (of {manifest.tokenizer.name!r})"
        )
    tokenizer = Tokenizer.from_folder(swarm_dir.tokenizer_dir)
    check_tokenizer(manifest, tokenizer, str(swarm_dir.tokenizer_dir))
    sieve = Sieve(drop_bad)
    found = {"prompts": prompt_sources.read(sources)}
    kept = without_repetitions(found, sieve, digests_of(charter, swarm_dir))["prompts"]
    async with (
        WorkerPool(1, RENDER_TIMEOUT_S) as workers,
        WorkerPool(1, REWARD_TIMEOUT_S) as judges,
    ):
        rewards = Rewards(manifest.reward, judges)
        limit = manifest.sampling.max_prompt_tokens
        terms = Terms(manifest.template, limit, tokenizer, workers, rewards)
        rendered = await terms.usable(kept, sieve)
    sieve.settle()
    if not rendered.prompts:
        raise DataError(f"{', '.join(sources)}: no prompt is left")
    data = encode_prompt_set(rendered.prompts)
    ref = prompt_set_ref(data, rendered.hashes)
    write_atomic(swarm_dir.prompt_set_path(ref.sha256), data)
    return ref


# -- parts of the genesis ------------------------------------------------------------------------


def _read_sets(options: SeedOptions) -> dict[str, list[Sourced]]:
    """The sets by name; the one that is trained on comes last, so that it loses what repeats."""
    shared = {key: value for key, value in options.source_options.items() if key != "split"}
    training = prompt_sources.read(options.prompts, options.source_options)
    sets: dict[str, list[Sourced]] = {}
    if options.held_out is not None:
        sets["held_out"] = prompt_sources.read([options.held_out], shared)
    elif options.held_out_fraction > 0:
        training, sets["held_out"] = split_held_out(training, options.held_out_fraction)
        if not training:
            raise DataError(
                f"{', '.join(options.prompts)}: nothing is left to train on with "
                f"--held-out-fraction {options.held_out_fraction}; give more prompts, or 0"
            )
    if options.out_of_distribution is not None:
        sets["out_of_distribution"] = prompt_sources.read([options.out_of_distribution], shared)
    sets["prompts"] = training
    return sets


def _shared_reward(options: SeedOptions, items: Sequence[Sourced]) -> PlainSpec | None:
    """The reward of all sources, where the options name none and they have the same."""
    rewards = [item.reward for item in items]
    first = rewards[0] if rewards else None
    if options.reward or first is None or any(reward != first for reward in rewards):
        return None
    return replace(first, params={**first.params, **options.reward_params})


_FLAGS = {"name": "swarm-name", "organizers": "co-organizer", "stop_token_ids": "stop"}


def _flag(name: str) -> str:
    """The flag of `swarm-node seed` that a field of the manifest comes from."""
    return "--" + _FLAGS.get(name, name).replace("_", "-")


def _warn(options: SeedOptions, refs: Mapping[str, PromptSetRef]) -> None:
    """Say what this swarm will not be able to do."""
    if "held_out" not in refs:
        log.warning(
            "no prompt is held out of %s, so that members cannot measure their accuracy: give "
            "--held-out, or a larger --held-out-fraction",
            ", ".join(options.prompts),
        )
    if not (options.tokenizer / "config.json").is_file():
        return
    context = model_files.context_tokens(options.tokenizer)
    if context is not None and context <= options.max_completion_tokens:
        log.warning(
            "%s has a context of %d tokens: it cannot join a swarm with "
            "--max-completion-tokens %d, which together with the prompt must fit",
            *(options.tokenizer, context, options.max_completion_tokens),
        )


def _template(
    options: SeedOptions, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> TemplateSpec:
    """`auto`: the tokenizer's chat template where a prompt has messages, else the plain text."""
    kind = options.template
    chat = any(prompt.messages is not None for prompt in prompts)
    if kind == "auto":
        kind = "chat" if chat else "plain"
    if kind == "plain":
        if chat:
            raise UsageError(
                "--template plain takes prompts with `prompt`; some have `messages`: use chat"
            )
        return TemplateSpec(text=PLAIN_TEMPLATE, system=options.system)
    if kind == "chat":
        if not tokenizer.chat_template:
            raise DataError(
                f"{options.tokenizer}: the tokenizer has no chat template; "
                + ("prompts with `messages` need one: " if chat else "use --template plain or ")
                + "--template FILE (Jinja over `messages`)"
            )
        return TemplateSpec(text=tokenizer.chat_template, system=options.system)
    path = Path(kind)
    if not path.is_file():
        raise UsageError(f"--template {kind}: neither auto, plain, chat nor a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the template cannot be read: {error}") from None
    return TemplateSpec(text=text, system=options.system)


def _stop_ids(options: SeedOptions, tokenizer: Tokenizer) -> tuple[int, ...]:
    names = options.stop or ((tokenizer.eos_token,) if tokenizer.eos_token else ())
    ids = set()
    for name in names:
        token_id = tokenizer.token_to_id(name)
        if token_id is None:
            raise UsageError(f"--stop {name}: the tokenizer has no such token")
        ids.add(token_id)
    if not ids:
        raise UsageError(
            f"{options.tokenizer}: the tokenizer names no end-of-sequence token; give --stop TOKEN"
        )
    return tuple(sorted(ids))


def same_terms(charter: Charter, genesis: Genesis) -> bool:
    """Whether a swarm made now would have the terms of one made earlier."""
    before = charter.manifest
    return genesis.manifest.model_copy(update={"created_s": before.created_s}) == before
