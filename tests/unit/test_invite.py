"""The invite: one word, and what is wrong with a damaged one."""

import hashlib

import base58
import msgpack
import pytest
from sample_charter import ADDRESS, BERT, MANIFEST

from swarm.errors import UsageError
from swarm.protocol.invite import Invite

INVITE = Invite(MANIFEST.swarm_id, (ADDRESS, f"/dns4/example.org/tcp/1/p2p/{BERT.peer_id}"), "Sums")


def test_an_invite_is_one_word_and_survives_copying() -> None:
    text = INVITE.encode()
    assert text.isalnum()
    assert text.isascii()
    assert Invite.decode(text) == INVITE
    assert Invite.decode(f"  {text[:40]}\n\t{text[40:]}\r\n") == INVITE


def test_the_largest_invite_can_be_read() -> None:
    address = "/" + "x" * (255 - len(ADDRESS)) + ADDRESS
    invite = Invite(bytes(32), (address,) * 16, "n" * 64)
    assert len(address) == 256
    assert Invite.decode(invite.encode()) == invite


def test_any_one_wrong_character_is_noticed() -> None:
    text = INVITE.encode()
    for place in range(6, len(text)):
        wrong = text[:place] + ("b" if text[place] != "b" else "c") + text[place + 1 :]
        with pytest.raises(UsageError, match="checksum"):
            Invite.decode(wrong)
        with pytest.raises(UsageError, match="checksum"):
            Invite.decode(text[:place] + text[place + 1 :])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with 'swarm1'"),
        ("hello", "begins with 'swarm1'"),
        ("Swarm1abc", "begins with 'swarm1'"),
        ("swarm2abc", "newer version"),
        ("swarm1", "checksum"),
        (INVITE.encode()[:-1], "checksum"),
        ("swarm1abc0def", "0, O, I, l"),
        ("swarm1äbc", "0, O, I, l"),
        ("swarm1" + "a" * 100_000, "above 8192"),
    ],
)
def test_a_damaged_invite_names_the_fault(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Invite.decode(text)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91" * 2000, msgpack.packb([bytes(32), "", []]),
     msgpack.packb([bytes(31), "", [ADDRESS]]), msgpack.packb(["a" * 32, "", [ADDRESS]]),
     msgpack.packb([bytes(32), "", [1]]), msgpack.packb([bytes(32), "", [ADDRESS] * 17]),
     msgpack.packb([bytes(32), "\x1b[31m", [ADDRESS]]), msgpack.packb([bytes(32), "", ["/ip4"]])],
)  # fmt: skip
def test_a_wrong_invite_with_a_right_checksum_is_refused(payload: bytes) -> None:
    checksum = hashlib.sha256(b"swarm-node invite 1\0" + payload).digest()[:4]
    text = "swarm1" + base58.b58encode(payload + checksum).decode()
    with pytest.raises(UsageError, match="invite: "):
        Invite.decode(text)


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:31337", "/ip4/127.0.0.1/tcp/1", ADDRESS + "x", ADDRESS + "\n", " " + ADDRESS,
     "/" + "x" * 256 + ADDRESS],
)  # fmt: skip
def test_an_address_names_its_peer(address: str) -> None:
    with pytest.raises(UsageError, match="multiaddress"):
        Invite(bytes(32), (address,))
