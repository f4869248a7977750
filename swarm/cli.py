"""`swarm-node`: the verbs.

Owns: arguments, exit codes, logging, what goes to stdout (results) and stderr (messages).
Does not know: how anything is done. Heavy modules are imported by the verb that needs them, so that
`--help` and `status` answer at once.
"""

import argparse
import json
import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

from swarm import __version__
from swarm.errors import ConfigError, DataError, ExitCode, SwarmError, UsageError

Arguments = argparse.Namespace

EXAMPLES = """\
examples:
  swarm-node demo                              a swarm on this machine that learns while you watch
  swarm-node seed prompts.jsonl --tokenizer DIR  start a swarm; prints its invite
  swarm-node join INVITE --model DIR           train your model in it
  swarm-node join                              go on where the last join was
  swarm-node status                            what the node here is doing
  swarm-node status INVITE                     all members of a swarm, from anywhere
  swarm-node replay --method nois              the last run's groups, another method
"""


class Parser(argparse.ArgumentParser):
    """argparse with this project's error line."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}\nsee `{self.prog} --help`", file=sys.stderr)  # noqa: T201 - the CLI prints
        raise SystemExit(int(ExitCode.USAGE))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `swarm-node`; ends the process with one of `ExitCode`."""
    arguments = _parser().parse_args(argv)
    if not hasattr(arguments, "verb"):
        _parser().print_help()
        raise SystemExit(int(ExitCode.USAGE))
    try:
        code = arguments.verb(arguments)
    except SwarmError as error:
        code = _report(error)
    except BaseExceptionGroup as group:
        known = group.subgroup(SwarmError)
        if known is None or group.split(SwarmError)[1] is not None:
            raise
        code = _report(_first(known))
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's flush at exit
        code = ExitCode.OK
    raise SystemExit(int(code))


def _report(error: SwarmError) -> ExitCode:
    print(f"swarm-node: {error}", file=sys.stderr)  # noqa: T201 - the CLI prints
    return error.exit_code


def _first(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, SwarmError):
        raise error
    return error


def _out(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the CLI prints


def _json(value: Any) -> None:
    _out(json.dumps(value, indent=2, sort_keys=True))


# -- arguments -----------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="swarm-node",
        description="Train your own language model together with others, without a server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"swarm-node {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", parser_class=Parser)

    def verb(
        name: str, function: Callable[[Arguments], int], summary: str, examples: str
    ) -> argparse.ArgumentParser:
        sub = verbs.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog="examples:\n" + examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(verb=function)
        return sub

    init = verb(
        "init",
        _init,
        "write a commented node.toml and make the identity",
        "  swarm-node init\n  swarm-node init --config ~/swarm/node.toml\n",
    )
    init.add_argument("--config", type=Path, metavar="FILE", help="where; default: in the data dir")
    _add_data_dir(init)

    join = verb(
        "join",
        _join,
        "join a swarm and train; without INVITE, go on with the last one",
        "  swarm-node join swarm1... --model ~/models/Qwen2.5-1.5B --mode lora\n"
        "  swarm-node join --config node.toml\n"
        "  swarm-node join --set train.learning_rate=2e-6\n",
    )
    join.add_argument("invite", nargs="?", metavar="INVITE", help="what `seed` or `invite` printed")
    join.add_argument("--config", type=Path, metavar="FILE", help="node.toml")
    join.add_argument("--model", metavar="DIR|ID", help="model folder or Hub id")
    join.add_argument("--mode", choices=("full", "lora"), help="train all weights or an adapter")
    join.add_argument("--lora-rank", metavar="N", help="rank of the adapter")
    join.add_argument("--learning-rate", metavar="X", help="peak learning rate")
    join.add_argument("--max-steps", metavar="N", help="stop training after N steps")
    join.add_argument("--method", metavar="NAME", help="ftis (default), tis, vis, nois, f-vis, ...")
    join.add_argument("--seed", metavar="N", help="seed of sampling")
    join.add_argument("--new-run", action="store_true", help="start from the model's own weights")
    join.add_argument(
        "--fail-fast", action="store_true", help="exit with 69 when no member can be reached"
    )
    _add_node_flags(join)

    seed = verb(
        "seed",
        _seed,
        "start a swarm on a prompt file, serve it, and print its invite; or amend it",
        "  swarm-node seed gsm8k.jsonl --tokenizer ~/models/Qwen2.5-1.5B --group-size 12\n"
        "  swarm-node seed                      serve the swarm of this data dir again\n"
        "  swarm-node seed --append more.jsonl  add prompts to it\n"
        "  swarm-node seed --close              end it: members evaluate, keep the result, idle\n",
    )
    seed.add_argument(
        "prompts",
        nargs="?",
        type=Path,
        metavar="PROMPTS",
        help="JSONL with `prompt` or `messages`, and `answer`",
    )
    seed.add_argument("--tokenizer", type=Path, metavar="DIR", help="folder with tokenizer.json")
    seed.add_argument("--swarm-name", metavar="NAME", help="shown to members; default: file's name")
    seed.add_argument("--held-out", type=Path, metavar="FILE", help="JSONL of evaluation prompts")
    seed.add_argument(
        "--held-out-fraction",
        type=float,
        default=0.1,
        metavar="X",
        help="without --held-out: this share of PROMPTS (default 0.1)",
    )
    seed.add_argument("--ood", type=Path, metavar="FILE", help="JSONL, out of distribution")
    seed.add_argument(
        "--template",
        default="auto",
        metavar="auto|plain|chat|FILE",
        help="how prompts are rendered",
    )
    seed.add_argument("--system", default="", metavar="TEXT", help="system prompt")
    seed.add_argument("--reward", default="number", metavar="NAME", help="number (default), exact")
    seed.add_argument(
        "--reward-param", action="append", default=[], metavar="KEY=VALUE", help="repeatable"
    )
    seed.add_argument("--temperature", type=float, default=1.0, metavar="X")
    seed.add_argument("--group-size", type=int, default=8, metavar="G", help="completions a prompt")
    seed.add_argument("--max-prompt-tokens", type=int, default=1024, metavar="N")
    seed.add_argument("--max-completion-tokens", type=int, default=512, metavar="N")
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
    seed.add_argument("--append", type=Path, metavar="FILE", help="add prompts to the swarm")
    seed.add_argument(
        "--close",
        nargs="?",
        const="now",
        metavar="WHEN",
        help="end the swarm now, or at an ISO 8601 time",
    )
    seed.add_argument("--min-version", metavar="X.Y.Z", help="oldest software that may train")
    _add_node_flags(seed)
    seed.add_argument("--config", type=Path, metavar="FILE", help="node.toml")

    status = verb(
        "status",
        _status,
        "show what the node here is doing, or the members of a swarm",
        "  swarm-node status\n  swarm-node status --watch\n  swarm-node status swarm1... --json\n",
    )
    status.add_argument("invite", nargs="?", metavar="INVITE", help="show this swarm's members")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    status.add_argument("--timeout", type=float, default=20.0, metavar="S", help="with INVITE")
    _add_data_dir(status)

    invite = verb(
        "invite",
        _invite,
        "print a fresh invite to the swarm of the running node",
        "  swarm-node invite\n",
    )
    invite.add_argument("--json", action="store_true", help="as JSON")
    _add_data_dir(invite)

    stop = verb("stop", _stop, "stop the running node", "  swarm-node stop\n")
    stop.add_argument("--timeout", type=float, default=90.0, metavar="S", help="wait so long")
    _add_data_dir(stop)

    replay = verb(
        "replay",
        _replay,
        "train again on the groups that a run logged, or ask what another filter would have done",
        "  swarm-node replay                    the last run, from its first checkpoint\n"
        "  swarm-node replay --method nois --from 0\n"
        "  swarm-node replay RUN --set ftis.kl_threshold=5 --set ftis.clip_max=3 --steps 100\n"
        "  swarm-node replay --what-if g=5 --what-if g=5,estimator=k3,clip_max=3,filter=and\n",
    )
    replay.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="a run's folder; default: the newest of the swarm that was joined last",
    )
    replay.add_argument("--method", metavar="NAME", help="ftis, tis, vis, nois, ...")
    _add_set(replay)
    replay.add_argument(
        "--from",
        dest="start",
        type=int,
        metavar="STEP",
        help="begin after this step, from its checkpoint; 0: from the model's own weights; "
        "default: the first checkpoint that was kept",
    )
    replay.add_argument("--steps", type=int, metavar="N", help="at most N steps")
    replay.add_argument(
        "--out", type=Path, metavar="DIR", help="the replay's folder; default: one beside RUN"
    )
    replay.add_argument(
        "--rollouts", type=Path, metavar="DIR", help="folder of the rollouts; default: the swarm's"
    )
    replay.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="g=..,clip_max=..,filter=..",
        help="train nothing; tell what this would have dropped and truncated (repeatable); also "
        "estimator, scope, mask_truncated",
    )
    replay.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    _add_data_dir(replay)

    demo = verb(
        "demo",
        _demo,
        "run a whole swarm on this machine and watch it learn",
        "  swarm-node demo\n  swarm-node demo --method nois\n"
        "  swarm-node demo --nodes 2 --steps 100 --json\n",
    )
    demo.add_argument("--nodes", type=int, default=3, metavar="N", help="volunteers (default 3)")
    demo.add_argument("--steps", type=int, metavar="N", help="steps of the slowest node")
    demo.add_argument("--seed", type=int, default=0, metavar="N")
    demo.add_argument("--method", default="ftis", metavar="NAME", help="ftis, tis, vis, nois, ...")
    demo.add_argument(
        "--model",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="your own models instead (repeatable); one tokenizer",
    )
    demo.add_argument("--out", type=Path, metavar="DIR", help="where results and logs go")
    demo.add_argument("--json", action="store_true", help="the results as JSON on stdout")

    verb("version", _version, "print versions", "  swarm-node version\n")
    return parser


def _add_data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="default: $XDG_DATA_HOME/swarm-node")


def _add_node_flags(parser: argparse.ArgumentParser) -> None:
    _add_data_dir(parser)
    parser.add_argument("--name", metavar="NAME", help="shown to others; default: the host's name")
    parser.add_argument("--host", metavar="ADDRESS", help="IPv4 address to listen on")
    parser.add_argument("--port", metavar="N", help="TCP port to listen on; 0: any")
    _add_set(parser)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any field of node.toml (repeatable)",
    )


FLAG_FIELDS = {
    "data_dir": "node.data_dir",
    "name": "node.name",
    "seed": "node.seed",
    "host": "network.host",
    "port": "network.port",
    "model": "model.path",
    "mode": "model.mode",
    "lora_rank": "model.lora_rank",
    "learning_rate": "train.learning_rate",
    "max_steps": "train.max_steps",
}


def _flags(arguments: Arguments) -> dict[str, str]:
    """Command-line flags as `section.key` to text."""
    flags = {}
    for name, dotted in FLAG_FIELDS.items():
        value = getattr(arguments, name, None)
        if value is not None:
            flags[dotted] = str(value)
    if "model.path" in flags and Path(flags["model.path"]).expanduser().is_dir():
        flags["model.path"] = str(Path(flags["model.path"]).expanduser().absolute())
    return flags | _method_and_settings(arguments)


def _method_and_settings(arguments: Arguments) -> dict[str, str]:
    """What --method and --set say, as `section.key` to text."""
    flags: dict[str, str] = {}
    if getattr(arguments, "method", None) is not None:
        flags |= method_flags(arguments.method)
    for item in arguments.set:
        dotted, equals, value = item.partition("=")
        if not equals or "." not in dotted:
            raise UsageError(f"--set {item}: expected SECTION.KEY=VALUE, e.g. train.max_steps=100")
        flags[dotted] = value
    return flags


def method_flags(method: str) -> dict[str, str]:
    """The fields that a method's name stands for.

    Raises:
        UsageError: there is no such method.
    """
    from swarm.config import METHODS

    if method not in METHODS:
        raise UsageError(f"--method {method}: expected one of {', '.join(METHODS)}")
    return dict(METHODS[method])


def _data_dir(arguments: Arguments) -> Any:
    """The data directory of verbs that read no node.toml."""
    from swarm.paths import DataDir, default_data_dir

    named = arguments.data_dir or os.environ.get("SWARM_NODE__DATA_DIR")
    return DataDir(Path(named) if named else default_data_dir())


def _configure_logging(level: str, log_path: Path | None) -> None:
    root = logging.getLogger()
    root.setLevel(level.upper())
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    console = logging.StreamHandler()
    console.setFormatter(text)
    root.addHandler(console)
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.handlers.RotatingFileHandler(log_path, maxBytes=10_000_000, backupCount=3)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        root.addHandler(file)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# -- verbs ---------------------------------------------------------------------------------------


def _init(arguments: Arguments) -> int:
    from swarm.config import render_example
    from swarm.paths import write_atomic
    from swarm.protocol.identity import Identity

    data_dir = _data_dir(arguments)
    path = arguments.config or data_dir.root / "node.toml"
    if path.exists():
        raise ConfigError(f"{path} exists already; edit it, or name another with --config")
    data_dir.create()
    identity = Identity.load_or_create(data_dir.identity_path)
    write_atomic(path, render_example().encode())
    _out(f"config    {path}\nidentity  {identity.peer_id}")
    return ExitCode.OK


def _join(arguments: Arguments) -> int:
    from swarm.config import load_config
    from swarm.paths import DataDir, default_data_dir
    from swarm.protocol.manifest import Invite

    flags = _flags(arguments)
    config = load_config(arguments.config, flags)
    data_dir = DataDir(Path(config.node.data_dir) if config.node.data_dir else default_data_dir())
    text = arguments.invite or config.node.invite
    if text:
        invite = Invite.decode(text)
        swarm_id, addresses = invite.swarm_id, invite.addresses
    else:
        current = data_dir.current
        if current is None:
            raise UsageError("no swarm has been joined here yet; give an invite: join swarm1...")
        swarm_id, addresses = current, ()
    swarm_dir = data_dir.swarm(swarm_id)
    if arguments.config is None and swarm_dir.config_path.exists():
        config = load_config(None, flags, saved=json.loads(swarm_dir.config_path.read_text()))
    _configure_logging(config.node.log_level, data_dir.log_path)

    from swarm.volunteer import Volunteer

    async def run() -> None:
        node = Volunteer(
            config,
            data_dir,
            swarm_id=swarm_id,
            addresses=addresses,
            fail_fast=arguments.fail_fast,
            new_run=arguments.new_run,
        )
        await node.run()

    _run(run())
    return ExitCode.OK


def _seed(arguments: Arguments) -> int:
    from swarm.config import load_config
    from swarm.paths import DataDir, default_data_dir

    config = load_config(arguments.config, _flags(arguments))
    data_dir = DataDir(Path(config.node.data_dir) if config.node.data_dir else default_data_dir())
    request = _amendment(arguments)
    if request is not None:
        return _amend(data_dir, request)
    _configure_logging(config.node.log_level, data_dir.log_path)
    swarm_id = _found_or_find(arguments, data_dir)

    from swarm.organizer import Organizer

    async def run() -> None:
        import asyncio

        announced: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        announced.add_done_callback(lambda f: None if f.cancelled() else _out(f.result()))
        node = Organizer(config, data_dir, swarm_id=swarm_id, announce_invite=announced)
        await node.run()

    _run(run())
    return ExitCode.OK


def _found_or_find(arguments: Arguments, data_dir: Any) -> bytes:
    """The id of the swarm to serve: made from PROMPTS, or the one of this data directory."""
    from swarm.protocol.identity import Identity
    from swarm.protocol.manifest import Charter

    current = data_dir.current
    if arguments.prompts is None:
        if current is None or not data_dir.swarm(current).charter_path.exists():
            raise UsageError("no swarm was seeded here yet; give a prompt file: seed PROMPTS")
        return bytes(current)
    if arguments.tokenizer is None:
        raise UsageError("--tokenizer DIR is needed: a model's folder with tokenizer.json")

    from swarm.organizer import SeedOptions, make_genesis, same_terms, store_genesis

    options = SeedOptions(
        prompts=arguments.prompts,
        tokenizer=arguments.tokenizer.expanduser().absolute(),
        name=arguments.swarm_name or "",
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
    )
    data_dir.create()
    identity = Identity.load_or_create(data_dir.identity_path)
    genesis = _run(make_genesis(options, identity.peer_id, float(int(time.time()))))
    if current is not None and data_dir.swarm(current).charter_path.exists():
        path = data_dir.swarm(current).charter_path
        charter = Charter.from_bytes(path.read_bytes(), current)
        if same_terms(charter, genesis):
            return bytes(current)
        raise DataError(
            f"{data_dir.root} holds the swarm {charter.manifest.name!r} ({current.hex()[:16]}) "
            "with other prompts or options. To add prompts: seed --append FILE. For another swarm: "
            "another --data-dir. To serve it again: seed without PROMPTS"
        )
    store_genesis(genesis, options, data_dir)
    return bytes(genesis.manifest.swarm_id)


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
        asked.append({"append": str(arguments.append.absolute())})
    if arguments.close is not None:
        when = time.time()
        if arguments.close != "now":
            try:
                when = datetime.datetime.fromisoformat(arguments.close).timestamp()
            except ValueError:
                raise UsageError(
                    f"--close {arguments.close}: expected an ISO 8601 time, "
                    "e.g. 2027-01-31T18:00+00:00"
                ) from None
        asked.append({"close_at_s": when})
    if arguments.min_version is not None:
        asked.append({"minimum_version": arguments.min_version})
    if len(asked) > 1 or (asked and arguments.prompts is not None):
        raise UsageError("give one of PROMPTS, --append, --close, --min-version at a time")
    return asked[0] if asked else None


def _amend(data_dir: Any, request: dict[str, Any]) -> int:
    """Have the running organizer sign an amendment, or sign it for its next start."""
    from swarm.control import control_request
    from swarm.errors import NotRunningError
    from swarm.protocol.identity import Identity
    from swarm.protocol.manifest import Charter

    try:
        answer = control_request(data_dir.control_socket, "amend", timeout_s=300.0, **request)
        _out(f"amendment {answer['amendments']} signed; members fetch it within a heartbeat")
        return ExitCode.OK
    except NotRunningError:
        current = data_dir.current
    if current is None or not data_dir.swarm(current).charter_path.exists():
        raise UsageError("no swarm was seeded in this data directory; see `swarm-node seed --help`")

    from swarm.organizer import amend

    data_dir.lock()
    try:
        swarm_dir = data_dir.swarm(current)
        charter = Charter.from_bytes(swarm_dir.charter_path.read_bytes(), current)
        identity = Identity.load_or_create(data_dir.identity_path)
        charter = _run(amend(charter, swarm_dir, identity, request))
    finally:
        data_dir.unlock()
    _out(
        f"amendment {len(charter.amendments)} signed; the organizer is not running: members get it "
        "once `swarm-node seed` runs again"
    )
    return ExitCode.OK


def _status(arguments: Arguments) -> int:
    if arguments.invite is None:
        from swarm.control import control_request

        path = _data_dir(arguments).control_socket
        return _show(arguments, lambda: control_request(path, "status"), local=True)
    from swarm.protocol.manifest import Invite

    invite = Invite.decode(arguments.invite)

    from swarm.observe import swarm_snapshot

    logging.basicConfig(level=logging.ERROR)
    return _show(arguments, lambda: _run(swarm_snapshot(invite, arguments.timeout)), local=False)


def _show(arguments: Arguments, fetch: Callable[[], dict[str, Any]], *, local: bool) -> int:
    """Print one snapshot, or go on refreshing it."""
    snapshot = fetch()
    if arguments.json and not arguments.watch:
        _json(snapshot)
        return _verdict(snapshot, local)
    if arguments.json:
        while True:
            _out(json.dumps(snapshot, sort_keys=True))
            time.sleep(2.0)
            snapshot = fetch()
    from swarm.status import console as status_console
    from swarm.status import node_view, swarm_view

    view = node_view if local else swarm_view
    console = status_console()
    if not arguments.watch:
        console.print(view(snapshot))
        return _verdict(snapshot, local)
    from rich.live import Live

    with Live(
        view(snapshot), console=console, auto_refresh=False, screen=console.is_terminal
    ) as live:
        while True:
            time.sleep(1.0 if local else 5.0)
            snapshot = fetch()
            live.update(view(snapshot), refresh=True)


def _verdict(snapshot: dict[str, Any], local: bool) -> int:
    return ExitCode.DEGRADED if local and snapshot["problems"] else ExitCode.OK


def _invite(arguments: Arguments) -> int:
    from swarm.control import control_request

    answer = control_request(_data_dir(arguments).control_socket, "invite")
    if arguments.json:
        _json({"schema": "swarm-node/invite/1", **answer})
    else:
        _out(answer["invite"])
    return ExitCode.OK


def _stop(arguments: Arguments) -> int:
    import psutil

    from swarm.control import control_request

    pid = control_request(_data_dir(arguments).control_socket, "stop")["pid"]
    deadline = time.monotonic() + arguments.timeout
    while time.monotonic() < deadline:
        try:
            # One that nobody has waited for yet has ended all the same.
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return ExitCode.OK
        except psutil.NoSuchProcess:
            return ExitCode.OK
        time.sleep(0.1)
    raise SwarmError(f"the node (pid {pid}) has not stopped within {arguments.timeout:g} s")


def _replay(arguments: Arguments) -> int:
    from swarm.logged_run import LoggedRun

    for flag, value, least in (("--from", arguments.start, 0), ("--steps", arguments.steps, 1)):
        if value is not None and value < least:
            raise UsageError(f"{flag} {value}: at least {least}")
    changes = _method_and_settings(arguments)
    if arguments.what_if and (changes or arguments.out or arguments.rollouts):
        raise UsageError(
            "--what-if trains nothing: it takes --from and --steps, but no --method, --set, --out "
            "or --rollouts"
        )
    run = LoggedRun(_run_dir(arguments))
    if arguments.what_if:
        from swarm import what_if

        result = what_if.answer(run, arguments.what_if, arguments.start or 0, arguments.steps)
        view = what_if.view
    else:
        from swarm import replay

        _configure_logging("info", None)
        options = replay.ReplayOptions(
            changes=changes,
            method=arguments.method or "",
            start=arguments.start,
            steps=arguments.steps,
            out=arguments.out,
            rollouts=arguments.rollouts,
        )
        result = _run(replay.replay(run, options))
        view = replay.view
    if arguments.json:
        _json(result)
        return ExitCode.OK
    from swarm.status import console

    console().print(view(result))
    return ExitCode.OK


def _run_dir(arguments: Arguments) -> Any:
    """The run that is named, or the newest one of the swarm joined last."""
    from swarm.paths import RunDir

    if arguments.run is not None:
        return RunDir(arguments.run.expanduser().absolute())
    data_dir = _data_dir(arguments)
    runs = data_dir.swarm(data_dir.current).runs() if data_dir.current else []
    if not runs:
        raise UsageError(f"no run in {data_dir.root} yet; name a run's folder: replay RUN")
    return runs[-1]


def _demo(arguments: Arguments) -> int:
    from swarm.demo import DemoOptions, run_demo

    options = DemoOptions(
        nodes=arguments.nodes,
        steps=arguments.steps,
        seed=arguments.seed,
        method=arguments.method,
        models=tuple(arguments.model),
        out=arguments.out,
        json=arguments.json,
    )
    return run_demo(options)


def _version(_: Arguments) -> int:
    import platform
    from importlib.metadata import PackageNotFoundError, version

    lines = [f"swarm-node {__version__}", f"python {platform.python_version()}"]
    for name in ("hivemind", "torch", "transformers", "peft", "vllm"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    _out("\n".join(lines))
    return ExitCode.OK


if __name__ == "__main__":
    main()
