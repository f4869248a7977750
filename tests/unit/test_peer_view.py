"""What the owner sees of peers: every table put together, strangers' words made harmless."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from sample_charter import ANNA, BERT, MALLORY, chain
from test_membership import heartbeat

from swarm.node.admission import Admission
from swarm.node.membership import Member
from swarm.node.peer_view import peers_snapshot
from swarm.protocol.peers import PeerTable
from swarm.protocol.reasons import Reason
from swarm.protocol.receipts import Receipt, Reception
from swarm.protocol.roster import RosterChange
from swarm.status import peers_view

HOSTILE = "\x1b[2J[bold]Anna[/]\u202e\n"


@pytest.fixture
def admission(tmp_path: Path) -> Admission:
    return Admission(tmp_path / "bans.json", follow_bans=True)


def member(peer_id: str, name: str) -> Member:
    beat = heartbeat(0)
    object.__setattr__(beat, "name", name)
    return Member(peer_id, beat, 0.0)


def rendered(snapshot: dict[str, object]) -> str:
    console = Console(width=400, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(peers_view(snapshot))
    return capture.get()


def test_all_tables_come_together(admission: Admission) -> None:
    table, reception = PeerTable(), Reception()
    for _ in range(3):
        table.rejected(ANNA.peer_id, Reason.TOKEN, 10.0)
    table.fetch_failed(BERT.peer_id, 10.0)
    table.accepted(BERT.peer_id, 10.0)
    reception.record(BERT.peer_id, Receipt("drift", 9, 2, 5), 10.0)
    admission.obey(chain(RosterChange()))
    admission.ban(MALLORY.peer_id)
    members = {peer.peer_id: member(peer.peer_id, HOSTILE) for peer in (ANNA, BERT)}
    snapshot = peers_snapshot(table, members, admission, reception, 10.5)
    assert json.loads(json.dumps(snapshot)) == snapshot
    rows = {row["peer_id"]: row for row in snapshot["peers"]}
    assert {peer: row["state"] for peer, row in rows.items()} == {
        ANNA.peer_id: "quarantined",
        BERT.peer_id: "backoff",
        MALLORY.peer_id: "banned",
    }
    assert rows[BERT.peer_id]["receipt"] == {
        "verdict": "drift",
        "judged": 9,
        "taken": 2,
        "quarantine_s": 5,
    }
    assert rows[ANNA.peer_id]["receipt"] is None
    assert (rows[ANNA.peer_id]["here"], rows[MALLORY.peer_id]["here"]) == (True, False)
    assert rows[MALLORY.peer_id]["seen_ago_s"] is None

    shown = rendered(snapshot)
    assert "roster of 2 members" in shown
    assert "token 3" in shown
    assert "drift" in shown
    assert "(bold)Anna(/)" in shown
    assert not any(char in shown for char in "\x1b\u202e[")


def test_an_open_swarm_says_that_it_is_open(admission: Admission) -> None:
    snapshot = peers_snapshot(PeerTable(), {}, admission, Reception(), 0.0)
    assert "open swarm: whoever has the invite may take part" in rendered(snapshot)
    assert snapshot["peers"] == []
