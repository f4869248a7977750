"""Results on stdout, messages and logs on stderr, coroutines run to their end."""

import json
import logging
import logging.handlers
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from swarm.terminal import printable


def out(text: str) -> None:
    """Print a result; a name in it, of a folder say, does nothing to a terminal."""
    print(printable(text), flush=True)  # noqa: T201 - the CLI prints


def out_json(value: Any) -> None:
    """Print a result as JSON for people and programs."""
    out(json.dumps(value, indent=2, sort_keys=True))


class _SafeFormatter(logging.Formatter):
    """What peers wrote can stand in a message; here it loses its power over a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure_logging(level: str, log_path: Path | None) -> None:
    """Log to stderr, and to a file that is rotated at 10 MB where one is named."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    text = _SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    console = logging.StreamHandler()
    console.setFormatter(text)
    root.addHandler(console)
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        file = logging.handlers.RotatingFileHandler(log_path, maxBytes=10_000_000, backupCount=3)
        file.setFormatter(_SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
        root.addHandler(file)


def run_async(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on uvloop."""
    import asyncio

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
