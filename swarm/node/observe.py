"""A whole swarm seen from outside: `swarm-node status INVITE`, without a running node.

Owns: a short-lived client of the DHT that reads manifest and heartbeats.
"""

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swarm.errors import IdentityError, RemoteProtocolError, UnreachableError
from swarm.model_memory import Workload
from swarm.net.exchange import Exchange, ExchangeError
from swarm.net.overlay import Overlay
from swarm.node.fitting import candidates, memory_for_learner
from swarm.node.member import member_row
from swarm.node.membership import SwarmRecords, read_swarm
from swarm.protocol.charter import Charter
from swarm.protocol.codec import blob_bytes
from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite
from swarm.protocol.reasons import Reason
from swarm.protocol.tallies import tag_of


@asynccontextmanager
async def visiting(
    swarm_id: bytes, addresses: Sequence[str]
) -> AsyncIterator[tuple[Overlay, Exchange]]:
    """A client of the network with an identity for once: it asks, and serves nothing."""
    with tempfile.TemporaryDirectory(prefix="swarm-node-") as folder:
        identity_path = Path(folder) / "identity.key"
        overlay = Overlay(
            Identity.load_or_create(identity_path),
            identity_path,
            host="127.0.0.1",
            port=0,
            announce=(),
            runtime_dir=Path(folder),
            bootstrap=addresses,
            client=True,
        )
        exchange = Exchange(
            overlay,
            swarm_id,
            charter=lambda: None,
            blob=lambda _: None,
            on_notice=lambda _peer, _body: None,
        )
        try:
            await overlay.start()
            yield overlay, exchange
        finally:
            await overlay.stop()


async def swarm_snapshot(invite: Invite, timeout_s: float) -> dict[str, Any]:
    """Members and terms of a swarm, now.

    Raises:
        UnreachableError: no address of the invite answers; names each one's result.
        IdentityError: the swarm has a roster.
    """
    charter, records = await _read(invite, timeout_s)
    manifest = charter.manifest
    members = _members(records)
    return {
        "schema": "swarm-node/swarm/1",
        "swarm": {
            "id": invite.swarm_id.hex(),
            "name": manifest.name,
            "prompts": charter.prompt_count,
            "amendments": len(charter.amendments),
            "closes_at_s": charter.closes_at_s,
            "reward": f"{manifest.reward.name} v{manifest.reward.version}",
            "tokenizer": manifest.tokenizer.name,
        },
        "totals": _totals(members),
        "members": members,
    }


async def offer(invite: Invite, timeout_s: float) -> dict[str, Any]:
    """What an invite invites to: terms, models that would do, traffic.

    Raises:
        UnreachableError: no address of the invite answers; names each one's result.
    """
    charter, records = await _read(invite, timeout_s)
    manifest = charter.manifest
    sampling = manifest.sampling
    totals = _totals(_members(records))
    group_tokens = sampling.group_size * sampling.max_completion_tokens
    room = memory_for_learner()
    workload = Workload(
        sampling.group_size, sampling.max_prompt_tokens, sampling.max_completion_tokens
    )
    return {
        "schema": "swarm-node/offer/1",
        "id": invite.swarm_id.hex(),
        "name": manifest.name,
        "organizers": list(manifest.organizers),
        "created_s": manifest.created_s,
        "closes_at_s": charter.closes_at_s,
        "task": {
            "prompts": charter.prompt_count,
            "prompt_bytes": sum(ref.size_bytes for ref in charter.prompt_sets),
            "held_out": manifest.held_out.count if manifest.held_out else 0,
            "reward": f"{manifest.reward.name} v{manifest.reward.version}",
        },
        "sampling": {
            "group_size": sampling.group_size,
            "max_prompt_tokens": sampling.max_prompt_tokens,
            "max_completion_tokens": sampling.max_completion_tokens,
            "temperature": sampling.temperature,
        },
        "tokenizer": {
            "name": manifest.tokenizer.name,
            "vocab_size": manifest.tokenizer.vocab_size,
            "fingerprint": manifest.tokenizer.fingerprint,
        },
        "models": candidates(manifest.tokenizer.vocab_size, workload, room),
        "room": {"where": room.where, "memory_bytes": room.memory_bytes},
        "traffic": {
            "group_bytes": blob_bytes(sampling.group_size, group_tokens),
            "swarm_bytes_per_hour": round(
                totals["tokens_per_s"] * 3600 * (blob_bytes(1, 1000) - blob_bytes(1, 0)) / 1000
            ),
        },
        "totals": totals,
    }


async def _read(invite: Invite, timeout_s: float) -> tuple[Charter, SwarmRecords]:
    deadline = time.monotonic() + timeout_s
    async with visiting(invite.swarm_id, invite.addresses) as (overlay, exchange):
        charter = await fetch_charter(overlay, exchange, invite.swarm_id, timeout_s)
        records = await read_swarm(overlay, charter)
        # Who gave the terms is a member: a search that finds none came before the DHT's first ping.
        while not records.heartbeats and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
            records = await read_swarm(overlay, charter)
        return charter, records


def _members(records: SwarmRecords) -> list[dict[str, Any]]:
    now = time.time()
    useful: Counter[bytes] = Counter()
    for tallies in records.tallies.values():
        useful.update({tally.tag: tally.accepted for tally in tallies})
    return [
        {
            **member_row(peer_id, heartbeat, now),
            "groups_accepted_by_others": useful[tag_of(peer_id)],
        }
        for peer_id, heartbeat in records.heartbeats.items()
        if heartbeat.state != "left"
    ]


def _totals(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "members": len(members),
        "sampling": sum(m["sampling"] for m in members),
        "tokens_per_s": round(sum(m["tokens_per_s"] for m in members), 1),
        "groups_made": sum(m["groups_made"] for m in members),
        "groups_accepted_by_others": sum(m["groups_accepted_by_others"] for m in members),
    }


async def fetch_charter(
    overlay: Overlay, exchange: Exchange, swarm_id: bytes, timeout_s: float
) -> Charter:
    """A swarm's terms from the first member that answers.

    Raises:
        UnreachableError: none does; names each address's result.
        IdentityError: the swarm has a roster.
    """
    deadline = time.monotonic() + timeout_s
    failures: dict[str, str] = {}
    while True:
        for peer in overlay.connected():
            try:
                return Charter.from_bytes(await exchange.fetch_charter(peer), swarm_id)
            except ExchangeError as error:
                if error.reason is Reason.NOT_MEMBER:
                    raise IdentityError(
                        "this swarm has a roster, and only its members see it; ask a member's own "
                        "node: `swarm-node status`"
                    ) from None
                failures[peer] = str(error)
            except RemoteProtocolError as error:
                failures[peer] = str(error)
        if time.monotonic() > deadline:
            lines = [f"  {k}: {v}" for k, v in {**overlay.dial_results, **failures}.items()]
            lines = lines or [f"  nothing came of dialling in {timeout_s:g} s; allow more time"]
            raise UnreachableError("no member of the swarm answers:\n" + "\n".join(lines))
        await asyncio.sleep(0.1)
