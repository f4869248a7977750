"""Honest nodes that see each other late, restart, disagree about amendments, speak other versions,
lose bytes and have skewed clocks: much is turned down, and nobody ever gets a strike."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import msgpack
import numpy as np
import pytest
from test_verify import MANIFEST, MORE, rollout

from swarm.errors import RemoteProtocolError
from swarm.net.record_validator import RecordValidator
from swarm.protocol.charter import AppendPrompts, Charter
from swarm.protocol.codec import blob_hash, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.ownership import is_candidate
from swarm.protocol.peers import PeerTable
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.prompts import Cursor, next_prompts
from swarm.protocol.reasons import Reason
from swarm.protocol.records import (
    ANNOUNCEMENT_TTL_S,
    CLOCK_SLACK_S,
    Announcement,
    GroupRef,
    heartbeat_key,
    record_subkey,
    sign_record,
)
from swarm.protocol.rollout import Finish, RolloutGroup
from swarm.protocol.verify import verify_group, verify_ref

NODES = 8
TURNS = 50
ORGANIZERS = [Identity(bytes([n]) * 32) for n in (101, 102)]
GENESIS = Charter.from_genesis(
    MANIFEST.model_copy(update={"organizers": tuple(o.peer_id for o in ORGANIZERS)})
)
# What two organizers appended at the same time: members see the one or the other for a while.
FORKS = [
    GENESIS.amended(
        AppendPrompts(prompts=MORE.model_copy(update={"sha256": f"{n}2" * 32})), 1.0, organizer
    )
    for n, organizer in enumerate(ORGANIZERS)
]
HASHES = {
    id(charter): [bytes([n, fork]) * 16 for n in range(5)] for fork, charter in enumerate(FORKS)
}
GENESIS_HASHES = [bytes([n, 9]) * 16 for n in range(3)]


@dataclass
class Honest:
    """A node that keeps to the rules; what it knows of the others is its own."""

    identity: Identity
    clock_skew_s: float
    versions: tuple[int, ...]
    dice: random.Random
    charter: Charter = GENESIS
    cursor: Cursor = field(default_factory=Cursor)
    saved: Cursor = field(default_factory=Cursor)
    samplers: set[str] = field(default_factory=set)
    table: PeerTable = field(default_factory=PeerTable)
    pool: Pool = field(default_factory=lambda: Pool(1))
    reasons: Counter[str] = field(default_factory=Counter)
    step: int = 0

    def __post_init__(self) -> None:
        self.records = RecordValidator(lambda: self.clock_s)
        self.clock_s = 0.0

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    @property
    def hashes(self) -> list[bytes]:
        head = GENESIS_HASHES
        return head if self.charter is GENESIS else head + HASHES[id(self.charter)][3:]

    def restart(self) -> None:
        """Back to the last checkpoint: the same prompts again, other samples."""
        self.cursor = self.saved

    def publish(self) -> tuple[bytes, GroupRef] | None:
        """The next group that it owns in its own view."""
        peers = [*self.samplers, self.peer_id]
        chosen, self.cursor = next_prompts(
            self.charter.swarm_id,
            self.cursor,
            len(self.hashes),
            lambda epoch, prompt: is_candidate(
                self.charter.swarm_id, epoch, prompt, peers, self.peer_id
            ),
            limit=1,
        )
        if not chosen:
            return None
        ((epoch, prompt_id),) = chosen
        self.step += 1
        rollouts = []
        for _ in range(2):
            body = [self.dice.choice([1, 2, 3, 4, 5, 6, 7, 8]) for _ in range(4)]
            if self.dice.random() < 0.7:
                ids, finish = [*body[: self.dice.randrange(4)], 0], Finish.STOP
            else:
                ids, finish = body, Finish.LENGTH
            lowest = self.dice.choice([-0.1, -20.0])
            rollouts.append(rollout(ids, finish, [self.dice.uniform(lowest, 0.0) for _ in ids]))
        group = RolloutGroup(
            swarm_id=self.charter.swarm_id,
            publisher=self.peer_id,
            epoch=epoch,
            prompt_id=prompt_id,
            prompt_sha256=self.hashes[prompt_id],
            policy_step=self.step,
            created_ms=int((1e9 + self.clock_s) * 1000),
            temperature=0.7,
            rollouts=tuple(rollouts),
            claimed_rewards=np.zeros(2, np.float32),
        )
        blob = encode_group(group, self.identity)
        return blob, GroupRef(blob_hash(blob), len(blob), epoch, prompt_id, 2, group.n_tokens)

    def receive(self, blob: bytes, ref: GroupRef, body: bytes, publisher: str) -> None:
        """All that a node does with an announcement and what was fetched for it."""
        now_s = self.clock_s
        try:
            Announcement.unpack(body)
            wanted = self.pool.wants(ref, publisher)
            if wanted is not None:
                raise RemoteProtocolError(wanted)
            sampling = self.samplers | {self.peer_id}
            verify_ref(
                ref,
                publisher=publisher,
                charter=self.charter,
                prompt_count=len(self.hashes),
                sampling_peers=sampling,
            )
            group = verify_group(
                blob,
                expected=ref,
                publisher=publisher,
                charter=self.charter,
                prompt_hashes=self.hashes,
                sampling_peers=sampling,
            )
        except RemoteProtocolError as error:
            self.reasons[error.reason] += 1
            self.table.rejected(publisher, error.reason, now_s)
            return
        if not self.pool.add(
            PooledGroup(
                hash=ref.hash,
                publisher=publisher,
                own=False,
                group=group,
                rewards=np.zeros(2, np.float32),
                prompt_token_ids=np.array([1], np.int32),
                arrived_s=now_s,
            )
        ):
            self.reasons[Reason.DUPLICATE] += 1
            self.table.rejected(publisher, Reason.DUPLICATE, now_s)
            return
        self.table.accepted(publisher, now_s)

    def hears(self, other: "Honest") -> None:
        """A heartbeat of another one, signed by its clock and judged by this one's."""
        key = heartbeat_key(GENESIS.swarm_id, 0).encode()[:20]
        subkey = record_subkey(other.peer_id)
        expires_s = other.clock_s + ANNOUNCEMENT_TTL_S
        value = sign_record(other.identity, key, subkey, expires_s, b"heartbeat")
        record = Record(key, msgpack.packb(subkey), value, expires_s)
        if self.records.validate(record):
            self.samplers.add(other.peer_id)


@dataclass(frozen=True)
class Record:
    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def announced(ref: GroupRef, node: Honest) -> bytes:
    body = Announcement((1,), (ref,), node.step, int((1e9 + node.clock_s) * 1000)).pack()
    if node.versions == (1,):
        return body
    return bytes(msgpack.packb({**msgpack.unpackb(body), "v": [2], "g": "in another form"}))


def lossy(blob: bytes, dice: random.Random) -> bytes:
    """What a failing disk or a cut transfer makes of a blob, now and then."""
    at = dice.randrange(len(blob))
    return blob[:at] if dice.random() < 0.5 else blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]


@pytest.mark.parametrize("seed", range(2))
def test_honest_nodes_never_get_a_strike(seed: int) -> None:
    dice = random.Random(seed)
    nodes = [
        Honest(
            Identity(bytes([n + 1]) * 32),
            dice.uniform(-CLOCK_SLACK_S / 2, CLOCK_SLACK_S / 2),
            (2,) if n == 0 else (1,),
            random.Random(seed * 100 + n),
        )
        for n in range(NODES)
    ]
    for turn in range(TURNS):
        for node in nodes:
            node.clock_s = 1000.0 + turn + node.clock_skew_s
        for node in nodes:
            for other in nodes:
                if other is not node and dice.random() < 0.15:
                    node.hears(other)
            if dice.random() < 0.3 and node.samplers:  # a heartbeat did not get through
                node.samplers.discard(dice.choice(sorted(node.samplers)))
            if dice.random() < 0.05:
                node.restart()
            elif dice.random() < 0.2:
                node.saved = node.cursor
            if turn > TURNS // 3 and dice.random() < 0.1:
                node.charter = dice.choice(FORKS)
            if dice.random() < 0.5:
                node.pool.expire(node.clock_s, 0.0)
            made = node.publish()
            if made is None:
                continue
            blob, ref = made
            for other in nodes:
                if other is not node and dice.random() < 0.8:
                    times = 2 if dice.random() < 0.2 else 1  # a notice, and the record too
                    for _ in range(times):
                        come = lossy(blob, dice) if dice.random() < 0.05 else blob
                        other.receive(come, ref, announced(ref, node), node.peer_id)
    strikes = {
        (node.peer_id, row["peer_id"]): row["strikes"]
        for node in nodes
        for row in node.table.view(node.clock_s)
        if row["strikes"] > 0
    }
    assert strikes == {}
    reasons = sum((node.reasons for node in nodes), Counter())
    # The trouble was real: all that honest nodes are turned down for did occur.
    assert set(reasons) >= {
        "ownership",
        "duplicate",
        "prompt_unknown",
        "incompatible",
        "no_room",
        "hash",
    }, reasons
    accepted = sum(row["accepted"] for node in nodes for row in node.table.view(0.0))
    assert accepted > 100
    for node in nodes:
        assert not [fault for fault in node.records.refused if fault == "record_signature"]


def test_one_that_breaks_a_rule_among_them_does() -> None:
    """The simulation can tell: the same node with one token out of range is struck."""
    node, evil = (Honest(Identity(bytes([n]) * 32), 0.0, (1,), random.Random(n)) for n in (1, 2))
    made = evil.publish()
    assert made is not None
    blob, ref = made
    node.receive(blob, ref, announced(ref, evil), evil.peer_id)
    assert node.table.strikes(evil.peer_id, 0.0) == 0.0
    node.receive(
        blob, replace(ref, hash=b"9" * 32, epoch=9, n_tokens=1), announced(ref, evil), evil.peer_id
    )
    assert node.table.strikes(evil.peer_id, 0.0) == 1.0
