"""The key file, peer ids, signatures."""

import os
import stat
import threading
from pathlib import Path

import pytest

from swarm.errors import IdentityError, RemoteProtocolError
from swarm.protocol.identity import Identity, peer_id_of, public_key_of, verify_signature

SEED = bytes(range(32))


def write_key(path: Path, data: bytes, mode: int = 0o400) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_creates_a_private_file_and_reads_it_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    created = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert path.read_bytes() == created.to_key_file()
    assert os.listdir(path.parent) == ["identity.key"]
    assert Identity.load_or_create(path).peer_id == created.peer_id
    assert Identity.load_or_create(tmp_path / "other").peer_id != created.peer_id


def test_processes_that_create_at_once_share_one_key(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    start = threading.Barrier(8)
    peer_ids: list[str] = []

    def create() -> None:
        start.wait()
        peer_ids.append(Identity.load_or_create(path).peer_id)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(peer_ids) == 8
    assert len(set(peer_ids)) == 1
    assert os.listdir(tmp_path) == ["identity.key"]


def test_a_key_that_was_made_first_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "identity.key"
    first = Identity(SEED)
    write_key(path, first.to_key_file())
    monkeypatch.setattr(Path, "exists", lambda _: False)  # the other process wins the race
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert os.listdir(tmp_path) == ["identity.key"]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(IdentityError, match="No space left"):
        Identity.load_or_create(tmp_path / "identity.key")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", [0o404, 0o440, 0o644, 0o420])
def test_a_key_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = write_key(tmp_path / "identity.key", Identity(SEED).to_key_file(), mode)
    with pytest.raises(IdentityError, match="chmod 400"):
        Identity.load_or_create(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\x08\x00" + data[2:],
        lambda data: data[:4] + bytes(32) + data[36:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
    ids=["empty", "short", "long", "key type", "other seed", "other public key"],
)
def test_a_damaged_key_is_refused_and_kept(tmp_path: Path, damage) -> None:
    data = damage(Identity(SEED).to_key_file())
    path = write_key(tmp_path / "identity.key", data)
    with pytest.raises(IdentityError, match="damaged"):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


def test_nobody_is_told_to_change_the_mode_of_another_file(tmp_path: Path) -> None:
    path = write_key(tmp_path / "passwd", b"root:x:0:0:root:/root:/bin/bash", 0o644)
    with pytest.raises(IdentityError, match=r"not a libp2p Ed25519 key") as info:
        Identity.load_or_create(path)
    assert "chmod" not in str(info.value)


def test_a_path_that_cannot_hold_a_key_is_an_identity_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "identity.key", tmp_path):
        with pytest.raises(IdentityError, match=str(tmp_path)):
            Identity.load_or_create(path)


def test_a_signature_holds_for_its_key_and_message_only() -> None:
    identity = Identity(SEED)
    signature = identity.sign(b"message")
    assert verify_signature(identity.public_key, b"message", signature)
    assert not verify_signature(identity.public_key, b"massage", signature)
    assert not verify_signature(Identity(bytes(32)).public_key, b"message", signature)
    assert not verify_signature(identity.public_key, b"message", bytes(64))


@pytest.mark.parametrize("length", [0, 63, 65])
def test_a_signature_of_wrong_length_does_not_hold(length: int) -> None:
    identity = Identity(SEED)
    assert not verify_signature(identity.public_key, b"", (identity.sign(b"") * 2)[:length])


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_public_key_of_wrong_length_has_no_peer_id_and_verifies_nothing(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        peer_id_of(bytes(length))
    assert not verify_signature(bytes(length), b"", Identity(SEED).sign(b""))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3Koo",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # an RSA key's
        "1" * 52,
        "z" * 52,
        "0" * 52,
        "é" * 52,
        Identity(SEED).peer_id[:-1],
        Identity(SEED).peer_id[:-1] + " ",
        Identity(SEED).peer_id + "1",
        "1" + Identity(SEED).peer_id[:-1],
        "1" * 100_000,
    ],
)
def test_what_is_no_ed25519_peer_id_is_refused(text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        public_key_of(text)
    assert caught.value.reason == "peer_id"


def test_the_secret_is_not_shown() -> None:
    identity = Identity(SEED)
    assert SEED.hex() not in repr(identity)
    assert identity.peer_id in repr(identity)
