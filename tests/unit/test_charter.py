"""Amendments and charter: bounds, canonical form, signatures, the rule of agreement."""

import hashlib
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError
from sample_charter import ANNA, BERT, CHARTER, MALLORY, MANIFEST, PEERS, REF, chain, reason_of

from swarm.errors import IdentityError, RemoteProtocolError
from swarm.protocol import charter as charter_module
from swarm.protocol.charter import (
    Action,
    Amendment,
    AppendPrompts,
    Charter,
    CloseSwarm,
    MinimumVersion,
)
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.roster import MAX_PEERS_PER_AMENDMENT, BanChange, RosterChange, changes_to

# -- amendments ----------------------------------------------------------------------------------


def test_a_signature_covers_every_field() -> None:
    amendment = chain(CloseSwarm(at_s=5.0)).amendments[0]
    assert amendment.verify()
    for change in (
        {"swarm_id": "00" * 32},
        {"number": 2},
        {"previous": "00" * 32},
        {"action": CloseSwarm(at_s=6.0)},
        {"created_s": 0.0},
        {"organizer": BERT.peer_id},
        {"signature": "00" * 64},
        {"signature": ""},
    ):
        assert not amendment.model_copy(update=change).verify(), change


def test_the_hash_covers_the_signature() -> None:
    amendment = chain(CloseSwarm(at_s=5.0)).amendments[0]
    unsigned = amendment.model_copy(update={"signature": ""})
    assert unsigned.hash != amendment.hash
    assert amendment.hash == hashlib.sha256(
        b"swarm-node amendment 1\0" + amendment.to_bytes()
    ).digest()  # fmt: skip


def test_only_the_named_organizer_signs() -> None:
    unsigned = chain(CloseSwarm(at_s=5.0)).amendments[0].model_copy(update={"signature": ""})
    with pytest.raises(IdentityError, match=BERT.peer_id):
        unsigned.sign(BERT)
    assert unsigned.sign(ANNA).verify()


@pytest.mark.parametrize(
    "action",
    [
        AppendPrompts(prompts=REF),
        CloseSwarm(at_s=2.0**40),
        MinimumVersion(version="1.22.333.4444"),
        RosterChange(),
        RosterChange(add=PEERS[:MAX_PEERS_PER_AMENDMENT]),
        BanChange(add=PEERS[:1], remove=PEERS[1:MAX_PEERS_PER_AMENDMENT]),
    ],
)
def test_an_amendment_survives_its_bytes(action: Action) -> None:
    amendment = chain(action).amendments[0]
    assert Amendment.from_bytes(amendment.to_bytes()) == amendment
    assert len(amendment.to_bytes()) <= charter_module.MAX_AMENDMENT_BYTES


@pytest.mark.parametrize("version", ["", "1.", "v1", "1.2.3.4.5", "123456", "1.2rc1"])
def test_a_minimum_version_is_plain_numbers(version: str) -> None:
    with pytest.raises(ValidationError):
        MinimumVersion(version=version)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"kind":"close"', b'"kind":"purge"', "incompatible"),
        (b"swarm-amendment/1", b"swarm-amendment/2", "incompatible"),
        (b'"number":1', b'"number":0', "amendment"),
        (b'"at_s":5.0', b'"at_s":5', "amendment"),
        (b'"at_s":5.0', b'"at_s":NaN', "amendment"),
        (b'"at_s":5.0', b'"at_s":5.0,"more":1', "amendment"),
        (b'"signature":"', b'"signature":"0', "amendment"),
    ],
)
def test_amendment_bytes_that_do_not_decode(old: bytes, new: bytes, reason: str) -> None:
    data = chain(CloseSwarm(at_s=5.0)).amendments[0].to_bytes()
    assert data.count(old) == 1
    with pytest.raises(RemoteProtocolError) as caught:
        Amendment.from_bytes(data.replace(old, new))
    assert reason_of(caught) == reason


def test_a_peers_text_is_cut_in_the_detail() -> None:
    data = chain(CloseSwarm(at_s=5.0)).amendments[0].to_bytes()
    with pytest.raises(RemoteProtocolError) as caught:
        Amendment.from_bytes(data.replace(b'"close"', b'"' + b"x" * 3000 + b'"'))
    assert len(caught.value.detail) <= 200


# -- charter -------------------------------------------------------------------------------------


def test_genesis_terms() -> None:
    assert CHARTER.swarm_id == MANIFEST.swarm_id
    assert CHARTER.prompt_sets == (REF,)
    assert CHARTER.prompt_count == 10
    assert CHARTER.closes_at_s is None
    assert CHARTER.minimum_version is None


def test_amendments_change_the_terms_and_the_last_one_of_a_kind_holds() -> None:
    more = PromptSetRef(sha256="11" * 32, size_bytes=5, count=3, tokens_sha256="22" * 32)
    charter = chain(
        AppendPrompts(prompts=more),
        CloseSwarm(at_s=9.0),
        MinimumVersion(version="2"),
        CloseSwarm(at_s=7.0),
        MinimumVersion(version="1.5"),
    )
    assert charter.swarm_id == CHARTER.swarm_id
    assert charter.prompt_sets == (REF, more)
    assert charter.prompt_count == 13
    assert charter.closes_at_s == 7.0
    assert charter.minimum_version == "1.5"


@pytest.mark.parametrize(
    ("version", "minimum", "admitted"),
    [
        ("1.2", "1.2.0", True),
        ("1.2.0", "1.2", True),
        ("1.10", "1.9", True),
        ("1.9", "1.10", False),
        ("2.0rc1", "2", True),
        ("2.0.dev5", "2.0.1", False),
        ("0.9.9.9.9", "1", False),
        ("unknown", "0.1", False),
    ],
)
def test_versions_compare_by_number(version: str, minimum: str, admitted: bool) -> None:
    assert CHARTER.admits(version)
    assert chain(MinimumVersion(version=minimum)).admits(version) is admitted


def test_a_swarm_is_open_until_its_first_roster() -> None:
    assert CHARTER.members is None
    assert CHARTER.is_member(MALLORY.peer_id)
    closed = chain(RosterChange())
    assert closed.members == {ANNA.peer_id, BERT.peer_id}  # the organizers, always
    assert closed.is_member(BERT.peer_id)
    assert not closed.is_member(MALLORY.peer_id)


def test_a_roster_grows_and_shrinks_and_keeps_its_organizers() -> None:
    one, two, three = PEERS[:3]
    charter = chain(
        RosterChange(add=(one, two)),
        RosterChange(add=(three,), remove=(one,)),
        RosterChange(remove=tuple(sorted((ANNA.peer_id, PEERS[9])))),
    )
    assert charter.members == {two, three, ANNA.peer_id, BERT.peer_id}
    assert not charter.is_member(one)
    assert chain(RosterChange(add=(one,)), base=charter).is_member(one)


def test_bans_are_a_list_of_their_own_and_spare_organizers() -> None:
    one, two = PEERS[:2]
    charter = chain(
        BanChange(add=tuple(sorted((one, two, ANNA.peer_id)))), BanChange(remove=(one,))
    )
    assert charter.banned == {two}
    assert charter.members is None
    assert CHARTER.banned == frozenset()


def test_any_number_of_peers_is_split_into_amendments() -> None:
    changes = changes_to(RosterChange, add=PEERS[:90], remove=PEERS[90:])
    assert len(changes) == 2
    assert chain(*changes).members == {*PEERS[:90], ANNA.peer_id, BERT.peer_id}
    assert changes_to(RosterChange) == [RosterChange()]  # closes the swarm
    with pytest.raises(ValueError, match="both"):
        changes_to(BanChange, add=PEERS[:1], remove=PEERS[:1])


@pytest.mark.parametrize(
    "fields",
    [
        {"add": PEERS[1::-1]},
        {"add": (PEERS[0], PEERS[0])},
        {"add": PEERS[:1], "remove": PEERS[:1]},
        {"add": PEERS[:31], "remove": PEERS[31:61]},
        {"add": ("12D3KooW",)},
        {"all": ()},
    ],
    ids=["falling", "twice", "on both", "too many", "no peer id", "unknown field"],
)
def test_a_list_of_peers_has_one_form(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RosterChange.model_validate(fields)


def forged(charter: Charter, signer: Identity = ANNA, **change: Any) -> tuple[Amendment, ...]:
    """The chain with its last amendment changed and properly signed again."""
    *rest, last = charter.amendments
    change.setdefault("organizer", signer.peer_id)
    return (*rest, last.model_copy(update=change).sign(signer))


TWO = chain(CloseSwarm(at_s=5.0), CloseSwarm(at_s=6.0))


@pytest.mark.parametrize(
    "amendments",
    [
        forged(TWO, swarm_id="00" * 32),
        forged(TWO, number=3),
        forged(TWO, number=1),
        forged(TWO, previous=MANIFEST.swarm_id.hex()),
        forged(TWO, signer=MALLORY),
        (*TWO.amendments[:1], TWO.amendments[1].model_copy(update={"signature": ""})),
        (*TWO.amendments[:1], TWO.amendments[1].model_copy(update={"created_s": 0.0})),
        TWO.amendments[1:],
        TWO.amendments[::-1],
        (*TWO.amendments, TWO.amendments[1]),
    ],
    ids=["swarm", "number", "repeated number", "link", "stranger", "unsigned", "tampered",
         "head missing", "reversed", "repeated"],
)  # fmt: skip
def test_a_chain_that_does_not_hold_is_refused(amendments: tuple[Amendment, ...]) -> None:
    for build in (lambda: Charter(MANIFEST, amendments), lambda: CHARTER.extended(amendments)):
        with pytest.raises(RemoteProtocolError) as caught:
            build()
        assert reason_of(caught) == "amendment"


def test_either_organizer_amends_and_nobody_else() -> None:
    charter = chain(CloseSwarm(at_s=6.0), by=BERT, base=chain(CloseSwarm(at_s=5.0)))
    assert [a.organizer for a in charter.amendments] == [ANNA.peer_id, BERT.peer_id]
    with pytest.raises(IdentityError, match="no organizer"):
        chain(CloseSwarm(at_s=6.0), by=MALLORY)


def test_prompt_ids_stay_within_bounds() -> None:
    many = REF.model_copy(update={"count": 2**24})
    with pytest.raises(RemoteProtocolError) as caught:
        chain(AppendPrompts(prompts=many))
    assert reason_of(caught) == "amendment"


def test_a_chain_has_a_greatest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charter_module, "MAX_AMENDMENTS", 1)
    with pytest.raises(RemoteProtocolError, match="more than 1"):
        Charter(MANIFEST, TWO.amendments)


def test_the_longer_chain_is_kept() -> None:
    longer = chain(CloseSwarm(at_s=7.0), base=TWO)
    assert TWO.extended(longer.amendments) == longer
    assert CHARTER.extended(iter(longer.amendments)) == longer
    with pytest.raises(RemoteProtocolError) as caught:
        longer.extended(TWO.amendments)
    assert reason_of(caught) == "charter_behind"


def test_a_longer_fork_is_kept_too() -> None:
    fork = chain(CloseSwarm(at_s=1.0), CloseSwarm(at_s=2.0), CloseSwarm(at_s=3.0), by=BERT)
    assert TWO.extended(fork.amendments) == fork


def test_the_same_chain_changes_nothing() -> None:
    assert TWO.extended(TWO.amendments) is TWO
    assert CHARTER.extended(()) is CHARTER


def test_of_equally_long_forks_all_keep_the_smaller_hash() -> None:
    forks = [chain(CloseSwarm(at_s=float(at_s))) for at_s in range(6)]
    best = min(forks, key=lambda charter: charter.amendments[-1].hash)
    for fork in forks:
        if fork != best:
            assert fork.extended(best.amendments) == best
            with pytest.raises(RemoteProtocolError) as caught:
                best.extended(fork.amendments)
            assert reason_of(caught) == "charter_behind"


def test_a_charter_survives_its_bytes() -> None:
    for charter in (CHARTER, TWO):
        assert Charter.from_bytes(charter.to_bytes(), MANIFEST.swarm_id) == charter
    expected = [MANIFEST.to_bytes(), [a.to_bytes() for a in TWO.amendments]]
    assert msgpack.unpackb(TWO.to_bytes()) == expected


def test_a_charter_of_another_swarm_is_refused() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Charter.from_bytes(CHARTER.to_bytes(), bytes(32))
    assert reason_of(caught) == "manifest"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 100_000,
        b"\x92" * 5000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb([MANIFEST.to_bytes()]),
        msgpack.packb([MANIFEST.to_bytes().decode(), []]),
        msgpack.packb([MANIFEST.to_bytes(), b""]),
        msgpack.packb([MANIFEST.to_bytes(), [1]]),
        msgpack.packb([MANIFEST.to_bytes(), {}]),
        msgpack.packb([MANIFEST.to_bytes(), [msgpack.ExtType(1, b"")]]),
        CHARTER.to_bytes() + b"\x00",
        CHARTER.to_bytes()[:-1] + b"\xdc\x00\x00",  # the empty list, longer than need be
        bytes(charter_module.MAX_CHARTER_BYTES + 1),
    ],
    ids=["empty", "deep", "deep pairs", "length bomb", "one item", "text", "no list", "no bytes",
         "map", "extension", "trailing", "not shortest", "huge"],
)  # fmt: skip
def test_bytes_that_are_no_charter_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Charter.from_bytes(data, MANIFEST.swarm_id)
    assert reason_of(caught) == "charter"
