"""Ask something of the running node: `swarm-node invite`, `swarm-node stop`."""

import time

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of, seconds
from swarm.cli.output import out, out_json
from swarm.errors import ExitCode, SwarmError


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    invite = add_verb(
        verbs,
        "invite",
        _invite,
        "print a fresh invite to the swarm of the running node",
        "  swarm-node invite\n",
    )
    invite.add_argument("--json", action="store_true", help="as JSON")
    add_data_dir(invite)

    stop = add_verb(verbs, "stop", _stop, "stop the running node", "  swarm-node stop\n")
    stop.add_argument("--timeout", type=seconds, default=90.0, metavar="S", help="wait so long")
    add_data_dir(stop)


def _invite(arguments: Arguments) -> int:
    from swarm.control import control_request

    answer = control_request(data_dir_of(arguments).control_socket, "invite")
    if arguments.json:
        out_json({"schema": "swarm-node/invite/1", **answer})
    else:
        out(answer["invite"])
    return ExitCode.OK


def _stop(arguments: Arguments) -> int:
    import psutil

    from swarm.control import control_request

    pid = control_request(data_dir_of(arguments).control_socket, "stop")["pid"]
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
