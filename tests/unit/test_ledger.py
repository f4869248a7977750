"""The ledger: sums by peer and day, what they say of a peer, damage, bounds."""

import math
import sqlite3
from pathlib import Path

import pytest

from swarm import ledger as module
from swarm.errors import DataError, SwarmError
from swarm.ledger import SCHEMA, Ledger, read_ledger

ME, ADA, BOB = "12D3KooWMe", "12D3KooWAda", "12D3KooWBob"
NOON_S = 1_800_014_400.0


class Clock:
    now_s = NOON_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def trade(ledger: Ledger) -> None:
    ledger.made(3, 300, 2400)
    for _ in range(4):
        ledger.fetched(ADA, 800)
    for _ in range(3):
        ledger.accepted(ADA, 100)
    ledger.rejected(ADA, "stale")
    ledger.given(ADA, 500)
    ledger.given(BOB, 70)
    ledger.trained(
        ME, samples=8, samples_trained=6, rewards=[1.0] * 4 + [0.0] * 4, divergences=[0.0] * 4
    )
    ledger.trained(
        ADA, samples=4, samples_trained=2, rewards=[1, 0, 0, 0], divergences=[1.0] * 9 + [100.0]
    )
    ledger.stepped()
    ledger.reported(ADA, 2, 5)
    ledger.reported(ADA, 3, 7)


def test_what_a_peer_was_good_for(path: Path) -> None:
    ledger = Ledger(path)
    trade(ledger)
    ledger.close()
    view = read_ledger(path, ME)
    assert view["schema"] == SCHEMA
    ada, bob = view["peers"]
    assert (ada["peer_id"], bob["peer_id"]) == (ADA, BOB)
    assert ada["accept_rate"] == 0.75
    assert ada["rejected_by_reason"] == {"stale": 1}
    assert ada["mean_reward"] == 0.25
    assert ada["trained_rate"] == 0.5
    assert ada["update_share"] == 0.25
    assert (ada["accepted_of_mine"], ada["trained_of_mine"]) == (3, 7)
    assert (ada["blobs_given"], bob["bytes_given"]) == (1, 70)
    assert bob["accept_rate"] is None
    assert bob["kl_p50"] is None
    assert view["own"]["update_share"] == 0.75
    assert view["own"]["mean_reward"] == 0.5


def test_totals(path: Path) -> None:
    ledger = Ledger(path)
    trade(ledger)
    ledger.close()
    view = read_ledger(path, ME)
    assert view["gave"] == {
        "groups_made": 3,
        "tokens_made": 300,
        "bytes_made": 2400,
        "blobs_sent": 2,
        "bytes_sent": 570,
        "groups_accepted_by_peers": 3,
        "samples_trained_by_peers": 7,
        "peers_that_accepted": 1,
    }
    assert view["got"] == {
        "groups_fetched": 4,
        "groups_accepted": 3,
        "groups_rejected": 1,
        "tokens": 300,
        "bytes": 3200,
        "samples_trained": 2,
        "update_share": 0.25,
    }


def test_quantiles_are_right_within_a_bin(path: Path) -> None:
    ledger = Ledger(path)
    values = [0.001 * 1.1**k for k in range(150)] + [math.inf, -3.0]
    ledger.trained(ADA, samples=0, samples_trained=0, rewards=[], divergences=values)
    (row,) = ledger.view(ME, 10)["peers"]
    ordered = sorted(values)
    for percent in (50, 90):
        exact = ordered[math.ceil(percent / 100 * len(ordered)) - 1]
        assert exact / 1.5 < row[f"kl_p{percent}"] < exact * 1.5
    ledger.close()


def test_sums_go_on_over_restarts_and_days(path: Path) -> None:
    clock = Clock()
    for _ in range(2):
        ledger = Ledger(path, clock)
        trade(ledger)
        ledger.close()
        clock.now_s += 86_400
    view = read_ledger(path, ME)
    assert view["peers"][0]["groups_accepted"] == 6
    assert view["peers"][0]["accepted_of_mine"] == 3  # a report replaces the one before it
    assert view["peers"][0]["last_s"] - view["peers"][0]["first_s"] == 86_400
    assert [day["groups_made"] for day in view["days"]] == [3, 3]
    assert view["days"][0]["day"] < view["days"][1]["day"]


def test_it_is_written_while_the_node_runs(path: Path) -> None:
    clock = Clock()
    ledger = Ledger(path, clock)
    ledger.made(1, 10, 80)
    assert read_ledger(path, ME)["gave"]["groups_made"] == 0
    clock.now_s += module.FLUSH_S
    ledger.made(1, 10, 80)
    assert read_ledger(path, ME)["gave"]["groups_made"] == 2
    ledger.close()


def test_a_write_that_fails_is_kept_and_said(path: Path) -> None:
    ledger = Ledger(path)
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    ledger.made(1, 10, 80)
    ledger.flush()
    assert "locked" in ledger.trouble
    other.rollback()
    other.close()
    ledger.flush()
    assert not ledger.trouble
    assert ledger.view(ME, 1)["gave"]["groups_made"] == 1
    ledger.close()


def test_strangers_do_not_fill_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 5)
    ledger = Ledger(path)
    ledger.accepted(ADA, 100)
    ledger.flush()
    for number in range(20):
        ledger.rejected(f"stranger {number}", "stale")
    ledger.flush()
    peers = ledger.view(ME, 100)["peers"]
    assert len(peers) == 5
    assert peers[0]["peer_id"] == ADA
    assert all(row["rejected_by_reason"] for row in peers[1:])
    ledger.close()


def test_publishers_for_tallies(path: Path) -> None:
    ledger = Ledger(path)
    trade(ledger)
    assert ledger.trades(5) == [(ADA, 3, 2)]
    ledger.close()


def test_a_damaged_file_is_put_aside(path: Path) -> None:
    path.write_bytes(b"not a database" * 100)
    ledger = Ledger(path)
    ledger.made(1, 10, 80)
    ledger.close()
    assert read_ledger(path, ME)["gave"]["groups_made"] == 1
    assert path.with_name("ledger.sqlite.damaged").read_bytes().startswith(b"not a database")


def test_one_that_is_locked_is_not_taken_for_damaged(path: Path) -> None:
    ledger = Ledger(path)
    ledger.made(1, 10, 80)
    ledger.close()
    other = sqlite3.connect(path)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SwarmError, match="locked"):
        Ledger(path)
    other.rollback()
    other.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert read_ledger(path, ME)["gave"]["groups_made"] == 1


def test_reading_what_is_none(path: Path) -> None:
    with pytest.raises(DataError, match="does not exist yet"):
        read_ledger(path, ME)
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(DataError, match="not a ledger"):
        read_ledger(path, ME)
