"""The pool by hand-computed batches: shares, turns, room, each group once."""

from collections import Counter
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from swarm.errors import DataError
from swarm.protocol import copies
from swarm.protocol import pool as module
from swarm.protocol.copies import SeenCompletions
from swarm.protocol.identity import Identity
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.reasons import Reason
from swarm.protocol.records import GroupRef
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

ME, ANNA, BERT, CARL = (Identity(bytes([n]) * 32).peer_id for n in range(1, 5))
NAMES = {ME: "me", ANNA: "a", BERT: "b", CARL: "c"}
ROLLOUT = Rollout(np.array([0], np.int32), np.array([-1], np.float32), Finish.STOP)


def group(publisher: str, number: int, arrived_s: float | None = None) -> PooledGroup:
    """Group `number` of a publisher: prompt `number`, arrived at `number` seconds by default."""
    return PooledGroup(
        hash=bytes([number]) + publisher[-31:].encode(),
        publisher=publisher,
        own=publisher == ME,
        group=RolloutGroup(
            swarm_id=bytes(32),
            publisher=publisher,
            epoch=0,
            prompt_id=number,
            prompt_sha256=bytes(32),
            policy_step=0,
            created_ms=0,
            temperature=1.0,
            rollouts=(ROLLOUT,),
            claimed_rewards=np.zeros(1, np.float32),
        ),
        rewards=np.zeros(1, np.float32),
        prompt_token_ids=np.array([1], np.int32),
        arrived_s=float(number) if arrived_s is None else arrived_s,
    )


def ref(pooled: PooledGroup) -> GroupRef:
    return GroupRef(pooled.hash, 1, pooled.group.epoch, pooled.group.prompt_id, 1, 1)


def filled(batch_groups: int, **counts: int) -> Pool:
    """A pool with groups 1 to n of each publisher."""
    pool = Pool(batch_groups)
    by_name = {name: peer for peer, name in NAMES.items()}
    for name, count in counts.items():
        for number in range(1, count + 1):
            assert pool.add(group(by_name[name], number))
    return pool


def composed(pool: Pool, live_peers: int) -> list[str] | None:
    """A batch as e.g. ["me1", "a3"]."""
    batch = pool.compose(live_peers)
    return None if batch is None else [f"{NAMES[g.publisher]}{g.group.prompt_id}" for g in batch]


def test_a_lone_node_trains_on_its_own_groups_only() -> None:
    pool = filled(4, me=5, a=8)
    assert composed(pool, live_peers=1) == ["me1", "me2", "me3", "me4"]
    assert composed(pool, live_peers=1) is None
    assert len(pool.pooled()) == 9


def test_own_share_then_others_in_turn_newest_first() -> None:
    pool = filled(8, me=8, a=5, b=5, c=5)
    expected = ["me1", "me2", "a5", "b5", "c5", "a4", "b4", "c4"]
    batch = composed(pool, live_peers=4)
    assert batch is not None
    assert batch[:2] == expected[:2]
    # Within a round the order is by hash where arrival is the same.
    assert [sorted(batch[2:5]), sorted(batch[5:8])] == [expected[2:5], expected[5:8]]


def test_own_groups_fill_what_others_do_not() -> None:
    assert composed(filled(8, me=8, a=1), live_peers=4) == [*(f"me{n}" for n in range(1, 8)), "a1"]
    assert composed(filled(8, me=8), live_peers=4) == [f"me{n}" for n in range(1, 9)]


def test_a_publisher_never_gets_more_than_its_share() -> None:
    pool = filled(8, me=5, a=16)
    assert composed(pool, live_peers=4) is None  # 5 own and 2 of a
    pool.add(group(ME, 6))
    batch = composed(pool, live_peers=4)
    assert batch == ["me1", "me2", "me3", "me4", "me5", "me6", "a16", "a15"]


def test_fewer_own_groups_than_the_share_are_made_up_by_others_within_theirs() -> None:
    # share = ceil(4 / 3) = 2
    assert composed(filled(4, a=4, b=4), live_peers=3) is not None
    assert composed(filled(4, a=4), live_peers=3) is None
    batch = composed(filled(4, me=1, a=4, b=4), live_peers=3)
    assert batch is not None
    assert batch[0] == "me1"
    assert Counter(name[0] for name in batch[1:]).most_common(1)[0][1] == 2


def test_the_share_is_at_least_one_group() -> None:
    batch = composed(filled(2, me=2, a=2, b=2), live_peers=50)
    assert batch is not None
    assert batch[0] == "me1"
    assert len(batch) == 2


def test_with_more_peers_than_places_all_come_in_turn() -> None:
    pool = filled(2, me=6, a=1, b=1)
    pool.add(group(CARL, 3))  # newer than the others', so it comes first
    pool.add(group(CARL, 4))
    taken = [batch[1][0] for _ in range(4) if (batch := composed(pool, live_peers=4))]
    assert taken[0] == "c"
    assert sorted(taken[1:3]) == ["a", "b"]
    assert taken[3] == "c"


def test_own_groups_come_oldest_first_whatever_the_order_of_adding() -> None:
    pool = Pool(2)
    for number in (3, 1, 2):
        pool.add(group(ME, number))
    assert composed(pool, live_peers=1) == ["me1", "me2"]


def test_a_group_is_taken_once_ever() -> None:
    pool = filled(1, me=1)
    again = group(ME, 1)
    assert not pool.add(again)
    assert composed(pool, live_peers=1) == ["me1"]
    assert not pool.add(again)
    assert composed(pool, live_peers=1) is None


def test_one_publisher_has_one_group_for_an_epoch_and_prompt_and_the_first_counts() -> None:
    pool = filled(4, a=1)
    other = group(ANNA, 1)
    repeated = PooledGroup(
        bytes(32), ANNA, False, other.group, other.rewards, other.prompt_token_ids, 9.0
    )
    assert not pool.add(repeated)
    assert pool.wants(ref(repeated), ANNA) is Reason.DUPLICATE
    assert pool.wants(ref(group(BERT, 1)), BERT) is None  # two peers, one prompt: two groups
    assert pool.add(group(BERT, 1))


def test_room_is_two_batches_and_the_oldest_goes_for_a_newer_one() -> None:
    pool = filled(2, a=4)
    assert (pool.room(), pool.evicted) == (0, 0)
    assert pool.add(group(ANNA, 5))
    assert (pool.room(), pool.evicted) == (0, 1)
    assert [g.group.prompt_id for g in pool.pooled()] == [2, 3, 4, 5]
    assert not pool.add(group(ANNA, 1))  # evicted, and not taken again


def test_a_flood_displaces_only_itself() -> None:
    pool = filled(3, a=2, b=2)
    for number in range(100, 140):
        pool.add(group(CARL, number))
    kept = Counter(NAMES[g.publisher] for g in pool.pooled())
    assert kept == {"a": 2, "b": 2, "c": 2}


def test_what_is_on_its_way_takes_room() -> None:
    pool = filled(2, a=2, b=1)  # room for one
    assert pool.wants(ref(group(CARL, 9)), CARL) is None
    assert pool.wants(ref(group(BERT, 9)), BERT, coming=1) is Reason.NO_ROOM
    assert pool.wants(ref(group(CARL, 9)), CARL, coming=1) is None  # evens it out
    assert Pool(1).wants(ref(group(CARL, 9)), CARL, coming=2) is Reason.NO_ROOM


def test_a_full_pool_wants_only_what_evens_it_out() -> None:
    pool = filled(2, a=4)
    assert pool.wants(ref(group(ANNA, 9)), ANNA) is Reason.NO_ROOM
    assert pool.wants(ref(group(BERT, 9)), BERT) is None
    pool.add(group(BERT, 9))
    pool.add(group(BERT, 10))  # 2 and 2
    assert pool.wants(ref(group(BERT, 11)), BERT) is Reason.NO_ROOM
    assert pool.wants(ref(group(ANNA, 11)), ANNA) is Reason.NO_ROOM
    assert pool.wants(ref(group(CARL, 11)), CARL) is None
    assert pool.wants(ref(group(ANNA, 1)), ANNA) is Reason.DUPLICATE
    uneven = filled(3, a=3, b=2, c=1)
    assert uneven.wants(ref(group(BERT, 9)), BERT) is Reason.NO_ROOM  # would only turn it round
    assert uneven.wants(ref(group(CARL, 9)), CARL) is None


def test_a_publisher_is_worth_two_shares_of_groups() -> None:
    pool = Pool(8)
    assert pool.lacks(ANNA, 4) == 4  # twice ceil(8 / 4)
    for n in range(3):
        pool.add(group(ANNA, n))
    assert (pool.lacks(ANNA, 4), pool.lacks(BERT, 4)) == (1, 4)
    assert pool.lacks(ANNA, 8) == 0  # more members came: what it has is more than enough
    assert pool.lacks(ANNA, 2) == 5


def test_own_groups_need_no_room() -> None:
    pool = filled(2, a=4, me=5)
    assert (len(pool.pooled()), pool.room(), pool.evicted) == (9, 0, 0)


def test_a_dismissed_group_is_not_wanted_again_but_its_place_is_free() -> None:
    pool = Pool(2)
    bad, good = group(ANNA, 1), group(ANNA, 2)
    pool.dismiss(bad.hash)
    pool.dismiss(group(BERT, 3).hash)
    assert pool.wants(ref(bad), ANNA) is Reason.DUPLICATE
    assert pool.wants(ref(group(BERT, 3)), BERT) is Reason.DUPLICATE
    place = GroupRef(good.hash, 1, 0, 1, 1, 1)  # same epoch and prompt, other content
    assert pool.wants(place, ANNA) is None


def test_what_was_turned_down_does_not_push_out_what_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SEEN_GROUPS", 10)
    monkeypatch.setattr(module, "MAX_DISMISSED", 10)
    pool = filled(2, a=1)
    for number in range(50):
        assert pool.dismiss(bytes([number]) * 32)
    assert not pool.add(group(ANNA, 1))
    assert not pool.dismiss(bytes([49]) * 32)
    assert pool.dismiss(bytes([0]) * 32)  # forgotten meanwhile


def test_a_banned_publishers_groups_go_and_their_room_is_free() -> None:
    pool = filled(2, a=3, b=1)
    assert pool.drop(ANNA) == 3
    assert pool.drop(CARL) == 0
    assert [group.publisher for group in pool.pooled()] == [BERT]
    assert not pool.add(group(ANNA, 1))  # its being used once still holds


def with_completions(pooled: PooledGroup, *completions: list[int], surprise: float) -> PooledGroup:
    """A group of prompt 1 with these token ids, each completion as surprising as that."""
    rollouts = tuple(
        Rollout(
            np.array(ids, np.int32),
            np.full(len(ids), -surprise / len(ids), np.float32),
            Finish.STOP,
        )
        for ids in completions
    )
    claimed = np.zeros(len(rollouts), np.float32)
    changed = replace(pooled.group, rollouts=rollouts, prompt_id=1, claimed_rewards=claimed)
    return replace(pooled, group=changed)


def test_completions_that_another_published_are_not_taken_again() -> None:
    pool = Pool(8)
    assert pool.add(with_completions(group(ANNA, 1), [5, 6, 7], [5, 6, 8], surprise=16.5))
    copy = with_completions(group(BERT, 2), [1, 2, 3], [5, 6, 8], surprise=0.1)
    assert pool.is_copy(copy.group)
    assert not pool.add(copy)
    again = with_completions(group(ANNA, 3), [5, 6, 7], [4, 4, 4], surprise=16.5)
    assert not pool.is_copy(again.group)  # one's own words are no copy
    other = replace(copy, group=replace(copy.group, prompt_id=2))
    assert pool.add(other)  # nor are the same words about another prompt
    assert pool.add(with_completions(group(ME, 9), [5, 6, 7], surprise=30.0))  # nor does it bind us


def test_what_two_honest_nodes_both_say_is_no_copy() -> None:
    pool = Pool(8)
    assert pool.add(with_completions(group(ANNA, 1), [5, 6, 7], surprise=15.5))
    assert pool.add(with_completions(group(BERT, 1), [5, 6, 7], surprise=15.5))


def test_the_memory_of_completions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MAX_SEEN_COMPLETIONS", 3)
    seen = SeenCompletions()
    for number in range(5):
        seen.add(with_completions(group(ANNA, 1), [number], surprise=20.0).group)
    assert len(seen) == 3
    assert seen.original(with_completions(group(BERT, 1), [4], surprise=1.0).group) == ANNA
    assert seen.original(with_completions(group(BERT, 1), [1], surprise=1.0).group) is None


def test_the_owner_may_cap_a_peers_share() -> None:
    pool = filled(8, me=8, a=8)
    capped = Pool(8, max_peer_share=0.25)
    for pooled in pool.pooled():
        capped.add(pooled)
    assert capped.lacks(BERT, live_peers=2) == 4
    assert composed(pool, live_peers=2) == ["me1", "me2", "me3", "me4", "a8", "a7", "a6", "a5"]
    assert composed(capped, live_peers=2) == [*(f"me{n}" for n in range(1, 7)), "a8", "a7"]
    assert capped.own_missing(live_peers=2) == 4
    tiny = Pool(2, max_peer_share=0.01)
    tiny.add(group(ME, 1))
    tiny.add(group(ANNA, 1))
    assert composed(tiny, live_peers=2) == ["me1", "a1"]


def test_age_is_counted_from_arrival_and_spares_own_groups() -> None:
    pool = filled(4, me=3, a=3)
    assert pool.expire(now_s=12.0, max_age_s=10.0) == 1
    assert [f"{NAMES[g.publisher]}{g.group.prompt_id}" for g in pool.pooled()] == [
        "me1",
        "me2",
        "me3",
        "a2",
        "a3",
    ]
    assert not pool.add(group(ANNA, 1))


def test_own_missing_says_what_a_batch_still_needs() -> None:
    assert Pool(8).own_missing(1) == 8
    assert Pool(8).own_missing(4) == 8
    assert filled(8, me=3).own_missing(4) == 5
    assert filled(8, a=16).own_missing(4) == 6  # 2 of a
    assert filled(8, a=9, b=3, c=4).own_missing(4) == 2  # all six of others: the own share
    assert filled(8, me=2, a=9, b=3, c=4).own_missing(4) == 0
    assert filled(8, me=1, a=9, b=3, c=4).own_missing(1) == 7


@pytest.mark.parametrize("live_peers", [0, -1])
def test_live_peers_below_one_is_a_fault_of_the_caller(live_peers: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pool(2).compose(live_peers)


def test_a_batch_has_at_least_one_group() -> None:
    with pytest.raises(ValueError, match="batch_groups"):
        Pool(0)


def test_the_seen_set_survives_a_restart_and_waiting_groups_can_come_again() -> None:
    pool = filled(2, me=3, a=2)
    assert composed(pool, live_peers=2) == ["me1", "a2"]
    after = Pool(2)
    after.import_seen(pool.export_seen())
    assert not after.add(group(ME, 1))
    assert not after.add(group(ANNA, 2))
    for waiting in (group(ME, 2), group(ME, 3), group(ANNA, 1)):
        assert after.add(waiting)


def test_the_seen_set_is_bounded_and_compact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SEEN_GROUPS", 10)
    pool = Pool(1)
    for number in range(20):
        pool.add(group(ME, number))
        pool.compose(1)
    assert len(pool.export_seen()) == 10 * 32 + 6
    assert not pool.add(group(ME, 10))
    assert pool.add(group(ME, 9))  # forgotten


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([2, b"", b""]),
        msgpack.packb([1, bytes(15), bytes(15)]),
        msgpack.packb([1, bytes(16), bytes(32)]),
        msgpack.packb([1, "x" * 16, "x" * 16]),
        msgpack.packb({}),
    ],
)
def test_a_damaged_seen_set_is_a_data_error(data: bytes) -> None:
    with pytest.raises(DataError, match="already used"):
        Pool(1).import_seen(data)
