"""A member's view of its swarm where others lie or stall; overlay and exchange are stand-ins."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import IdentityError
from swarm.ledger import Ledger
from swarm.net.exchange import ExchangeError, Status
from swarm.node import membership as membership_module
from swarm.node.admission import Admission
from swarm.node.membership import Membership
from swarm.paths import SwarmDir
from swarm.protocol.charter import Charter, CloseSwarm
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest
from swarm.protocol.reasons import Reason
from swarm.protocol.records import PROTOCOL_VERSIONS, Heartbeat
from swarm.protocol.roster import RosterChange

ORGANIZER, OWN = Identity(b"\x01" * 32), Identity(b"\x02" * 32)
LIARS = [Identity(bytes([number]) * 32).peer_id for number in range(10, 16)]

GENESIS = Charter.from_genesis(
    Manifest.model_validate(
        {
            "name": "Sums",
            "created_s": 1_700_000_000.0,
            "organizers": (ORGANIZER.peer_id,),
            "prompts": {
                "sha256": "ab" * 32,
                "size_bytes": 100,
                "count": 1,
                "tokens_sha256": "cd" * 32,
            },
            "template": {"text": "{{ prompt }}"},
            "tokenizer": {"fingerprint": "ef" * 32, "vocab_size": 9, "name": "digits"},
            "sampling": {
                "temperature": 1.0,
                "group_size": 4,
                "max_prompt_tokens": 8,
                "max_completion_tokens": 4,
                "stop_token_ids": (0,),
            },
            "reward": {"name": "number", "version": 1},
            "record_shards": 1,
        }
    )
)
CLOSED = GENESIS.amended(CloseSwarm(at_s=1_800_000_000.0), 1_700_000_001.0, ORGANIZER)

ROSTER = GENESIS.amended(RosterChange(), 1_700_000_001.0, ORGANIZER)
WITH_US = ROSTER.amended(RosterChange(add=(OWN.peer_id,)), 1_700_000_002.0, ORGANIZER)


def heartbeat(amendments: int) -> Heartbeat:
    return Heartbeat(
        versions=PROTOCOL_VERSIONS,
        addresses=(),
        name="",
        software="",
        model="",
        parameters=0,
        mode="",
        role="volunteer",
        step=0,
        sampling=True,
        state="",
        accuracy=None,
        reward=None,
        tokens_per_s=0.0,
        groups_made=0,
        groups_used=0,
        amendments=amendments,
        peers=0,
        started_s=0.0,
    )


class Network:
    """Overlay and exchange in one: who is there, what their heartbeats say, what they serve."""

    peer_id = OWN.peer_id

    def __init__(self) -> None:
        self.claims: dict[str, int] = {}
        self.charters: dict[str, Callable[[], Any]] = {}
        self.asked: list[str] = []
        self.beats = 0

    def connected(self) -> list[str]:
        return sorted(self.charters)

    async def put(self, *_: Any, **__: Any) -> bool:
        self.beats += 1
        return True

    async def get(self, _: str) -> dict[tuple[str, bytes], bytes]:
        return {(peer, b""): heartbeat(count).pack() for peer, count in self.claims.items()}

    def remember(self, _: Any) -> None:
        raise AssertionError("no heartbeat has addresses")

    async def fetch_charter(self, peer: str) -> bytes:
        self.asked.append(peer)
        return bytes(await self.charters[peer]())

    async def fetch_blob(self, peer: str, *_: Any, **__: Any) -> bytes:
        return await self.fetch_charter(peer)


def serves(charter: Charter) -> Callable[[], Any]:
    async def answer() -> bytes:
        return charter.to_bytes()

    return answer


async def stalls() -> bytes:
    await asyncio.Event().wait()
    return b""


async def is_busy() -> bytes:
    raise ExchangeError(Status.BUSY, "later")


def member(network: Any, folder: Path) -> Membership:
    async def describe() -> Heartbeat:
        return heartbeat(0)

    async def on_charter() -> None:
        return None

    return Membership(
        network,
        network,
        SwarmDir(folder),
        Admission(folder / "bans.json", follow_bans=True),
        heartbeat_s=0.01,
        describe=describe,
        ledger=Ledger(folder / "ledger.sqlite"),
        on_charter=on_charter,
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.01)


async def test_promises_of_amendments_stop_neither_heartbeats_nor_true_amendments(
    tmp_path: Path,
) -> None:
    network = Network()
    mine = member(network, tmp_path)
    mine.adopt(GENESIS)
    for liar, answer in zip(LIARS, (stalls, stalls, serves(GENESIS), is_busy), strict=False):
        network.claims[liar] = 2**32 - 1
        network.charters[liar] = answer
    running = asyncio.create_task(mine.run())
    await until(lambda: network.beats > 20)
    assert len(network.asked) == len(set(network.asked)) == 4
    assert mine.charter == GENESIS

    network.claims = {ORGANIZER.peer_id: 1, **network.claims}
    network.charters[ORGANIZER.peer_id] = serves(CLOSED)
    await until(lambda: mine.charter == CLOSED)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_one_that_stalls_does_not_keep_a_newcomer_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "CHARTER_TIMEOUT_S", 0.05)
    network = Network()
    network.charters = {LIARS[0]: stalls, LIARS[1]: is_busy, ORGANIZER.peer_id: serves(CLOSED)}
    async with asyncio.timeout(20.0):
        assert await member(network, tmp_path).join(GENESIS.swarm_id, fail_fast=False) == CLOSED


@pytest.mark.parametrize("damage", [b"", b"\xc1", CLOSED.to_bytes()[:-9]])
async def test_a_damaged_charter_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    mine = member(Network(), tmp_path)
    mine.adopt(CLOSED)
    path = SwarmDir(tmp_path).charter_path
    path.write_bytes(damage)
    network = Network()
    network.charters[ORGANIZER.peer_id] = serves(CLOSED)
    async with asyncio.timeout(20.0):
        await member(network, tmp_path).join(GENESIS.swarm_id, fail_fast=False)
    assert path.read_bytes() == CLOSED.to_bytes()


async def refuses() -> bytes:
    raise ExchangeError(Status.REFUSED, "not on the roster", Reason.NOT_MEMBER)


async def test_a_newcomer_off_the_roster_is_told_what_to_do_and_gets_in_later(
    tmp_path: Path,
) -> None:
    network = Network()
    network.charters[ORGANIZER.peer_id] = refuses
    mine = member(network, tmp_path)
    joining = asyncio.create_task(mine.join(GENESIS.swarm_id, fail_fast=False))
    await until(lambda: bool(mine.outside))
    assert OWN.peer_id in mine.outside
    assert "organizer" in mine.outside
    network.charters[ORGANIZER.peer_id] = serves(WITH_US)
    async with asyncio.timeout(20.0):
        assert await joining == WITH_US
    assert mine.outside == ""
    mine.adopt(ROSTER)
    assert OWN.peer_id in mine.outside  # taken off again


async def test_with_fail_fast_a_newcomer_off_the_roster_ends(tmp_path: Path) -> None:
    network = Network()
    network.charters[ORGANIZER.peer_id] = refuses
    with pytest.raises(IdentityError, match=OWN.peer_id):
        await member(network, tmp_path).join(GENESIS.swarm_id, fail_fast=True)


async def test_who_knocks_may_know_a_newer_roster_but_is_not_asked_at_each_knock(
    tmp_path: Path,
) -> None:
    network = Network()
    stranger, liar = LIARS[:2]
    network.charters = {stranger: serves(WITH_US), liar: serves(GENESIS)}
    mine = member(network, tmp_path)
    mine.knocked(stranger)  # before there is a charter to extend
    mine.adopt(ROSTER)
    running = asyncio.create_task(mine.run())
    await until(lambda: network.beats > 2)
    assert network.asked == []
    mine.knocked(stranger)
    await until(lambda: mine.charter == WITH_US)
    for _ in range(50):
        mine.knocked(liar)
    beats = network.beats
    await until(lambda: network.beats > beats + 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert network.asked == [stranger]


async def test_a_crowd_does_not_push_out_who_was_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "MAX_MEMBERS", 2)
    network = Network()
    mine = member(network, tmp_path)
    mine.adopt(GENESIS)
    network.claims = {ORGANIZER.peer_id: 0}
    await mine.read_heartbeats()
    network.claims = dict.fromkeys([*LIARS, ORGANIZER.peer_id], 0)
    await mine.read_heartbeats()
    assert len(mine.members) == 2
    assert ORGANIZER.peer_id in mine.members
    mine.adopt(ROSTER)
    assert mine.samplers() == [ORGANIZER.peer_id]
