"""Rows of growth: what a node has to do as the swarm gets larger, from 10 to 1,000 peers.

Owns: a swarm on a simulated transport, with the product's own ownership, announcer, gatherer,
verifier and pool. Does not know: time; nothing here is timed, all is counted.

All peers publish what they own; a sample of them gathers and trains, which is what is counted.
"""

import asyncio
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.codec import PROMPT_HASH, charter, make_group
from benchmarks.measure import Row
from swarm.ledger import Ledger
from swarm.node.announce import DHT_PERIOD_S, MAX_SHARDS_READ, Announcer
from swarm.node.gather import Gatherer
from swarm.protocol.charter import Charter
from swarm.protocol.codec import blob_hash, encode_group
from swarm.protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity
from swarm.protocol.ownership import owner
from swarm.protocol.peers import PeerTable
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.records import Announcement, GroupRef, Heartbeat
from swarm.protocol.rollout import RolloutGroup
from swarm.protocol.verify import verify_group, verify_ref

COMPLETIONS, TOKENS = 4, 16
BATCH_GROUPS = 16
ROUNDS = 6
WARM_UP = 2
"""Rounds in which pools fill, which are not counted."""
OBSERVED = 16
PEERS_PER_SHARD = 64
MAX_VALUE_BYTES = 512 * 1024
"""Of one DHT key; more is refused (`swarm.net.record_validator`)."""
RECORD_OVERHEAD_BYTES = PUBLIC_KEY_BYTES + SIGNATURE_BYTES + 40
"""Key of the publisher, signature, expiry and framing of a stored record."""


class Wire:
    """Everything between the peers."""

    def __init__(self) -> None:
        self.blobs: dict[str, dict[bytes, bytes]] = {}
        self.receivers: dict[str, Announcer] = {}
        self.records: dict[str, dict[tuple[str, bytes], bytes]] = {}


class SimulatedNetwork:
    """One peer's overlay and exchange, so far as announcer and gatherer call them."""

    def __init__(self, peer_id: str, wire: Wire) -> None:
        self.peer_id = peer_id
        self._wire = wire
        self.counted: Counter[str] = Counter()

    async def put(self, key: str, body: bytes, *, ttl_s: float, suffix: bytes = b"") -> None:
        self._wire.records.setdefault(key, {})[self.peer_id, suffix] = body

    async def get(self, key: str) -> dict[tuple[str, bytes], bytes]:
        if self.peer_id not in self._wire.receivers:
            return {}  # it only publishes
        found = self._wire.records.get(key, {})
        self.counted["dht_bytes"] += value_bytes(found)
        return found

    async def notify(self, peer: str, body: bytes) -> None:
        self.counted["notices"] += 1
        if peer in self._wire.receivers:
            self._wire.receivers[peer].receive(self.peer_id, body)

    async def fetch_blobs(
        self, peer: str, wanted: Sequence[tuple[bytes, int]]
    ) -> list[bytes | None]:
        found = [self._wire.blobs[peer].get(digest) for digest, _ in wanted]
        self.counted["groups"] += len(found)
        self.counted["bytes"] += sum(size for _, size in wanted)
        self.counted["sources"] += 1
        return found


def value_bytes(records: dict[tuple[str, bytes], bytes]) -> int:
    """Of a DHT key's dictionary."""
    return sum(len(body) + RECORD_OVERHEAD_BYTES for body in records.values())


class Gathering:
    """A peer that gathers and trains."""

    def __init__(
        self, network: Any, terms: Charter, folder: Path, samplers: frozenset[str], shards: int
    ) -> None:
        self.peer_id: str = network.peer_id
        self.pool = Pool(BATCH_GROUPS)
        self.ledger = Ledger(folder / f"{self.peer_id}.sqlite")
        self.batches = 0
        self._samplers = len(samplers)
        n_prompts = 1 << 20

        def check(ref: GroupRef, publisher: str) -> None:
            verify_ref(
                ref,
                publisher=publisher,
                charter=terms,
                prompt_count=n_prompts,
                sampling_peers=samplers,
            )

        def verify(blob: bytes, ref: GroupRef, publisher: str) -> RolloutGroup:
            return verify_group(
                blob,
                expected=ref,
                publisher=publisher,
                charter=terms,
                prompt_hashes=_SameHash(n_prompts),
                sampling_peers=samplers,
            )

        async def score(groups: Sequence[RolloutGroup]) -> list[np.ndarray | None]:
            return [np.zeros(COMPLETIONS, np.float32) for _ in groups]

        self.gatherer = Gatherer(
            network,
            self.pool,
            PeerTable(),
            streams=4,
            live_peers=lambda: self._samplers,
            check=check,
            verify=verify,
            score=score,
            prompt_ids=lambda _: np.zeros(1, np.int32),
            keep=lambda _digest, _blob: True,
            ledger=self.ledger,
        )

    def train(self, own: Sequence[PooledGroup]) -> None:
        """Take a batch, if there is one, as a training step does."""
        for group in own:
            self.pool.add(group)
        if self.pool.compose(self._samplers) is not None:
            self.batches += 1
            self.gatherer.wake()


class _SameHash(Sequence[bytes]):
    """Of every prompt."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return PROMPT_HASH


def ownership(terms: Charter, ids: Sequence[str], prompts: int) -> dict[str, list[int]]:
    """Who owns which prompts of epoch 0."""
    owned: dict[str, list[int]] = {peer: [] for peer in ids}
    for prompt in range(prompts):
        owned[owner(terms.swarm_id, 0, prompt, ids)].append(prompt)
    return owned


async def simulate(size: int, folder: Path) -> dict[str, float]:
    """One swarm over some rounds, each a group of every peer that has one and a step of those
    observed."""
    terms = charter(TOKENS, COMPLETIONS)
    identities = [Identity(number.to_bytes(32, "big")) for number in range(1, size + 1)]
    ids = [identity.peer_id for identity in identities]
    samplers = frozenset(ids)
    shards = max(terms.manifest.record_shards, 4, ceil(size / PEERS_PER_SHARD))
    owned = ownership(terms, ids, ROUNDS * size)
    wire = Wire()
    networks = {peer: SimulatedNetwork(peer, wire) for peer in ids}
    observed = random.Random(0).sample(ids, min(OBSERVED, size))
    gathering = {
        peer: Gathering(networks[peer], terms, folder, samplers, shards) for peer in observed
    }
    announcers, tasks = {}, []
    for peer in ids:
        here = gathering.get(peer)
        announcers[peer] = Announcer(
            networks[peer],  # type: ignore[arg-type]  # what it calls of them is there
            networks[peer],  # type: ignore[arg-type]
            terms.swarm_id,
            shards,
            recipients=partial(_others, ids, peer),
            offer=here.gatherer.offer if here else lambda _peer, _announcement: None,
            reject=here.gatherer.reject if here else lambda _peer, _error: None,
        )
        tasks.append(asyncio.create_task(announcers[peer].run()))
        if here is not None:
            wire.receivers[peer] = announcers[peer]
            tasks.append(asyncio.create_task(here.gatherer.run(lambda: 600.0)))
    before: list[Counter[str]] = []
    for turn in range(ROUNDS):
        if turn == WARM_UP:
            before = [networks[peer].counted.copy() for peer in observed]
        own: dict[str, list[PooledGroup]] = {}
        for identity in identities:
            peer = identity.peer_id
            for prompt in owned[peer][turn : turn + 1]:
                group = make_group(identity, terms, TOKENS, prompt_id=prompt)
                blob = encode_group(group, identity)
                digest = blob_hash(blob)
                wire.blobs.setdefault(peer, {})[digest] = blob
                announcers[peer].publish([GroupRef.of(group, digest, len(blob))], turn)
                own.setdefault(peer, []).append(_pooled(digest, group))
        for _ in range(200):
            await asyncio.sleep(0)
        for peer, node in gathering.items():
            node.train(own.get(peer, []))
    seen = [
        {name: counted[name] - start[name] for name in ("groups", "bytes", "notices")}
        for counted, start in zip(
            (networks[peer].counted for peer in observed), before, strict=True
        )
    ]
    await asyncio.sleep(DHT_PERIOD_S + 1)  # until records were stored and read
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    for node in gathering.values():
        node.ledger.close()
    counts = [len(prompts) for prompts in owned.values()]
    return {
        "peers": size,
        "shards": shards,
        "groups_in": statistics.fmean(c["groups"] for c in seen) / (ROUNDS - WARM_UP),
        "most_groups_in": max(c["groups"] for c in seen) / (ROUNDS - WARM_UP),
        "bytes_in": statistics.fmean(c["bytes"] for c in seen) / (ROUNDS - WARM_UP),
        "notices_out": statistics.fmean(c["notices"] for c in seen) / (ROUNDS - WARM_UP),
        "rejected": sum(node.gatherer.counts.rejected for node in gathering.values()),
        "evicted": sum(node.pool.evicted for node in gathering.values()),
        "batches": statistics.fmean(node.batches for node in gathering.values()),
        "spread": statistics.pstdev(counts) / statistics.fmean(counts),
        "fair_spread": (size / (ROUNDS * size)) ** 0.5 * (1 - 1 / size) ** 0.5,
        "largest_value": max(value_bytes(records) for records in wire.records.values()),
    }


def _others(ids: Sequence[str], peer: str) -> list[str]:
    return [other for other in ids if other != peer]


def _pooled(digest: bytes, group: RolloutGroup) -> PooledGroup:
    return PooledGroup(
        hash=digest,
        publisher=group.publisher,
        own=True,
        group=group,
        rewards=np.zeros(COMPLETIONS, np.float32),
        prompt_token_ids=np.zeros(1, np.int32),
        arrived_s=0.0,
    )


def rows(quick: bool) -> list[Row]:
    """Counts by size; ownership; the sizes of records."""
    sizes = (10,) if quick else (10, 100, 1000)
    found = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            found.append(asyncio.run(simulate(size, Path(folder))))
    return [
        *(_traffic_row(one) for one in found),
        _balance_row(200 if quick else 20_000),
        *(_spread_row(one) for one in found),
        _membership_row(sizes[-1]),
        _value_row(sizes[-1], max(4, ceil(sizes[-1] / PEERS_PER_SHARD))),
    ]


def _traffic_row(found: dict[str, float]) -> Row:
    bound = 2 * BATCH_GROUPS
    return Row(
        what=f"groups that a node fetches in a step, {found['peers']:,} peers",
        unit="groups",
        ours=found["groups_in"],
        limit=float(min(found["peers"], BATCH_GROUPS) - 1),
        limit_name="others' part of a full batch",
        aim=f"bounded: <= {bound}",
        met=found["most_groups_in"] <= bound,
        how=f"simulated transport, {ROUNDS - WARM_UP} steps of {BATCH_GROUPS} groups, "
        f"{min(OBSERVED, found['peers'])} nodes counted: at most {found['most_groups_in']:g}; "
        f"{found['notices_out']:.0f} notices sent, "
        f"{found['bytes_in'] / 1e3:.1f} KB fetched a step at 64 tokens a group; "
        f"{found['rejected']:.0f} rejected",
        details=found,
    )


def _balance_row(prompts: int) -> Row:
    ids = [Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 11)]
    counts = [len(p) for p in ownership(charter(TOKENS, COMPLETIONS), ids, prompts).values()]
    worst = max(abs(count / statistics.fmean(counts) - 1) for count in counts)
    return Row(
        what=f"ownership: largest deviation from an equal share, 10 peers, {prompts:,} prompts",
        unit="%",
        ours=100 * worst,
        aim="<= 10 %",
        met=worst <= 0.1 if prompts >= 20_000 else None,
        how="counted",
    )


def _spread_row(found: dict[str, float]) -> Row:
    return Row(
        what=f"ownership: spread of peers' shares, {found['peers']:,} peers, "
        f"{ROUNDS} prompts each on average",
        unit="of the mean",
        ours=found["spread"],
        limit=found["fair_spread"],
        limit_name="fair dice",
        ratio=found["spread"] / found["fair_spread"],
        ratio_of="ours / limit",
        how="standard deviation, counted; it falls with the root of the prompts a peer has",
    )


def heartbeat_bytes() -> int:
    """Of a stored heartbeat with usual texts and two addresses."""
    identity = Identity(b"\1" * 32)
    address = f"/ip4/203.0.113.77/tcp/31337/p2p/{identity.peer_id}"
    heartbeat = Heartbeat(
        versions=(1,),
        addresses=(address, address.replace("203", "198")),
        name="somebody's node",
        software="0.1.0",
        model="Qwen2.5-1.5B-Instruct",
        parameters=1_543_714_304,
        mode="full",
        step=1234,
        sampling=True,
        state="training",
        accuracy=0.625,
        reward=0.5,
        tokens_per_s=1234.5,
        groups_made=1000,
        groups_used=10_000,
        amendments=1,
        peers=16,
        role="volunteer",
        started_s=1.7e9,
    )
    return len(heartbeat.pack()) + RECORD_OVERHEAD_BYTES


def _membership_row(size: int) -> Row:
    each = heartbeat_bytes()
    return Row(
        what="membership: bytes that a node reads per member and heartbeat",
        unit="bytes",
        ours=float(each),
        aim="linear, small constant",
        met=each < 1000,
        how=f"a signed heartbeat as stored; {size:,} members: {each * size / 1e6:.2f} MB a period",
    )


def _value_row(size: int, shards: int) -> Row:
    """With everybody's four announcement records full, evenly spread."""
    ref = GroupRef(bytes(32), 263_000, 1000, 100_000, 64, 32_768)
    full = len(Announcement((1,), (ref,) * 8, 10_000, 1_700_000_000_000).pack())
    per_peer = 4 * (full + RECORD_OVERHEAD_BYTES)
    largest = per_peer * ceil(size / shards)
    read = largest * 2 * min(shards, MAX_SHARDS_READ)
    return Row(
        what=f"largest DHT value, {size:,} peers, {shards} shards",
        unit="KiB",
        ours=largest / 1024,
        limit=MAX_VALUE_BYTES / 1024,
        limit_name="refused above",
        ratio=largest / MAX_VALUE_BYTES,
        ratio_of="ours / limit",
        aim="<= 512 KiB",
        met=largest <= MAX_VALUE_BYTES,
        how=f"every peer with four full announcement records; a node reads at most "
        f"{read / 1e6:.1f} MB of them each {DHT_PERIOD_S:.0f} s; a swarm of so many needs "
        f"--record-shards {shards}",
    )
