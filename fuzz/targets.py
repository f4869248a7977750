"""What is fuzzed: everything that reads bytes which somebody else wrote.

Owns: a function for each reader, which returns for a value and for the one error that it may
raise, and raises for anything else; first inputs for each. Does not know: who makes the bytes
(atheris in `python -m fuzz`, the committed corpus in the tests).
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swarm.control import ControlServer
from swarm.errors import DataError, RemoteProtocolError, SwarmError, UsageError
from swarm.net import exchange
from swarm.protocol.charter import Amendment, Charter, CloseSwarm
from swarm.protocol.codec import CodecLimits, decode_group, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite
from swarm.protocol.manifest import Manifest, PromptSetRef
from swarm.protocol.prompts import Prompt, decode_prompt_set, encode_prompt_set
from swarm.protocol.records import (
    Announcement,
    GroupRef,
    Heartbeat,
    record_subkey,
    sign_record,
    verify_record,
)
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup

CORPUS = Path(__file__).parent / "corpus"

ANNA = Identity(b"\x01" * 32)
LIMITS = CodecLimits(max_group_size=8, max_completion_tokens=64)
KEY = b"\x02" * 20


class FoundError(AssertionError):
    """An input on which a reader breaks its promise."""


def codec(data: bytes) -> None:
    """A rollout group; bytes that begin with another letter are signed first, as a member can."""
    if data[:1] != b"S":
        data = _signed_group(data[1:])
    with contextlib.suppress(RemoteProtocolError):
        group = decode_group(data, LIMITS)
        _same(encode_group(group, ANNA) if group.publisher == ANNA.peer_id else data, data)


def _signed_group(data: bytes) -> bytes:
    """A blob with a member's signature around fields of the fuzzer's choice."""
    fields, rest = data[:98].ljust(98, b"\0"), data[98:]
    count, swarm_id, others = fields[:2], fields[2:34], fields[34:]
    each = 9 * min(int.from_bytes(count, "little"), 2 * LIMITS.max_group_size)
    header = b"SWRG\x01\x00" + count + swarm_id + ANNA.public_key + others + rest[:each]
    body = rest[each:]
    message = b"swarm-node group 1\0" + header + hashlib.sha256(body).digest()
    return header + ANNA.sign(message) + body


def _unsigned_group(blob: bytes) -> bytes:
    """What `_signed_group` makes the blob of."""
    each = 9 * int.from_bytes(blob[6:8], "little")
    return blob[6:40] + blob[72 : 136 + each] + blob[136 + each + 64 :]


def record(data: bytes) -> None:
    """A DHT record: its signature, and the bodies that a signature of a member makes possible."""
    subkey = record_subkey(ANNA.peer_id, data[:4])
    with contextlib.suppress(RemoteProtocolError):
        verify_record(KEY, subkey, 2e9, data, now_s=2e9)
    if data:
        value = sign_record(ANNA, KEY, subkey, 2e9, data[:900])
        _same(verify_record(KEY, subkey, 2e9, value, now_s=2e9).body, data[:900])
    for kind in (Heartbeat, Announcement):
        with contextlib.suppress(RemoteProtocolError):
            read: Any = kind.unpack(data)
            _same(kind.unpack(read.pack()), read)


def manifest(data: bytes) -> None:
    """Manifest, amendments, charter."""
    for kind in (Manifest, Amendment):
        with contextlib.suppress(RemoteProtocolError):
            _same(kind.from_bytes(data).to_bytes(), data)
    with contextlib.suppress(RemoteProtocolError):
        _same(Charter.from_bytes(data, _MANIFEST.swarm_id).to_bytes(), data)


def invite(data: bytes) -> None:
    """The line that people copy, with and without its right checksum."""
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(UsageError):
        _same(Invite.decode(text).encode(), "".join(text.split()))


def prompts(data: bytes) -> None:
    """A prompt set as its manifest names it, so that its hash is no obstacle."""
    reference = PromptSetRef(
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=max(1, len(data)),
        count=max(1, data.count(b"\n")),
        tokens_sha256="0" * 64,
    )
    with contextlib.suppress(RemoteProtocolError, DataError):
        decode_prompt_set(data, reference)


def control(data: bytes) -> None:
    """A line on the control socket."""

    async def handler(request: Mapping[str, Any]) -> dict[str, Any]:
        if "fault" in request:
            raise SwarmError("a fault")
        return {}

    server = ControlServer(Path("unused"), {"status": handler})
    answer = asyncio.run(server._answer(data))
    if not isinstance(answer.get("ok"), bool):
        raise FoundError(f"an answer without its verdict: {answer}")


def frame(data: bytes) -> None:
    """A frame of a stream, read as request and as reply."""

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        fields = await exchange._read_frame(reader)
        for part in (exchange._check_reply, exchange._hashes, exchange._notice_body):
            with contextlib.suppress(RemoteProtocolError, exchange.ExchangeError):
                part(fields)

    with contextlib.suppress(RemoteProtocolError, asyncio.IncompleteReadError):
        asyncio.run(read())


def _same(got: Any, wanted: Any) -> None:
    if got != wanted:
        raise FoundError(f"{got!r} and {wanted!r} should be the same")


_MANIFEST = Manifest.model_validate(
    {
        "name": "Sums",
        "created_s": 0.0,
        "organizers": (ANNA.peer_id,),
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

TARGETS: Mapping[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (codec, record, manifest, invite, prompts, control, frame)
}


def first_inputs(name: str) -> list[bytes]:
    """Whole inputs of every kind, for the fuzzer to change."""
    reference = GroupRef(
        hash=b"\x03" * 32, prompt_id=1, epoch=2, size_bytes=300, n_completions=2, n_tokens=5
    )
    charter = Charter.from_genesis(_MANIFEST)
    closed = charter.amended(CloseSwarm(at_s=1.0), 0.0, ANNA)
    blob = encode_group(_group(), ANNA)
    made: Mapping[str, list[bytes]] = {
        "codec": [blob, b"r" + _unsigned_group(blob)],
        "record": [
            sign_record(ANNA, KEY, record_subkey(ANNA.peer_id, b""), 2e9, b"body"),
            Announcement(
                versions=(1,), groups=(reference,), policy_step=3, created_ms=4
            ).pack(),
        ],
        "manifest": [_MANIFEST.to_bytes(), closed.amendments[0].to_bytes(), closed.to_bytes()],
        "invite": [
            Invite(
                _MANIFEST.swarm_id, (f"/ip4/127.0.0.1/tcp/9/p2p/{ANNA.peer_id}",), "Sums"
            ).encode().encode()
        ],
        "prompts": [
            encode_prompt_set(
                [
                    Prompt("1+1=", None, "2"),
                    Prompt(None, ({"role": "user", "content": "?"},), "3", "third", ("a",)),
                ]
            )
        ],
        "control": [b'{"command": "status"}\n', b'{"command": "status", "fault": 1}\n'],
        "frame": [
            exchange._frame({"op": "blobs", "hashes": [b"\x03" * 32], "swarm": b"\x04" * 32}),
            exchange._frame({"status": "ok", "sizes": [3, None]}),
            exchange._frame({"body": b"notice"}),
        ],
    }  # fmt: skip
    nested = [opening * 3000 for opening in (b"[", b'{"a":', b"\x91")]
    return made[name] + nested


def _group() -> RolloutGroup:
    rollouts = tuple(
        Rollout(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), Finish.STOP)
        for ids in ([5, 6, 1], [7, 1])
    )
    return RolloutGroup(
        swarm_id=_MANIFEST.swarm_id,
        publisher=ANNA.peer_id,
        epoch=2,
        prompt_id=1,
        prompt_sha256=b"\x05" * 32,
        policy_step=3,
        created_ms=4,
        temperature=1.0,
        rollouts=rollouts,
        claimed_rewards=np.zeros(len(rollouts), np.float32),
    )
