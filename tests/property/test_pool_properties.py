"""The pool under any sequence of arrivals, batches and time: shares, bounds, each group once."""

import math
from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swarm.protocol.identity import Identity
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.records import GroupRef
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 6)]
ME = PEERS[0]
ROLLOUT = Rollout(np.array([0], np.int32), np.array([-1], np.float32), Finish.STOP)


def pooled(publisher: str, prompt_id: int, variant: int, arrived_s: float) -> PooledGroup:
    return PooledGroup(
        hash=bytes([variant, prompt_id]) + publisher[-30:].encode(),
        publisher=publisher,
        own=publisher == ME,
        group=RolloutGroup(
            swarm_id=bytes(32),
            publisher=publisher,
            epoch=0,
            prompt_id=prompt_id,
            prompt_sha256=bytes(32),
            policy_step=0,
            created_ms=0,
            temperature=1.0,
            rollouts=(ROLLOUT,),
            claimed_rewards=np.zeros(1, np.float32),
        ),
        rewards=np.zeros(1, np.float32),
        prompt_token_ids=np.array([1], np.int32),
        arrived_s=arrived_s,
    )


class PoolMachine(RuleBasedStateMachine):
    """Beside the pool, plain sets of what was taken in and what was used."""

    @initialize(batch_groups=st.integers(1, 6))
    def start(self, batch_groups: int) -> None:
        self.batch_groups = batch_groups
        self.pool = Pool(batch_groups)
        self.now_s = 0.0
        self.taken: set[tuple[str, int]] = set()
        self.used: set[bytes] = set()

    @rule(
        publisher=st.sampled_from(PEERS),
        prompt_id=st.integers(0, 255),
        variant=st.integers(0, 1),
        passed_s=st.floats(0, 10),
    )
    def arrive(self, publisher: str, prompt_id: int, variant: int, passed_s: float) -> None:
        self.now_s += passed_s
        group = pooled(publisher, prompt_id, variant, self.now_s)
        wanted = self.pool.wants(GroupRef(group.hash, 1, 0, prompt_id, 1, 1), publisher)
        fresh = (publisher, prompt_id) not in self.taken
        assert self.pool.add(group) is fresh
        if not fresh:
            assert wanted == "duplicate"
        self.taken.add((publisher, prompt_id))

    @rule(live_peers=st.integers(1, 8))
    def train(self, live_peers: int) -> None:
        before = self.pool.pooled()
        share = max(math.ceil(self.batch_groups / live_peers), 1)
        own_before = sum(group.own for group in before)
        missing = self.pool.own_missing(live_peers)
        batch = self.pool.compose(live_peers)
        if batch is None:
            assert missing > 0
            assert own_before < self.batch_groups
            assert {g.hash for g in self.pool.pooled()} == {g.hash for g in before}
            return
        assert len(batch) == self.batch_groups
        hashes = {group.hash for group in batch}
        assert len(hashes) == len(batch)
        assert not hashes & self.used
        assert hashes <= {group.hash for group in before}
        self.used |= hashes
        own = sum(group.own for group in batch)
        assert own >= min(share, own_before)
        counts = Counter(group.publisher for group in batch if not group.own)
        assert all(count <= share for count in counts.values())
        if live_peers == 1:
            assert own == len(batch)
        if missing == 0:
            assert own >= share
        left = {g.hash for g in self.pool.pooled()}
        assert left == {g.hash for g in before} - hashes
        # Of each publisher the newest went.
        for publisher in counts:
            theirs = [g for g in before if g.publisher == publisher]
            oldest_used = min(g.arrived_s for g in theirs if g.hash in hashes)
            assert all(g.arrived_s <= oldest_used for g in theirs if g.hash in left)

    @rule(max_age_s=st.floats(0, 50))
    def age(self, max_age_s: float) -> None:
        before = self.pool.pooled()
        dropped = self.pool.expire(self.now_s, max_age_s)
        after = self.pool.pooled()
        assert len(before) - len(after) == dropped
        assert all(g.own or self.now_s - g.arrived_s <= max_age_s for g in after)
        assert [g.hash for g in before if g.own] == [g.hash for g in after if g.own]

    @rule()
    def restart(self) -> None:
        """The seen set goes through a checkpoint; what waited may come again, what was used not."""
        waiting = self.pool.pooled()
        seen = self.pool.export_seen()
        self.pool = Pool(self.batch_groups)
        self.pool.import_seen(seen)
        for group in waiting:
            assert self.pool.add(group)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        group_hash = data.draw(st.sampled_from(sorted(self.used)))
        assert self.pool.wants(GroupRef(group_hash, 1, 9, 999, 1, 1), PEERS[1]) == "duplicate"

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "pool"):
            return
        foreign = [group for group in self.pool.pooled() if not group.own]
        assert len(foreign) <= 2 * self.batch_groups
        assert self.pool.room() == 2 * self.batch_groups - len(foreign)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestPool = PoolMachine.TestCase


def test_two_pools_with_the_same_contents_compose_the_same_batches() -> None:
    def batches(order: int) -> list[list[bytes]]:
        pool = Pool(4)
        groups = [pooled(peer, n, 0, float(n % 3)) for peer in PEERS[:3] for n in range(2)]
        for group in groups[::order]:
            pool.add(group)
        composed = []
        while batch := pool.compose(3):
            composed.append([group.hash for group in batch])
        return composed

    assert batches(1) == batches(-1) != []
