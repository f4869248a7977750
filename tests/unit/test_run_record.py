"""The source's revision in a run's record."""

import subprocess
from pathlib import Path

from swarm.node.run_record import SOURCE_ROOT, git_revision


def test_the_source_root_is_the_top_of_the_checkout() -> None:
    assert (SOURCE_ROOT / "swarm" / "node" / "run_record.py").is_file()


def test_revision_of_a_checkout_and_of_anything_else(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for arguments in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "one")):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    revision = git_revision(tmp_path)
    assert revision is not None
    assert head.stdout.startswith(revision)
