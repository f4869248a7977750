"""One node at a time works in a data directory."""

from pathlib import Path

import pytest

from swarm.cli.main import main
from swarm.node.store import BlobStore
from swarm.paths import DataDir
from swarm.protocol.codec import blob_hash
from tests.cli.answers import some_invite


@pytest.mark.parametrize("verb", ["join", "seed"])
def test_a_second_one_leaves_alone_what_the_first_one_works_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """Also its log, and where the second was given less room for rollouts."""
    held = DataDir(tmp_path / "data")
    with held.locked():
        rollouts = held.swarm(bytes(32)).rollouts_dir
        blob = bytes(2_000_000)
        assert BlobStore(rollouts, 10_000_000, 0).put(blob_hash(blob), blob)
        (rollouts / f"{'0' * 64}.draft").write_bytes(b"half")
        before = {path: path.stat().st_size for path in held.root.rglob("*")}
        small = ["--set", "limits.blob_store_mb=1", "--data-dir", str(held.root)]
        with pytest.raises(SystemExit, match="75"):
            main([verb, some_invite(), *small])
        assert "is in use by the node with pid" in capsys.readouterr().err
        assert {path: path.stat().st_size for path in held.root.rglob("*")} == before
