"""What a peer claims of its samples' rewards, against what this node makes of them itself."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swarm.config import NodeConfig
from swarm.errors import RemoteProtocolError
from swarm.node import gather
from swarm.node.announce import MAX_UNDER_WAY, Announcer
from swarm.node.gather import MAX_QUEUES, Gatherer
from swarm.node.prompt_table import RenderedSet
from swarm.node.volunteer import Volunteer
from swarm.paths import DataDir
from swarm.protocol import peers
from swarm.protocol.charter import Charter
from swarm.protocol.codec import blob_hash, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.prompts import Prompt
from swarm.protocol.reasons import Reason
from swarm.protocol.records import PROTOCOL_VERSIONS, Announcement, GroupRef
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.rewards.grading import Grader
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import Tokenizer, prompt_hash

SMALL = Path(__file__).parents[2] / "swarm" / "models" / "arith-small"
MALLORY = Identity(b"\x03" * 32)
TOKENIZER = Tokenizer.from_folder(SMALL)
EOS = TOKENIZER.eos_token_id
PROMPT = Prompt(prompt="13+4=", messages=None, answer="17")
COMPLETIONS = ("17", "18", "17")
OWN_REWARDS = [1.0, 0.0, 1.0]


def charter() -> Charter:
    return Charter.from_genesis(
        Manifest.model_validate(
            {
                "name": "Sums",
                "created_s": 1_700_000_000.0,
                "organizers": (MALLORY.peer_id,),
                "prompts": {
                    "sha256": "ab" * 32,
                    "size_bytes": 100,
                    "count": 1,
                    "tokens_sha256": "cd" * 32,
                },
                "template": {"text": "{{ prompt }}"},
                "tokenizer": {
                    "fingerprint": TOKENIZER.fingerprint(),
                    "vocab_size": TOKENIZER.vocab_size,
                    "name": "arith-small",
                },
                "sampling": {
                    "temperature": 1.0,
                    "group_size": len(COMPLETIONS),
                    "max_prompt_tokens": 8,
                    "max_completion_tokens": 4,
                    "stop_token_ids": (EOS,),
                },
                "reward": {"name": "number", "version": 1},
            }
        )
    )


def volunteer(tmp_path: Path, terms: Charter, workers: WorkerPool) -> Volunteer:
    """A node that is in the swarm without a network."""
    node = Volunteer(NodeConfig(), DataDir(tmp_path), swarm_id=terms.swarm_id)
    node.open_stores()
    ids = np.array(TOKENIZER.encode(PROMPT.prompt or ""), np.int32)
    node.prompts.append(RenderedSet((PROMPT,), (ids,), (prompt_hash(ids),)))
    parts: Any = node
    parts.grader = Grader(workers, TOKENIZER, terms.manifest.reward)
    parts.membership = SimpleNamespace(charter=terms, samplers=lambda: [MALLORY.peer_id])
    parts.overlay = SimpleNamespace(peer_id=Identity(b"\x01" * 32).peer_id)
    return node


def signed_group(node: Volunteer, epoch: int, claimed: Sequence[float]) -> tuple[GroupRef, bytes]:
    """Mallory's group of the prompt, in all respects right but for the claims."""
    rollouts = []
    for text in COMPLETIONS:
        ids = np.array([*TOKENIZER.encode(text), EOS], np.int32)
        rollouts.append(Rollout(ids, np.full(len(ids), -0.5, np.float32), Finish.STOP))
    group = RolloutGroup(
        swarm_id=node.swarm_id,
        publisher=MALLORY.peer_id,
        epoch=epoch,
        prompt_id=0,
        prompt_sha256=node.prompts.prompt_hash(0),
        policy_step=3,
        created_ms=5,
        temperature=1.0,
        rollouts=tuple(rollouts),
        claimed_rewards=np.array(claimed, np.float32),
    )
    blob = encode_group(group, MALLORY)
    return GroupRef(blob_hash(blob), len(blob), epoch, 0, len(rollouts), group.n_tokens), blob


def gatherer_of(
    node: Volunteer, exchange: Any, pool: Pool | None = None, **changes: Any
) -> Gatherer:
    """A node's gatherer, beside that node's network."""
    parts: dict[str, Any] = {
        "streams": 1,
        "live_peers": lambda: 2,
        "check": node._check,
        "verify": node._verify,
        "score": node.score,
        "prompt_ids": node.prompts.token_ids,
        "keep": node.store.put,
        "ledger": node.ledger,
    }
    return Gatherer(exchange, pool or node.pool, node.peers, **(parts | changes))


async def fetched_by(gatherer: Gatherer, until: Callable[[], bool]) -> None:
    """Run a gatherer until a condition holds."""
    running = asyncio.create_task(gatherer.run(lambda: 60.0))
    async with asyncio.timeout(60.0):
        while not until():
            assert not running.done(), running.exception()
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def waiting(
    node: Volunteer,
    group: RolloutGroup,
    group_hash: bytes,
    publisher: str = MALLORY.peer_id,
    arrived_s: float = 1.0,
) -> PooledGroup:
    """A group as it waits in a pool."""
    return PooledGroup(
        hash=group_hash,
        publisher=publisher,
        own=False,
        group=group,
        rewards=np.array(OWN_REWARDS, np.float32),
        prompt_token_ids=node.prompts.token_ids(0),
        arrived_s=arrived_s,
    )


async def test_a_peer_that_claims_other_rewards_changes_nothing(tmp_path: Path) -> None:
    async with WorkerPool(1, 60.0) as workers:
        node = volunteer(tmp_path, charter(), workers)
        claims = (OWN_REWARDS, [0.0, 1.0, 0.0], [1e30, -1e30, 5.0])
        blobs = dict(signed_group(node, epoch, claimed) for epoch, claimed in enumerate(claims))
        by_hash = {ref.hash: blob for ref, blob in blobs.items()}

        async def fetch_blobs(peer: str, wanted: list[tuple[bytes, int]]) -> list[bytes]:
            assert peer == MALLORY.peer_id
            return [by_hash[digest] for digest, _ in wanted]

        exchange: Any = SimpleNamespace(fetch_blobs=fetch_blobs)
        gatherer = gatherer_of(node, exchange)
        gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, tuple(blobs), 3, 5))
        await fetched_by(gatherer, lambda: len(node.pool.pooled()) == len(claims))
    pooled = node.pool.pooled()
    assert {item.group.epoch for item in pooled} == {0, 1, 2}
    for item in pooled:
        assert item.group.claimed_rewards.tolist() == np.float32(claims[item.group.epoch]).tolist()
        assert item.rewards.tolist() == OWN_REWARDS
    assert (gatherer.counts.accepted, gatherer.counts.rejected) == (3, 0)


async def test_what_finds_no_room_is_fetched_once_there_is_some(tmp_path: Path) -> None:
    async with WorkerPool(1, 60.0) as workers:
        node = volunteer(tmp_path, charter(), workers)
        ref, blob = signed_group(node, 7, OWN_REWARDS)
        group = node._verify(blob, ref, MALLORY.peer_id)
        pool = Pool(batch_groups=1)
        for number in (1, 2):  # two others fill it
            other = Identity(bytes([number]) * 32).peer_id
            assert pool.add(waiting(node, group, bytes([number]) * 32, other, float(number)))
        asked = []

        async def fetch_blobs(peer: str, wanted: list[tuple[bytes, int]]) -> list[bytes]:
            asked.extend(wanted)
            return [blob]

        exchange: Any = SimpleNamespace(fetch_blobs=fetch_blobs)
        gatherer = gatherer_of(node, exchange, pool, live_peers=lambda: 4)
        checked: list[GroupRef] = []
        check = gatherer._check
        gatherer._check = lambda ref, peer: (checked.append(ref), check(ref, peer))[1]
        gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, (ref,), 3, 5))
        running = asyncio.create_task(gatherer.run(lambda: 600.0))
        await asyncio.sleep(0.05)
        assert not asked
        assert not checked  # an owner takes a hash for each member: not for what is not fetched
        assert pool.compose(4) is not None
        gatherer.wake()
        async with asyncio.timeout(60.0):
            while MALLORY.peer_id not in {item.publisher for item in pool.pooled()}:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_nonsense_is_counted_and_waits_ever_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "FIRST_BACKOFF_S", 3600.0)
    async with WorkerPool(1, 60.0) as workers:
        node = volunteer(tmp_path, charter(), workers)
        asked = []

        async def fetch_blobs(peer: str, wanted: list[tuple[bytes, int]]) -> list[bytes]:
            asked.append(peer)
            raise RemoteProtocolError(Reason.HASH, "other bytes")

        exchange: Any = SimpleNamespace(fetch_blobs=fetch_blobs)
        gatherer = gatherer_of(node, exchange)
        announcer = Announcer(
            exchange,
            exchange,
            node.swarm_id,
            1,
            recipients=list,
            offer=gatherer.offer,
            reject=gatherer.reject,
        )
        announcer.receive(MALLORY.peer_id, b"\xc1")
        announcer.receive(MALLORY.peer_id, b"")
        assert gatherer.counts.rejected_by_reason == {"malformed": 2}

        running = asyncio.create_task(gatherer.run(lambda: 600.0))
        for epoch in range(5):
            ref, _ = signed_group(node, epoch, OWN_REWARDS)
            announcer.receive(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, (ref,), 3, 5).pack())
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(asked) == 1  # the others wait
        assert gatherer.counts.rejected_by_reason == {"malformed": 2, "hash": 1}


async def test_queues_of_many_strangers_are_bounded(tmp_path: Path) -> None:
    async with WorkerPool(1, 60.0) as workers:
        node = volunteer(tmp_path, charter(), workers)
        gatherer = gatherer_of(node, SimpleNamespace(), check=lambda _ref, _publisher: None)
        for number in range(MAX_QUEUES + 5):
            ref = GroupRef(number.to_bytes(32, "big"), 9, 0, 0, 3, 9)
            gatherer.offer(f"peer {number}", Announcement(PROTOCOL_VERSIONS, (ref,), 3, 5))
        assert len(gatherer._queues) == MAX_QUEUES
        assert "peer 4" not in gatherer._queues


async def test_what_is_announced_and_not_to_be_had_waits_ever_longer(tmp_path: Path) -> None:
    node = volunteer(tmp_path, charter(), None)

    async def fetch_blobs(_: str, wanted: list[tuple[bytes, int]]) -> list[None]:
        return [None for _ in wanted]

    gatherer = gatherer_of(node, SimpleNamespace(fetch_blobs=fetch_blobs))
    ref, _ = signed_group(node, 0, OWN_REWARDS)
    gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, (ref,), 3, 5))
    await fetched_by(gatherer, lambda: not node.peers.may_fetch(MALLORY.peer_id, monotonic()))
    assert node.peers.strikes(MALLORY.peer_id, monotonic()) == 0.0  # its disk may have failed


async def test_a_fetch_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "MIN_FETCH_S", 0.05)
    node = volunteer(tmp_path, charter(), None)

    async def fetch_blobs(_: str, wanted: list[tuple[bytes, int]]) -> list[bytes]:
        await asyncio.sleep(3600.0)
        return [b"" for _ in wanted]

    gatherer = gatherer_of(node, SimpleNamespace(fetch_blobs=fetch_blobs))
    ref, _ = signed_group(node, 0, OWN_REWARDS)
    gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, (ref,), 3, 5))
    running = asyncio.create_task(gatherer.run(lambda: 0.5))
    async with asyncio.timeout(60.0):
        while node.peers.may_fetch(MALLORY.peer_id, monotonic()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_from_quarantine_nothing_is_even_looked_at(tmp_path: Path) -> None:
    node = volunteer(tmp_path, charter(), None)
    gatherer = gatherer_of(node, SimpleNamespace())
    for _ in range(3):
        gatherer.reject(MALLORY.peer_id, RemoteProtocolError(Reason.TOKEN, "no such token"))
    ref, _ = signed_group(node, 0, OWN_REWARDS)
    gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, (ref,), 3, 5))
    assert gatherer.counts.announced == 0
    node.peers.pardon(MALLORY.peer_id)
    gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, (ref,), 3, 5))
    assert gatherer.counts.announced == 1


async def test_who_is_banned_has_nothing_waiting(tmp_path: Path) -> None:
    node = volunteer(tmp_path, charter(), None)
    node.gatherer = gatherer_of(node, SimpleNamespace())
    ref, blob = signed_group(node, 0, OWN_REWARDS)
    group = node._verify(blob, ref, MALLORY.peer_id)
    assert node.pool.add(waiting(node, group, ref.hash))
    later, _ = signed_group(node, 1, OWN_REWARDS)
    node.gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, (later,), 3, 5))
    lists = await node.handlers()["ban"]({"peers": [MALLORY.peer_id]})
    assert lists["banned_here"] == [MALLORY.peer_id]
    assert node.pool.pooled() == []
    assert node.gatherer._choose(60.0) is None
    assert node.admission.refusal(MALLORY.peer_id) is Reason.BANNED
    lists = await node.handlers()["unban"]({"peers": [MALLORY.peer_id]})
    assert lists["banned_here"] == []


async def test_a_copied_group_is_dropped_without_a_strike(tmp_path: Path) -> None:
    thief = Identity(b"\x04" * 32)
    node = volunteer(tmp_path, charter(), None)
    ref, blob = signed_group(node, 0, OWN_REWARDS)
    group = node._verify(blob, ref, MALLORY.peer_id)
    surprising = tuple(
        replace(item, logprobs=np.full(len(item.token_ids), -16.0, np.float32))
        for item in group.rollouts
    )
    original = replace(group, rollouts=surprising)
    node.pool.add(waiting(node, original, b"1" * 32))
    stolen = replace(original, publisher=thief.peer_id, epoch=5)
    copy = encode_group(stolen, thief)
    copy_ref = GroupRef(blob_hash(copy), len(copy), 5, 0, len(COMPLETIONS), stolen.n_tokens)

    async def fetch_blobs(*_: object) -> list[bytes]:
        return [copy]

    gatherer = gatherer_of(node, SimpleNamespace(fetch_blobs=fetch_blobs))
    gatherer.offer(thief.peer_id, Announcement(PROTOCOL_VERSIONS, (copy_ref,), 3, 5))
    await fetched_by(gatherer, lambda: gatherer.counts.rejected > 0)
    assert gatherer.counts.rejected_by_reason == {"duplicate": 1}
    assert node.peers.strikes(thief.peer_id, monotonic()) == 0.0
    assert len(node.pool.pooled()) == 1


async def test_a_member_that_takes_no_notices_holds_up_nobody_elses(tmp_path: Path) -> None:
    node = volunteer(tmp_path, charter(), None)
    gatherer = gatherer_of(node, SimpleNamespace())
    told: list[str] = []

    async def notify(peer: str, _: bytes) -> None:
        told.append(peer)
        if peer == "stalled":
            await asyncio.Event().wait()

    exchange: Any = SimpleNamespace(notify=notify)
    announcer = Announcer(
        exchange,
        exchange,
        node.swarm_id,
        1,
        recipients=lambda: ["stalled", "quick"],
        offer=gatherer.offer,
        reject=gatherer.reject,
    )
    sending = asyncio.create_task(announcer._send_notices())
    for epoch in range(10):
        announcer.publish([signed_group(node, epoch, OWN_REWARDS)[0]], 0)
        await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert told.count("quick") == announcer.notices_sent == 10
    assert told.count("stalled") == MAX_UNDER_WAY
    assert announcer.notices_failed == 10 - MAX_UNDER_WAY


async def test_a_bad_record_is_a_strike_once_however_often_it_is_read(tmp_path: Path) -> None:
    node = volunteer(tmp_path, charter(), None)
    gatherer = gatherer_of(node, SimpleNamespace())

    class Dht:
        peer_id = "me"

        async def get(self, _: str) -> dict[tuple[str, bytes], bytes]:
            return {(MALLORY.peer_id, b""): b"\xc1", (MALLORY.peer_id, b"2"): b"\xc1\xc1"}

    dht: Any = Dht()
    announcer = Announcer(
        dht,
        dht,
        node.swarm_id,
        1,
        recipients=list,
        offer=gatherer.offer,
        reject=gatherer.reject,
    )
    for _ in range(5):
        await announcer._read()
    assert gatherer.counts.rejected_by_reason == {"malformed": 2}


def test_one_fetch_takes_no_more_than_memory_is_meant_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = volunteer(tmp_path, charter(), None)
    refs = tuple(signed_group(node, epoch, OWN_REWARDS)[0] for epoch in range(4))
    monkeypatch.setattr(gather, "MAX_FETCH_BYTES", 2 * refs[0].size_bytes)
    gatherer = gatherer_of(node, SimpleNamespace())
    gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, refs, 3, 5))
    sizes = []
    while (choice := gatherer._choose(60.0)) is not None:
        sizes.append(len(choice[1]))
    assert sizes == [2, 2]
    monkeypatch.setattr(gather, "MAX_FETCH_BYTES", 1)  # one group is always fetched
    gatherer.offer(MALLORY.peer_id, Announcement(PROTOCOL_VERSIONS, refs[:1], 3, 5))
    choice = gatherer._choose(60.0)
    assert choice is not None
    assert len(choice[1]) == 1
