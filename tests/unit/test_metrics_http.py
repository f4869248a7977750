"""The HTTP side of metrics: what is answered, and to whom."""

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest

from swarm.metrics.http import MAX_HEAD_BYTES, Answer, MetricsServer


async def hello() -> Answer:
    return Answer(b"hello\n")


async def not_ready() -> Answer:
    return Answer.of_json({"ready": False}, HTTPStatus.SERVICE_UNAVAILABLE)


@pytest.fixture
async def server() -> AsyncIterator[MetricsServer]:
    server = MetricsServer(
        "127.0.0.1", 0, {"/metrics": hello, "/readyz": not_ready}, allowed_hosts=["volunteer-1"]
    )
    await server.start()
    yield server
    await server.stop()


async def ask(server: MetricsServer, request: bytes) -> tuple[int, str, bytes]:
    """Status, head and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


def get(path: str, host: str = "127.0.0.1:9797", method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def test_a_page_and_its_length(server: MetricsServer) -> None:
    status, head, body = await ask(server, get("/metrics?x=1"))
    assert (status, body) == (200, b"hello\n")
    assert "Content-Length: 6" in head
    status, head, body = await ask(server, get("/metrics", method="HEAD"))
    assert (status, body) == (200, b"")
    assert "Content-Length: 6" in head


async def test_a_probe_says_why(server: MetricsServer) -> None:
    status, _, body = await ask(server, get("/readyz"))
    assert status == 503
    assert json.loads(body) == {"ready": False}


@pytest.mark.parametrize("host", ["localhost:1", "LOCALHOST", "[::1]:9797", "volunteer-1:9797"])
async def test_hosts_that_name_this_machine(server: MetricsServer, host: str) -> None:
    assert (await ask(server, get("/metrics", host)))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "volunteer-2"])
async def test_other_hosts_are_refused(server: MetricsServer, host: str) -> None:
    status, _, body = await ask(server, get("/metrics", host))
    assert status == 421
    assert b"hello" not in body


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", 421),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 421),
        (get("/metrics", method="POST"), 405),
        (get("/etc/passwd"), 404),
        (b"\x00\xff\r\n\r\n", 400),
        (b"GET /metrics SPDY/9\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_no_request_of_ours(
    server: MetricsServer, request_bytes: bytes, status: int
) -> None:
    assert (await ask(server, request_bytes))[0] == status


async def test_the_port_is_free_after_stop(server: MetricsServer) -> None:
    port = server.port
    await server.stop()
    with pytest.raises(OSError):  # noqa: PT011 - the kernel's own
        await asyncio.open_connection("127.0.0.1", port)
