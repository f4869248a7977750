"""The address book by itself, with a clock that the test moves."""

import pytest

from swarm.net import address_book
from swarm.net.address_book import CONNECTED, OWN_ADDRESS, AddressBook, Entry, parse_address
from swarm.protocol.identity import Identity

OWN = Identity(b"0" * 32).peer_id


def address(number: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{number}/p2p/{Identity(bytes([number]) * 32).peer_id}"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> AddressBook:
    return AddressBook(OWN, clock)


def added(book: AddressBook, number: int, *, pinned: bool = False) -> Entry:
    entry = book.add(address(number), pinned=pinned)
    assert isinstance(entry, Entry)
    return entry


def test_pinned_ones_are_always_due_and_the_others_when_asked_for(book: AddressBook) -> None:
    one, two = added(book, 1, pinned=True), added(book, 2)
    assert book.due([], all_of_them=False) == [one]
    assert book.due([], all_of_them=True) == [one, two]
    assert book.due([one.peer], all_of_them=True) == [two]
    assert book.pinned() == [address(1)]
    assert added(book, 2, pinned=True) is two
    assert book.pinned() == [address(1), address(2)]


def test_failures_are_retried_ever_more_rarely_but_for_ever(
    book: AddressBook, clock: Clock
) -> None:
    entry = added(book, 1, pinned=True)
    waits = []
    for _ in range(12):
        assert book.due([], all_of_them=False) == [entry]
        book.record(entry, "TCP refused")
        assert book.due([], all_of_them=False) == []
        waits.append(entry.next_try_s - clock.now_s)
        clock.now_s = entry.next_try_s
    for wait_s, around_s in zip(waits, [1, 2, 4, 8, 16, 32, *[60] * 6], strict=True):
        assert 0.75 * around_s <= wait_s <= 1.25 * around_s
    book.record(entry, CONNECTED)
    assert entry.next_try_s - clock.now_s <= 1.25
    book.record(entry, "TCP refused")
    book.retry_now()
    assert book.due([], all_of_them=False) == [entry]


def test_results_say_when_they_change(book: AddressBook) -> None:
    entry = added(book, 1)
    assert book.record(entry, "TCP refused")
    assert not book.record(entry, "TCP refused")
    assert book.record(entry, CONNECTED)
    assert book.results == {address(1): CONNECTED}


def test_of_too_many_the_one_that_failed_most_is_dropped(
    book: AddressBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address_book, "MAX_REMEMBERED", 3)
    pinned = [added(book, number, pinned=True) for number in (1, 2, 3, 4)]
    remembered = [added(book, number) for number in (5, 6, 7)]
    book.record(pinned[0], "failed")
    book.record(remembered[1], "failed")
    last = added(book, 8)
    due = book.due([], all_of_them=True)
    assert last in due
    assert remembered[0] in due
    assert book.results == {address(1): "failed"}
    assert book.pinned() == [address(number) for number in (1, 2, 3, 4)]
    assert isinstance(book.add(address(6)), Entry)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "/ip4/127.0.0.1/tcp/1",
        f"/p2p/{OWN}",
        f"/ip4/300.0.0.1/tcp/1/p2p/{OWN}",
        f"/ip4/127.0.0.1/tcp/99999/p2p/{OWN}",
        "/ip4/127.0.0.1/tcp/1/p2p/",
        "/ip4/127.0.0.1/tcp/1/p2p/nobody",
        f"/ip4/127.0.0.1/tcp/1/p2p/{OWN}/x",
        "/ip4/127.0.0.1/tcp/1/p2p/\0",
    ],
)
def test_what_is_no_address_is_said_and_not_kept(book: AddressBook, text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_address(text)
    assert str(book.add(text)).startswith("not an address")
    assert book.results == {}
    book.add(text, pinned=True)
    assert book.results[text].startswith("not an address")
    assert book.due([], all_of_them=True) == []


def test_own_addresses_are_left_out(book: AddressBook) -> None:
    assert book.add(f"/ip4/127.0.0.1/tcp/1/p2p/{OWN}", pinned=True) == OWN_ADDRESS
    assert book.results == {}


def test_a_relayed_address_keeps_its_relay() -> None:
    relay = f"/ip4/127.0.0.1/tcp/1/p2p/{address(1).rpartition('/')[2]}/p2p-circuit"
    assert parse_address(f"{relay}/p2p/{OWN}") == (relay, OWN)
