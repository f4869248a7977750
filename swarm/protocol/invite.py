"""The invite: one word with which a newcomer finds a swarm.

Owns: its form, its checksum, what is wrong with one that was damaged.
Does not know: who serves at its addresses.
"""

import hashlib
import re
from dataclasses import dataclass
from typing import Self

import base58
import msgpack

from swarm.errors import RemoteProtocolError, UsageError
from swarm.protocol.identity import public_key_of
from swarm.protocol.manifest import NAME_PATTERN

MAX_INVITE_CHARS = 8192
MAX_INVITE_ADDRESSES = 16
MAX_ADDRESS_CHARS = 256

INVITE_PREFIX = "swarm1"

_INVITE_DOMAIN = b"swarm-node invite 1\0"
_CHECKSUM_BYTES = 4
_HASH_BYTES = 32
_ADDRESS_PATTERN = r"/[!-~]+"


@dataclass(frozen=True, slots=True)
class Invite:
    """All that a newcomer needs: the swarm's id and addresses of a few members.

    Attributes:
        swarm_id: 32 bytes; what the addressed members serve is checked against it.
        addresses: 1 to 16 multiaddresses that end in a peer id.
        name: the swarm's name, for people; nothing is derived from it.

    Raises:
        UsageError: a field is out of bounds.
    """

    swarm_id: bytes
    addresses: tuple[str, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.swarm_id) != _HASH_BYTES:
            raise UsageError(f"invite: a swarm id has {_HASH_BYTES} bytes")
        if not 1 <= len(self.addresses) <= MAX_INVITE_ADDRESSES:
            raise UsageError(
                f"invite: {len(self.addresses)} addresses; 1 to {MAX_INVITE_ADDRESSES} are right"
            )
        for address in self.addresses:
            if not _is_address(address):
                raise UsageError(
                    f"invite: {address[:MAX_ADDRESS_CHARS]!r} is no multiaddress of a peer, "
                    "e.g. /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."
                )
        if self.name and not re.fullmatch(NAME_PATTERN, self.name):
            raise UsageError(f"invite: {self.name[:64]!r} is no name of a swarm")

    def encode(self) -> str:
        """The invite as one word of ASCII letters and digits."""
        payload = msgpack.packb([self.swarm_id, self.name, list(self.addresses)])
        return INVITE_PREFIX + base58.b58encode(payload + _checksum(payload)).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read an invite; blanks and line breaks that copying put in are ignored.

        Raises:
            UsageError: names what is wrong: prefix, length, character, checksum, contents.
        """
        word = "".join(text.split())
        if not word.startswith(INVITE_PREFIX):
            if re.match(r"swarm[2-9]", word):
                raise UsageError(f"invite {word[:12]}...: made by a newer version of swarm-node")
            raise UsageError(f"{word[:12]!r} is no invite: one begins with {INVITE_PREFIX!r}")
        if len(word) > MAX_INVITE_CHARS:
            raise UsageError(f"invite: {len(word)} characters, above {MAX_INVITE_CHARS}")
        try:
            data = base58.b58decode(word.removeprefix(INVITE_PREFIX))
        except ValueError:
            raise UsageError(
                "invite: holds a character that invites never have "
                "(only letters and digits without 0, O, I, l); copy it again"
            ) from None
        payload, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if checksum != _checksum(payload):
            raise UsageError(
                "invite: damaged: its checksum does not match, so a character was lost or changed; "
                "copy the whole invite again"
            )
        try:
            match msgpack.unpackb(
                payload, max_array_len=MAX_INVITE_ADDRESSES, max_map_len=0, max_ext_len=0
            ):
                case [bytes() as swarm_id, str() as name, [*addresses]] if all(
                    isinstance(address, str) for address in addresses
                ):
                    return cls(swarm_id, tuple(addresses), name)
                case _:
                    raise ValueError("not [swarm id, name, [address, ...]]")
        except ValueError as error:
            raise UsageError(
                f"invite: its checksum is right but not its contents: {error}"
            ) from None


def _is_address(address: str) -> bool:
    if len(address) > MAX_ADDRESS_CHARS or not re.fullmatch(_ADDRESS_PATTERN, address):
        return False
    try:
        public_key_of(address.rpartition("/p2p/")[2])
    except RemoteProtocolError:
        return False
    return True


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(_INVITE_DOMAIN + payload).digest()[:_CHECKSUM_BYTES]
