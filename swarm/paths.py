"""Where a node keeps its things, and the lock that keeps a second node away from them.

Owns: the layout of the data directory and of the runtime directory (sockets).
Does not know: what the files hold.

    <data>/identity.key            who this node is
    <data>/lock                    held while a node runs; holds its pid
    <data>/current                 the swarm that a bare `swarm-node join` resumes
    <data>/port                    the port used last
    <data>/bans.json               peers that the owner keeps out, or lets in all the same
    <data>/paused                  there after `swarm-node pause`
    <data>/control                 link to the control socket
    <data>/swarms/<id>/            one swarm
        charter.bin, prompts/      manifest, amendments, prompt sets: re-served to others
        tokenizer/                 of an organizer: for prompts that are appended
        peers.json                 addresses of members seen
        node.json                  the settings of the last join
        epoch                      the latest one that this node published in, over all runs
        ledger.sqlite              what was given and got, by peer
        rollouts/                  blobs by content hash
        runs/<number>/             one run: run.json, steps.jsonl, metrics.jsonl, learner.log,
                                   checkpoints/, tensorboard/
        runs/<number>-replay-<n>/  what `swarm-node replay` made of it: the same, and result.json
    <data>/logs/
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from swarm.errors import ConfigError, DataError, TryAgainError

APP = "swarm-node"

SHARED_MEMORY = Path("/dev/shm")
"""A file system in main memory, where there is one."""

SWARM_ID_BYTES = 32

RUN_NAME = re.compile("[0-9]{4,9}")

CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
"""Folder of a checkpoint: its step, and its revision where there are several."""


def listed_checkpoints(folder: Path) -> list[tuple[int, int, Path]]:
    """(step, revision, path) of every checkpoint by its name, whole or not."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), int(match[2] or 0), path))
    return found


_DOOMED = ".deleting-"


def doomed(folder: Path) -> Path:
    """Rename a folder that is to be deleted, so that one half deleted is not taken for it.

    Returns:
        Where it lies now; `doomed_left` finds what a killed process leaves of it.
    """
    return folder.rename(folder.with_name(f"{_DOOMED}{folder.name}"))


def doomed_left(parent: Path) -> list[Path]:
    """Folders that somebody began to delete."""
    return list(parent.glob(f"{_DOOMED}*"))


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/swarm-node`, or `~/.local/share/swarm-node`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / APP


def user_path(text: str | os.PathLike[str]) -> Path:
    """The absolute path that a person named, with ~ for their home.

    Raises:
        ConfigError: no path can be so called, or there is no such home.
    """
    try:
        named = os.fspath(text)
        named.encode()  # which all that is printed or stored needs
        if "\0" in named:
            raise ValueError("it holds a zero byte")
        return Path(named).expanduser().absolute()
    except (ValueError, RuntimeError) as error:
        reason = "not valid UTF-8" if isinstance(error, UnicodeError) else error
        raise ConfigError(f"{os.fspath(text)!r} is no path: {reason}") from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of reading and writing, which know no name, the file's."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """What is written takes a file's place at the end: a reader sees the old bytes or the new ones,
    also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with naming(path), os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file whole, as `replacing`."""
    with replacing(path, mode) as file:
        file.write(data)


_DRAFT_NAME = re.compile(r"\..+\.([0-9]{1,9})\.tmp")
"""Of `replacing` and `draft_folder`, with the pid of the writer."""


def draft_folder(parent: Path, purpose: str) -> Path:
    """A new folder for this process's work; what a kill leaves goes when a node next starts.

    Raises:
        OSError: none can be made there.
    """
    return Path(tempfile.mkdtemp(prefix=f".{purpose}-", suffix=f".{os.getpid()}.tmp", dir=parent))


def _runs_elsewhere(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`write_atomic` of indented JSON."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def parse_json(text: str | bytes) -> Any:
    """The value that a text of JSON describes.

    Raises:
        ValueError: malformed, or nested deeper than Python's parser goes.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def append_json(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line of JSON to a log.

    Raises:
        OSError: the disk is full or fails; then nothing of the line stands in the log.
    """
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        start = file.tell()
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):
                file.truncate(start)
            raise


class DataDir:
    """The data directory of one node.

    Args:
        root: the folder; created with mode 0700 where missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = user_path(root)

    @property
    def identity_path(self) -> Path:
        return self.root / "identity.key"

    @property
    def lock_path(self) -> Path:
        return self.root / "lock"

    @property
    def port_path(self) -> Path:
        return self.root / "port"

    @property
    def bans_path(self) -> Path:
        return self.root / "bans.json"

    @property
    def paused_path(self) -> Path:
        """There while the node's owner wants the device for something else."""
        return self.root / "paused"

    @property
    def log_path(self) -> Path:
        return self.root / "logs" / "node.log"

    @property
    def runtime_dir(self) -> Path:
        """Folder of this node's sockets: short (a socket's path has at most 107 bytes), private."""
        base = os.environ.get("XDG_RUNTIME_DIR")
        if base and len(base) <= 40 and Path(base).is_dir():
            return Path(base) / APP / self._digest
        return Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}" / self._digest

    @property
    def _digest(self) -> str:
        """Names this folder, by whatever path it is reached, and no copy of it."""
        try:
            found = self.root.stat()
            name = f"{found.st_dev} {found.st_ino}"
        except OSError:  # there is none yet
            name = str(self.root)
        return hashlib.sha256(name.encode()).hexdigest()[:12]

    @property
    def control_socket(self) -> Path:
        """Where the node that runs here answers, also when XDG_RUNTIME_DIR is another here."""
        try:
            path = self._socket_link.readlink()
        except OSError:
            path = None
        if path is None or path.parent.name != self._digest:  # a copied folder's: another node's
            return self.runtime_dir / "control.sock"
        return path

    @property
    def _socket_link(self) -> Path:
        return self.root / "control"

    def place_control_socket(self) -> Path:
        """Where the control socket of this process goes; noted in the data directory."""
        path = self.runtime_dir / "control.sock"
        self._socket_link.unlink(missing_ok=True)
        self._socket_link.symlink_to(path)
        return path

    def create(self) -> None:
        """Make the folders.

        Raises:
            ConfigError: the place cannot be written, or the runtime folder belongs to another user.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.runtime_dir.parent, self.runtime_dir):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                if folder.stat().st_uid != os.getuid():
                    raise ConfigError(f"{folder} belongs to another user; set XDG_RUNTIME_DIR")
                folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"data directory {self.root} cannot be made: {error}; choose another --data-dir"
            ) from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory, which is made where it is missing, for this process.

        Raises:
            TryAgainError: another process holds it; the message names its pid.
        """
        self.create()
        fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise TryAgainError(
                f"data directory {self.root} is in use by the node with pid {pid}; "
                "stop it, or give this one another --data-dir"
            ) from None
        self.create()  # what another may have removed meanwhile, giving it back
        with naming(self.lock_path):
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        try:
            self._delete_drafts()
            yield
        finally:
            with suppress(OSError):
                self.runtime_dir.rmdir()  # leave no empty folder for sockets behind
            os.ftruncate(fd, 0)
            os.close(fd)

    def _delete_drafts(self) -> None:
        """What a killed process was writing, or deleting; another verb may be writing just now."""
        for left in doomed_left(self.root / "swarms"):
            shutil.rmtree(left, ignore_errors=True)
        for folder in ("", "swarms/*/", "swarms/*/prompts/", "swarms/*/runs/*/"):
            for path in self.root.glob(f"{folder}.*.tmp"):
                writer = _DRAFT_NAME.fullmatch(path.name)
                if writer is None or _runs_elsewhere(int(writer[1])):
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def swarm(self, swarm_id: bytes) -> "SwarmDir":
        return SwarmDir(self.root / "swarms" / swarm_id.hex())

    @property
    def current(self) -> bytes | None:
        """Id of the swarm used last, or None."""
        try:
            swarm_id = bytes.fromhex((self.root / "current").read_text().strip())
        except (OSError, ValueError):
            return None
        return swarm_id if len(swarm_id) == SWARM_ID_BYTES else None

    @current.setter
    def current(self, swarm_id: bytes) -> None:
        write_atomic(self.root / "current", swarm_id.hex().encode() + b"\n")

    @property
    def newest_run(self) -> "RunDir | None":
        """The newest run in the swarm used last."""
        runs = self.swarm(self.current).runs() if self.current else []
        return runs[-1] if runs else None

    def forget_current(self) -> None:
        """No swarm is resumed by a bare `join`."""
        (self.root / "current").unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class SwarmDir:
    """Everything that a node keeps of one swarm."""

    root: Path

    @property
    def charter_path(self) -> Path:
        return self.root / "charter.bin"

    @property
    def swarm_id(self) -> bytes:
        """By the folder's name.

        Raises:
            DataError: it is not the folder of a swarm.
        """
        try:
            return bytes.fromhex(self.root.name)
        except ValueError:
            raise DataError(f"{self.root} is not the folder of a swarm") from None

    @property
    def prompts_dir(self) -> Path:
        return self.root / "prompts"

    @property
    def tokenizer_dir(self) -> Path:
        """Of an organizer: the tokenizer's files, for prompts that are appended."""
        return self.root / "tokenizer"

    def prompt_set_path(self, sha256: str) -> Path:
        return self.prompts_dir / f"{sha256}.jsonl"

    @property
    def epoch_path(self) -> Path:
        return self.root / "epoch"

    @property
    def peers_path(self) -> Path:
        return self.root / "peers.json"

    @property
    def config_path(self) -> Path:
        return self.root / "node.json"

    def saved_config(self) -> dict[str, Any] | None:
        """The settings of the last join, by section; None where there was none with a model.

        Raises:
            DataError: they are damaged.
        """
        saved = _json_object(self.config_path, "delete it to start from the defaults")
        if saved is not None and not all(isinstance(part, dict) for part in saved.values()):
            raise DataError(
                f"{self.config_path}: damaged: no sections; delete it to start from the defaults"
            )
        return saved

    @property
    def ledger_path(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def rollouts_dir(self) -> Path:
        return self.root / "rollouts"

    def load_peers(self) -> list[str]:
        """Addresses of members seen earlier, newest first; empty where there is no usable list."""
        try:
            value = parse_json(self.peers_path.read_text())
        except (OSError, ValueError):
            return []
        addresses = value.get("addresses") if isinstance(value, dict) else None
        return [a for a in addresses if isinstance(a, str)] if isinstance(addresses, list) else []

    def save_peers(self, addresses: list[str]) -> None:
        write_json(self.peers_path, {"addresses": addresses[:64]})

    def runs(self) -> list["RunDir"]:
        """All runs, oldest first."""
        folder = self.root / "runs"
        names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
        return [RunDir(folder / name) for name in names if RUN_NAME.fullmatch(name)]

    def new_run(self) -> "RunDir":
        last = int(self.runs()[-1].root.name) if self.runs() else 0
        return RunDir.create(self.root / "runs" / f"{last + 1:04d}")


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run of one model in one swarm."""

    root: Path

    @classmethod
    def create(cls, root: Path) -> Self:
        root.mkdir(parents=True)
        return cls(root)

    @property
    def record_path(self) -> Path:
        return self.root / "run.json"

    @property
    def steps_path(self) -> Path:
        return self.root / "steps.jsonl"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def learner_log_path(self) -> Path:
        return self.root / "learner.log"

    @property
    def checkpoints_dir(self) -> Path:
        return self.root / "checkpoints"

    @property
    def tensorboard_dir(self) -> Path:
        return self.root / "tensorboard"

    @property
    def handover_dirs(self) -> tuple[Path, Path]:
        """Where weights wait for the sampling engine: in main memory, or on disk."""
        digest = hashlib.sha256(os.fsencode(self.root.absolute())).hexdigest()[:16]
        return SHARED_MEMORY / f"{APP}-{os.getuid()}-{digest}", self.root / "engine"

    def delete_handover(self) -> None:
        """Remove what a learner that did not come to its end left in `handover_dirs`."""
        for folder in self.handover_dirs:
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def swarm_dir(self) -> SwarmDir:
        """The swarm that it is a run in."""
        return SwarmDir(self.root.parent.parent)

    def checkpoints(self) -> dict[int, Path]:
        """Step to folder of the kept checkpoints, rising; whole or not."""
        return {step: path for step, _, path in sorted(listed_checkpoints(self.checkpoints_dir))}

    def record(self) -> dict[str, Any] | None:
        """run.json, or None where the run never got that far.

        Raises:
            DataError: it is damaged; it appears whole or not at all.
        """
        record = _json_object(self.record_path)
        if record is not None and not all(
            isinstance(record.get(name, {}), dict) for name in ("trained", "configs")
        ):
            raise DataError(
                f"{self.record_path}: damaged: no record of a run; move {self.root} away"
            )
        return record


def _json_object(path: Path, advice: str = "") -> dict[str, Any] | None:
    """What a file of JSON holds; None where there is none.

    Raises:
        DataError: it is damaged, and what can be done.
    """
    try:
        value = parse_json(path.read_text())
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}{'; ' if advice else ''}{advice}") from None
    return value
