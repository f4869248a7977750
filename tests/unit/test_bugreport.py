"""What a bug report holds, and what it must not."""

import json
import tarfile
from pathlib import Path

import pytest

from swarm.bugreport import LOG_BYTES, Redactor, tail, write
from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite

PEER = Identity(bytes(32)).peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
INVITE = Invite(bytes(32), (ADDRESS,), "sums").encode()
NAMES = {"home": "/home/ada", "user": "ada", "host": "enigma"}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"joined {INVITE}", INVITE[10:40]),
        (f"member {PEER} is here", PEER),
        (ADDRESS, "203.0.113.7"),
        ("/ip6/2001:db8:0:1::17/tcp/1", "2001:db8"),
        ("listening on fe80::1ff:fe23:4567:890a", "fe80"),
        ("/dns4/lab.example.org/tcp/1", "lab.example.org"),
        ("HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrStUv", "hf_AbC"),
        ("/home/ada/models/qwen", "ada"),
        ("node 'enigma' (volunteer)", "enigma"),
        (f"member {PEER} ('bobs-laptop') is here\n", "bobs-laptop"),
        (f'member {PEER} ("bob\'s") is here\n', "bob's"),
        ("in the swarm 'our sums' (b0d78a6b87827e0d): 275 prompts", "our sums"),
        ('{\n  "name": "bobs-laptop",\n  "peers": 2\n}', "bobs-laptop"),
        (r'{"name": "bob\"s", "peers": 2}', "bob"),
    ],
)
def test_what_tells_who_and_where(text: str, secret: str) -> None:
    assert secret not in Redactor(NAMES)(text)


def test_marks_stay_the_same_and_figures_stay_readable() -> None:
    redact = Redactor(NAMES)
    assert redact("10.0.0.1 to 10.0.0.2, 10.0.0.1") == "<ip 1> to <ip 2>, <ip 1>"
    assert redact("10.0.0.2") == "<ip 2>"
    for harmless in (
        "127.0.0.1:9797",
        "2026-11-30 20:01:02,345 INFO step 12: loss 0.1234",
        "adapter canada",
        "torch 2.13.0+cpu",
        '{"12:30": 1.5}',
        "packages (torch, peft) is here",
    ):
        assert redact(harmless) == harmless


def test_the_archive(tmp_path: Path) -> None:
    def broken() -> str:
        raise ValueError("no such thing")

    path = tmp_path / "report.tar.gz"
    held = write(
        path,
        {"a.json": lambda: {"address": ADDRESS}, "b.log": lambda: "x\n", "c.txt": broken},
        Redactor(NAMES),
    )
    assert [name for name, _ in held] == ["a.json", "b.log", "c.txt"]
    with tarfile.open(path) as archive:
        texts = {
            member.name: archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive
        }
    assert json.loads(texts["bugreport/a.json"]) == {
        "address": "/ip4/<ip 1>/tcp/31337/p2p/<peer 1>"
    }
    assert texts["bugreport/b.log"] == "x\n"
    assert "no such thing" in texts["bugreport/c.txt"]


def test_an_interrupted_one_leaves_the_one_before(tmp_path: Path) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    path = tmp_path / "report.tar.gz"
    write(path, {"a.log": lambda: "x\n"}, Redactor(NAMES))
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write(path, {"a.log": lambda: "y\n", "b.log": interrupted}, Redactor(NAMES))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"line {number:06d}" for number in range(LOG_BYTES // 10)]
    path.write_text("\n".join(lines) + "\n")
    text = tail(path)
    assert len(text) <= LOG_BYTES
    assert text.startswith("line ")
    assert text.endswith(f"{lines[-1]}\n")
