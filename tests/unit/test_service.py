"""What systemd is told, and the unit that it is given."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from swarm.service import UNIT_NAME, notify, unit_text


def test_a_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    assert not notify("READY=1")  # it is gone


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_a_manager(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert not notify("READY=1")


def test_the_unit_runs_this_python_on_that_folder() -> None:
    lines = unit_text(Path("/data/50% mine")).splitlines()
    (start,) = [line for line in lines if line.startswith("ExecStart=")]
    assert start == f'ExecStart={sys.executable} -P -m swarm.cli join --data-dir "/data/50%% mine"'
    assert "Type=notify" in lines
    assert "seed --data-dir" in unit_text(Path("/d"), verb="seed")
    for forbidden in ("MemoryDenyWriteExecute=", "PrivateDevices="):  # CUDA would not start
        assert not any(line.startswith(forbidden) for line in lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT_NAME
    unit.write_text(unit_text(tmp_path))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0
