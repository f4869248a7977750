"""Every command that the docs show is one that the program understands, every link leads on."""

import re
from pathlib import Path

import pytest

from swarm.cli.main import _parser
from tests.documented import ROOT, Command, commands, mentions, pages

SHOWN = {command for page in pages() for command in commands(page)}
MENTIONED = {command for page in pages() for command in mentions(page)}
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", sorted(SHOWN | MENTIONED), ids=lambda c: c.text)
def test_a_command_of_the_docs_is_understood(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = command.words
    if program == "make":
        targets = [word for word in words if "=" not in word]
        assert targets
        assert set(targets) <= set(TARGETS), command.where
        return
    fault = not_understood(words, needs_all=command in SHOWN, said=capsys)
    assert fault is None, f"{command.where}: {fault}"


def not_understood(
    words: list[str], *, needs_all: bool, said: pytest.CaptureFixture[str]
) -> str | None:
    """What the program says to a command line that it refuses."""
    try:
        arguments = _parser().parse_args(words)
    except SystemExit as end:  # --help ends like this, too
        error = said.readouterr().err
        named = "arguments are required" in error and not needs_all
        return None if end.code == 0 or named else error
    return None if hasattr(arguments, "verb") else "no verb"


def test_the_docs_show_commands() -> None:
    assert {page.name for page in pages()} >= {"README.md", "OPERATING.md", "CONTRIBUTING.md"}
    assert len(SHOWN) > 40


def test_a_comment_and_a_broken_line_are_read_as_a_shell_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.documented.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# How\n\n```\nswarm-node join swarm1... \\\n    --name 'a b'   # in\nls\n```\n\n"
        "Or `swarm-node\nstop`, `swarm-node status`.\n```json\nmake it\n```\n"
    )
    (found,) = commands(page)
    assert found.words == ["swarm-node", "join", "swarm1...", "--name", "a b"]
    assert found.where == "page.md: How"
    assert [mention.text for mention in mentions(page)] == ["swarm-node status"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        file, _, heading = link.partition("#")
        if ":" in file:
            continue
        target = (page.parent / file) if file else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings]
            assert heading in anchors, link
