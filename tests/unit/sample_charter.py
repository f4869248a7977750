"""A manifest and a charter of two organizers, for tests."""

import json
from typing import Any

import pytest

from swarm.errors import RemoteProtocolError
from swarm.protocol.charter import Action, Charter
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest, PromptSetRef

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
