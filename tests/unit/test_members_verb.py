"""Files of peer ids, and what `seed --members` makes of one."""

from pathlib import Path

import pytest
from sample_charter import ANNA, CHARTER, PEERS

from swarm.cli.peers import read_members
from swarm.cli.seed import _admit
from swarm.errors import DataError
from swarm.paths import SwarmDir
from swarm.protocol.charter import Charter


def test_a_line_has_an_id_and_whatever_one_likes(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_text(f"# friends\n\n{PEERS[0]} Anna's laptop\n  {PEERS[1]}#no name\n")
    assert read_members(path) == list(PEERS[:2])
    path.write_text("")
    assert read_members(path) == []


@pytest.mark.parametrize("text", [b"Anna\n", b"12D3KooW\x1b[2J\n", b"\xff\n"])
def test_what_is_no_id_is_named_with_its_place(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(text)
    with pytest.raises(DataError, match=r"ids\.txt") as caught:
        read_members(path)
    assert "\x1b" not in str(caught.value)
    with pytest.raises(DataError, match="nowhere"):
        read_members(tmp_path / "nowhere")


def test_a_roster_takes_what_it_lacks_and_is_signed_once(tmp_path: Path) -> None:
    swarm_dir = SwarmDir(tmp_path)
    _admit(None, CHARTER, swarm_dir, ANNA)
    assert not swarm_dir.charter_path.exists()  # an open swarm stays open

    def stored() -> Charter:
        return Charter.from_bytes(swarm_dir.charter_path.read_bytes(), CHARTER.swarm_id)

    _admit([], CHARTER, swarm_dir, ANNA)
    assert stored().members == set(CHARTER.manifest.organizers)
    _admit(list(PEERS[:2]), stored(), swarm_dir, ANNA)
    _admit(list(PEERS[1:3]), stored(), swarm_dir, ANNA)
    assert stored().members == {*PEERS[:3], *CHARTER.manifest.organizers}
    assert len(stored().amendments) == 3
    _admit(list(PEERS[:3]), stored(), swarm_dir, ANNA)
    assert len(stored().amendments) == 3
