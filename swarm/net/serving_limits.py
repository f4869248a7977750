"""What serving may cost this node: bytes a second, streams at once, streams a second.

Owns: the limits and the accounting. Does not know: what a stream carries.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum, auto

CHUNK_BYTES = 256 * 1024
CHUNK_TIMEOUT_S = 15.0
"""For one chunk to come or go, at most."""
MIN_STREAM_BYTES_PER_S = 24 * 1024
"""What a stream moves in the long run, or it ends."""

MAX_STREAMS_PER_PEER = 8
# Streams beside those that send a payload: a request being read, a notice, a last byte awaited.
_EXTRA_STREAMS = 64
# Of those that are told that they are not let in: together, and of one peer.
MAX_TURNED_AWAY = 16
_MAX_TURNED_AWAY_PER_PEER = 2

STREAMS_PER_S = 50.0
"""What one peer may open for long: a node that trains ten steps a second opens some twenty."""
STREAM_BURST = 500.0
# Peers whose rate is remembered; some 200 bytes each.
_MAX_RATES = 4096


class UploadLimit:
    """Spaces out chunks so that all streams together keep to a rate.

    Args:
        bytes_per_s: None: no limit.
        clock: seconds, monotonic.
    """

    def __init__(
        self, bytes_per_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_s = clock()

    def reserve(self, size_bytes: int) -> float:
        """Take the next place in line; how many seconds to wait before sending."""
        if self._bytes_per_s is None:
            return 0.0
        now_s = self._clock()
        start_s = max(now_s, self._free_s)
        self._free_s = start_s + size_bytes / self._bytes_per_s
        return start_s - now_s

    def streams(self, at_most: int) -> int:
        """How many streams can share the rate before their readers give a chunk up."""
        if self._bytes_per_s is None:
            return at_most
        chunks = self._bytes_per_s * CHUNK_TIMEOUT_S / 2 / CHUNK_BYTES
        return min(at_most, max(1, int(chunks)))


class Pace:
    """How long the other side of one stream may keep this one waiting.

    There is patience for one chunk at the start. Each byte adds to it by the minimum rate, never
    above the start, and waiting spends it: so neither many small payloads nor many chunks, each
    just in time, hold a stream for long.

    Args:
        patience_s: for one chunk.
        clock: seconds, monotonic.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._left_s = patience_s

    @asynccontextmanager
    async def chunk(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait for so many bytes to come or go inside of it.

        Raises:
            TimeoutError: they did not in time.
        """
        earned_s = size_bytes / MIN_STREAM_BYTES_PER_S
        self._left_s = min(self._patience_s, self._left_s + earned_s)
        started_s = self._clock()
        async with asyncio.timeout(self._left_s):
            yield
        self._left_s -= self._clock() - started_s


class Place(Enum):
    """What a stream gets."""

    SERVED = auto()
    BUSY = auto()
    """An answer that says so, no more."""
    DROPPED = auto()
    """Not even that."""


class StreamLimits:
    """How many streams are open, of each peer and together, and how fast each peer opens them.

    Args:
        sending: streams that send payloads at once.
        clock: seconds, monotonic.
    """

    def __init__(self, sending: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_streams = sending + _EXTRA_STREAMS
        self._clock = clock
        self._open: Counter[str] = Counter()
        self._turned_away: Counter[str] = Counter()
        # Peer -> what it may still open at once, as of when; the longest unused is the first.
        self._allowances: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Streams of admitted peers that are open now."""
        return self._open.total()

    def of(self, peer: str) -> int:
        """Streams of one peer that are open now."""
        return self._open[peer]

    @contextmanager
    def place(self, peer: str) -> Iterator[Place]:
        """Count a stream of an admitted peer while it lasts.

        Beyond the limits it is answered "busy"; beyond twice the limits, and beyond its peer's
        rate, it is dropped.
        """
        of_peer, of_all = self._open[peer], self._open.total()
        if (
            of_peer >= 2 * MAX_STREAMS_PER_PEER
            or of_all >= 2 * self._max_streams
            or not self._within_rate(peer)
        ):
            yield Place.DROPPED
            return
        busy = of_peer >= MAX_STREAMS_PER_PEER or of_all >= self._max_streams
        with _counted(self._open, peer):
            yield Place.BUSY if busy else Place.SERVED

    @contextmanager
    def doorstep(self, peer: str) -> Iterator[bool]:
        """Count a stream of a peer that is not admitted; False: it is not even told so."""
        of_peer, of_all = self._turned_away[peer], self._turned_away.total()
        if of_peer >= _MAX_TURNED_AWAY_PER_PEER or of_all >= MAX_TURNED_AWAY:
            yield False
            return
        with _counted(self._turned_away, peer):
            yield True

    def _within_rate(self, peer: str) -> bool:
        now_s = self._clock()
        allowance, then_s = self._allowances.pop(peer, (STREAM_BURST, now_s))
        allowance = min(STREAM_BURST, allowance + (now_s - then_s) * STREAMS_PER_S)
        within = allowance >= 1.0
        self._allowances[peer] = (allowance - 1.0 if within else allowance, now_s)
        if len(self._allowances) > _MAX_RATES:
            self._allowances.popitem(last=False)
        return within


@contextmanager
def _counted(counter: Counter[str], peer: str) -> Iterator[None]:
    counter[peer] += 1
    try:
        yield
    finally:
        counter[peer] -= 1
        if not counter[peer]:
            del counter[peer]
