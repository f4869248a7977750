"""Ask something of the running node: `swarm-node stop`, `pause`, `resume`, `leave`."""

import contextlib
import time

from swarm.cli.arguments import (
    Arguments,
    Verbs,
    add_data_dir,
    add_verb,
    data_dir_of,
    seconds,
    swarm_dir_of,
)
from swarm.cli.output import out
from swarm.errors import ExitCode, NotRunningError, SwarmError, TryAgainError


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    stop = add_verb(verbs, "stop", _stop, "stop the running node", "  swarm-node stop\n")
    pause = add_verb(
        verbs,
        "pause",
        _pause,
        "free the device: end the learner, stay in the swarm; holds over restarts",
        "  swarm-node pause\n  swarm-node pause --timeout 600\n",
    )
    resume = add_verb(
        verbs, "resume", _resume, "load the model again and train on", "  swarm-node resume\n"
    )
    leave = add_verb(
        verbs,
        "leave",
        _leave,
        "stop the node and forget that it was in a swarm",
        "  swarm-node leave             keep checkpoints, rollouts and ledger\n"
        "  swarm-node leave --delete    delete them\n",
    )
    leave.add_argument("--delete", action="store_true", help="delete the swarm's folder")
    for verb, timeout_s in ((stop, 90.0), (pause, 300.0), (leave, 90.0)):
        verb.add_argument("--timeout", type=seconds, default=timeout_s, metavar="S")
    for verb in (stop, pause, resume, leave):
        add_data_dir(verb)


def _pause(arguments: Arguments) -> int:
    from swarm.control import control_request

    path = data_dir_of(arguments).control_socket
    control_request(path, "pause")
    deadline = time.monotonic() + arguments.timeout
    doing = ""
    while time.monotonic() < deadline:
        doing = control_request(path, "status")["activity"]["doing"]
        if doing == "paused by its owner":
            out("paused; `swarm-node resume` goes on")
            return ExitCode.OK
        time.sleep(0.2)
    raise TryAgainError(
        f"the node is still {doing} after {arguments.timeout:g} s; it pauses when that is done"
    )


def _resume(arguments: Arguments) -> int:
    from swarm.control import control_request

    if control_request(data_dir_of(arguments).control_socket, "resume")["was_paused"]:
        out("the model is being loaded; `swarm-node status` shows when it trains")
    else:
        out("the node was not paused; `swarm-node status` shows what it does")
    return ExitCode.OK


def _leave(arguments: Arguments) -> int:
    import shutil

    from swarm.paths import doomed

    data_dir = data_dir_of(arguments)
    with contextlib.suppress(NotRunningError):
        _stop(arguments)  # also one that has found no member of its swarm yet
    swarm_dir = swarm_dir_of(arguments)
    with data_dir.locked():
        data_dir.forget_current()
        if arguments.delete and swarm_dir.root.exists():
            shutil.rmtree(doomed(swarm_dir.root))
    out(
        f"left {swarm_dir.root.name[:16]}; "
        + (
            "its folder is deleted"
            if arguments.delete
            else f"its checkpoints, rollouts and ledger stay in {swarm_dir.root}"
        )
    )
    return ExitCode.OK


def _stop(arguments: Arguments) -> int:
    import psutil

    from swarm.control import control_request

    pid = control_request(data_dir_of(arguments).control_socket, "stop")["pid"]
    deadline = time.monotonic() + arguments.timeout
    try:
        node = psutil.Process(pid)
        while time.monotonic() < deadline:
            # One that nobody has waited for yet has ended all the same.
            if not node.is_running() or node.status() == psutil.STATUS_ZOMBIE:
                return ExitCode.OK
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        return ExitCode.OK
    raise SwarmError(f"the node (pid {pid}) has not stopped within {arguments.timeout:g} s")
