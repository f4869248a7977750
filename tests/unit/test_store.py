"""The blob store: whole or absent, within its quota, whatever lies in its folder."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from swarm.node import store as module
from swarm.node.store import BlobStore


def named(blob: bytes) -> tuple[bytes, bytes]:
    return hashlib.sha256(blob).digest(), blob


A, B, C, D = (named(letter * 100) for letter in (b"a", b"b", b"c", b"d"))


def open_store(root: Path, quota_bytes: int = 1000, min_free_bytes: int = 0) -> BlobStore:
    return BlobStore(root, quota_bytes, min_free_bytes)


@pytest.fixture(autouse=True)
def no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes as much of the disk as it is long."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)


def test_a_stored_blob_is_there_now_and_after_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "blobs"
    store = open_store(root)
    assert store.put(*A)
    for opened in (store, open_store(root)):
        assert opened.get(A[0]) == A[1]
        path = opened.path(A[0])
        assert path is not None
        assert path.read_bytes() == A[1]
        assert (len(opened), opened.used_bytes, A[0] in opened) == (1, 100, True)


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.get(A[0]) is None
    assert store.path(A[0]) is None
    assert A[0] not in store


def test_with_fsync_it_stores_too(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, 1000, 0, fsync=True)
    assert store.put(*A)
    assert store.get(A[0]) == A[1]


def test_the_oldest_go_when_the_quota_is_reached(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota_bytes=250)
    for blob in (A, B, C):
        assert store.put(*blob)
    assert [store.get(blob[0]) is not None for blob in (A, B, C)] == [False, True, True]
    assert store.used_bytes == 200
    assert len(list(tmp_path.iterdir())) == 2


def test_small_blobs_count_as_the_blocks_that_they_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", 4096)
    store = open_store(tmp_path, quota_bytes=3 * 4096)
    for blob in (A, B, C, D):
        assert store.put(*blob)
    assert (len(store), store.used_bytes) == (3, 3 * 4096)
    taken = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert taken <= store.used_bytes
    assert open_store(tmp_path, quota_bytes=2 * 4096).used_bytes == 2 * 4096


def test_storing_twice_counts_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.put(*A)
    assert store.put(*A)
    assert store.used_bytes == 100


def test_after_a_restart_the_oldest_are_still_the_first_to_go(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for age_s, blob in ((10, C), (30, A), (20, B)):
        store.put(*blob)
        path = store.path(blob[0])
        assert path is not None
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    reopened = open_store(tmp_path, quota_bytes=300)
    reopened.put(*D)
    assert [blob[0] in reopened for blob in (A, B, C, D)] == [False, True, True, True]


def test_a_smaller_quota_is_met_at_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for blob in (A, B, C):
        store.put(*blob)
    assert open_store(tmp_path, quota_bytes=150).used_bytes == 100
    assert len(list(tmp_path.iterdir())) == 1


def test_a_blob_above_the_quota_is_refused_and_nothing_is_evicted(tmp_path: Path) -> None:
    store = open_store(tmp_path, quota_bytes=150)
    store.put(*A)
    assert not store.put(*named(bytes(151)))
    assert "quota of 150" in store.trouble
    assert store.get(A[0]) == A[1]


def test_below_the_free_space_floor_nothing_is_written_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int

    free = 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free))
    store = open_store(tmp_path, min_free_bytes=900)
    assert store.put(*A)
    free = 999
    assert not store.put(*B)
    assert "900 bytes" in store.trouble
    assert store.get(A[0]) == A[1]
    assert list(tmp_path.iterdir()) == [store.path(A[0])]
    free = 1000
    assert store.put(*B)
    assert store.trouble == ""


def test_a_full_disk_leaves_no_draft_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert not store.put(*A)
    assert "No space left" in store.trouble
    assert list(tmp_path.iterdir()) == []
    assert A[0] not in store
    monkeypatch.setattr(Path, "replace", replace)
    assert store.put(*A)


def test_a_write_that_was_cut_short_is_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for the process's end: no handler runs that could tidy up."""

    store = open_store(tmp_path)

    def killed(self: Path, target: Path) -> Path:
        raise Killed

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(Killed):
        store.put(*A)
    assert len(list(tmp_path.iterdir())) == 1  # the draft
    assert store.get(A[0]) is None
    reopened = open_store(tmp_path)
    assert reopened.get(A[0]) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", A[1][:-1], b"b" + A[1][1:], A[1] + b"a"])
def test_a_damaged_blob_is_absent_and_deleted(tmp_path: Path, damage: bytes) -> None:
    store = open_store(tmp_path)
    store.put(*A)
    path = store.path(A[0])
    assert path is not None
    path.write_bytes(damage)
    for opened in (open_store(tmp_path), store):
        assert opened.get(A[0]) is None
        assert opened.used_bytes == 0
    assert list(tmp_path.iterdir()) == []
    assert store.put(*A)


def test_a_blob_that_someone_deleted_is_absent(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for blob in (A, B):
        store.put(*blob)
        (tmp_path / f"{blob[0].hex()}.blob").unlink()
    assert store.path(A[0]) is None
    assert store.get(B[0]) is None
    assert store.used_bytes == 0


def test_junk_in_the_folder_is_left_alone_and_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"{'zz' * 32}.blob").write_text("no hash")
    (tmp_path / f"{'ab' * 31}.blob").write_text("short")
    (tmp_path / f"{B[0].hex()}.blob").mkdir()
    (tmp_path / f"{C[0].hex()}.blob").symlink_to(tmp_path / "notes.txt")
    store = open_store(tmp_path, quota_bytes=150)
    assert (len(store), store.used_bytes) == (0, 0)
    assert store.put(*A)
    assert not store.put(*B)  # a folder is in its place
    assert store.trouble
    assert store.get(B[0]) is None
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("call", ["put", "path", "get"])
def test_a_hash_of_another_length_is_a_fault_of_the_caller(tmp_path: Path, call: str) -> None:
    store = open_store(tmp_path)
    arguments: dict[str, Any] = {"put": (b"short", b""), "path": (b"",), "get": (b"",)}
    with pytest.raises(ValueError, match="32 bytes"):
        getattr(store, call)(*arguments[call])
