"""A child's log file, and what is said of its end.

Owns: where its output goes, the last of it, and how it ended. Does not know: what the child does.
"""

import signal
from pathlib import Path
from typing import IO

MAX_LOG_BYTES = 8 << 20
"""A longer log is put aside as <name>.1 before the next start."""

LOG_LINES = 5
"""Last lines of the log in an error."""


def fate(returncode: int | None) -> str:
    """How a process ended, to stand after its name."""
    if returncode is not None and returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"ended with exit status {returncode}"


def open_log(path: Path) -> IO[bytes]:
    """The log, to be the child's standard output.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(path.name + ".1"))
    return path.open("ab")


def last_lines(path: Path) -> str:
    """The log's end, to stand after an error; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()][-LOG_LINES:]
    return "".join(f"\n    {line}" for line in [f"; the end of {path}:", *lines]) if lines else ""
