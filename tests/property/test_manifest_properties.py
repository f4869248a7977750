"""Manifest, amendments, charter, invite and peer ids for any content and any bytes."""

import json
from typing import Any

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import RemoteProtocolError, UsageError
from swarm.protocol.charter import Amendment, AppendPrompts, Charter, CloseSwarm, MinimumVersion
from swarm.protocol.identity import Identity, peer_id_of, public_key_of
from swarm.protocol.invite import Invite
from swarm.protocol.manifest import Manifest
from swarm.protocol.roster import BanChange, RosterChange

ORGANIZERS = tuple(Identity(bytes([i]) * 32) for i in range(3))

hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)
texts = st.text(st.characters(codec="utf-8"), max_size=40)
times = st.floats(0, 2**40)
refs = st.fixed_dictionaries(
    {
        "sha256": hashes,
        "size_bytes": st.integers(1, 2**36),
        "count": st.integers(1, 1000),
        "tokens_sha256": hashes,
    }
)
small_names = st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True)
manifest_fields = st.fixed_dictionaries(
    {
        "schema": st.just("swarm-manifest/1"),
        "name": st.from_regex(r"[A-Za-z0-9 ._-]{1,64}", fullmatch=True),
        "created_s": times,
        "organizers": st.permutations([o.peer_id for o in ORGANIZERS]).map(tuple),
        "prompts": refs,
        "held_out": st.none() | refs,
        "out_of_distribution": st.none() | refs,
        "template": st.fixed_dictionaries({"text": texts.filter(len), "system": texts}),
        "tokenizer": st.fixed_dictionaries(
            {"fingerprint": hashes, "vocab_size": st.integers(100, 2**24), "name": texts}
        ),
        "sampling": st.fixed_dictionaries(
            {
                "temperature": st.floats(0.01, 10),
                "group_size": st.integers(2, 4096),
                "max_prompt_tokens": st.integers(1, 2**20),
                "max_completion_tokens": st.integers(1, 2**20),
                "stop_token_ids": st.sets(st.integers(0, 99), max_size=5).map(
                    lambda ids: tuple(sorted(ids))
                ),
            }
        ),
        "reward": st.fixed_dictionaries(
            {
                "name": small_names,
                "version": st.integers(1, 65_535),
                "params": st.dictionaries(
                    small_names,
                    texts
                    | st.integers(-(2**53) + 1, 2**53 - 1)
                    | st.floats(allow_nan=False, allow_infinity=False)
                    | st.booleans(),
                    max_size=4,
                ),
            }
        ),
        "record_shards": st.integers(1, 256),
    }
)
manifests = manifest_fields.map(Manifest.model_validate)
peers = st.lists(st.binary(min_size=32, max_size=32).map(peer_id_of), unique=True, max_size=8)


def peer_changes(kind):
    """Some added and others removed."""
    return st.builds(
        lambda ids, cut: kind(add=tuple(sorted(ids[:cut])), remove=tuple(sorted(ids[cut:]))),
        peers,
        st.integers(0, 8),
    )


actions = st.one_of(
    peer_changes(RosterChange),
    peer_changes(BanChange),
    refs.map(lambda ref: AppendPrompts.model_validate({"prompts": ref})),
    times.map(lambda at_s: CloseSwarm(at_s=at_s)),
    st.from_regex(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}", fullmatch=True).map(
        lambda version: MinimumVersion(version=version)
    ),
)
amendment_lists = st.lists(st.tuples(actions, times, st.sampled_from(ORGANIZERS)), max_size=4)


def charter_of(manifest: Manifest, amendments: list[Any]) -> Charter:
    charter = Charter.from_genesis(manifest)
    for action, created_s, organizer in amendments:
        charter = charter.amended(action, created_s, organizer)
    return charter


@given(manifest_fields)
def test_a_manifest_survives_its_bytes_and_keeps_its_id(fields) -> None:
    manifest = Manifest.model_validate(fields)
    data = manifest.to_bytes()
    again = Manifest.from_bytes(data)
    assert again == manifest
    assert again.to_bytes() == data
    assert again.swarm_id == manifest.swarm_id
    shuffled = Manifest.model_validate(dict(reversed(fields.items())))
    assert shuffled.swarm_id == manifest.swarm_id
    assert json.loads(data) == json.loads(json.dumps(fields))


@given(manifest_fields, manifest_fields, st.data())
@settings(max_examples=60)
def test_the_id_depends_on_every_field(fields, others, data) -> None:
    name = data.draw(st.sampled_from(sorted(fields.keys() - {"schema"})))
    one = Manifest.model_validate(fields)
    other = Manifest.model_validate({**fields, name: others[name]})
    assert (one.swarm_id == other.swarm_id) == (one.to_bytes() == other.to_bytes())
    same = json.dumps(fields[name], sort_keys=True) == json.dumps(others[name], sort_keys=True)
    assert (one.swarm_id == other.swarm_id) == same


@given(manifests, amendment_lists)
@settings(max_examples=50)
def test_a_charter_survives_its_bytes(manifest, amendments) -> None:
    charter = charter_of(manifest, amendments)
    assert Charter.from_bytes(charter.to_bytes(), manifest.swarm_id) == charter
    for amendment in charter.amendments:
        assert amendment.verify()
        assert Amendment.from_bytes(amendment.to_bytes()) == amendment


@given(st.lists(amendment_lists, min_size=2, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_members_that_hear_all_chains_agree_whatever_the_order(chains, random) -> None:
    charters = [charter_of(MANIFEST, amendments) for amendments in chains]
    ends = []
    for _ in range(3):
        random.shuffle(charters)
        kept = Charter.from_genesis(MANIFEST)
        for charter in charters:
            try:
                kept = kept.extended(charter.amendments)
            except RemoteProtocolError as error:
                assert error.reason == "charter_behind"  # noqa: PT017 - a right outcome
        ends.append(kept)
    assert ends[0] == ends[1] == ends[2]
    assert len(ends[0].amendments) == max(len(charter.amendments) for charter in charters)


MANIFEST = Manifest.model_validate(
    {
        "name": "Sums",
        "created_s": 0.0,
        "organizers": tuple(o.peer_id for o in ORGANIZERS),
        "prompts": {"sha256": "0" * 64, "size_bytes": 1, "count": 1, "tokens_sha256": "0" * 64},
        "template": {"text": "{{ prompt }}"},
        "tokenizer": {"fingerprint": "0" * 64, "vocab_size": 9, "name": ""},
        "sampling": {
            "temperature": 1.0,
            "group_size": 2,
            "max_prompt_tokens": 1,
            "max_completion_tokens": 1,
            "stop_token_ids": (),
        },
        "reward": {"name": "exact"},
    }
)
CHARTER = charter_of(MANIFEST, [(CloseSwarm(at_s=1.0), 0.0, ORGANIZERS[0])])
VALID = [MANIFEST.to_bytes(), CHARTER.amendments[0].to_bytes(), CHARTER.to_bytes()]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Valid bytes with a stretch replaced, taken out or put in."""
    data = draw(st.sampled_from(VALID))
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 8)))
    piece = draw(st.binary(max_size=8) | st.sampled_from([b"null", b"1e0", b"-1", b'"', b"{}"]))
    return data[:start] + piece + data[end:]


msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=9)
    | st.text(max_size=5) | st.sampled_from(VALID),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
).map(msgpack.packb)  # fmt: skip


@given(st.binary(max_size=200) | damaged() | msgpack_values)
@settings(max_examples=500)
def test_any_bytes_decode_or_raise_the_one_error(data) -> None:
    """INVARIANT: a value with exactly these bytes, or RemoteProtocolError."""
    for decode in (
        Manifest.from_bytes,
        Amendment.from_bytes,
        lambda data: Charter.from_bytes(data, MANIFEST.swarm_id),
    ):
        try:
            value = decode(data)
        except RemoteProtocolError:
            continue
        assert value.to_bytes() == data


@given(damaged())
@settings(max_examples=300)
def test_a_damaged_charter_never_becomes_other_terms(data) -> None:
    try:
        charter = Charter.from_bytes(data, MANIFEST.swarm_id)
    except RemoteProtocolError:
        return
    assert charter == CHARTER


peer_ids = st.binary(min_size=32, max_size=32).map(peer_id_of)
addresses = st.tuples(st.from_regex(r"(/[!-~]{1,20}){1,4}", fullmatch=True), peer_ids).map(
    lambda parts: f"{parts[0]}/p2p/{parts[1]}"
)


@given(
    st.binary(min_size=32, max_size=32),
    st.lists(addresses, min_size=1, max_size=4).map(tuple),
    st.from_regex(r"([A-Za-z0-9 ._-]{1,64})?", fullmatch=True),
)
@settings(max_examples=50)
def test_an_invite_survives_its_text(swarm_id, invite_addresses, name) -> None:
    invite = Invite(swarm_id, invite_addresses, name)
    text = invite.encode()
    assert Invite.decode(text) == invite
    assert Invite.decode(text).encode() == text


@given(st.text(max_size=60).map(lambda text: "swarm1" + text) | st.text(max_size=60))
@settings(max_examples=300)
def test_any_text_is_an_invite_or_a_usage_error(text) -> None:
    try:
        invite = Invite.decode(text)
    except UsageError:
        return
    assert invite.encode() == "".join(text.split())


@given(st.binary(min_size=32, max_size=32))
def test_a_public_key_survives_its_peer_id(public_key) -> None:
    peer_id = peer_id_of(public_key)
    assert len(peer_id) == 52
    assert public_key_of(peer_id) == public_key


@given(
    st.text(max_size=60)
    | st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=52,
              max_size=52)
    | st.tuples(st.just("12D3KooW"), st.text("123456789ABCDEFabcdef", min_size=44, max_size=44))
    .map("".join)
)  # fmt: skip
@settings(max_examples=300)
def test_any_text_is_a_peer_id_or_the_one_error(text) -> None:
    try:
        public_key = public_key_of(text)
    except RemoteProtocolError as error:
        assert error.reason == "peer_id"  # noqa: PT017 - both outcomes are right
        return
    assert peer_id_of(public_key) == text
