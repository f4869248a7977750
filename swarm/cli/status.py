"""What a node does, or a whole swarm: `swarm-node status`."""

import json
import time
from collections.abc import Callable
from typing import Any

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of, seconds
from swarm.cli.output import configure_logging, out, out_json, run_async
from swarm.errors import ExitCode


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    status = add_verb(
        verbs,
        "status",
        _status,
        "show what the node here is doing, or the members of a swarm",
        "  swarm-node status\n  swarm-node status --watch\n  swarm-node status swarm1... --json\n",
    )
    status.add_argument("invite", nargs="?", metavar="INVITE", help="show this swarm's members")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    status.add_argument("--timeout", type=seconds, default=20.0, metavar="S", help="with INVITE")
    add_data_dir(status)


def _status(arguments: Arguments) -> int:
    if arguments.invite is None:
        from swarm.control import control_request

        path = data_dir_of(arguments).control_socket
        return _show(arguments, lambda: control_request(path, "status"), local=True)
    from swarm.protocol.invite import Invite

    invite = Invite.decode(arguments.invite)

    from swarm.node.observe import swarm_snapshot

    configure_logging("error", None)
    return _show(
        arguments, lambda: run_async(swarm_snapshot(invite, arguments.timeout)), local=False
    )


def _show(arguments: Arguments, fetch: Callable[[], dict[str, Any]], *, local: bool) -> int:
    """Print one snapshot, or go on refreshing it."""
    snapshot = fetch()
    if arguments.json and not arguments.watch:
        out_json(snapshot)
        return _verdict(snapshot, local)
    if arguments.json:
        while True:
            out(json.dumps(snapshot, sort_keys=True))
            time.sleep(2.0)
            snapshot = fetch()
    from swarm.status import console as status_console
    from swarm.status import node_view, swarm_view

    view = node_view if local else swarm_view
    console = status_console()
    if not arguments.watch:
        console.print(view(snapshot, width=console.width))
        return _verdict(snapshot, local)
    pause_s = 1.0 if local else 5.0
    if not console.is_terminal:  # a file or a pipe: one after the other
        while True:
            console.print(view(snapshot, width=console.width))
            time.sleep(pause_s)
            snapshot = fetch()
    from rich.live import Live

    with Live(
        view(snapshot, width=console.width),
        console=console,
        auto_refresh=False,
        screen=True,
    ) as live:
        while True:
            time.sleep(pause_s)
            snapshot = fetch()
            live.update(view(snapshot, width=console.width), refresh=True)


def _verdict(snapshot: dict[str, Any], local: bool) -> int:
    return ExitCode.DEGRADED if local and snapshot["problems"] else ExitCode.OK
