"""The fuzzer's targets on their first inputs, on what the fuzzer found, and on changes of both."""

import random
import tracemalloc

import pytest

from fuzz.targets import ANNA, CORPUS, LIMITS, TARGETS, _signed_group, first_inputs
from swarm.protocol.codec import decode_group

MEMORY_FACTOR, MEMORY_BYTES = 60, 400_000
"""What a reader may take: so much for each byte that it was given, and so much besides."""


def inputs(name: str) -> list[bytes]:
    kept = sorted((CORPUS / name).glob("*"))
    return [*first_inputs(name), *(path.read_bytes() for path in kept)]


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_keeps_its_promise_on_known_and_changed_inputs(name: str) -> None:
    generator = random.Random(name)
    for data in inputs(name):
        TARGETS[name](data)
        for _ in range(40):
            changed = bytearray(data)
            for _ in range(generator.randint(1, 4)):
                changed[generator.randrange(len(changed))] = generator.randrange(256)
            TARGETS[name](bytes(changed[: generator.randint(1, len(changed))]))


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_takes_memory_by_the_size_of_its_input(name: str) -> None:
    for data in inputs(name):
        TARGETS[name](data)  # what is made once is made now
        tracemalloc.start()
        try:
            TARGETS[name](data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= MEMORY_FACTOR * len(data) + MEMORY_BYTES


def test_the_codec_target_gets_past_the_signature() -> None:
    whole, unsigned = first_inputs("codec")[:2]
    assert _signed_group(unsigned[1:]) == whole
    changed = _signed_group(unsigned[1:-1] + b"\x01")
    assert changed != whole
    assert decode_group(changed, LIMITS).publisher == ANNA.peer_id
