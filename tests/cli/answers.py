"""What a verb answered, and what it must be when it refuses."""

from typing import Protocol

from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite


class Answer(Protocol):
    """Of a verb that ran, in this process or in one of its own."""

    @property
    def returncode(self) -> int: ...
    @property
    def stdout(self) -> str: ...
    @property
    def stderr(self) -> str: ...


def refused(result: Answer, code: int, *words: str) -> None:
    """One clear message with these words, nothing else."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr


def some_invite() -> str:
    """To a swarm that nobody serves."""
    peer = Identity(bytes(32)).peer_id
    return Invite(bytes(32), (f"/ip4/127.0.0.1/tcp/9/p2p/{peer}",), "gone").encode()
