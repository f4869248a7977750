"""Strikes, backoff and quarantine over made-up time."""

import json

import pytest

from swarm.protocol import peers as module
from swarm.protocol.peers import PeerTable
from swarm.protocol.reasons import Reason
from swarm.protocol.receipts import Receipt

ANNA, BERT = "12D3KooWAnna", "12D3KooWBert"


def struck(times: int, now_s: float = 0.0) -> PeerTable:
    table = PeerTable()
    for _ in range(times):
        table.rejected(ANNA, Reason.TOKEN, now_s)
    return table


def test_an_unknown_peer_is_welcome() -> None:
    table = PeerTable()
    assert table.may_fetch(ANNA, 0.0)
    assert not table.quarantined(ANNA, 0.0)
    assert table.strikes(ANNA, 0.0) == 0.0
    assert len(table) == 0


def test_three_strikes_mean_quarantine_and_two_do_not() -> None:
    assert not struck(2).quarantined(ANNA, 0.0)
    table = struck(3)
    assert table.quarantined(ANNA, 0.0)
    assert not table.may_fetch(ANNA, 0.0)
    assert not table.quarantined(BERT, 0.0)


def test_strikes_halve_in_ten_minutes_and_quarantine_ends_at_one() -> None:
    table = struck(4)
    assert table.strikes(ANNA, 600.0) == pytest.approx(2.0)
    assert table.quarantined(ANNA, 1199.0)
    assert not table.quarantined(ANNA, 1200.0)
    assert table.strikes(ANNA, 1200.0) == pytest.approx(1.0)
    assert table.may_fetch(ANNA, 1200.0)


def test_strikes_far_apart_never_add_up() -> None:
    table = PeerTable()
    for hour in range(100):
        table.rejected(ANNA, Reason.LOGPROB, hour * 3600.0)
        assert not table.quarantined(ANNA, hour * 3600.0)


def test_after_release_fewer_strikes_bring_it_back() -> None:
    table = struck(3)
    released_s = 951.0  # 600 * log2(3)
    assert not table.quarantined(ANNA, released_s)
    table.rejected(ANNA, Reason.TOKEN, released_s)
    assert not table.quarantined(ANNA, released_s)
    table.rejected(ANNA, Reason.TOKEN, released_s)
    assert table.quarantined(ANNA, released_s)


def test_a_long_flood_ends_in_50_minutes_of_quarantine_not_for_ever() -> None:
    table = struck(100_000)
    assert table.strikes(ANNA, 0.0) == 32.0
    assert table.quarantined(ANNA, 2999.0)
    assert not table.quarantined(ANNA, 3000.0)


@pytest.mark.parametrize("reason", [reason for reason in Reason if not reason.provable])
def test_no_number_of_neutral_rejects_is_a_strike(reason: Reason) -> None:
    table = PeerTable()
    for _ in range(1000):
        table.rejected(ANNA, reason, 0.0)
    assert table.strikes(ANNA, 0.0) == 0.0
    assert table.may_fetch(ANNA, 0.0)


def test_a_reason_comes_as_text_from_the_error_too() -> None:
    table = PeerTable()
    for _ in range(3):
        table.rejected(ANNA, "malformed", 0.0)
    table.rejected(BERT, "a reason of another layer", 0.0)
    assert table.quarantined(ANNA, 0.0)
    assert table.strikes(BERT, 0.0) == 0.0


def test_backoff_doubles_up_to_its_limit_and_ends_with_a_success() -> None:
    table = PeerTable()
    waits = []
    for _ in range(12):
        table.fetch_failed(ANNA, 100.0)
        waits.append(table.view(100.0)[0]["retry_in_s"])
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert not table.may_fetch(ANNA, 399.9)
    assert table.may_fetch(ANNA, 400.0)
    assert table.strikes(ANNA, 100.0) == 0.0
    table.fetched(ANNA, 10, 200.0)  # by another download, begun before
    assert table.may_fetch(ANNA, 200.0)
    table.fetch_failed(ANNA, 401.0)
    assert table.view(401.0)[0]["retry_in_s"] == 1.0


def test_endless_failures_do_not_overflow() -> None:
    table = PeerTable()
    for _ in range(5000):
        table.fetch_failed(ANNA, 0.0)
    assert table.may_fetch(ANNA, 300.0)


def test_a_clock_that_steps_back_does_not_multiply_strikes() -> None:
    table = struck(2, now_s=1000.0)
    assert table.strikes(ANNA, 0.0) == 2.0


def test_the_view_counts_everything_and_is_plain_data() -> None:
    table = PeerTable()
    table.seen(BERT, 1.0)
    table.fetched(ANNA, 100, 2.0)
    table.fetched(ANNA, 50, 3.0)
    table.accepted(ANNA, 3.0)
    table.trained(ANNA, kept=3, drifted=2, now_s=4.0)
    table.rejected(ANNA, Reason.TOKEN, 5.0)
    table.rejected(ANNA, "ownership", 5.0)
    table.rejected(ANNA, Reason.OWNERSHIP, 5.0)
    table.fetch_failed(ANNA, 5.0)
    first, second = table.view(6.0)
    assert json.loads(json.dumps(first)) == first
    assert first == {
        "peer_id": ANNA,
        "seen_ago_s": 1.0,
        "fetched": 2,
        "fetched_bytes": 150,
        "accepted": 1,
        "samples_trained": 3,
        "samples_drifted": 2,
        "rejected": {"token": 1, "ownership": 2},
        "fetch_failures": 1,
        "retry_in_s": 0.0,
        "strikes": 0.999,
        "quarantined": False,
        "quarantine_left_s": 0.0,
    }
    assert (second["peer_id"], second["seen_ago_s"]) == (BERT, 5.0)


def outcomes(table: PeerTable, accepted: int, now_s: float = 0.0, **rejected: int) -> PeerTable:
    for _ in range(accepted):
        table.accepted(ANNA, now_s)
    for reason, count in rejected.items():
        for _ in range(count):
            table.rejected(ANNA, Reason(reason), now_s)
    return table


def verdict(table: PeerTable, now_s: float = 0.0) -> str:
    receipt = table.receipt(ANNA, now_s)
    assert receipt is not None
    return receipt.verdict


def test_who_published_nothing_gets_no_receipt() -> None:
    table = PeerTable()
    assert table.receipt(ANNA, 0.0) is None
    table.seen(ANNA, 0.0)
    assert table.receipt(ANNA, 0.0) is None


def test_a_receipt_names_the_reason_of_most_groups() -> None:
    table = outcomes(PeerTable(), 3, ownership=2, prompt_unknown=1)
    assert table.receipt(ANNA, 0.0) == Receipt("ok", judged=6, taken=3)
    outcomes(table, 0, ownership=1)
    assert table.receipt(ANNA, 0.0) == Receipt("ownership", judged=7, taken=3)


def test_room_age_and_duplicates_say_nothing_about_a_publisher() -> None:
    assert verdict(outcomes(PeerTable(), 1, no_room=50, duplicate=50, age=50)) == "ok"


def test_a_receipt_says_how_long_a_quarantine_lasts_and_why() -> None:
    table = outcomes(PeerTable(), 40, token=4, ownership=100)
    receipt = table.receipt(ANNA, 0.0)
    assert receipt is not None
    assert (receipt.verdict, receipt.quarantine_s) == ("token", 1200)
    late = table.receipt(ANNA, 1199.5)
    assert late is not None
    assert (late.verdict, late.quarantine_s) == ("token", 1)


def test_drift_is_when_the_filter_drops_most_good_samples_for_divergence() -> None:
    table = outcomes(PeerTable(), 3)
    table.trained(ANNA, kept=0, drifted=3, now_s=0.0)
    assert verdict(table) == "ok"  # too few to say
    table.trained(ANNA, kept=3, drifted=1, now_s=0.0)
    assert verdict(table) == "drift"
    table.trained(ANNA, kept=1, drifted=0, now_s=0.0)
    assert verdict(table) == "ok"


def test_old_outcomes_no_longer_decide() -> None:
    table = outcomes(PeerTable(), 0, ownership=8)
    outcomes(table, 2, now_s=900.0)  # three half-lives later, eight count as one
    assert verdict(table, 900.0) == "ok"
    assert table.receipt(ANNA, 10_000.0) is None


def test_a_pardon_frees_at_once() -> None:
    table = struck(5)
    table.fetch_failed(ANNA, 0.0)
    table.pardon(ANNA)
    table.pardon(BERT)
    assert table.may_fetch(ANNA, 0.0)
    assert table.strikes(ANNA, 0.0) == 0.0
    assert len(table) == 1


def test_the_least_recently_seen_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 3)
    table = PeerTable()
    for now_s, peer in enumerate(["a", "b", "c", "a", "d"]):
        table.seen(peer, float(now_s))
    assert [entry["peer_id"] for entry in table.view(9.0)] == ["d", "a", "c"]


def test_new_identities_do_not_free_an_offender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 3)
    table = struck(3)
    for number in range(50):
        table.seen(f"new{number}", 1.0)
    assert table.quarantined(ANNA, 1.0)
    assert len(table) == 3


def test_a_table_full_of_offenders_still_takes_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PEERS", 2)
    table = PeerTable()
    for peer in ("a", "b"):
        for _ in range(3):
            table.rejected(peer, Reason.TOKEN, 0.0)
    table.seen("c", 1.0)
    assert [entry["peer_id"] for entry in table.view(1.0)] == ["c", "b"]
