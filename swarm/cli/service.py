"""Run at boot: `swarm-node service install`."""

import os
from pathlib import Path

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of
from swarm.cli.output import out
from swarm.errors import ConfigError, ExitCode, UsageError


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    service = add_verb(
        verbs,
        "service",
        _needs_kind,
        "run the node as a systemd user service",
        "  swarm-node service install\n  swarm-node service install --run seed\n"
        "  swarm-node service install --print\n",
    )
    kinds = service.add_subparsers(metavar="install", parser_class=type(service))
    install = add_verb(
        kinds,
        "install",
        _install,
        "write the unit that goes on with the swarm joined last; prints what to run then",
        "  swarm-node service install\n",
    )
    install.add_argument(
        "--run", choices=("join", "seed"), default="join", help="train (default), or organize"
    )
    install.add_argument("--print", action="store_true", help="to stdout; write nothing")
    install.add_argument("--force", action="store_true", help="replace a unit that is there")
    add_data_dir(service, install)


def _needs_kind(_: Arguments) -> int:
    raise UsageError("service: say what: swarm-node service install")


def _install(arguments: Arguments) -> int:
    from swarm.paths import write_atomic
    from swarm.service import UNIT_NAME, unit_text

    data_dir = data_dir_of(arguments)
    text = unit_text(data_dir.root, verb=arguments.run)
    if arguments.print:
        out(text.rstrip("\n"))
        return ExitCode.OK
    if data_dir.current is None:
        raise UsageError(
            f"no swarm has been joined in {data_dir.root}; the service goes on with one: "
            "run `swarm-node join INVITE --model DIR` (or `seed`) once by hand"
        )
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    path = Path(base) / "systemd" / "user" / UNIT_NAME
    if path.exists() and path.read_text() != text and not arguments.force:
        raise ConfigError(f"{path} exists with other contents; replace it with --force")
    write_atomic(path, text.encode())
    out(
        f"{path}\n"
        "systemctl --user daemon-reload\n"
        f"systemctl --user enable --now {UNIT_NAME}\n"
        "loginctl enable-linger    # so that it runs while you are not logged in"
    )
    return ExitCode.OK
