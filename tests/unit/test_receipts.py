"""Receipts: read when well formed, counted over the peers that are there, forgotten with age."""

import json

import msgpack
import pytest

from swarm.protocol import receipts as module
from swarm.protocol.receipts import Receipt, Reception, complaint


def test_a_receipt_survives_its_map() -> None:
    receipt = Receipt("ownership", judged=7, taken=3, quarantine_s=5)
    packed = msgpack.packb({**receipt.to_map(), "later": 1})
    assert Receipt.from_map(msgpack.unpackb(packed)) == receipt
    assert len(msgpack.packb(receipt.to_map())) < 64


@pytest.mark.parametrize(
    "value",
    [
        None,
        "ok",
        [],
        {},
        {"w": "ok", "n": 1, "k": 1},
        {"w": "OK", "n": 1, "k": 1, "q": 0},
        {"w": "x" * 33, "n": 1, "k": 1, "q": 0},
        {"w": "ok\x1b[2J", "n": 1, "k": 1, "q": 0},
        {"w": "ok", "n": -1, "k": 1, "q": 0},
        {"w": "ok", "n": True, "k": 1, "q": 0},
        {"w": "ok", "n": 2**53, "k": 1, "q": 0},
    ],
)
def test_what_is_no_receipt_is_none(value: object) -> None:
    assert Receipt.from_map(value) is None


def test_the_view_counts_the_peers_that_are_there() -> None:
    reception = Reception()
    for number in range(9):
        verdict = "drift" if number < 7 else "ok"
        reception.record(f"peer{number}", Receipt(verdict, 1, 0), now_s=0.0)
    reception.record("peer0", Receipt("age", 1, 0), now_s=1.0)
    peers = [f"peer{number}" for number in range(9)]
    view = reception.view([*peers, "silent"], now_s=600.0)
    assert json.loads(json.dumps(view)) == view
    assert view == {"reporting": 9, "rejecting": 7, "verdicts": {"drift": 6, "ok": 2, "age": 1}}
    assert complaint(view) == "7 of 9 peers reject this node's groups: drift, age"
    assert reception.view(["gone"], now_s=600.0)["reporting"] == 0
    assert reception.view(peers, now_s=600.5)["reporting"] == 1  # the others' are too old


@pytest.mark.parametrize(("rejecting", "reporting"), [(0, 0), (1, 2), (4, 9)])
def test_a_minority_is_no_problem(rejecting: int, reporting: int) -> None:
    verdicts = {"ok": reporting - rejecting, "age": rejecting}
    view = {"reporting": reporting, "rejecting": rejecting, "verdicts": verdicts}
    assert complaint(view) == ""


def test_receipts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 2)
    reception = Reception()
    for peer in "aba" + "c":
        reception.record(peer, Receipt("ok", 1, 1), now_s=0.0)
    assert list(reception.current(0.0)) == ["a", "c"]


def test_a_peer_with_nothing_more_to_say_takes_its_last_word_back() -> None:
    reception = Reception()
    reception.record("peer", Receipt("not_member", 0, 0), now_s=0.0)
    assert reception.current(60.0)
    assert not reception.current(61.0)  # sooner than a verdict about groups
    reception.record("peer", None, now_s=0.0)
    assert not reception.current(0.0)
