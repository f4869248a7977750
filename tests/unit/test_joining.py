"""What `join` and `doctor` take from flags, node.toml, an invite and the last join."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from swarm.cli.arguments import Joining, joining
from swarm.config import NodeConfig
from swarm.paths import DataDir
from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite

ADDRESS = f"/ip4/192.0.2.1/tcp/1/p2p/{Identity(bytes(32)).peer_id}"
OLD, NEW = bytes(32), bytes([1]) * 32


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataDir:
    """A data directory, the default one, in which OLD was joined with 7 groups a step."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    place = DataDir(tmp_path / "swarm-node")
    place.create()
    place.current = OLD
    swarm_dir = place.swarm(OLD)
    swarm_dir.root.mkdir(parents=True)
    saved = NodeConfig.model_validate({"train": {"groups_per_step": 7}})
    swarm_dir.config_path.write_text(json.dumps(saved.model_dump(mode="json")))
    return place


def chosen(invite: bytes | None = None, config: Path | None = None, *, set: str = "") -> Joining:
    text = None if invite is None else Invite(invite, (ADDRESS,), "sums").encode()
    return joining(Namespace(invite=text, config=config, set=[set] if set else []))


def test_the_last_swarm_with_its_settings(place: DataDir) -> None:
    found = chosen()
    assert (found.swarm_id, found.addresses) == (OLD, ())
    assert found.config.train.groups_per_step == 7
    assert chosen(set="train.groups_per_step=3").config.train.groups_per_step == 3


def test_an_invite_to_a_swarm_that_was_joined_before(place: DataDir) -> None:
    found = chosen(OLD)
    assert (found.swarm_id, found.addresses) == (OLD, (ADDRESS,))
    assert found.config.train.groups_per_step == 7


def test_an_invite_to_another_swarm(place: DataDir) -> None:
    found = chosen(NEW)
    assert (found.swarm_id, found.addresses) == (NEW, (ADDRESS,))
    assert found.config == NodeConfig()


def test_a_file_names_settings_invite_and_data_directory(place: DataDir, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    invite = Invite(NEW, (ADDRESS,), "sums").encode()
    path.write_text(f'[node]\ninvite = "{invite}"\ndata_dir = "{tmp_path / "other"}"\n')
    found = chosen(config=path)
    assert (found.swarm_id, found.addresses) == (NEW, (ADDRESS,))
    assert found.data_dir.root == tmp_path / "other"
    assert chosen(OLD, path).swarm_id == OLD  # an argument goes before the file


def test_nothing_to_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert chosen().swarm_id is None
