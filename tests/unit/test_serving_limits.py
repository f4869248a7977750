"""What serving may cost, by itself, with a clock that the test moves."""

import asyncio
from contextlib import ExitStack

import pytest

from swarm.net import serving_limits as module
from swarm.net.serving_limits import (
    CHUNK_BYTES,
    MAX_STREAMS_PER_PEER,
    MAX_TURNED_AWAY,
    MIN_STREAM_BYTES_PER_S,
    STREAM_BURST,
    STREAMS_PER_S,
    Pace,
    Place,
    StreamLimits,
    UploadLimit,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_chunks_of_all_streams_keep_to_the_rate() -> None:
    clock = Clock()
    limit = UploadLimit(1000.0, clock)
    assert [limit.reserve(500) for _ in range(4)] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    clock.now_s += 2.0
    assert limit.reserve(100) == 0.0
    clock.now_s += 60.0  # silence saves nothing up
    assert [limit.reserve(1000), limit.reserve(1)] == pytest.approx([0.0, 1.0])


def test_without_a_limit_nothing_waits() -> None:
    limit = UploadLimit(None, Clock())
    assert [limit.reserve(10**12) for _ in range(3)] == [0.0] * 3
    assert limit.streams(16) == 16


@pytest.mark.parametrize(("rate", "streams"), [(1.0, 1), (CHUNK_BYTES, 7), (1e9, 16)])
def test_a_low_rate_is_shared_by_fewer_streams(rate: float, streams: int) -> None:
    assert UploadLimit(rate, Clock()).streams(16) == streams


async def test_payloads_that_come_just_in_time_do_not_for_long() -> None:
    clock = Clock()
    pace = Pace(15.0, clock)
    async with pace.chunk(10):
        clock.now_s += 14.9
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10.0) as enough, pace.chunk(10):
            await asyncio.Event().wait()
    assert not enough.expired()


async def test_a_slow_stream_that_keeps_the_rate_goes_on() -> None:
    clock = Clock()
    pace = Pace(15.0, clock)
    for _ in range(100):
        async with pace.chunk(CHUNK_BYTES):
            clock.now_s += CHUNK_BYTES / MIN_STREAM_BYTES_PER_S


def place(limits: StreamLimits, peer: str) -> Place:
    """What a stream gets that ends at once."""
    with limits.place(peer) as given:
        return given


def test_a_peer_has_so_many_streams_then_is_put_off_then_dropped() -> None:
    limits = StreamLimits(16, Clock())
    with ExitStack() as stack:
        given = [
            stack.enter_context(limits.place("a")) for _ in range(2 * MAX_STREAMS_PER_PEER + 1)
        ]
        served, busy = given[:MAX_STREAMS_PER_PEER], given[MAX_STREAMS_PER_PEER:-1]
        assert (set(served), set(busy), given[-1]) == ({Place.SERVED}, {Place.BUSY}, Place.DROPPED)
        assert (limits.of("a"), len(limits)) == (2 * MAX_STREAMS_PER_PEER,) * 2
        assert place(limits, "b") is Place.SERVED
    assert len(limits) == 0
    assert place(limits, "a") is Place.SERVED


def test_many_peers_together_are_bounded_too() -> None:
    limits = StreamLimits(1, Clock())  # and 64 that send nothing
    with ExitStack() as stack:
        given = [stack.enter_context(limits.place(f"peer {n}")) for n in range(131)]
    assert given == [Place.SERVED] * 65 + [Place.BUSY] * 65 + [Place.DROPPED]


def test_a_peer_opens_streams_at_a_bounded_rate() -> None:
    clock = Clock()
    limits = StreamLimits(16, clock)
    burst = int(STREAM_BURST)
    given = [place(limits, "a") for _ in range(burst + 5)]
    assert given == [Place.SERVED] * burst + [Place.DROPPED] * 5
    assert place(limits, "b") is Place.SERVED
    clock.now_s += 1.0
    given = [place(limits, "a") for _ in range(int(STREAMS_PER_S) + 1)]
    assert given == [Place.SERVED] * int(STREAMS_PER_S) + [Place.DROPPED]
    clock.now_s += 1e9  # silence saves up no more than a burst
    assert [place(limits, "a") for _ in range(burst + 1)].count(Place.SERVED) == burst


def test_the_memory_of_rates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_RATES", 3)
    limits = StreamLimits(16, Clock())
    for number in range(10):
        place(limits, f"peer {number}")
    assert len(limits._allowances) == 3


def test_only_so_many_are_told_that_they_are_not_let_in() -> None:
    limits = StreamLimits(16, Clock())
    with ExitStack() as stack:
        of_one = [stack.enter_context(limits.doorstep("a")) for _ in range(3)]
        of_all = [stack.enter_context(limits.doorstep(f"peer {n}")) for n in range(20)]
        assert len(limits) == 0  # members' streams are counted apart
    assert of_one == [True, True, False]
    assert of_all.count(True) == MAX_TURNED_AWAY - 2
