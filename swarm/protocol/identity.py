"""A node's Ed25519 key: the file that holds it, the peer id that names it, its signatures.

Owns: the key file's format (libp2p's, so that the network daemon reads the same file) and the
mapping between public keys and peer ids. Does not know: what is signed, nor who uses the key now
(the data directory's lock does).
"""

import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from swarm.errors import IdentityError, RemoteProtocolError
from swarm.protocol.reasons import Reason

PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
PEER_ID_CHARS = 52

_SEED_BYTES = 32
# crypto.pb.PrivateKey{key_type: Ed25519, data: seed || public key}
_KEY_FILE_PREFIX = b"\x08\x01\x12\x40"
_KEY_FILE_BYTES = len(_KEY_FILE_PREFIX) + _SEED_BYTES + PUBLIC_KEY_BYTES
# identity multihash of crypto.pb.PublicKey{key_type: Ed25519, data: public key}
_PEER_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"
# Every peer whose records are seen passes through; an entry is some 200 bytes.
_CACHED_PEERS = 16_384


class Identity:
    """An Ed25519 key pair and the peer id that follows from it.

    Args:
        seed: the 32 secret bytes.
    """

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.peer_id: str = peer_id_of(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    @classmethod
    def generate(cls) -> "Identity":
        """A new random identity, in memory only."""
        return cls(secrets.token_bytes(_SEED_BYTES))

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Read the key file, or write one with a new key (mode 0400) where there is none.

        The file appears whole or not at all; when two processes create it at once, both end with
        the same key.

        Raises:
            IdentityError: the file is damaged, readable by others, or cannot be read or written.
        """
        return cls.store(path, cls.generate())

    @classmethod
    def store(cls, path: Path, identity: "Identity") -> "Identity":
        """Write the key file unless there is one; returns the identity that the file then holds.

        Raises:
            IdentityError: the file is damaged, readable by others, or cannot be read or written.
        """
        try:
            if not path.exists():
                _create_key_file(path, identity)
            return cls._load(path)
        except OSError as error:
            raise IdentityError(
                f"{path}: the identity key cannot be read or written: {error.strerror or error}"
            ) from None

    @classmethod
    def _load(cls, path: Path) -> "Identity":
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_KEY_FILE_BYTES + 1)
        if len(data) != _KEY_FILE_BYTES or not data.startswith(_KEY_FILE_PREFIX):
            raise IdentityError(
                f"{path}: damaged: not a libp2p Ed25519 key of {_KEY_FILE_BYTES} bytes; "
                "restore it from a backup, or move it away to get a new identity"
            )
        if mode & 0o077:
            raise IdentityError(
                f"{path}: the identity key has mode {mode:04o} and others may read it; "
                f"mend with: chmod 400 {path}"
            )
        seed_end = len(_KEY_FILE_PREFIX) + _SEED_BYTES
        identity = cls(data[len(_KEY_FILE_PREFIX) : seed_end])
        if identity.public_key != data[seed_end:]:
            raise IdentityError(
                f"{path}: damaged: its public key does not belong to its private key; "
                "restore it from a backup, or move it away to get a new identity"
            )
        return identity

    def to_key_file(self) -> bytes:
        """The secret key as the 68 bytes of its file."""
        return _KEY_FILE_PREFIX + self._seed + self.public_key

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature over `message` (which carries its own domain prefix)."""
        return self._key.sign(message)


@lru_cache(maxsize=_CACHED_PEERS)
def peer_id_of(public_key: bytes) -> str:
    """The peer id ("12D3Koo...", 52 characters of base58) of a 32-byte Ed25519 public key.

    Raises:
        ValueError: `public_key` is not 32 bytes long.
    """
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode("ascii")


@lru_cache(maxsize=_CACHED_PEERS)
def public_key_of(peer_id: str) -> bytes:
    """The 32-byte Ed25519 public key inside a peer id; inverse of `peer_id_of`.

    Raises:
        RemoteProtocolError: reason "peer_id": not the base58 form of an Ed25519 peer id.
    """
    if len(peer_id) != PEER_ID_CHARS:
        raise RemoteProtocolError(
            Reason.PEER_ID, f"{len(peer_id)} characters; an Ed25519 peer id has {PEER_ID_CHARS}"
        )
    try:
        data = base58.b58decode(peer_id)
    except ValueError:
        raise RemoteProtocolError(Reason.PEER_ID, f"{peer_id!r} is not base58") from None
    public_key = data[len(_PEER_ID_PREFIX) :]
    if not data.startswith(_PEER_ID_PREFIX) or len(public_key) != PUBLIC_KEY_BYTES:
        raise RemoteProtocolError(
            Reason.PEER_ID, f"{peer_id!r} does not hold an Ed25519 public key"
        )
    return public_key


def verify_signature(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is the signature over `message` by the owner of `public_key`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _create_key_file(path: Path, identity: Identity) -> None:
    """Write the key file whole or not at all; a file that another process made first stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named as all drafts are, so that one which a killed process left is deleted at the next start.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.{os.getpid()}.tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.to_key_file())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # fails where the file exists, unlike a rename
        except FileExistsError:
            return
    finally:
        draft.unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
