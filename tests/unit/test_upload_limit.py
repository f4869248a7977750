"""The upload limit by itself, with a clock that the test moves."""

import pytest

from swarm.net.exchange import CHUNK_BYTES, UploadLimit


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
