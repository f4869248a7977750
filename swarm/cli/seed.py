"""Found, serve and amend a swarm: `swarm-node seed`."""

import json
import time
from pathlib import Path
from typing import Any

from swarm.cli.arguments import (
    Arguments,
    Verbs,
    add_node_flags,
    add_verb,
    configured_data_dir,
    count,
    flags_of,
)
from swarm.cli.output import configure_logging, out, out_json, run_async
from swarm.errors import DataError, ExitCode, IdentityError, UsageError

TERMS = (
    *("swarm_name", "held_out", "held_out_fraction", "ood", "template", "system", "reward"),
    *("reward_param", "temperature", "group_size", "max_prompt_tokens", "max_completion_tokens"),
    *("stop", "record_shards", "co_organizer", "split", "map", "size", "source_seed"),
)
"""Arguments that say what a new swarm is; without one they would be passed over in silence."""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    seed = add_verb(
        verbs,
        "seed",
        _seed,
        "start a swarm on a prompt file, serve it, and print its invite; or amend it",
        "  swarm-node seed gsm8k.jsonl --tokenizer ~/models/Qwen2.5-1.5B --group-size 12\n"
        "  swarm-node seed                      serve the swarm of this data dir again\n"
        "  swarm-node seed gsm8k.jsonl --tokenizer DIR --members ids.txt  for these only\n"
        "  swarm-node seed 'hf:openai/gsm8k?config=main' --map prompt=question,answer=answer \\\n"
        "      --tokenizer DIR\n"
        "  swarm-node seed reasoning-gym:chain_sum --size 2000 --tokenizer DIR\n"
        "  swarm-node seed a.jsonl 'reasoning-gym:gcd?size=500&seed=1' --tokenizer DIR\n"
        "  swarm-node seed gsm8k.jsonl --check ~/models/Qwen2.5-1.5B  what would it get?\n"
        "  swarm-node seed --append more.jsonl  add prompts to it\n"
        "  swarm-node seed swarm1...            serve it as its second organizer (--co-organizer)\n"
        "  swarm-node seed --close              end it: members evaluate, keep the result, idle\n",
    )
    seed.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPTS",
        help="FILE.jsonl with `prompt` or `messages`, and `answer`; hf:OWNER/NAME; "
        "reasoning-gym:TASK. Options of one behind it: 'NAME?key=value&key=value' (reward, tag, "
        "limit; split, config, map, revision; size, seed and the task's own)",
    )
    seed.add_argument("--split", metavar="NAME", help="of hf: data sets (default train)")
    seed.add_argument(
        "--map",
        metavar="FIELD=COLUMN,...",
        help="of hf: data sets, e.g. prompt=question,answer=answer (default: the same names)",
    )
    seed.add_argument("--size", metavar="N", help="of reasoning-gym: prompts (default 1000)")
    seed.add_argument(  # node.seed is something else
        "--seed", dest="source_seed", metavar="S", help="of reasoning-gym (default 0)"
    )
    seed.add_argument(
        "--drop-bad",
        action="store_true",
        help="leave out prompts that cannot be used (repeated, too long, no answer), and name them",
    )
    seed.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json")
    seed.add_argument("--swarm-name", metavar="NAME", help="shown to members; default: file's name")
    seed.add_argument("--held-out", metavar="PROMPTS", help="evaluation prompts, as PROMPTS")
    seed.add_argument(
        "--held-out-fraction",
        type=float,
        default=0.1,
        metavar="X",
        help="without --held-out: this share of PROMPTS (default 0.1)",
    )
    seed.add_argument("--ood", metavar="PROMPTS", help="evaluation prompts out of distribution")
    seed.add_argument(
        "--template",
        default="auto",
        metavar="auto|plain|chat|FILE",
        help="how prompts become text: plain: `prompt` as it is; chat: by the tokenizer's chat "
        "template; FILE: Jinja over `prompt` or `messages`; auto (default): chat where there "
        "are `messages`, else plain",
    )
    seed.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    seed.add_argument(
        "--reward",
        default="",
        metavar="NAME",
        help="number (default), exact, regex, format, math, reasoning-gym (default for its tasks), "
        "or a sum such as number:0.9+format:0.1 (docs/REWARDS.md)",
    )
    seed.add_argument(
        "--reward-param", action="append", default=[], metavar="KEY=VALUE", help="repeatable"
    )
    seed.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="of sampling (default 1)"
    )
    seed.add_argument(
        "--group-size", type=int, default=8, metavar="G", help="completions a prompt (default 8)"
    )
    seed.add_argument(
        "--max-prompt-tokens", type=int, default=1024, metavar="N", help="default 1024"
    )
    seed.add_argument(
        "--max-completion-tokens",
        type=int,
        default=512,
        metavar="N",
        help="default 512; with the prompt it must fit the context of every member's model",
    )
    seed.add_argument(
        "--stop", action="append", default=[], metavar="TOKEN", help="default: the tokenizer's end"
    )
    seed.add_argument(
        "--record-shards",
        type=int,
        default=4,
        metavar="N",
        help="keys that the DHT's records are spread over: 1 for a handful of members, 16 for 1000",
    )
    seed.add_argument(
        "--co-organizer",
        action="append",
        default=[],
        metavar="PEER_ID",
        help="may amend the swarm too, with `seed INVITE`, or as a volunteer; repeatable",
    )
    seed.add_argument(
        "--append", action="append", metavar="PROMPTS", help="add prompts to the swarm; repeatable"
    )
    seed.add_argument(
        "--close",
        nargs="?",
        const="now",
        metavar="WHEN",
        help="end the swarm now, or at an ISO 8601 time",
    )
    seed.add_argument("--min-version", metavar="X.Y.Z", help="oldest software that may train")
    seed.add_argument(
        "--members",
        type=Path,
        metavar="FILE",
        help="only these may take part: one peer id a line; more with `swarm-node members add`",
    )
    seed.add_argument(
        "--check",
        metavar="MODEL",
        help="found nothing: sample some prompts with this model (folder or Hub id) and show "
        "rewards, the share of groups that teach, truncation, and overlap with evaluation prompts",
    )
    seed.add_argument(
        "--check-prompts", type=count, default=50, metavar="N", help="so many (default 50)"
    )
    seed.add_argument("--json", action="store_true", help="of --check: the result as JSON")
    seed.set_defaults(terms={name: seed.get_default(name) for name in TERMS})
    add_node_flags(seed)
    seed.add_argument("--config", type=Path, metavar="FILE", help="node.toml")


def _seed(arguments: Arguments) -> int:
    from swarm.config import load_config

    config = load_config(arguments.config, flags_of(arguments))
    data_dir = configured_data_dir(config)
    if arguments.check is not None:
        return _check(arguments, config)
    if arguments.json:
        raise UsageError("--json goes with --check; seed's result is the invite")
    request = _amendment(arguments)
    invite = _invite(arguments, data_dir)
    if request is not None or invite is not None or not arguments.prompts:
        _refuse_terms(arguments)
    if request is not None:
        return sign_amendment(data_dir, request, arguments.tokenizer)
    with data_dir.locked():
        configure_logging(config.node.log_level, data_dir.log_path)
        _organize(arguments, config, data_dir, invite)
    return ExitCode.OK


def _organize(arguments: Arguments, config: Any, data_dir: Any, invite: Any) -> None:
    """Found the swarm, or find it, and serve it until stopped."""
    if invite is None:
        swarm_id, addresses = _found_or_find(arguments, data_dir), ()
    else:
        swarm_id, addresses = invite.swarm_id, invite.addresses
        _keep_tokenizer(arguments.tokenizer, data_dir.swarm(swarm_id), _own_charter(data_dir))

    from swarm.node.organizer import Organizer

    async def run() -> None:
        import asyncio

        announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        announced.add_done_callback(lambda f: None if f.cancelled() else out(f.result()))
        node = Organizer(
            config, data_dir, swarm_id=swarm_id, addresses=addresses, announce_invite=announced
        )
        await node.run()

    run_async(run())


def _check(arguments: Arguments, config: Any) -> int:
    """What a model gets for the prompts of a swarm that is not founded."""
    if not arguments.prompts:
        raise UsageError("--check needs prompts: seed PROMPTS --check MODEL")
    configure_logging(config.node.log_level, None)

    from swarm import model_files
    from swarm.node.genesis import make_genesis
    from swarm.node.seed_check import check, lines
    from swarm.protocol.identity import Identity

    model = config.model.model_copy(update={"path": arguments.check})
    if arguments.tokenizer is None:
        arguments.tokenizer = model_files.resolve(model)
    options = _options(arguments)

    async def run() -> dict[str, Any]:
        genesis = await make_genesis(options, Identity.generate().peer_id, 0.0)
        chosen = config.model_copy(update={"model": model})
        return await check(genesis, chosen, arguments.check_prompts)

    result = run_async(run())
    if arguments.json:
        out_json(result)
    else:
        for line in lines(result):
            out(line)
    return ExitCode.OK


def _invite(arguments: Arguments, data_dir: Any) -> Any:
    """The invite in place of PROMPTS, to a swarm whose founder named this peer as an organizer.

    Raises:
        UsageError: it is damaged.
        DataError: another swarm is in this data directory.
    """
    from swarm.protocol.invite import INVITE_PREFIX, Invite

    word = arguments.prompts[0] if len(arguments.prompts) == 1 else ""
    if not (word.startswith(INVITE_PREFIX) and word.isalnum()):
        return None
    invite = Invite.decode(word)
    charter = _own_charter(data_dir)
    if charter is not None and charter.swarm_id != invite.swarm_id:
        raise DataError(
            f"{data_dir.root} holds the swarm {charter.manifest.name!r} "
            f"({charter.swarm_id.hex()[:16]}), the invite is to {invite.swarm_id.hex()[:16]}: "
            "another --data-dir"
        )
    return invite


def _keep_tokenizer(folder: Path | None, swarm_dir: Any, charter: Any) -> None:
    """For prompts that are appended; `charter` is None where the terms are not known yet."""
    if folder is None:
        return
    from swarm.node.genesis import store_tokenizer
    from swarm.node.prompt_table import check_tokenizer
    from swarm.paths import user_path
    from swarm.text.tokenizer import Tokenizer

    folder = user_path(folder)
    tokenizer = Tokenizer.from_folder(folder)
    if charter is not None:
        check_tokenizer(charter.manifest, tokenizer, str(folder))
    store_tokenizer(folder, swarm_dir)


def _refuse_terms(arguments: Arguments) -> None:
    """Of flags that would say nothing, because no swarm is made."""
    flags = {name: "--" + name.removeprefix("source_").replace("_", "-") for name in TERMS}
    given = [flags[name] for name in TERMS if vars(arguments)[name] != arguments.terms[name]]
    if given:
        raise UsageError(
            f"{', '.join(given)}: only with PROMPTS, for "
            "a new swarm: the terms of one that was made do not change, and options of a further "
            "source stand behind it, as in 'hf:NAME?split=test'"
        )


def _found_or_find(arguments: Arguments, data_dir: Any) -> bytes:
    """The id of the swarm to serve: made from PROMPTS, or the one of this data directory."""
    charter = _own_charter(data_dir)
    if not arguments.prompts:
        if charter is None:
            raise UsageError(
                f"no swarm was seeded in {data_dir.root} yet; give a prompt file: seed PROMPTS"
            )
        return bytes(charter.swarm_id)
    return _found(arguments, data_dir, charter)


def _found(arguments: Arguments, data_dir: Any, charter: Any) -> bytes:
    """The id of the swarm made from PROMPTS; `charter`: of the one that is here already."""
    from swarm.protocol.identity import Identity
    from swarm.stored import load_charter

    if arguments.tokenizer is None:
        raise UsageError("--tokenizer DIR is needed: a model's folder with tokenizer.json")

    from swarm.cli.peers import read_members
    from swarm.node.genesis import make_genesis, same_terms, store_genesis

    members = None if arguments.members is None else read_members(arguments.members)
    options = _options(arguments)
    identity = Identity.load_or_create(data_dir.identity_path)
    genesis = run_async(make_genesis(options, identity.peer_id, float(int(time.time()))))
    if charter is not None:
        if same_terms(charter, genesis):
            _admit(members, charter, data_dir.swarm(charter.swarm_id), identity)
            return bytes(charter.swarm_id)
        raise DataError(
            f"{data_dir.root} holds the swarm {charter.manifest.name!r} "
            f"({charter.swarm_id.hex()[:16]}) with other prompts or options. "
            "To add prompts: seed --append FILE. For another swarm: another --data-dir. "
            "To serve it again: seed without PROMPTS"
        )
    swarm_dir = store_genesis(genesis, options, data_dir)
    charter = load_charter(swarm_dir, genesis.manifest.swarm_id)
    _admit(members, charter, swarm_dir, identity)
    return bytes(genesis.manifest.swarm_id)


def _admit(members: list[str] | None, charter: Any, swarm_dir: Any, identity: Any) -> None:
    """Put on the roster who is not on it yet; without a roster there is one from now on."""
    if members is None:
        return
    missing = set(members) - (charter.members or frozenset())
    if missing or charter.members is None:
        from swarm.node.amending import amend

        amend(charter, swarm_dir, identity, {"roster": {"add": sorted(missing)}})


def _options(arguments: Arguments) -> Any:
    """What the flags say about a new swarm."""
    from swarm.cli.peers import checked_peer_id
    from swarm.node.genesis import SeedOptions
    from swarm.paths import user_path

    return SeedOptions(
        prompts=tuple(arguments.prompts),
        tokenizer=user_path(arguments.tokenizer),
        name=arguments.swarm_name or "",
        source_options={
            key: value
            for key, value in (
                ("split", arguments.split),
                ("map", arguments.map),
                ("size", arguments.size),
                ("seed", arguments.source_seed),
            )
            if value is not None
        },
        drop_bad=arguments.drop_bad,
        held_out=arguments.held_out,
        held_out_fraction=arguments.held_out_fraction,
        out_of_distribution=arguments.ood,
        template=arguments.template,
        system=arguments.system,
        reward=arguments.reward,
        reward_params=dict(_reward_param(item) for item in arguments.reward_param),
        temperature=arguments.temperature,
        group_size=arguments.group_size,
        max_prompt_tokens=arguments.max_prompt_tokens,
        max_completion_tokens=arguments.max_completion_tokens,
        stop=tuple(arguments.stop),
        record_shards=arguments.record_shards,
        co_organizers=tuple(
            checked_peer_id(peer, "--co-organizer") for peer in arguments.co_organizer
        ),
    )


def _own_charter(data_dir: Any) -> Any:
    """The terms of the swarm that was seeded in this data directory; None: none was.

    Raises:
        IdentityError: the swarm there was joined, and is another's.
    """
    from swarm.protocol.identity import Identity
    from swarm.stored import current_charter

    charter = current_charter(data_dir)
    if charter is None:
        return None
    if Identity.load_or_create(data_dir.identity_path).peer_id not in charter.manifest.organizers:
        raise IdentityError(
            f"the swarm {charter.manifest.name!r} in {data_dir.root} was joined, not seeded there; "
            "only its organizers serve it with `seed` and amend it. To go on in it: "
            "`swarm-node join`. For a swarm of your own: another --data-dir"
        )
    return charter


def _reward_param(text: str) -> tuple[str, str | int | float | bool]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--reward-param {text}: expected KEY=VALUE")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    return key, parsed if isinstance(parsed, str | int | float | bool) else value


def _amendment(arguments: Arguments) -> dict[str, Any] | None:
    """The amendment that the flags ask for, if any."""
    import datetime

    asked: list[dict[str, Any]] = []
    if arguments.append is not None:
        asked.append({"append": arguments.append, "drop_bad": arguments.drop_bad})
    if arguments.close is not None:
        when = time.time()
        if arguments.close != "now":
            try:
                when = datetime.datetime.fromisoformat(arguments.close).timestamp()
            except (ValueError, OverflowError):
                raise UsageError(
                    f"--close {arguments.close}: expected an ISO 8601 time, "
                    "e.g. 2027-01-31T18:00+00:00"
                ) from None
            if when < 0:
                raise UsageError(f"--close {arguments.close}: a time before 1970")
        asked.append({"close_at_s": when})
    if arguments.min_version is not None:
        asked.append({"minimum_version": arguments.min_version})
    if arguments.members is not None and not arguments.prompts:
        from swarm.cli.peers import read_members

        asked.append({"roster": {"add": read_members(arguments.members)}})
    if len(asked) > 1 or (asked and arguments.prompts):
        raise UsageError(
            "give one of PROMPTS, --append, --close, --min-version, --members at a time "
            "(--members goes with PROMPTS too)"
        )
    return asked[0] if asked else None


def sign_amendment(data_dir: Any, request: dict[str, Any], tokenizer: Path | None = None) -> int:
    """Have the running node sign amendments, or sign them for its next start.

    Args:
        data_dir: of an organizer.
        request: what `swarm.node.amending.amend` takes, or {"append": sources, "drop_bad": bool}.
        tokenizer: the folder of the swarm's, to append prompts with from now on.
    """
    from swarm.control import control_request
    from swarm.errors import NotRunningError
    from swarm.protocol.identity import Identity

    charter = _own_charter(data_dir)
    if charter is None:
        raise UsageError(f"no swarm was seeded in {data_dir.root}; see `swarm-node seed --help`")
    swarm_dir = data_dir.swarm(charter.swarm_id)
    _keep_tokenizer(tokenizer, swarm_dir, charter)
    identity = Identity.load_or_create(data_dir.identity_path)
    if "append" in request:
        request = _stored(request, charter, swarm_dir, identity)
    try:
        answer = control_request(data_dir.control_socket, "amend", timeout_s=60.0, **request)
        out(f"amendment {answer['amendments']} signed; members fetch it within a heartbeat")
        return ExitCode.OK
    except NotRunningError:
        pass

    from swarm.node.amending import amend
    from swarm.stored import load_charter

    with data_dir.locked():
        charter = load_charter(swarm_dir, charter.swarm_id)
        charter = amend(charter, swarm_dir, identity, request)
    out(
        f"amendment {len(charter.amendments)} signed; the organizer is not running: members get it "
        "once it runs again (`swarm-node seed`)"
    )
    return ExitCode.OK


def _stored(request: dict[str, Any], charter: Any, swarm_dir: Any, identity: Any) -> dict[str, Any]:
    """Read, check and store prompts; what is left to ask for.

    Here and not in the node that runs: a data set may take minutes, and a pipe is this process's.
    """
    from swarm.node.genesis import append_set

    charter.check_organizer(identity.peer_id)
    sources, drop_bad = request["append"], request["drop_bad"]
    ref = run_async(append_set(charter, swarm_dir, sources, drop_bad=drop_bad))
    return {"append": ref.model_dump(mode="json"), "sets": len(charter.prompt_sets)}
