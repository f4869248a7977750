"""An archive for whoever is to help: versions, settings, status, ends of logs, made anonymous.

Owns: what goes in and what is taken out of it. Does not know: how each part is made.

Never in it: the identity's key, prompts, completions, weights. Replaced by marks that stay the same
within one report: addresses, peer ids, invites, tokens of other services, the names of the host,
the user and the home folder, and those that members and swarms go by.
"""

import getpass
import io
import json
import re
import socket
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swarm.paths import write_atomic

LOG_BYTES = 256 * 1024
"""From the end of each log."""

_PATTERNS = (
    ("invite", re.compile(r"swarm1[1-9A-HJ-NP-Za-km-z]{20,}")),
    ("peer", re.compile(r"\b12D3Koo[1-9A-HJ-NP-Za-km-z]{20,}")),
    ("secret", re.compile(r"\b(?:hf|sk|ghp|gho|glpat|wandb)[_-][A-Za-z0-9_-]{16,}")),
    ("ip", re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")),
    ("ip", re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])")),
    ("ip", re.compile(r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:)+:(?:[0-9a-fA-F]{1,4}:?)*(?![\w:])")),
    ("name", re.compile(r"(?<=/dns/)[^/\s]+|(?<=/dns4/)[^/\s]+|(?<=/dns6/)[^/\s]+")),
    # What a node or a swarm calls itself: in JSON; in the log (swarm.node.membership, .member).
    ("name", re.compile(r'(?<="name": ")(?:[^"\\]|\\.)+(?=")')),
    ("name", re.compile(r"""(?<=\(['"]).+(?=['"]\) is here$)""", re.MULTILINE)),
    ("name", re.compile(r"""(?<=in the swarm ['"]).+(?=['"] \([0-9a-f]{16}\): )""")),
)
_HARMLESS = {"127.0.0.1", "0.0.0.0"}


class Redactor:
    """Replaces what tells who and where someone is.

    Args:
        names: mark to a word that it replaces wherever it stands by itself.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = [
            (mark, re.compile(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])"))
            for mark, word in sorted(names.items(), key=lambda item: -len(item[1]))
            if len(word) >= 3
        ]
        self._marks: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, text: str) -> str:
        """The text with marks."""
        for kind, pattern in _PATTERNS:
            text = pattern.sub(lambda match, kind=kind: self._mark(kind, match[0]), text)  # type: ignore[misc]
        for mark, pattern in self._names:
            text = pattern.sub(f"<{mark}>", text)
        return text

    def _mark(self, kind: str, found: str) -> str:
        if found in _HARMLESS:
            return found
        if found not in self._marks:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._marks[found] = f"<{kind} {self._counts[kind]}>"
        return self._marks[found]


def names_here() -> dict[str, str]:
    """What tells this machine and its user: mark to word."""
    names = {"home": str(Path.home()), "host": socket.gethostname()}
    try:
        names["user"] = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        names["user"] = ""
    return names


def tail(path: Path) -> str:
    """The end of a log, whole lines."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        data = file.read()
    if size > LOG_BYTES:
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")


def write(
    path: Path, parts: Mapping[str, Callable[[], Any]], redact: Callable[[str], str]
) -> list[tuple[str, int]]:
    """Write the archive, whole or not at all.

    Args:
        path: of the .tar.gz file.
        parts: name in the archive to what makes it: text, or something for JSON.
        redact: is given every text before it is written.

    Returns:
        Names and sizes of what is in it. A part that cannot be made holds the reason.
    """
    held = []
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, make in parts.items():
            try:
                value = make()
            except Exception as error:  # noqa: BLE001 - a report on faults must survive them
                value = f"not to be had: {error!r}\n"
            if not isinstance(value, str):
                value = json.dumps(value, indent=2, sort_keys=True, default=str) + "\n"
            data = redact(value).encode()
            info = tarfile.TarInfo(f"bugreport/{name}")
            info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
            archive.addfile(info, io.BytesIO(data))
            held.append((name, len(data)))
    write_atomic(path, packed.getvalue())
    return held
