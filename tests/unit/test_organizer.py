"""What an organizer is told while a swarm is made, and who may amend it."""

import asyncio
import json
import logging
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarm.config import NodeConfig
from swarm.errors import IdentityError
from swarm.node import organizer
from swarm.node.amending import amend
from swarm.node.genesis import SeedOptions, make_genesis, store_genesis
from swarm.paths import DataDir
from swarm.protocol.charter import Charter
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.prompts import prompt_set_ref

SMALL = Path(__file__).parents[2] / "swarm" / "models" / "arith-small"


def options(tmp_path: Path, *, max_completion_tokens: int = 512) -> SeedOptions:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return SeedOptions((str(path),), SMALL, max_completion_tokens=max_completion_tokens)


async def test_another_than_the_organizer_learns_so_at_once(tmp_path: Path) -> None:
    chosen, founder = options(tmp_path), Identity.generate().peer_id
    genesis = await make_genesis(chosen, founder, 1_700_000_000.0)
    swarm_dir = store_genesis(genesis, chosen, DataDir(tmp_path / "data"))
    charter = Charter.from_genesis(genesis.manifest)
    with pytest.raises(IdentityError, match="no organizer"):
        amend(charter, swarm_dir, Identity.generate(), {"append": "is not even read"})


async def test_an_organizer_is_told_what_the_swarm_cannot_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await make_genesis(options(tmp_path), Identity.generate().peer_id, 1_700_000_000.0)
    accuracy, context = (record.getMessage() for record in caplog.records)
    assert "cannot measure their accuracy" in accuracy
    assert "context of 64 tokens" in context
    assert "--max-completion-tokens 512" in context


async def test_a_model_that_can_take_part_is_no_reason_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = options(tmp_path, max_completion_tokens=8)
    with caplog.at_level(logging.WARNING):
        await make_genesis(chosen, Identity.generate().peer_id, 1_700_000_000.0)
    assert "context" not in caplog.text


async def test_a_lost_set_that_cannot_be_kept_is_not_fetched_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: members would send it fifty times a second."""
    fetched, ref = [], prompt_set_ref(b"{}\n", [bytes(32)])

    class Members:
        charter = SimpleNamespace(all_sets=[ref])

        @staticmethod
        def stored_set(_: PromptSetRef) -> None:
            return None

        @staticmethod
        async def prompt_set(wanted: PromptSetRef, _: int) -> bytes:
            fetched.append(wanted)
            return b"{}\n"

    node = organizer.Organizer(NodeConfig(), DataDir(tmp_path), swarm_id=bytes(32))
    monkeypatch.setattr(node, "membership", Members(), raising=False)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.3):
            await node._keep_prompts()
    assert fetched == [ref]
