"""Who is let in: the owner's word, then the roster, then the organizers' advice."""

import json
from pathlib import Path

import pytest
from sample_charter import ANNA, BERT, CHARTER, MALLORY, chain

from swarm.errors import DataError, UsageError
from swarm.node.admission import Admission
from swarm.protocol.roster import BanChange, RosterChange

CARL = MALLORY.peer_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bans.json"


def admission(path: Path, *, follow_bans: bool = True) -> Admission:
    return Admission(path, follow_bans=follow_bans)


def test_an_open_swarm_lets_everybody_in(path: Path) -> None:
    door = admission(path)
    assert door.refusal(CARL) is None
    door.obey(CHARTER)
    assert door.refusal(CARL) is None
    assert door.view()["open"] is True
    assert not path.exists()


def test_a_roster_lets_its_members_in(path: Path) -> None:
    door = admission(path)
    door.obey(chain(RosterChange()))
    assert door.refusal(CARL) == "not_member"
    assert door.refusal(ANNA.peer_id) is None
    door.obey(chain(RosterChange(add=(CARL,))))
    assert door.refusal(CARL) is None
    assert (door.view()["open"], door.view()["members"]) == (False, 3)


def test_the_owners_bans_hold_across_restarts_and_over_the_roster(path: Path) -> None:
    door = admission(path)
    door.ban(CARL)
    door.ban(BERT.peer_id)
    door = admission(path)
    door.obey(chain(RosterChange(add=(CARL,))))
    assert door.refusal(CARL) == door.refusal(BERT.peer_id) == "banned"
    assert door.view()["banned_here"] == sorted((CARL, BERT.peer_id))
    door.unban(CARL)
    assert door.refusal(CARL) is None
    assert admission(path).refusal(BERT.peer_id) == "banned"


def test_the_organizers_bans_are_followed_unless_the_owner_says_otherwise(path: Path) -> None:
    charter = chain(BanChange(add=(CARL,)))
    door = admission(path)
    door.obey(charter)
    assert door.refusal(CARL) == "banned"
    deaf = admission(path, follow_bans=False)
    deaf.obey(charter)
    assert deaf.refusal(CARL) is None
    door.unban(CARL)
    again = admission(path)
    again.obey(charter)
    assert again.refusal(CARL) is None
    again.ban(CARL)  # takes the exception back
    again.unban(CARL)
    assert json.loads(path.read_text()) == {"allowed": [CARL], "banned": []}


def test_what_is_no_peer_id_is_refused(path: Path) -> None:
    for change in (admission(path).ban, admission(path).unban):
        with pytest.raises(UsageError, match="12D3Koo"):
            change("12D3KooWshort")
    assert not path.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"banned": [1], "allowed": []}', '{"banned": 5'])
def test_a_damaged_list_is_named(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(DataError, match=r"bans\.json"):
        admission(path)
