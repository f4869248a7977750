"""A member that lies in every message, against a real node: that one trains on and says why not."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from liar import DEEP, STREAM, liar
from nodes import Node, Swarm, sums, wait_until, write_prompts

from swarm.net.exchange import Exchange, ExchangeError, Status
from swarm.net.overlay import Overlay
from swarm.protocol.invite import Invite
from swarm.protocol.records import ANNOUNCEMENT_TTL_S, announcement_key, bucket_of, shard_of


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as swarm:
        swarm.seed(write_prompts(tmp_path / "prompts.jsonl", sums(range(3, 9), range(2, 12))))
        swarm.join("honest")
        yield swarm


async def reach(overlay: Overlay, node: Node) -> str:
    """The node's peer id, once there is a connection to it."""
    status = await asyncio.to_thread(node.status)
    await overlay.dial(status["network"]["addresses"])
    return str(status["node"]["peer_id"])


async def tell(exchange: Exchange, victim: str, body: bytes) -> None:
    """Send a notice until there is room for its stream: idle ones take a moment to be gone."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                return await exchange.notify(victim, body)
            except ExchangeError as error:
                if error.status not in (Status.BUSY, Status.UNREACHABLE):
                    return
            await asyncio.sleep(0.1)


async def test_a_liar_costs_itself_only(swarm: Swarm) -> None:
    organizer, honest = swarm.nodes
    both = [organizer, honest]
    await asyncio.to_thread(wait_until, lambda: honest.step >= 2, "two steps", both)
    async with liar(Invite.decode(swarm.invite)) as (evil, exchange):
        victim = await reach(evil.overlay, honest)
        idle = [await evil.overlay.open_stream(victim, [STREAM], 5.0) for _ in range(20)]
        await evil.say(evil.heartbeat())
        shard = shard_of(evil.overlay.peer_id, evil.charter.manifest.record_shards)
        key = announcement_key(evil.charter.swarm_id, bucket_of(time.time()), shard)
        await evil.overlay.put(key, b"\xc1", ttl_s=ANNOUNCEMENT_TTL_S)

        def listed() -> bool:
            return any(m["peer_id"] == evil.overlay.peer_id for m in honest.status()["members"])

        await asyncio.to_thread(wait_until, listed, "the liar is listed", both)
        for _, _, writer in idle:
            writer.close()
        notices = [b"", b"\xc1", DEEP, msgpack.packb({"v": [1]}), *[b"\x80"] * 9]
        for body in [*(evil.announcement(number) for number in range(8)), *notices]:
            await tell(exchange, victim, body)
        step = honest.step

        def trained_on() -> bool:
            return honest.step >= step + 5

        await asyncio.to_thread(wait_until, trained_on, "five more steps", both)
        await evil.say(b"\xc1")
        status = honest.status()
        assert status["exchange"]["rejected_by_reason"]["malformed"] > 0
        assert status["exchange"]["groups_accepted"] == 0
        assert status["network"]["p2pd_restarts"] == 0
        assert not [p for p in status["problems"] if "failed" in p]
    for node in both:
        assert node.running
        assert "Traceback" not in node.log()
        assert "\x1b" not in node.log()
        assert "\x9b" not in node.log()
    assert honest.stop() == 0
