"""Blobs on disk by content hash: atomic, within a quota, the oldest deleted first.

Owns: one folder and what lies in it under names of its own form. Does not know: what a blob holds,
who asks for it. Synchronous, for one thread. One process at a time works in a folder (the data
directory's lock sees to it); files that it does not know are left alone.
"""

import hashlib
import logging
import os
import re
import shutil
from collections import OrderedDict
from pathlib import Path

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4096
"""What file systems give out: a smaller blob takes as much of the disk."""

_HASH_BYTES = 32
_BLOB_NAME = re.compile(r"([0-9a-f]{64})\.blob")
_DRAFT_NAME = re.compile(r"[0-9a-f]{64}\.draft")


def blob_path(root: Path, blob_hash: bytes) -> Path:
    """Where a store with this root keeps a blob, for readers beside it.

    Raises:
        ValueError: `blob_hash` is not 32 bytes long.
    """
    if len(blob_hash) != _HASH_BYTES:
        raise ValueError(f"a blob's hash has {_HASH_BYTES} bytes, not {len(blob_hash)}")
    return root / f"{blob_hash.hex()}.blob"


def bytes_on_disk(size_bytes: int) -> int:
    """What a file of this size takes."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


class BlobStore:
    """A folder of blobs.

    Args:
        root: made where it is missing; drafts that a killed process left in it are deleted.
        quota_bytes: of all blobs together, on the disk.
        min_free_bytes: nothing is written when the file system would have less than this left.
        fsync: whether `put` waits for the disk. Without it a power cut can lose or damage the
            newest blobs; `get` notices.

    Attributes:
        trouble: why the last `put` stored nothing; empty when it did.

    Raises:
        OSError: `root` cannot be made or read.
    """

    def __init__(
        self, root: Path, quota_bytes: int, min_free_bytes: int, *, fsync: bool = False
    ) -> None:
        self._root = root
        self._quota_bytes = quota_bytes
        self._min_free_bytes = min_free_bytes
        self._fsync = fsync
        # Hash -> size on the disk, the oldest first.
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._used_bytes = 0
        self.trouble = ""
        root.mkdir(parents=True, exist_ok=True)
        self._read_folder()
        self._evict(room_for_bytes=0)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, blob_hash: bytes) -> bool:
        return blob_hash in self._sizes

    @property
    def used_bytes(self) -> int:
        """What all blobs together take of the disk."""
        return self._used_bytes

    def put(self, blob_hash: bytes, blob: bytes) -> bool:
        """Store a blob; it appears whole or not at all.

        Args:
            blob_hash: sha256 of `blob`, which the caller has checked.
            blob: what to store.

        Returns:
            True: it is stored, or was already. False: `trouble` says why not (disk full, less than
            `min_free_bytes` free, larger than the quota, a failing disk). The node goes on
            without it.

        Raises:
            ValueError: `blob_hash` is not 32 bytes long.
        """
        path = self._path(blob_hash)
        if blob_hash in self._sizes:
            return True
        try:
            problem = self._make_room(bytes_on_disk(len(blob)))
            if not problem:
                self._write(path, blob)
        except OSError as error:
            problem = f"{self._root}: {error.strerror or error}"
        if problem:
            if problem != self.trouble:
                logger.warning("blob not stored: %s", problem)
            self.trouble = problem
            return False
        if self.trouble:
            logger.info("blobs are stored again")
            self.trouble = ""
        self._sizes[blob_hash] = bytes_on_disk(len(blob))
        self._used_bytes += self._sizes[blob_hash]
        return True

    def get(self, blob_hash: bytes) -> bytes | None:
        """A blob, checked against its hash; None: not here. A damaged one is deleted."""
        path = self.path(blob_hash)
        if path is None:
            return None
        try:
            blob = path.read_bytes()
        except OSError as error:
            logger.warning("blob unreadable: %s: %s", path, error.strerror or error)
            self._drop(blob_hash)
            return None
        if hashlib.sha256(blob).digest() != blob_hash:
            logger.warning("blob damaged, deleted: %s", path)
            self._drop(blob_hash)
            return None
        return blob

    def path(self, blob_hash: bytes) -> Path | None:
        """Where a blob lies, for a server that reads it piece by piece; None: not here."""
        path = self._path(blob_hash)
        if blob_hash in self._sizes and not path.is_file():
            self._drop(blob_hash)
        return path if blob_hash in self._sizes else None

    def _path(self, blob_hash: bytes) -> Path:
        return blob_path(self._root, blob_hash)

    def _read_folder(self) -> None:
        found: list[tuple[int, bytes, int]] = []
        with os.scandir(self._root) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                if _DRAFT_NAME.fullmatch(entry.name):
                    os.unlink(entry.path)
                elif match := _BLOB_NAME.fullmatch(entry.name):
                    stat = entry.stat(follow_symlinks=False)
                    found.append((stat.st_mtime_ns, bytes.fromhex(match[1]), stat.st_size))
        for _, blob_hash, size_bytes in sorted(found):
            self._sizes[blob_hash] = bytes_on_disk(size_bytes)
            self._used_bytes += self._sizes[blob_hash]

    def _make_room(self, size_bytes: int) -> str:
        """Evict for a blob of this size; returns why there is no room all the same, or ""."""
        if size_bytes > self._quota_bytes:
            return f"{size_bytes} bytes exceed the quota of {self._quota_bytes} bytes"
        self._evict(room_for_bytes=size_bytes)
        free_bytes = shutil.disk_usage(self._root).free
        if free_bytes - size_bytes < self._min_free_bytes:
            return (
                f"{self._root}: less than {self._min_free_bytes} bytes would stay free "
                "on its file system"
            )
        return ""

    def _write(self, path: Path, blob: bytes) -> None:
        draft = path.with_suffix(".draft")
        try:
            with draft.open("wb") as file:
                file.write(blob)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        if self._fsync:
            folder = os.open(self._root, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _evict(self, room_for_bytes: int) -> None:
        while self._sizes and self._used_bytes + room_for_bytes > self._quota_bytes:
            self._drop(next(iter(self._sizes)))

    def _drop(self, blob_hash: bytes) -> None:
        """Forget a blob and delete its file; one that cannot be deleted is only forgotten."""
        self._used_bytes -= self._sizes.pop(blob_hash)
        path = self._path(blob_hash)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("blob not deleted: %s: %s", path, error.strerror or error)
