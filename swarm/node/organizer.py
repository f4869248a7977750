"""`swarm-node seed`: make a swarm out of prompt files, serve it, amend it.

Owns: from files and options to a manifest, and the member that signs amendments.
Does not know: torch; an organizer needs no model, only the tokenizer's files.
"""

import asyncio
import json
import logging
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swarm.config import NodeConfig
from swarm.control import Handler
from swarm.errors import DataError, RemoteProtocolError, UsageError
from swarm.node.member import Node
from swarm.node.prompt_table import RenderedSet, render
from swarm.paths import DataDir, SwarmDir, write_atomic
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import (
    Action,
    AppendPrompts,
    Charter,
    CloseSwarm,
    Manifest,
    MinimumVersion,
    PromptSetRef,
    RewardSpec,
    SamplingSpec,
    TemplateSpec,
    TokenizerSpec,
)
from swarm.protocol.prompts import (
    Prompt,
    decode_prompt_set,
    encode_prompt_set,
    prompt_set_ref,
    read_jsonl,
)
from swarm.protocol.roster import BanChange, RosterChange, changes_to
from swarm.rewards import combined
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import PLAIN_TEMPLATE, Tokenizer

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class SeedOptions:
    """What the organizer decides; everything else is derived from the files."""

    prompts: Path
    tokenizer: Path
    name: str = ""
    held_out: Path | None = None
    held_out_fraction: float = 0.1
    out_of_distribution: Path | None = None
    template: str = "auto"
    system: str = ""
    reward: str = "number"
    reward_params: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    temperature: float = 1.0
    group_size: int = 8
    max_prompt_tokens: int = 1024
    max_completion_tokens: int = 512
    stop: tuple[str, ...] = ()
    record_shards: int = 4


@dataclass(frozen=True, slots=True)
class Genesis:
    """A manifest and the prompt sets that it names, by hex hash."""

    manifest: Manifest
    sets: dict[str, bytes]


def split_held_out(prompts: Sequence[Prompt], fraction: float) -> tuple[list[Prompt], list[Prompt]]:
    """Split by a hash of the prompt's text, so that the same prompt always falls on one side.

    crc32, since a linear function of the text would correlate with the answers.
    """
    training: list[Prompt] = []
    held_out: list[Prompt] = []
    for prompt in prompts:
        key = prompt.prompt if prompt.prompt is not None else json.dumps(prompt.messages)
        share = zlib.crc32(key.encode()) / 2**32
        (held_out if share < fraction else training).append(prompt)
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
            f"{'.'.join(map(str, item['loc']))} = {item['input']!r:.80}: {item['msg']}"
            for item in error.errors()
        )
        raise UsageError(f"the manifest would not be valid: {faults}") from None


async def _make_genesis(options: SeedOptions, organizer: str, created_s: float) -> Genesis:
    if not 0 <= options.held_out_fraction < 1:
        raise UsageError(
            f"--held-out-fraction {options.held_out_fraction}: from 0 to below 1, e.g. 0.1"
        )
    tokenizer = Tokenizer.from_folder(options.tokenizer)
    training = read_jsonl(options.prompts)
    held_out: list[Prompt] = []
    if options.held_out is not None:
        held_out = read_jsonl(options.held_out)
    elif options.held_out_fraction > 0:
        training, held_out = split_held_out(training, options.held_out_fraction)
        if not training:
            raise DataError(
                f"{options.prompts}: nothing is left to train on with "
                f"--held-out-fraction {options.held_out_fraction}"
            )
    _refuse_overlap(training, options.prompts, held_out, options.held_out)
    ood = read_jsonl(options.out_of_distribution) if options.out_of_distribution else []
    template = _template(options, tokenizer, [*training, *held_out, *ood])
    sets: dict[str, bytes] = {}
    async with WorkerPool(1, 120.0) as workers:
        reward = await _reward(options, workers)
        refs = [
            await _reference(
                prompts, template, reward, tokenizer, workers, sets, options.max_prompt_tokens
            )
            if prompts
            else None
            for prompts in (training, held_out, ood)
        ]
    train_ref, held_out_ref, ood_ref = refs
    if train_ref is None:
        raise DataError(f"{options.prompts}: holds no prompts")
    manifest = Manifest(
        name=options.name or re.sub("[^A-Za-z0-9 ._-]", "_", options.prompts.stem)[:64],
        created_s=created_s,
        organizers=(organizer,),
        prompts=train_ref,
        held_out=held_out_ref,
        out_of_distribution=ood_ref,
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
        reward=reward,
        record_shards=options.record_shards,
    )
    return Genesis(manifest, sets)


def store_genesis(genesis: Genesis, options: SeedOptions, data_dir: DataDir) -> SwarmDir:
    """Write charter, prompt sets and the tokenizer's files where the node finds them."""
    swarm_dir = data_dir.swarm(genesis.manifest.swarm_id)
    for sha256, data in genesis.sets.items():
        write_atomic(swarm_dir.prompts_dir / f"{sha256}.jsonl", data)
    for name in TOKENIZER_FILES:
        if (options.tokenizer / name).is_file():
            write_atomic(
                swarm_dir.root / "tokenizer" / name, (options.tokenizer / name).read_bytes()
            )
    write_atomic(swarm_dir.charter_path, Charter.from_genesis(genesis.manifest).to_bytes())
    data_dir.current = genesis.manifest.swarm_id
    return swarm_dir


def same_terms(charter: Charter, genesis: Genesis) -> bool:
    """Whether a swarm made now would have the terms of one made earlier."""
    before = charter.manifest
    return genesis.manifest.model_copy(update={"created_s": before.created_s}) == before


def parse_actions(request: Mapping[str, Any], append: PromptSetRef | None) -> Sequence[Action]:
    """The amendments that a command asks for.

    Raises:
        UsageError: it is none of append, close, minimum_version, roster, ban_list.
    """
    if append is not None:
        return [AppendPrompts(prompts=append)]
    if "close_at_s" in request:
        return [CloseSwarm(at_s=float(request["close_at_s"]))]
    if "minimum_version" in request:
        version = str(request["minimum_version"])
        if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}", version):
            raise UsageError(f"minimum version {version!r}: expected numbers such as 1.2.0")
        return [MinimumVersion(version=version)]
    try:
        if "roster" in request:
            return changes_to(RosterChange, **request["roster"])
        if "ban_list" in request:
            return changes_to(BanChange, **request["ban_list"])
    except (ValueError, TypeError) as error:  # pydantic's is a ValueError
        raise UsageError(f"a list of peers that cannot be: {error}") from None
    raise UsageError(
        "an amendment appends prompts, closes the swarm, sets a minimum version, or changes the "
        "roster or the list of bans"
    )


async def amend(
    charter: Charter, swarm_dir: SwarmDir, identity: Identity, request: Mapping[str, Any]
) -> Charter:
    """Sign what a command asks for; appended prompts are rendered and stored first.

    Args:
        request: one of {"append": path}, {"close_at_s": Unix time}, {"minimum_version": text},
            {"roster" or "ban_list": {"add": peer ids, "remove": peer ids}}.
    """
    append = None
    if "append" in request:
        manifest = charter.manifest
        tokenizer = Tokenizer.from_folder(swarm_dir.root / "tokenizer")
        path = Path(str(request["append"]))
        prompts = read_jsonl(path)
        _refuse_overlap(prompts, path, _stored(swarm_dir, manifest.held_out), "the held-out set")
        sets: dict[str, bytes] = {}
        async with WorkerPool(1, 120.0) as workers:
            append = await _reference(
                prompts,
                manifest.template,
                manifest.reward,
                tokenizer,
                workers,
                sets,
                manifest.sampling.max_prompt_tokens,
            )
        for sha256, data in sets.items():
            write_atomic(swarm_dir.prompts_dir / f"{sha256}.jsonl", data)
    extended = charter
    for action in parse_actions(request, append):
        extended = extended.amended(action, time.time(), identity)
    write_atomic(swarm_dir.charter_path, extended.to_bytes())
    return extended


class Organizer(Node):
    """Serves manifest and prompts, is a bootstrap address, signs amendments; trains nothing."""

    role = "organizer"

    def __init__(
        self,
        config: NodeConfig,
        data_dir: DataDir,
        *,
        swarm_id: bytes,
        announce_invite: asyncio.Future[str] | None = None,
    ) -> None:
        super().__init__(config, data_dir, swarm_id=swarm_id)
        self._announce_invite = announce_invite
        self._amending = asyncio.Lock()

    async def work(self) -> None:
        charter = await self.join()
        if charter.members is None:
            log.info("an open swarm: whoever has the invite may take part; see `members add`")
        if self._announce_invite is not None:
            self._announce_invite.set_result(await self.invite())
        await self.unless_stopped(self.membership.run())

    def handlers(self) -> dict[str, Handler]:
        return {**super().handlers(), "amend": self._amend}

    async def _amend(self, request: Mapping[str, Any]) -> dict[str, Any]:
        async with self._amending:  # two at once would both follow the same amendment
            charter = await amend(self.membership.charter, self.swarm_dir, self.identity, request)
            await self.membership.amend(charter)
        return {"amendments": len(charter.amendments)}


# -- parts of the genesis ------------------------------------------------------------------------


async def _reward(options: SeedOptions, workers: WorkerPool) -> RewardSpec:
    """The reward that the options name, with every parameter written out."""
    spec = combined.parse(options.reward, options.reward_params)
    params = await workers.complete(spec)
    return RewardSpec(name=spec.name, version=spec.version, params=dict(params))


async def _reference(
    prompts: Sequence[Prompt],
    template: TemplateSpec,
    reward: RewardSpec,
    tokenizer: Tokenizer,
    workers: WorkerPool,
    sets: dict[str, bytes],
    max_prompt_tokens: int,
) -> PromptSetRef:
    rendered: RenderedSet = await render(
        prompts, template.text, template.system, tokenizer, workers
    )
    faults = await workers.check_answers(reward, [prompt.answer for prompt in prompts])
    for prompt, ids, wrong in zip(prompts, rendered.token_ids, faults, strict=True):
        if not 0 < len(ids) <= max_prompt_tokens:
            raise DataError(
                f"prompt {_text(prompt)} has {len(ids)} tokens; allowed "
                f"are 1 to {max_prompt_tokens} (--max-prompt-tokens)"
            )
        if wrong:
            raise DataError(
                f"prompt {_text(prompt)}: answer {prompt.answer!r:.80}: {wrong} "
                f"(reward {reward.name})"
            )
    data = encode_prompt_set(prompts)
    ref = prompt_set_ref(data, rendered.hashes)
    sets[ref.sha256] = data
    return ref


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
                "use --template plain or --template FILE"
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


def _text(prompt: Prompt) -> str:
    """The beginning of a prompt, for messages."""
    return repr(prompt.prompt if prompt.prompt is not None else prompt.messages)[:80]


def _stored(swarm_dir: SwarmDir, ref: PromptSetRef | None) -> list[Prompt]:
    """The prompts of a set that lies here; none where it does not."""
    path = swarm_dir.prompts_dir / f"{ref.sha256}.jsonl" if ref is not None else None
    if ref is None or path is None or not path.exists():
        return []
    try:
        return decode_prompt_set(path.read_bytes(), ref)
    except RemoteProtocolError as error:
        raise DataError(f"{path}: damaged: {error}") from None


def _refuse_overlap(
    training: Sequence[Prompt],
    training_path: Path,
    held_out: Sequence[Prompt],
    held_out_name: Path | str | None,
) -> None:
    texts = {
        (prompt.prompt, prompt.messages and json.dumps(prompt.messages)) for prompt in training
    }
    for prompt in held_out:
        if (prompt.prompt, prompt.messages and json.dumps(prompt.messages)) in texts:
            raise DataError(
                f"{held_out_name}: {_text(prompt)} stands in "
                f"{training_path} too; held-out prompts must not be trained on"
            )
