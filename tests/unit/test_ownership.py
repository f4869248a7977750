"""Rendezvous hashing against a computation of its own."""

import hashlib

import pytest

from swarm.errors import RemoteProtocolError
from swarm.protocol import ownership
from swarm.protocol.identity import peer_id_of
from swarm.protocol.ownership import candidates, is_candidate, owner, score

SWARM = bytes(range(32))
KEYS = [bytes([i]) * 32 for i in range(1, 8)]
PEERS = [peer_id_of(key) for key in KEYS]


def reference_score(epoch: int, prompt_id: int, key: bytes) -> int:
    message = b"swarm-node owner 1\x00" + SWARM
    message += epoch.to_bytes(8, "little") + prompt_id.to_bytes(4, "little") + key
    return int(hashlib.sha256(message).hexdigest()[:16], 16)


def test_the_highest_score_owns() -> None:
    for prompt_id in range(50):
        by_score = sorted(KEYS, key=lambda key: reference_score(3, prompt_id, key), reverse=True)
        line = [peer_id_of(key) for key in by_score]
        assert owner(SWARM, 3, prompt_id, PEERS) == line[0]
        assert candidates(SWARM, 3, prompt_id, PEERS, 3) == line[:3]
        assert score(SWARM, 3, prompt_id, by_score[0]) == reference_score(3, prompt_id, by_score[0])


def test_equal_scores_go_to_the_larger_public_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_score", lambda prefix, key: 7)
    assert owner(SWARM, 0, 0, PEERS[::-1]) == PEERS[-1]
    assert candidates(SWARM, 0, 0, PEERS, 3) == PEERS[:-4:-1]
    assert is_candidate(SWARM, 0, 0, PEERS, PEERS[-1])
    assert not is_candidate(SWARM, 0, 0, PEERS, PEERS[-2])
    assert is_candidate(SWARM, 0, 0, PEERS, PEERS[-2], 2)


def test_nobody_owns_among_no_peers() -> None:
    with pytest.raises(ValueError, match="empty"):
        owner(SWARM, 0, 0, [])
    assert candidates(SWARM, 0, 0, [], 3) == []


def test_a_peer_named_twice_stands_in_line_once() -> None:
    assert len(candidates(SWARM, 0, 0, [*PEERS, *PEERS], 20)) == len(PEERS)


def test_a_peer_not_in_the_list_is_judged_as_if_it_were() -> None:
    for prompt_id in range(30):
        expected = owner(SWARM, 0, prompt_id, PEERS) == PEERS[0]
        assert is_candidate(SWARM, 0, prompt_id, PEERS[1:], PEERS[0]) == expected


def test_most_prompts_of_others_are_recognised_without_asking_every_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers = [peer_id_of(i.to_bytes(32, "big")) for i in range(300)]
    hashed = 0
    plain_score = ownership._score

    def counted(prefix: bytes, key: bytes) -> int:
        nonlocal hashed
        hashed += 1
        return plain_score(prefix, key)

    monkeypatch.setattr(ownership, "_score", counted)
    for prompt_id in range(100):
        is_candidate(SWARM, 0, prompt_id, peers, peers[150])
    assert hashed < 100 * len(peers) / 10


def test_no_place_in_line_is_no_candidate() -> None:
    assert not is_candidate(SWARM, 0, 0, [], PEERS[0], 0)


def test_what_is_no_peer_id_is_refused() -> None:
    for call in (owner, lambda *a: candidates(*a, 2), lambda *a: is_candidate(*a, PEERS[0])):
        with pytest.raises(RemoteProtocolError) as caught:
            call(SWARM, 0, 0, ["nobody"])
        assert caught.value.reason == "peer_id"
