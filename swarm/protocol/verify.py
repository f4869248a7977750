"""The one gate for groups from peers: bytes in, an accepted group or a typed reason out.

Owns: every rule that a peer's group must keep, by the manifest and by its own announcement. Does
not know: what follows from a reject (`swarm.protocol.peers`), duplicates and room
(`swarm.protocol.pool`), rewards.

Strikes go to the peer that announced the group, never to the one that the blob names: whoever
passes on another's group, or a forgery in another's name, put their own name under it.
docs/PROTOCOL.md ("What a receiver checks") has the table.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from swarm.errors import RemoteProtocolError
from swarm.protocol.charter import Charter
from swarm.protocol.codec import CodecLimits, PackedGroup, blob_bytes, blob_hash, decode_packed
from swarm.protocol.ownership import is_candidate
from swarm.protocol.reasons import Reason
from swarm.protocol.records import GroupRef
from swarm.protocol.rollout import Finish, RolloutGroup

__all__ = [
    "LOGPROB_FLOOR",
    "LOGPROB_TOLERANCE",
    "OWNER_CANDIDATES",
    "Reason",
    "codec_limits",
    "verify_group",
    "verify_ref",
]

# log_softmax is never above 0; this much is left to an engine that rounds it in low precision.
# A lie within it changes a token's weight by 0.1 %.
LOGPROB_TOLERANCE = 1e-3
# A token of probability 2^-149 (-103 nats) cannot be drawn in float32. Far below that, so that
# no honest engine meets it, and far above where sums over a completion overflow.
LOGPROB_FLOOR = -1e4
# Members that see the swarm differently for a while after churn still accept each other's groups
# when the publisher is among so many first owners of the prompt.
OWNER_CANDIDATES = 3


def codec_limits(charter: Charter) -> CodecLimits:
    """What the swarm's terms let a blob hold."""
    sampling = charter.manifest.sampling
    return CodecLimits(sampling.group_size, sampling.max_completion_tokens)


def verify_ref(
    ref: GroupRef,
    *,
    publisher: str,
    charter: Charter,
    prompt_count: int,
    sampling_peers: AbstractSet[str],
) -> None:
    """Check what an announcement says of a group, before anything is fetched.

    Args:
        ref: the announced group.
        publisher: peer id of the announcer.
        charter: the swarm's terms.
        prompt_count: prompts that this node knows; ids are below it.
        sampling_peers: live members that sample, as this node sees them, itself included. The
            publisher counts as one of them, since its announcement shows that it samples.

    Raises:
        RemoteProtocolError: reasons group_size, length, size (provable); prompt_unknown, ownership
            (neutral).
    """
    sampling = charter.manifest.sampling
    if ref.n_completions != sampling.group_size:
        raise RemoteProtocolError(
            Reason.GROUP_SIZE,
            f"announces {ref.n_completions} completions; the swarm's group has "
            f"{sampling.group_size}",
        )
    most_tokens = ref.n_completions * sampling.max_completion_tokens
    if not ref.n_completions <= ref.n_tokens <= most_tokens:
        raise RemoteProtocolError(
            Reason.LENGTH,
            f"announces {ref.n_tokens} tokens; {ref.n_completions} to {most_tokens} are possible",
        )
    if ref.size_bytes != blob_bytes(ref.n_completions, ref.n_tokens):
        raise RemoteProtocolError(
            Reason.SIZE,
            f"announces {ref.size_bytes} bytes; its counts make "
            f"{blob_bytes(ref.n_completions, ref.n_tokens)}",
        )
    if ref.prompt_id >= prompt_count:
        raise RemoteProtocolError(
            Reason.PROMPT_UNKNOWN, f"prompt {ref.prompt_id}; this node knows {prompt_count}"
        )
    if not is_candidate(
        charter.swarm_id, ref.epoch, ref.prompt_id, sampling_peers, publisher, OWNER_CANDIDATES
    ):
        raise RemoteProtocolError(
            Reason.OWNERSHIP,
            f"not among the first {OWNER_CANDIDATES} owners of prompt {ref.prompt_id} "
            f"in epoch {ref.epoch}",
        )


def verify_group(
    blob: bytes,
    *,
    expected: GroupRef,
    publisher: str,
    charter: Charter,
    prompt_hashes: Sequence[bytes],
    sampling_peers: AbstractSet[str],
) -> RolloutGroup:
    """Check a fetched blob against its announcement and the swarm's terms.

    Args:
        blob: what came for `expected.hash`.
        expected: the announced group.
        publisher: peer id of the announcer.
        charter: the swarm's terms.
        prompt_hashes: hash of each rendered prompt's token ids, by prompt id, over all sets.
        sampling_peers: as for `verify_ref`.

    Returns:
        The group, fit to be rewarded and pooled.

    Raises:
        RemoteProtocolError: `reason` is the `Reason`; `Reason(...).provable` says whether it is a
            strike against `publisher`.
    """
    verify_ref(
        expected,
        publisher=publisher,
        charter=charter,
        prompt_count=len(prompt_hashes),
        sampling_peers=sampling_peers,
    )
    digest = blob_hash(blob)
    if digest != expected.hash:
        raise RemoteProtocolError(
            Reason.HASH, f"sha256 {digest.hex()}, asked for {expected.hash.hex()}"
        )
    if len(blob) != expected.size_bytes:
        raise RemoteProtocolError(
            Reason.SIZE, f"{len(blob)} bytes, announced as {expected.size_bytes}"
        )
    packed = decode_packed(blob, codec_limits(charter))
    group = packed.unpack()
    if group.swarm_id != charter.swarm_id:
        raise RemoteProtocolError(Reason.SWARM, f"a group of swarm {group.swarm_id.hex()}")
    if group.publisher != publisher:
        raise RemoteProtocolError(
            Reason.PUBLISHER, f"a group of {group.publisher}, announced by {publisher}"
        )
    announced = (expected.epoch, expected.prompt_id, expected.n_completions, expected.n_tokens)
    found = (group.epoch, group.prompt_id, len(group.rollouts), len(packed.token_ids))
    if found != announced:
        raise RemoteProtocolError(
            Reason.ANNOUNCEMENT,
            f"epoch, prompt, completions, tokens are {found}, announced as {announced}",
        )
    _check_prompt(group, charter, prompt_hashes)
    _check_samples(packed, group.temperature, charter)
    return group


def _check_prompt(group: RolloutGroup, charter: Charter, prompt_hashes: Sequence[bytes]) -> None:
    if group.prompt_sha256 == prompt_hashes[group.prompt_id]:
        return
    detail = (
        f"prompt {group.prompt_id} has token ids with sha256 {group.prompt_sha256.hex()}; here "
        f"{prompt_hashes[group.prompt_id].hex()}"
    )
    # All members agree on the genesis prompts. Which ones an organizer appended, two members may
    # see differently while amendments spread.
    if group.prompt_id < charter.manifest.prompts.count:
        raise RemoteProtocolError(Reason.PROMPT, detail)
    raise RemoteProtocolError(Reason.PROMPT_UNKNOWN, detail)


def _check_samples(packed: PackedGroup, temperature: float, charter: Charter) -> None:
    """Temperature, token range, stop rule and log-probs, over all completions at once."""
    sampling = charter.manifest.sampling
    if temperature != float(np.float32(sampling.temperature)):
        raise RemoteProtocolError(
            Reason.TEMPERATURE, f"{temperature}; the swarm's is {sampling.temperature}"
        )
    token_ids, logprobs = packed.token_ids, packed.logprobs
    vocab_size = charter.manifest.tokenizer.vocab_size
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise RemoteProtocolError(
            Reason.TOKEN,
            f"token ids from {token_ids.min()} to {token_ids.max()}; the vocabulary has "
            f"{vocab_size}",
        )
    problem = _stop_rule_problem(packed, sampling.stop_token_ids, sampling.max_completion_tokens)
    if problem:
        raise RemoteProtocolError(Reason.FINISH, problem)
    # Written so that NaN fails it.
    if not (logprobs.min() >= LOGPROB_FLOOR and logprobs.max() <= LOGPROB_TOLERANCE):
        raise RemoteProtocolError(
            Reason.LOGPROB,
            f"log-probs from {logprobs.min()} to {logprobs.max()}; "
            f"{LOGPROB_FLOOR} to {LOGPROB_TOLERANCE} are possible",
        )


def _stop_rule_problem(
    packed: PackedGroup, stop_token_ids: Sequence[int], max_completion_tokens: int
) -> str:
    """What contradicts the rule: a completion ends with its first stop token, or at the limit."""
    is_stop = np.zeros(len(packed.token_ids), dtype=np.bool_)
    for stop_token_id in stop_token_ids:
        is_stop |= packed.token_ids == stop_token_id
    ends_with_stop = is_stop[np.cumsum(packed.lengths) - 1]
    if not np.array_equal(ends_with_stop, packed.finishes == Finish.STOP):
        return "a last token is a stop token where the finish is not STOP, or the other way round"
    if np.count_nonzero(is_stop) != np.count_nonzero(ends_with_stop):
        return "a stop token stands before the end of a completion"
    if (packed.lengths[packed.finishes == Finish.LENGTH] != max_completion_tokens).any():
        return f"finish LENGTH before {max_completion_tokens} tokens"
    return ""
