"""What the node wrote: `swarm-node logs`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, count, data_dir_of
from swarm.cli.output import out
from swarm.errors import DataError, ExitCode
from swarm.terminal import printable

if TYPE_CHECKING:
    from swarm.paths import DataDir

POLL_S = 0.5


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    logs = add_verb(
        verbs,
        "logs",
        _logs,
        "print the end of the node's log, or its learner's",
        "  swarm-node logs\n  swarm-node logs --follow\n  swarm-node logs --learner -n 200\n",
    )
    logs.add_argument("-n", "--lines", type=count, default=50, metavar="N", help="last N lines")
    logs.add_argument("-f", "--follow", action="store_true", help="and what comes, until Ctrl-C")
    logs.add_argument("--learner", action="store_true", help="of the newest run's learner")
    add_data_dir(logs)


def _logs(arguments: Arguments) -> int:
    path = _path(arguments)
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}; a node writes it when it runs"
        ) from None
    for line in lines[-arguments.lines :]:
        out(printable(line))
    if arguments.follow:
        _follow(path)
    return ExitCode.OK


def _path(arguments: Arguments) -> Path:
    data_dir: DataDir = data_dir_of(arguments)
    if not arguments.learner:
        return data_dir.log_path
    if data_dir.newest_run is None:
        raise DataError(f"no run in {data_dir.root} yet, so no learner")
    return data_dir.newest_run.learner_log_path


def _follow(path: Path) -> None:
    """Print lines as they come; a log that is rotated is read from its beginning."""
    file = path.open(errors="replace")
    try:
        file.seek(0, 2)
        held = path.stat().st_ino
        while True:
            for line in iter(file.readline, ""):
                out(printable(line.rstrip("\n")))
            time.sleep(POLL_S)
            if path.exists() and path.stat().st_ino != held:
                file.close()
                file = path.open(errors="replace")
                held = path.stat().st_ino
    finally:
        file.close()
