"""The commands that README.md and docs/ show, as a reader would type them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:swarm-node|make) [^`|\n]+)`")


class Command(NamedTuple):
    """One command line.

    Attributes:
        where: file and heading, for a failing test's message.
        text: the line, without its comment; a line that `\\` continues is one.
    """

    where: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def pages() -> list[Path]:
    """What is written for readers, in Markdown; not the roadmap, which tells of what is to come."""
    folders = (ROOT / "docs", ROOT / "recipes")
    found = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    return sorted(page for page in found if page.name != "ROADMAP.md")


def commands(page: Path) -> list[Command]:
    """The `swarm-node` and `make` commands of a page's blocks, in order."""
    return list(_of_blocks(page))


def mentions(page: Path) -> list[Command]:
    """Those that stand between backticks in its text, often without their arguments."""
    text = _FENCE.sub("", page.read_text())
    return [Command(str(page.relative_to(ROOT)), found) for found in _INLINE.findall(text)]


def _of_blocks(page: Path) -> Iterator[Command]:
    text = page.read_text()
    for block in _FENCE.finditer(text):
        if block[1] not in ("", "sh", "bash", "console"):
            continue
        headings = re.findall(r"^#+ (.+)$", text[: block.start()], re.MULTILINE)
        where = f"{page.relative_to(ROOT)}: {headings[-1] if headings else ''}"
        for line in block[2].replace("\\\n", " ").split("\n"):
            shown = re.sub(r"\s+#\s.*$", "", line).rstrip()
            if shown.startswith(("swarm-node ", "make ")):
                yield Command(where, " ".join(shown.split()))
