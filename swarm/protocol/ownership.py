"""Who samples which prompt: rendezvous hashing over the peers that are sampling.

Owns: the score and the choice. Does not know: who is alive (the caller says), nor the prompts.
Every member computes the same answer from the same list of peers; when one peer leaves, only its
own prompts find new owners, when one comes, it takes its share evenly from all.
"""

import hashlib
import heapq
import struct
from collections.abc import Iterable

from swarm.protocol.identity import public_key_of

_OWNER_DOMAIN = b"swarm-node owner 1\0"
_PLACE = struct.Struct("<QI")
_SCORE_BYTES = 8


def score(swarm_id: bytes, epoch: int, prompt_id: int, public_key: bytes) -> int:
    """A peer's claim to a prompt in an epoch, below 2^64; the highest one owns it."""
    return _score(_prefix(swarm_id, epoch, prompt_id), public_key)


def owner(swarm_id: bytes, epoch: int, prompt_id: int, peers: Iterable[str]) -> str:
    """The peer id that samples this prompt in this epoch.

    Args:
        swarm_id: 32 bytes.
        epoch: the asker's pass over the prompts, u64.
        prompt_id: u32.
        peers: ids of the peers that are sampling; order and repetition do not matter.

    Raises:
        ValueError: no peers.
        RemoteProtocolError: reason "peer_id": one of them is no peer id.
    """
    prefix = _prefix(swarm_id, epoch, prompt_id)
    return max(peers, key=lambda peer: _claim(prefix, peer))


def candidates(
    swarm_id: bytes, epoch: int, prompt_id: int, peers: Iterable[str], k: int
) -> list[str]:
    """The first `k` peers in line for a prompt, the owner first; all of them when there are fewer.

    Raises:
        RemoteProtocolError: reason "peer_id": one of `peers` is no peer id.
    """
    prefix = _prefix(swarm_id, epoch, prompt_id)
    return heapq.nlargest(k, set(peers), key=lambda peer: _claim(prefix, peer))


def is_candidate(
    swarm_id: bytes, epoch: int, prompt_id: int, peers: Iterable[str], peer: str, k: int = 1
) -> bool:
    """Whether `peer` is among `candidates(..., {*peers, peer}, k)`; with k = 1, whether it owns.

    Stops at the k-th peer with a higher score: about k * ln(peers) hashes in place of one for
    each peer, when most prompts are others'.

    Args:
        swarm_id, epoch, prompt_id: as for `owner`.
        peers: ids of the peers that are sampling, each once; `peer` itself may be among them.
        peer: the one asked about.
        k: places in line.

    Raises:
        RemoteProtocolError: reason "peer_id": one of them is no peer id.
    """
    prefix = _prefix(swarm_id, epoch, prompt_id)
    claim = _claim(prefix, peer)
    ahead = 0
    for other in peers:
        if _claim(prefix, other) > claim:
            ahead += 1
            if ahead >= k:
                return False
    return k > 0


def _prefix(swarm_id: bytes, epoch: int, prompt_id: int) -> bytes:
    return _OWNER_DOMAIN + swarm_id + _PLACE.pack(epoch, prompt_id)


def _claim(prefix: bytes, peer: str) -> tuple[int, bytes]:
    """Score, then public key, which breaks ties."""
    public_key = public_key_of(peer)
    return _score(prefix, public_key), public_key


def _score(prefix: bytes, public_key: bytes) -> int:
    return int.from_bytes(hashlib.sha256(prefix + public_key).digest()[:_SCORE_BYTES], "big")
