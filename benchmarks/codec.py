"""Rows of the codec: what bytes of groups cost, in time and on the wire.

Owns: a group of 64 completions and the formats that it is compared with.
Does not know: how rows are shown.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from benchmarks.measure import (
    ROOT,
    NotMeasuredError,
    Row,
    Timing,
    Worker,
    interleave,
    on_cpu,
    peers_python,
    ratio,
)
from swarm.protocol.charter import Charter
from swarm.protocol.codec import BYTES_PER_TOKEN, blob_hash, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest
from swarm.protocol.records import Announcement, GroupRef
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.protocol.verify import verify_group

COMPLETIONS = 64
VOCABULARY = 151_936
STOP_ID = VOCABULARY - 1
PROMPT_HASH = bytes(32)


def charter(
    max_tokens: int, completions: int = COMPLETIONS, vocabulary: int = VOCABULARY
) -> Charter:
    """Terms under which groups of so many completions are right."""
    reference = {"count": 1000, "sha256": "0" * 64, "size_bytes": 1000, "tokens_sha256": "0" * 64}
    manifest = Manifest.model_validate(
        {
            "schema": "swarm-manifest/1",
            "name": "bench",
            "created_s": 1.7e9,
            "organizers": (Identity(bytes(32)).peer_id,),
            "prompts": reference,
            "held_out": None,
            "out_of_distribution": None,
            "template": {"text": "{{ prompt }}", "system": ""},
            "tokenizer": {"fingerprint": "0" * 64, "vocab_size": vocabulary, "name": "bench"},
            "sampling": {
                "temperature": 1.0,
                "group_size": completions,
                "max_prompt_tokens": 256,
                "max_completion_tokens": max_tokens,
                "stop_token_ids": (vocabulary - 1,),
            },
            "reward": {"name": "number", "version": 1, "params": {}},
            "record_shards": 1,
        }
    )
    return Charter.from_genesis(manifest)


def make_group(
    identity: Identity,
    terms: Charter,
    tokens: int,
    *,
    epoch: int = 0,
    prompt_id: int = 0,
    prompt_sha256: bytes = PROMPT_HASH,
) -> RolloutGroup:
    """A full-length group of random tokens with plausible log-probs."""
    rng = np.random.default_rng([epoch, prompt_id, *identity.public_key[:4]])
    sampling = terms.manifest.sampling
    n = sampling.group_size
    vocabulary = terms.manifest.tokenizer.vocab_size
    ids = rng.integers(0, vocabulary - 1, (n, tokens), dtype=np.int32)
    logprobs = -rng.exponential(0.5, (n, tokens)).astype(np.float32)
    finish = Finish.LENGTH
    if tokens < sampling.max_completion_tokens:
        ids[:, -1] = vocabulary - 1
        finish = Finish.STOP
    return RolloutGroup(
        swarm_id=terms.swarm_id,
        publisher=identity.peer_id,
        epoch=epoch,
        prompt_id=prompt_id,
        prompt_sha256=prompt_sha256,
        policy_step=0,
        created_ms=1_700_000_000_000,
        temperature=float(np.float32(sampling.temperature)),
        rollouts=tuple(Rollout(*pair, finish) for pair in zip(ids, logprobs, strict=True)),
        claimed_rewards=np.zeros(n, np.float32),
    )


def rows(quick: bool) -> list[Row]:
    """Encode, decode and verify against the limit and the list formats; bytes of each."""
    tokens, rounds = (32, 3) if quick else (512, 40)
    identity, terms = Identity(b"\1" * 32), charter(tokens)
    group = make_group(identity, terms, tokens)
    blob = encode_group(group, identity)
    ref = GroupRef.of(group, blob_hash(blob), len(blob))
    prompt_hashes = [PROMPT_HASH]

    def encode() -> None:
        blob_hash(encode_group(group, identity))

    def decode() -> None:
        verify_group(
            blob,
            expected=ref,
            publisher=identity.peer_id,
            charter=terms,
            prompt_hashes=prompt_hashes,
            sampling_peers=frozenset(),
        )

    source = bytearray(blob)

    def limit() -> None:
        for copy in (bytes(source), bytes(source)):
            hashlib.sha256(copy).digest()

    lists: dict[str, list[np.ndarray]] = {
        "i": [rollout.token_ids for rollout in group.rollouts],
        "p": [rollout.logprobs for rollout in group.rollouts],
    }

    def as_lists() -> dict[str, Any]:
        return {key: [array.tolist() for array in arrays] for key, arrays in lists.items()}

    def back(found: dict[str, Any]) -> list[np.ndarray]:
        return [
            np.array(values, dtype)
            for key, dtype in (("i", np.int32), ("p", np.float32))
            for values in found[key]
        ]

    packed: dict[str, bytes] = {
        "msgpack": msgpack.packb(as_lists()),
        "json": json.dumps(as_lists()).encode(),
    }
    pack: dict[str, Callable[[], Any]] = {
        "msgpack": lambda: blob_hash(msgpack.packb(as_lists())),
        "json": lambda: blob_hash(json.dumps(as_lists()).encode()),
    }
    unpack: dict[str, Callable[[], Any]] = {
        "msgpack": lambda: (
            blob_hash(packed["msgpack"]),
            back(msgpack.unpackb(packed["msgpack"])),
        ),
        "json": lambda: (blob_hash(packed["json"]), back(json.loads(packed["json"]))),
    }
    where = f"{COMPLETIONS} completions x {tokens} tokens"
    result = []
    for what, ours, lists_of in (
        (f"encode, sign and hash a group, {where}", encode, pack),
        (f"hash, decode and verify a group, {where}", decode, unpack),
    ):
        # Apart, as the lists leave nothing in the caches to either.
        bound = interleave({"ours": on_cpu(ours), "limit": on_cpu(limit)}, rounds)
        against = {"ours": on_cpu(ours), **{name: on_cpu(f) for name, f in lists_of.items()}}
        result.append(_against_limit(what, bound))
        result.append(_against_lists(what, interleave(against, rounds), bound["limit"]))
    result.append(_bytes_row(len(blob), {k: len(v) for k, v in packed.items()}, where))
    result.extend(_genrl_rows(tokens, rounds, blob, encode, decode))
    result.append(_wire_row(32 if quick else 256))
    return result


def _ms(timing: Timing) -> float:
    return timing.median * 1e3


def _details(found: dict[str, Timing]) -> dict[str, Any]:
    return {name: timing.summary() for name, timing in found.items()}


def _against_limit(what: str, found: dict[str, Timing]) -> Row:
    share = ratio(found["limit"], found["ours"])
    return Row(
        what=what,
        unit="ms",
        ours=_ms(found["ours"]),
        limit=_ms(found["limit"]),
        limit_name="two copies and two sha256 of the bytes",
        ratio=share,
        ratio_of="limit / ours",
        aim=">= 0.6",
        met=share >= 0.6,
        cause="Beyond the two hashes it checks an Ed25519 signature (0.13 ms), makes 64 rollouts "
        "(0.1 ms), and checks tokens, stop rule and log-probs (0.1 ms). Tried: these checks on the "
        "arrays as they stand on the wire, which took a quarter of the time away; a body that is "
        "not copied before it is joined.",
        how=f"{len(found['ours'].values)} interleaved rounds, CPU time of one thread",
        details=_details(found),
    )


def _against_lists(what: str, found: dict[str, Timing], limit: Timing) -> Row:
    faster = {name: ratio(found[name], found["ours"]) for name in ("msgpack", "json")}
    return Row(
        what=what,
        unit="ms",
        ours=_ms(found["ours"]),
        peer=_ms(found["msgpack"]),
        peer_name=f"MessagePack lists, unsigned, unchecked (JSON: {_ms(found['json']):.1f} ms)",
        ratio=faster["msgpack"],
        ratio_of="peer / ours",
        aim=">= 20",
        met=min(faster.values()) >= 20,
        cause=f"Two hashes and two copies, the limit, are themselves only "
        f"{found['msgpack'].median / limit.median:.0f} times as fast as MessagePack lists, which "
        "are hashed once, signed not at all and not checked.",
        how="as above; lists are made of arrays and become arrays again, and are hashed once",
        details={"times_faster": faster},
    )


def _bytes_row(ours: int, others: dict[str, int], where: str) -> Row:
    share = ours / others["msgpack"]
    return Row(
        what=f"bytes of a group, {where}",
        unit="KB",
        ours=ours / 1e3,
        peer=others["msgpack"] / 1e3,
        peer_name=f"MessagePack lists (JSON: {others['json'] / 1e3:.0f} KB)",
        ratio=share,
        ratio_of="ours / peer",
        aim="<= 0.65",
        met=share <= 0.65,
        how="counted",
    )


def _genrl_rows(
    tokens: int,
    rounds: int,
    blob: bytes,
    encode: Callable[[], None],
    decode: Callable[[], None],
) -> list[Row]:
    """Its own serializer with text payloads, in the peers' environment."""

    def both() -> None:
        encode()
        decode()

    what = f"the same completions as text, {COMPLETIONS} x {tokens} tokens"
    name = "gensyn-genrl 0.3.0, text without log-probs"
    try:
        script = ROOT / "benchmarks" / "peers" / "genrl_codec.py"
        with Worker([peers_python(), str(script)]) as worker:
            size = worker.call(op="make", completions=COMPLETIONS, tokens=tokens)["bytes"]
            found = interleave(
                {
                    "ours": on_cpu(both),
                    "genrl": lambda: float(worker.call(op="both")["cpu_s"]),
                },
                rounds,
            )
    except NotMeasuredError as error:
        return [Row(what=what, unit="ms", ours=None, peer_name=name, how=f"not measured: {error}")]
    return [
        Row(
            what="write and read back: " + what,
            unit="ms",
            ours=_ms(found["ours"]),
            peer=_ms(found["genrl"]),
            peer_name=name,
            ratio=ratio(found["genrl"], found["ours"]),
            ratio_of="peer / ours",
            how="interleaved, each in its own process; ours also hashes, signs and verifies",
            details=_details(found),
        ),
        Row(
            what=f"bytes: {what}",
            unit="KB",
            ours=len(blob) / 1e3,
            peer=size / 1e3,
            peer_name=name,
            ratio=len(blob) / size,
            ratio_of="ours / peer",
            how="counted; shown beside ours, no log-prob of it can be trained on off-policy",
        ),
    ]


def _wire_row(tokens: int) -> Row:
    """All that one delivered copy of a group moves, but for TCP, TLS and the stream's opening."""
    identity, terms = Identity(b"\1" * 32), charter(tokens)
    group = make_group(identity, terms, tokens)
    blob = encode_group(group, identity)
    digest = blob_hash(blob)
    announcement = Announcement((1,), (GroupRef.of(group, digest, len(blob)),), 0, group.created_ms)
    body = announcement.pack()
    # The frames of `swarm.net.exchange`, each with its length, and the reader's last byte.
    frames = [
        {"op": "notice", "body": body, "swarm": terms.swarm_id},
        {"status": "ok", "sizes": [], "detail": ""},
        {"op": "blobs", "hashes": [digest], "swarm": terms.swarm_id},
        {"status": "ok", "sizes": [len(blob)], "detail": ""},
    ]
    moved = len(blob) + sum(4 + len(msgpack.packb(frame)) for frame in frames) + 2
    per_token = moved / group.n_tokens
    return Row(
        what=f"bytes on the wire per completion token, {COMPLETIONS} x {tokens} tokens",
        unit="bytes",
        ours=per_token,
        limit=float(BYTES_PER_TOKEN),
        limit_name="int32 id and float32 log-prob",
        ratio=per_token / BYTES_PER_TOKEN,
        ratio_of="ours / limit",
        aim="<= 8.2 bytes",
        met=per_token <= 8.2,
        how="counted: blob, its notice and all four frames, once each",
        details={"blob": len(blob), "announcement": len(body), "moved": moved},
    )
