"""Manifest, amendments, charter and invite: bounds, canonical form, the rule of agreement."""

import hashlib
import json
from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from swarm.errors import IdentityError, RemoteProtocolError, UsageError
from swarm.protocol import manifest as module
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import (
    Action,
    Amendment,
    AppendPrompts,
    Charter,
    CloseSwarm,
    Invite,
    Manifest,
    MinimumVersion,
    PromptSetRef,
)
from swarm.protocol.roster import MAX_PEERS_PER_AMENDMENT, BanChange, RosterChange, changes_to

PEERS = tuple(sorted(Identity(n.to_bytes(32, "big")).peer_id for n in range(100)))
ANNA = Identity(b"\x01" * 32)
BERT = Identity(b"\x02" * 32)
MALLORY = Identity(b"\x03" * 32)
REF = PromptSetRef(sha256="ab" * 32, size_bytes=1000, count=10, tokens_sha256="cd" * 32)
FIELDS: dict[str, Any] = {
    "schema": "swarm-manifest/1",
    "name": "Sums",
    "created_s": 1_700_000_000.0,
    "organizers": (ANNA.peer_id, BERT.peer_id),
    "prompts": REF.model_dump(),
    "held_out": None,
    "out_of_distribution": None,
    "template": {"text": "{{ prompt }}", "system": ""},
    "tokenizer": {"fingerprint": "ef" * 32, "vocab_size": 100, "name": "tiny"},
    "sampling": {
        "temperature": 1.0,
        "group_size": 8,
        "max_prompt_tokens": 64,
        "max_completion_tokens": 32,
        "stop_token_ids": (0, 2),
    },
    "reward": {"name": "exact", "version": 1, "params": {"a": 1, "b": 1.0, "c": True, "d": "x"}},
    "record_shards": 4,
}
MANIFEST = Manifest.model_validate(FIELDS)
CHARTER = Charter.from_genesis(MANIFEST)
ADDRESS = f"/ip4/127.0.0.1/tcp/31337/p2p/{ANNA.peer_id}"


def changed(path: str, value: Any) -> dict[str, Any]:
    """FIELDS with the field at a dotted path replaced."""
    fields: dict[str, Any] = {**FIELDS}
    head, _, tail = path.partition(".")
    fields[head] = {**fields[head], tail: value} if tail else value
    return fields


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def chain(*actions: Action, by: Identity = ANNA, base: Charter = CHARTER) -> Charter:
    for action in actions:
        base = base.amended(action, 1_700_000_001.0, by)
    return base


def reason_of(error: pytest.ExceptionInfo[RemoteProtocolError]) -> str:
    return error.value.reason


# -- manifest ------------------------------------------------------------------------------------


def test_the_id_is_the_hash_of_the_canonical_bytes() -> None:
    data = canonical(FIELDS)
    assert MANIFEST.to_bytes() == data
    assert MANIFEST.swarm_id == hashlib.sha256(b"swarm-node manifest 1\0" + data).digest()
    assert Manifest.from_bytes(data) == MANIFEST


def test_a_copy_with_another_field_has_another_id() -> None:
    before = MANIFEST.swarm_id
    assert MANIFEST.model_copy(update={"name": "Products"}).swarm_id != before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", "swarm-manifest/2"),
        ("name", ""),
        ("name", "a" * 65),
        ("name", "tab\t"),
        ("name", "line\n"),
        ("created_s", -1.0),
        ("created_s", float("nan")),
        ("created_s", "1"),
        ("organizers", ()),
        ("organizers", (ANNA.peer_id,) * 2),
        ("organizers", ("12D3Koo",)),
        ("organizers", tuple(Identity(bytes([i]) * 32).peer_id for i in range(17))),
        ("prompts", None),
        ("prompts.count", 0),
        ("prompts.count", 2**24 + 1),
        ("prompts.size_bytes", 0),
        ("prompts.sha256", "AB" * 32),
        ("prompts.sha256", "ab" * 31),
        ("prompts.extra", 1),
        ("template.text", ""),
        ("template.text", "a" * 16_385),
        ("template.system", "\ud800"),
        ("tokenizer.vocab_size", 0),
        ("tokenizer.vocab_size", 2),  # below a stop token
        ("tokenizer.name", "a" * 257),
        ("sampling.temperature", 0.0),
        ("sampling.temperature", float("inf")),
        ("sampling.group_size", 1),
        ("sampling.group_size", True),
        ("sampling.group_size", 8.0),
        ("sampling.max_completion_tokens", 0),
        ("sampling.stop_token_ids", (2, 0)),
        ("sampling.stop_token_ids", (2, 2)),
        ("sampling.stop_token_ids", (-1,)),
        ("sampling.stop_token_ids", tuple(range(65))),
        ("reward.name", "Exact"),
        ("reward.version", 0),
        ("reward.params", {"A": 1}),
        ("reward.params", {"a": float("nan")}),
        ("reward.params", {"a": 2**53}),
        ("reward.params", {"a": None}),
        ("reward.params", {"a": [1]}),
        ("reward.params", {"a": "x" * 1025}),
        ("reward.params", {f"a{i}": i for i in range(33)}),
        ("record_shards", 0),
        ("record_shards", 257),
        ("unknown", 1),
    ],
)
def test_a_field_out_of_bounds_is_refused(path: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate(changed(path, value))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"created_s"', b'{ "created_s"'),
        (b'"record_shards":4,', b'"record_shards":4,"record_shards":4,'),
        (b"1700000000.0", b"1700000000"),
        (b"1700000000.0", b"1.7e9"),
        (b'"Sums"', b'"\\u0053ums"'),
        (b'"held_out":null,', b""),
        (b'"b":1.0', b'"b":1.00'),
        (b'"c":true,"d":"x"', b'"d":"x","c":true'),
    ],
)
def test_bytes_that_are_not_canonical_are_refused(old: bytes, new: bytes) -> None:
    data = MANIFEST.to_bytes()
    assert data.count(old) == 1
    with pytest.raises(RemoteProtocolError) as caught:
        Manifest.from_bytes(data.replace(old, new))
    assert reason_of(caught) == "manifest"


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, MANIFEST.to_bytes()[:-1],
     MANIFEST.to_bytes() + b"\n", b'"' + b"a" * 300_000 + b'"'],
    ids=["empty", "null", "list", "no fields", "no UTF-8", "deep", "cut", "longer", "huge"],
)  # fmt: skip
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Manifest.from_bytes(data)
    assert reason_of(caught) == "manifest"


@pytest.mark.parametrize("field", ["top_p", "top_k", "min_p"])
def test_cut_off_distributions_are_refused(field: str) -> None:
    """They would bias the importance ratio: the wire carries the whole distribution's log-probs."""
    terms = json.loads(MANIFEST.to_bytes())
    terms["sampling"][field] = 0.9
    with pytest.raises(RemoteProtocolError, match=f"sampling.*{field}"):
        Manifest.from_bytes(canonical(terms))


def test_another_schema_is_incompatible_rather_than_wrong() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Manifest.from_bytes(canonical(changed("schema", "swarm-manifest/2") | {"new": 1}))
    assert reason_of(caught) == "incompatible"


def test_the_largest_manifest_can_be_read() -> None:
    text = "\x01" * 16_384
    fields = changed("template", {"text": text, "system": text})
    fields["reward"] = {
        **FIELDS["reward"],
        "params": {f"{i:a>64}": "\x01" * 1024 for i in range(10, 42)},
    }
    fields["tokenizer"] = {**FIELDS["tokenizer"], "name": "\x01" * 256}
    largest = Manifest.model_validate(fields)
    assert Manifest.from_bytes(largest.to_bytes()) == largest


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
    assert len(amendment.to_bytes()) <= module.MAX_AMENDMENT_BYTES


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
    monkeypatch.setattr(module, "MAX_AMENDMENTS", 1)
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
        bytes(module.MAX_CHARTER_BYTES + 1),
    ],
    ids=["empty", "deep", "deep pairs", "length bomb", "one item", "text", "no list", "no bytes",
         "map", "extension", "trailing", "not shortest", "huge"],
)  # fmt: skip
def test_bytes_that_are_no_charter_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Charter.from_bytes(data, MANIFEST.swarm_id)
    assert reason_of(caught) == "charter"


# -- invite --------------------------------------------------------------------------------------

INVITE = Invite(MANIFEST.swarm_id, (ADDRESS, f"/dns4/example.org/tcp/1/p2p/{BERT.peer_id}"), "Sums")


def test_an_invite_is_one_word_and_survives_copying() -> None:
    text = INVITE.encode()
    assert text.isalnum()
    assert text.isascii()
    assert Invite.decode(text) == INVITE
    assert Invite.decode(f"  {text[:40]}\n\t{text[40:]}\r\n") == INVITE


def test_the_largest_invite_can_be_read() -> None:
    address = "/" + "x" * (255 - len(ADDRESS)) + ADDRESS
    invite = Invite(bytes(32), (address,) * 16, "n" * 64)
    assert len(address) == 256
    assert Invite.decode(invite.encode()) == invite


def test_any_one_wrong_character_is_noticed() -> None:
    text = INVITE.encode()
    for place in range(6, len(text)):
        wrong = text[:place] + ("b" if text[place] != "b" else "c") + text[place + 1 :]
        with pytest.raises(UsageError, match="checksum"):
            Invite.decode(wrong)
        with pytest.raises(UsageError, match="checksum"):
            Invite.decode(text[:place] + text[place + 1 :])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with 'swarm1'"),
        ("hello", "begins with 'swarm1'"),
        ("Swarm1abc", "begins with 'swarm1'"),
        ("swarm2abc", "newer version"),
        ("swarm1", "checksum"),
        (INVITE.encode()[:-1], "checksum"),
        ("swarm1abc0def", "0, O, I, l"),
        ("swarm1äbc", "0, O, I, l"),
        ("swarm1" + "a" * 100_000, "above 8192"),
    ],
)
def test_a_damaged_invite_names_the_fault(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Invite.decode(text)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91" * 2000, msgpack.packb([bytes(32), "", []]),
     msgpack.packb([bytes(31), "", [ADDRESS]]), msgpack.packb(["a" * 32, "", [ADDRESS]]),
     msgpack.packb([bytes(32), "", [1]]), msgpack.packb([bytes(32), "", [ADDRESS] * 17]),
     msgpack.packb([bytes(32), "\x1b[31m", [ADDRESS]]), msgpack.packb([bytes(32), "", ["/ip4"]])],
)  # fmt: skip
def test_a_wrong_invite_with_a_right_checksum_is_refused(payload: bytes) -> None:
    checksum = hashlib.sha256(b"swarm-node invite 1\0" + payload).digest()[:4]
    text = "swarm1" + module.base58.b58encode(payload + checksum).decode()
    with pytest.raises(UsageError, match="invite: "):
        Invite.decode(text)


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:31337", "/ip4/127.0.0.1/tcp/1", ADDRESS + "x", ADDRESS + "\n", " " + ADDRESS,
     "/" + "x" * 256 + ADDRESS],
)  # fmt: skip
def test_an_address_names_its_peer(address: str) -> None:
    with pytest.raises(UsageError, match="multiaddress"):
        Invite(bytes(32), (address,))
