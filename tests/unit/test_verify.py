"""Each rule of the gate for groups: what breaks it, and that honest peers never meet a strike."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swarm.errors import RemoteProtocolError
from swarm.protocol.charter import AppendPrompts, Charter
from swarm.protocol.codec import blob_hash, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest, PromptSetRef
from swarm.protocol.ownership import candidates
from swarm.protocol.reasons import Reason
from swarm.protocol.records import GroupRef
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.protocol.verify import LOGPROB_TOLERANCE, codec_limits, verify_group, verify_ref

ANNA = Identity(b"\x01" * 32)
MALLORY = Identity(b"\x03" * 32)
PEERS = {ANNA.peer_id, MALLORY.peer_id}
MANIFEST = Manifest.model_validate(
    {
        "name": "Sums",
        "created_s": 1_700_000_000.0,
        "organizers": (ANNA.peer_id,),
        "prompts": {
            "sha256": "ab" * 32,
            "size_bytes": 100,
            "count": 3,
            "tokens_sha256": "cd" * 32,
        },
        "template": {"text": "{{ prompt }}"},
        "tokenizer": {"fingerprint": "ef" * 32, "vocab_size": 10, "name": "tiny"},
        "sampling": {
            "temperature": 0.7,
            "group_size": 2,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 4,
            "stop_token_ids": (0, 9),
        },
        "reward": {"name": "exact"},
    }
)
MORE = PromptSetRef(sha256="12" * 32, size_bytes=100, count=2, tokens_sha256="34" * 32)
CHARTER = Charter.from_genesis(MANIFEST).amended(AppendPrompts(prompts=MORE), 1.0, ANNA)
PROMPT_HASHES = [bytes([i]) * 32 for i in range(5)]


def rollout(
    token_ids: list[int], finish: Finish = Finish.STOP, logprobs: list[float] | None = None
) -> Rollout:
    values = [-0.5] * len(token_ids) if logprobs is None else logprobs
    return Rollout(np.array(token_ids, np.int32), np.array(values, np.float32), finish)


HONEST = (rollout([1, 2, 0]), rollout([3, 4, 5, 6], Finish.LENGTH))
GROUP = RolloutGroup(
    swarm_id=CHARTER.swarm_id,
    publisher=ANNA.peer_id,
    epoch=0,
    prompt_id=1,
    prompt_sha256=PROMPT_HASHES[1],
    policy_step=3,
    created_ms=5,
    temperature=0.7,
    rollouts=HONEST,
    claimed_rewards=np.zeros(2, np.float32),
)


def ref_of(blob: bytes, group: RolloutGroup) -> GroupRef:
    return GroupRef(
        blob_hash(blob),
        len(blob),
        group.epoch,
        group.prompt_id,
        len(group.rollouts),
        group.n_tokens,
    )


def verify(blob: bytes, ref: GroupRef, **changes: Any) -> RolloutGroup:
    terms: dict[str, Any] = {
        "publisher": ANNA.peer_id,
        "charter": CHARTER,
        "prompt_hashes": PROMPT_HASHES,
        "sampling_peers": PEERS,
    }
    return verify_group(blob, expected=ref, **terms | changes)


def reason(group: RolloutGroup, signer: Identity = ANNA, **changes: Any) -> Reason:
    """Why an honestly announced group is rejected."""
    blob = encode_group(group, signer)
    with pytest.raises(RemoteProtocolError) as caught:
        verify(blob, ref_of(blob, group), **changes)
    return Reason(caught.value.reason)


BLOB = encode_group(GROUP, ANNA)
REF = ref_of(BLOB, GROUP)


def test_an_honest_group_is_accepted() -> None:
    group = verify(BLOB, REF)
    assert group.publisher == ANNA.peer_id
    assert [r.token_ids.tolist() for r in group.rollouts] == [[1, 2, 0], [3, 4, 5, 6]]


def test_limits_are_the_manifests() -> None:
    limits = codec_limits(CHARTER)
    assert (limits.max_group_size, limits.max_completion_tokens) == (2, 4)


@pytest.mark.parametrize(
    ("rollouts", "expected"),
    [
        ((rollout([1, 10, 0]), HONEST[1]), Reason.TOKEN),
        ((rollout([1, -1, 0]), HONEST[1]), Reason.TOKEN),
        ((rollout([1, 2]), HONEST[1]), Reason.FINISH),
        ((rollout([1, 0, 2, 9]), HONEST[1]), Reason.FINISH),
        ((rollout([0, 0]), HONEST[1]), Reason.FINISH),
        ((rollout([1, 2], Finish.LENGTH), HONEST[1]), Reason.FINISH),
        ((HONEST[0], rollout([1, 2, 3, 0], Finish.LENGTH)), Reason.FINISH),
        ((HONEST[0], rollout([1, 0, 3, 4], Finish.LENGTH)), Reason.FINISH),
        ((HONEST[0], rollout([1, 2, 3, 4], Finish.STOP)), Reason.FINISH),
        ((rollout([1, 0], logprobs=[-0.5, float("nan")]), HONEST[1]), Reason.LOGPROB),
        ((rollout([1, 0], logprobs=[-0.5, float("-inf")]), HONEST[1]), Reason.LOGPROB),
        ((rollout([1, 0], logprobs=[float("inf"), -0.5]), HONEST[1]), Reason.LOGPROB),
        ((rollout([1, 0], logprobs=[0.01, -0.5]), HONEST[1]), Reason.LOGPROB),
        ((rollout([1, 0], logprobs=[-20_000.0, -0.5]), HONEST[1]), Reason.LOGPROB),
        ((HONEST[0],), Reason.GROUP_SIZE),
        ((*HONEST, HONEST[0]), Reason.GROUP_SIZE),
    ],
)
def test_samples_against_the_rules_are_strikes(
    rollouts: tuple[Rollout, ...], expected: Reason
) -> None:
    claimed = np.zeros(len(rollouts), np.float32)
    found = reason(replace(GROUP, rollouts=rollouts, claimed_rewards=claimed))
    assert found is expected
    assert found.provable


@pytest.mark.parametrize(
    "rollouts",
    [
        (rollout([9]), rollout([1, 2, 3, 0])),  # a stop token alone, and at the limit
        (rollout([1, 0], logprobs=[0.0, LOGPROB_TOLERANCE / 2]), HONEST[1]),
        (rollout([1, 0], logprobs=[-103.0, -0.0]), HONEST[1]),
    ],
)
def test_honest_edge_cases_are_accepted(rollouts: tuple[Rollout, ...]) -> None:
    group = replace(GROUP, rollouts=rollouts)
    blob = encode_group(group, ANNA)
    verify(blob, ref_of(blob, group))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"swarm_id": bytes(32)}, Reason.SWARM),
        ({"temperature": 1.0}, Reason.TEMPERATURE),
        ({"prompt_sha256": PROMPT_HASHES[0]}, Reason.PROMPT),
    ],
)
def test_a_header_against_the_manifest_is_a_strike(
    changes: dict[str, Any], expected: Reason
) -> None:
    found = reason(replace(GROUP, **changes))
    assert found is expected
    assert found.provable


def test_completions_above_the_limit_are_a_strike() -> None:
    long = rollout([1, 2, 3, 4, 5], Finish.LENGTH)
    assert reason(replace(GROUP, rollouts=(rollout([0]), long))) is Reason.LENGTH


def test_prompts_that_amendments_may_explain_are_no_strike() -> None:
    ahead = reason(replace(GROUP, prompt_id=5))
    other_chain = reason(replace(GROUP, prompt_id=4, prompt_sha256=PROMPT_HASHES[0]))
    behind = reason(replace(GROUP, prompt_id=4), prompt_hashes=PROMPT_HASHES[:3])
    assert [ahead, other_chain, behind] == [Reason.PROMPT_UNKNOWN] * 3
    assert not Reason.PROMPT_UNKNOWN.provable


def test_an_appended_prompt_is_accepted() -> None:
    group = replace(GROUP, prompt_id=4, prompt_sha256=PROMPT_HASHES[4])
    blob = encode_group(group, ANNA)
    assert verify(blob, ref_of(blob, group)).prompt_id == 4


def test_who_announces_anothers_group_is_struck_and_not_the_other() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        verify(BLOB, REF, publisher=MALLORY.peer_id)
    assert caught.value.reason == Reason.PUBLISHER
    assert Reason.PUBLISHER.provable


def test_a_forgery_in_anothers_name_is_refused() -> None:
    forged = bytearray(BLOB)
    forged[-1] ^= 1
    blob = bytes(forged)
    with pytest.raises(RemoteProtocolError) as caught:
        verify(blob, ref_of(blob, GROUP), publisher=MALLORY.peer_id)
    assert caught.value.reason == Reason.SIGNATURE


def test_bytes_that_were_damaged_on_the_way_are_no_strike() -> None:
    for blob in (BLOB[:-1], BLOB + b"\0", b"", BLOB[:-1] + b"\xff"):
        with pytest.raises(RemoteProtocolError) as caught:
            verify(blob, REF)
        assert caught.value.reason == Reason.HASH
    assert not Reason.HASH.provable


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"size_bytes": REF.size_bytes + 8}, Reason.SIZE),
        ({"n_completions": 3}, Reason.GROUP_SIZE),
        ({"n_tokens": 1}, Reason.LENGTH),
        ({"n_tokens": 9}, Reason.LENGTH),
        ({"n_tokens": 6, "size_bytes": REF.size_bytes - 8}, Reason.SIZE),
        ({"epoch": 1}, Reason.ANNOUNCEMENT),
        ({"prompt_id": 2}, Reason.ANNOUNCEMENT),
    ],
)
def test_an_announcement_that_its_own_blob_contradicts_is_a_strike(
    changes: dict[str, Any], expected: Reason
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        verify(BLOB, replace(REF, **changes))
    assert caught.value.reason == expected
    assert expected.provable


def test_impossible_announcements_are_refused_before_anything_is_fetched() -> None:
    for ref, expected in (
        (replace(REF, n_completions=3), Reason.GROUP_SIZE),
        (replace(REF, n_tokens=9), Reason.LENGTH),
        (replace(REF, size_bytes=2**31), Reason.SIZE),
        (replace(REF, prompt_id=5), Reason.PROMPT_UNKNOWN),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            verify_ref(
                ref,
                publisher=ANNA.peer_id,
                charter=CHARTER,
                prompt_count=5,
                sampling_peers=PEERS,
            )
        assert caught.value.reason == expected


def test_a_blob_of_a_newer_codec_is_incompatible_and_no_strike() -> None:
    blob = BLOB[:4] + b"\x02\x00" + BLOB[6:]
    with pytest.raises(RemoteProtocolError) as caught:
        verify(blob, ref_of(blob, GROUP))
    assert caught.value.reason == Reason.INCOMPATIBLE
    assert not Reason.INCOMPATIBLE.provable


def test_a_signed_blob_of_other_bytes_is_malformed() -> None:
    blob = b"x" * len(BLOB)
    with pytest.raises(RemoteProtocolError) as caught:
        verify(blob, ref_of(blob, GROUP))
    assert caught.value.reason == Reason.MALFORMED


def test_only_the_first_three_in_line_are_accepted_and_nobody_is_struck() -> None:
    identities = {i.peer_id: i for i in (Identity(bytes([n]) * 32) for n in range(1, 9))}
    line = candidates(CHARTER.swarm_id, 0, 1, identities, len(identities))
    for place, peer_id in enumerate(line):
        group = replace(GROUP, publisher=peer_id)
        blob = encode_group(group, identities[peer_id])
        arguments: dict[str, Any] = {"publisher": peer_id, "sampling_peers": set(identities)}
        if place < 3:
            assert verify(blob, ref_of(blob, group), **arguments).publisher == peer_id
        else:
            found = reason(group, identities[peer_id], **arguments)
            assert found is Reason.OWNERSHIP
            assert not found.provable


def test_honest_views_that_differ_by_a_few_members_cost_no_strike() -> None:
    """A publisher that does not know some newcomers is taken or left out, never struck."""
    identities = [Identity(bytes([n]) * 32) for n in range(1, 13)]
    everyone = {identity.peer_id for identity in identities}
    newcomers = {identity.peer_id for identity in identities[-3:]}
    reasons = []
    for epoch in range(40):
        owner = candidates(CHARTER.swarm_id, epoch, 1, everyone - newcomers, 1)[0]
        ref = replace(REF, epoch=epoch)
        try:
            verify_ref(
                ref, publisher=owner, charter=CHARTER, prompt_count=5, sampling_peers=everyone
            )
        except RemoteProtocolError as error:
            reasons.append(error.reason)
    assert set(reasons) <= {Reason.OWNERSHIP}
    # It takes all three newcomers ahead of the owner of the other nine: 1 in 220.
    assert len(reasons) <= 4


def test_a_publisher_that_we_have_not_heard_of_counts_as_alive() -> None:
    verify(BLOB, REF, sampling_peers={MALLORY.peer_id})
