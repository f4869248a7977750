"""Whose completions these are: text that another publisher made first is not taken again.

Owns: the memory of completions by content. Does not know: groups' hashes and places
(`swarm.protocol.pool`), the clock.

Only completions that chance cannot repeat are remembered: two honest nodes do sample the same short
answer, and often the same one when both have learned it.
"""

import hashlib
import struct
from collections import OrderedDict

import numpy as np

from swarm.protocol.rollout import Rollout, RolloutGroup

# A completion that its sampler drew with probability e^-16 or less: that another node draws it too
# for the same prompt is not to be expected in the life of a swarm.
MIN_SURPRISE_NATS = 16.0
# Some 200 bytes each.
MAX_SEEN_COMPLETIONS = 32_768
_DIGEST_BYTES = 16


class SeenCompletions:
    """Completions and who published them first; bounded, the oldest are forgotten."""

    def __init__(self) -> None:
        self._publishers: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._publishers)

    def add(self, group: RolloutGroup) -> None:
        """Remember a group's completions, those that are not known yet."""
        for rollout in group.rollouts:
            if -float(rollout.logprobs.sum(dtype=np.float64)) >= MIN_SURPRISE_NATS:
                self._publishers.setdefault(_digest(group.prompt_id, rollout), group.publisher)
        while len(self._publishers) > MAX_SEEN_COMPLETIONS:
            self._publishers.popitem(last=False)

    def original(self, group: RolloutGroup) -> str | None:
        """Who published a completion of this group before its publisher did; None: nobody."""
        for rollout in group.rollouts:
            first = self._publishers.get(_digest(group.prompt_id, rollout))
            if first is not None and first != group.publisher:
                return first
        return None


def _digest(prompt_id: int, rollout: Rollout) -> bytes:
    digest = hashlib.sha256(struct.pack("<I", prompt_id))
    digest.update(rollout.token_ids.astype("<i4", copy=False).data)
    return digest.digest()[:_DIGEST_BYTES]
