"""A swarm seen from outside, without a network."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_verify import MANIFEST

from swarm.node import observe
from swarm.node.membership import SwarmRecords
from swarm.protocol.charter import Charter
from swarm.protocol.invite import Invite


@pytest.mark.parametrize(("timeout_s", "searches"), [(60.0, 3), (0.0, 1)])
async def test_a_search_that_finds_nobody_is_repeated(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, searches: int
) -> None:
    charter = Charter.from_genesis(MANIFEST)
    made = 0

    @asynccontextmanager
    async def visiting(*_: Any) -> AsyncIterator[tuple[None, None]]:
        yield None, None

    async def fetch_charter(*_: Any) -> Charter:
        return charter

    async def read_swarm(*_: Any) -> Any:
        nonlocal made
        made += 1
        return SwarmRecords({"a member": object()} if made == 3 else {})  # type: ignore[dict-item]

    for fake in (visiting, fetch_charter, read_swarm):
        monkeypatch.setattr(observe, fake.__name__, fake)
    invite = Invite(charter.swarm_id, (f"/ip4/127.0.0.1/tcp/9/p2p/{MANIFEST.organizers[0]}",), "x")
    _, records = await observe._read(invite, timeout_s)
    assert len(records.heartbeats) == (searches == 3)
    assert made == searches
