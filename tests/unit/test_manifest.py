"""The manifest: bounds, canonical form, the id."""

import hashlib
import json
from typing import Any

import pytest
from pydantic import ValidationError
from sample_charter import ANNA, FIELDS, MANIFEST, canonical, changed, reason_of

from swarm.errors import RemoteProtocolError
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest


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
