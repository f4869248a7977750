"""A node's files: written whole or not at all, and found again."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.cli.main import main
from swarm.errors import of_os_error
from swarm.paths import DataDir, append_json, parse_json, write_atomic

FILLED = """
import resource, signal, sys
from pathlib import Path
from swarm.paths import append_json
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))
path = Path(sys.argv[1])
for number in range(9):
    try:
        append_json(path, {"number": number, "text": "twenty characters..."})
    except OSError as error:
        print(number, error.errno)
"""


def test_a_line_for_which_there_is_no_room_leaves_no_trace(tmp_path: Path) -> None:
    """A file may not grow beyond 60 bytes: the second line of 44 would."""
    path = tmp_path / "log.jsonl"
    result = subprocess.run(
        [sys.executable, "-c", FILLED, str(path)], capture_output=True, text=True, check=True
    )
    failed = [line.split() for line in result.stdout.splitlines()]
    assert [number for number, _ in failed] == [str(n) for n in range(1, 9)]
    assert {int(code) for _, code in failed} <= {errno.ENOSPC, errno.EFBIG}
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0]
    append_json(path, {"number": 9})
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 9]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    os.symlink("/dev/full", path)
    with pytest.raises(OSError, match="space"):
        append_json(path, {"a": 1})


def test_the_control_socket_is_found_from_another_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = DataDir(tmp_path / "data")
    sessions = [tmp_path / "a", tmp_path / "b"]
    for session in sessions:
        session.mkdir()
    monkeypatch.setattr("swarm.paths.tempfile.gettempdir", lambda: str(sessions[0]))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    data_dir.create()
    path = data_dir.place_control_socket()
    assert sessions[0] in path.parents
    monkeypatch.setattr("swarm.paths.tempfile.gettempdir", lambda: str(sessions[1]))
    assert DataDir(tmp_path / "data").control_socket == path
    # A node that starts there has its own place, and is found at that.
    later = DataDir(tmp_path / "data")
    later.create()
    assert sessions[1] in later.place_control_socket().parents
    assert DataDir(tmp_path / "data").control_socket == later.place_control_socket()


def test_a_copy_of_a_data_directory_does_not_lead_to_the_node_of_the_original(
    tmp_path: Path,
) -> None:
    original = DataDir(tmp_path / "data")
    original.create()
    path = original.place_control_socket()
    shutil.copytree(original.root, tmp_path / "copy", symlinks=True)
    assert DataDir(tmp_path / "copy").control_socket != path
    (tmp_path / "link").symlink_to(original.root)
    assert DataDir(tmp_path / "link").control_socket == path
    original.root.rename(tmp_path / "moved")
    assert DataDir(tmp_path / "moved").control_socket == path


def test_a_node_that_ended_leaves_no_folder_for_sockets(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path / "data")
    for _ in range(2):
        with data_dir.locked():
            assert data_dir.runtime_dir.is_dir()
        assert not data_dir.runtime_dir.exists()


def test_drafts_of_killed_processes_are_deleted_at_the_next_start(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    folders = [tmp_path, *(tmp_path / name for name in ("swarms/ab", "swarms/ab/prompts"))]
    folders.append(tmp_path / "swarms/ab/runs/0001")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f".charter.bin.{killed.pid}.tmp", f".peers.{os.getpid()}.tmp"):
            (folder / name).write_bytes(b"half")
        for name in (f".other.{os.getppid()}.tmp", ".mine.tmp", "1.tmp"):
            (folder / name).write_bytes(b"in use, or not ours")
    data_dir = DataDir(tmp_path)
    with data_dir.locked():
        pass
    for folder in folders:
        left = {path.name for path in folder.iterdir() if path.name.endswith(".tmp")}
        assert left == {f".other.{os.getppid()}.tmp", ".mine.tmp", "1.tmp"}


def test_a_swarm_that_was_half_deleted_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`swarm-node leave --delete`, killed: the rest is deleted at the next start."""

    class Killed(BaseException): ...

    def deletes_a_file_and_dies(path: Path, **_: object) -> None:
        next(path.glob("*.bin")).unlink()
        raise Killed

    data_dir = DataDir(tmp_path)
    data_dir.create()
    data_dir.current = bytes(32)
    swarm_dir = data_dir.swarm(bytes(32))
    swarm_dir.rollouts_dir.mkdir(parents=True)
    swarm_dir.charter_path.write_bytes(b"terms")
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", deletes_a_file_and_dies)
        with pytest.raises(Killed):
            main(["leave", "--delete", "--data-dir", str(tmp_path)])
    assert not swarm_dir.root.exists()
    assert data_dir.current is None
    with data_dir.locked():
        pass
    assert list(swarm_dir.root.parent.iterdir()) == []


def test_half_a_key_of_a_killed_process_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib, swarm.protocol.identity as module\n"
        "os.link = lambda *_: os._exit(9)\n"
        "module.Identity.load_or_create(pathlib.Path(sys.argv[1]))\n"
    )
    data_dir = DataDir(tmp_path)
    killed = subprocess.run([sys.executable, "-c", code, str(data_dir.identity_path)], check=False)
    assert killed.returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    with data_dir.locked():
        pass
    assert [path.name for path in tmp_path.iterdir()] == [data_dir.lock_path.name]


def test_json_that_is_nested_too_deep_is_an_error_like_any_other() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        parse_json("[" * 100_000)


def test_a_full_disk_names_what_could_not_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    (tmp_path / f".a.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomic(path, b"x")
    assert str(of_os_error(caught.value)).startswith(f"{path}: No space left")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_finds_no_room_names_where_it_goes() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/from", None, "/to")
    assert str(of_os_error(error)).startswith("/to: No space left")
