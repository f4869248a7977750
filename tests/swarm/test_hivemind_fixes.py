"""Each mend of hivemind: the scenario fails without it and holds with it; the sources still match.

A scenario runs in a process of its own, with and without the mends, since they hold for a process.
"""

import hashlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).parent / "fix_scenarios.py"
FOLDER = Path(__file__).parent


def run(scenario: str, *, mended: bool) -> subprocess.CompletedProcess[str]:
    """Exit code 0: the good outcome."""
    return subprocess.run(
        [sys.executable, str(SCENARIOS), scenario, "mended" if mended else "stock"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=FOLDER,
    )


@pytest.mark.parametrize(
    "scenario",
    [
        "an_old_record_does_not_shorten_the_new_one",
        "a_record_that_ends_never_is_refused",
        "nested_extensions_are_refused",
        "a_dictionary_holds_only_what_its_types_allow",
        "a_large_reply_is_answered",
        "a_bad_entry_does_not_discard_the_others",
        "a_large_store_is_cut_into_messages",
    ],
)
def test_mend(scenario: str) -> None:
    mended = run(scenario, mended=True)
    assert mended.returncode == 0, mended.stderr
    assert run(scenario, mended=False).returncode != 0, "hivemind no longer needs this mend"


def test_nested_extensions_killed_the_process() -> None:
    assert run("nested_extensions_are_refused", mended=False).returncode == -11  # SIGSEGV


def test_the_sources_are_those_that_were_mended() -> None:
    program = (
        "import hashlib, inspect\n"
        "from swarm.net.hivemind_fixes import PATCHES\n"
        "for patch in PATCHES:\n"
        "    source = inspect.getsource(getattr(patch.owner, patch.attribute))\n"
        "    assert hashlib.sha256(source.encode()).hexdigest() == patch.source_sha256, patch\n"
        "print(len(PATCHES))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6\n"


def test_apply_puts_every_mend_in_place_and_may_be_repeated() -> None:
    from swarm.net import hivemind_fixes

    hivemind_fixes.apply()
    hivemind_fixes.apply()
    for patch in hivemind_fixes.PATCHES:
        source = inspect.getsource(getattr(patch.owner, patch.attribute))
        assert hashlib.sha256(source.encode()).hexdigest() != patch.source_sha256


def test_the_pinned_version_is_the_one_that_is_installed() -> None:
    import importlib.metadata
    import tomllib

    from swarm.net.hivemind_lean import HIVEMIND_VERSION

    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
    assert f"hivemind=={HIVEMIND_VERSION}" in project["project"]["dependencies"]
    assert importlib.metadata.version("hivemind") == HIVEMIND_VERSION


def test_the_lean_import_loads_nothing_heavy() -> None:
    program = (
        "import sys, swarm.net.overlay, swarm.net.exchange\n"
        "heavy = {'torch', 'scipy', 'grpc', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import logging\n"
        "assert not logging.getLogger('hivemind').handlers\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_another_version_is_refused() -> None:
    program = (
        "import importlib.metadata\n"
        "importlib.metadata.version = lambda name: '1.2.0'\n"
        "from swarm.errors import ConfigError\n"
        "try:\n"
        "    import swarm.net.hivemind_lean\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("hivemind 1.2.0 is installed; exactly 1.1.12 is needed")
