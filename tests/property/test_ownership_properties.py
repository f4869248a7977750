"""Ownership for any swarm, epoch and set of peers: one owner, even shares, little movement."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.identity import peer_id_of
from swarm.protocol.ownership import candidates, is_candidate, owner

swarm_ids = st.binary(min_size=32, max_size=32)
epochs = st.integers(0, 2**64 - 1)
prompt_ids = st.integers(0, 2**32 - 1)
peer_lists = st.lists(
    st.binary(min_size=32, max_size=32).map(peer_id_of), min_size=1, max_size=12, unique=True
)


@given(swarm_ids, epochs, prompt_ids, peer_lists, st.randoms(use_true_random=False))
def test_exactly_one_owner_whatever_the_order_of_the_peers(
    swarm_id, epoch, prompt_id, peers, random
) -> None:
    first = owner(swarm_id, epoch, prompt_id, peers)
    owners = [peer for peer in peers if is_candidate(swarm_id, epoch, prompt_id, peers, peer)]
    assert owners == [first]
    random.shuffle(peers)
    assert owner(swarm_id, epoch, prompt_id, peers) == first


@given(swarm_ids, epochs, prompt_ids, peer_lists, st.integers(0, 14))
def test_is_candidate_agrees_with_the_line(swarm_id, epoch, prompt_id, peers, k) -> None:
    line = candidates(swarm_id, epoch, prompt_id, peers, k)
    assert len(line) == min(k, len(peers))
    for peer in peers:
        assert is_candidate(swarm_id, epoch, prompt_id, peers, peer, k) == (peer in line)


@given(swarm_ids, epochs, prompt_ids, peer_lists)
def test_the_line_behind_a_peer_that_leaves_moves_up_by_one(
    swarm_id, epoch, prompt_id, peers
) -> None:
    line = candidates(swarm_id, epoch, prompt_id, peers, len(peers))
    for gone in peers:
        rest = [peer for peer in peers if peer != gone]
        expected = [peer for peer in line if peer != gone]
        assert candidates(swarm_id, epoch, prompt_id, rest, len(rest)) == expected


@given(swarm_ids, epochs, peer_lists, st.binary(min_size=32, max_size=32).map(peer_id_of))
@settings(max_examples=30)
def test_churn_moves_only_what_the_one_peer_wins_or_loses(swarm_id, epoch, peers, newcomer) -> None:
    for prompt_id in range(100):
        before = owner(swarm_id, epoch, prompt_id, peers)
        after = owner(swarm_id, epoch, prompt_id, [*peers, newcomer])
        assert after in (before, newcomer)


@given(swarm_ids, epochs, st.integers(2, 12))
@settings(max_examples=10)
def test_shares_are_even(swarm_id, epoch, n_peers) -> None:
    peers = [peer_id_of(bytes([i]) * 32) for i in range(n_peers)]
    prompts = 4000
    shares = Counter(owner(swarm_id, epoch, prompt_id, peers) for prompt_id in range(prompts))
    mean = prompts / n_peers
    deviation = (mean * (1 - 1 / n_peers)) ** 0.5
    for peer in peers:
        assert abs(shares[peer] - mean) < 6 * deviation


@given(swarm_ids, epochs)
@settings(max_examples=10)
def test_the_next_epoch_deals_anew(swarm_id, epoch) -> None:
    peers = [peer_id_of(bytes([i]) * 32) for i in range(4)]
    other = (epoch + 1) % 2**64
    same = sum(
        owner(swarm_id, epoch, i, peers) == owner(swarm_id, other, i, peers) for i in range(400)
    )
    assert 40 < same < 170  # 100 by chance, 8.7 the standard deviation
