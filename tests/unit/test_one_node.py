"""One node at a time works in a data directory."""

from pathlib import Path

import pytest

from swarm.config import LimitsSection, NodeConfig
from swarm.errors import TryAgainError
from swarm.node.organizer import Organizer
from swarm.node.store import BlobStore
from swarm.node.volunteer import Volunteer
from swarm.paths import DataDir
from swarm.protocol.codec import blob_hash

SWARM_ID = bytes(32)


@pytest.mark.parametrize("role", [Volunteer, Organizer])
async def test_a_second_one_leaves_alone_what_the_first_one_works_on(
    tmp_path: Path, role: type[Volunteer] | type[Organizer]
) -> None:
    """Also where it was given less room for rollouts."""
    held = DataDir(tmp_path / "data")
    held.lock()
    try:
        rollouts = held.swarm(SWARM_ID).rollouts_dir
        blob = bytes(2_000_000)
        assert BlobStore(rollouts, 10_000_000, 0).put(blob_hash(blob), blob)
        (rollouts / f"{'0' * 64}.draft").write_bytes(b"half")
        before = sorted(rollouts.parent.rglob("*"))
        config = NodeConfig(limits=LimitsSection(blob_store_mb=1))
        with pytest.raises(TryAgainError, match="in use"):
            await role(config, DataDir(tmp_path / "data"), swarm_id=SWARM_ID).run()
        assert sorted(rollouts.parent.rglob("*")) == before
    finally:
        held.unlock()
