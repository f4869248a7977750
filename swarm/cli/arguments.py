"""What several verbs share of their arguments: flags, and how they become settings of node.toml.

Owns: the parser class, the data directory, `--set`, what a join joins. Does not know: any verb.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from swarm.errors import DataError, ExitCode, UsageError
from swarm.terminal import printable

Arguments = argparse.Namespace
Verbs = Any
"""What `add_subparsers` gives."""


class Parser(argparse.ArgumentParser):
    """argparse with this project's error line."""

    def error(self, message: str) -> NoReturn:
        text = printable(f"{self.prog}: {message}\nsee `{self.prog} --help`")
        print(text, file=sys.stderr)  # noqa: T201 - the CLI prints
        raise SystemExit(int(ExitCode.USAGE))


def add_verb(
    verbs: Verbs, name: str, function: Callable[[Arguments], int], summary: str, examples: str
) -> argparse.ArgumentParser:
    """Declare a verb: its function, the line of `swarm-node --help`, and examples."""
    sub: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.set_defaults(verb=function)
    return sub


def _folder(text: str) -> str:
    """A folder's name; an empty one is a variable of the shell that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name is no folder")
    return text


def add_data_dir(parser: argparse.ArgumentParser, *parts: argparse.ArgumentParser) -> None:
    """Declare `--data-dir`, of a verb that has parts before and behind the part's name."""
    for place in (parser, *parts):
        place.add_argument(
            "--data-dir",
            metavar="DIR",
            type=_folder,
            default=None if place is parser else argparse.SUPPRESS,
            help="default: $XDG_DATA_HOME/swarm-node",
        )


def add_node_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of verbs that run a node."""
    add_data_dir(parser)
    parser.add_argument("--name", metavar="NAME", help="shown to others; default: the host's name")
    parser.add_argument("--host", metavar="ADDRESS", help="IPv4 address to listen on")
    parser.add_argument("--port", metavar="N", help="TCP port to listen on; 0: any")
    add_set(parser)


def seconds(text: str) -> float:
    """An argument's duration."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def count(text: str) -> int:
    """An argument's number of things: at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, at least 1")
    return min(value, sys.maxsize)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Declare `--set`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any field of node.toml (repeatable)",
    )


METHOD_HELP = "ftis (default), ftis-and, tis, vis, nois, f-vis, f-nois"
"""Names of swarm.config.METHODS, which `--help` does not import."""

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


def flags_of(arguments: Arguments) -> dict[str, str]:
    """Command-line flags as `section.key` to text."""
    from swarm.paths import user_path

    flags = {}
    for name, dotted in FLAG_FIELDS.items():
        value = getattr(arguments, name, None)
        if value is not None:
            flags[dotted] = str(value)
    if flags.get("model.path") and user_path(flags["model.path"]).is_dir():
        flags["model.path"] = str(user_path(flags["model.path"]))
    return flags | method_and_settings(arguments)


def method_and_settings(arguments: Arguments) -> dict[str, str]:
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


def data_dir_of(arguments: Arguments) -> Any:
    """The data directory of verbs that read no node.toml."""
    from swarm.paths import DataDir, default_data_dir

    named = arguments.data_dir or os.environ.get("SWARM_NODE__DATA_DIR")
    return DataDir(Path(named) if named else default_data_dir())


def configured_data_dir(config: Any) -> Any:
    """The data directory of verbs that read node.toml."""
    from swarm.paths import DataDir, default_data_dir

    return DataDir(Path(config.node.data_dir) if config.node.data_dir else default_data_dir())


@dataclass(frozen=True, slots=True)
class Joining:
    """What `join` with some arguments joins, and how.

    Attributes:
        config: the settings (swarm.config.NodeConfig).
        data_dir: of these settings (swarm.paths.DataDir).
        swarm_id: of the invite, else of the swarm joined last; None where there is neither.
        addresses: the invite's.
    """

    config: Any
    data_dir: Any
    swarm_id: bytes | None
    addresses: tuple[str, ...]


def joining(arguments: Arguments) -> Joining:
    """What `join` with these arguments joins: flags, node.toml, an invite in either, else the last
    swarm; without a node.toml with the settings of the last join.

    Raises:
        ConfigError: a setting is wrong.
        DataError: the settings of the last join are damaged.
        UsageError: the invite is damaged.
    """
    from swarm.config import load_config
    from swarm.protocol.invite import Invite

    flags = flags_of(arguments)
    config = load_config(arguments.config, flags)
    data_dir = configured_data_dir(config)
    text = arguments.invite or config.node.invite
    invite = Invite.decode(text) if text else None
    swarm_id = data_dir.current if invite is None else invite.swarm_id
    if arguments.config is None and swarm_id is not None:
        config = load_config(None, flags, saved=data_dir.swarm(swarm_id).saved_config())
    return Joining(config, data_dir, swarm_id, () if invite is None else invite.addresses)


def swarm_dir_of(arguments: Arguments) -> Any:
    """The folder of the swarm used last.

    Raises:
        UsageError: there is none.
    """
    data_dir = data_dir_of(arguments)
    if data_dir.current is None:
        raise UsageError(f"no swarm has been joined or seeded in {data_dir.root} yet")
    return data_dir.swarm(data_dir.current)


def run_dir_of(arguments: Arguments, name: str = "RUN") -> Any:
    """The run that is named, or the newest one of the swarm joined last.

    Args:
        name: of the argument, for the message.

    Raises:
        UsageError: none is named, and there is none.
        DataError: what is named is no run.
    """
    from swarm.paths import RunDir, user_path

    if arguments.run is not None:
        run = RunDir(user_path(arguments.run))
        if not run.record_path.is_file():
            raise DataError(
                f"{run.root} is no run: it holds no {run.record_path.name}. "
                "Runs are in <data dir>/swarms/<id>/runs/<number>"
            )
        return run
    data_dir = data_dir_of(arguments)
    if data_dir.newest_run is None:
        raise UsageError(f"no run in {data_dir.root} yet; name a run's folder as {name}")
    return data_dir.newest_run
