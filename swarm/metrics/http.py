"""`/metrics`, `/livez` and `/readyz` over HTTP, for machines.

Owns: one short request, one short answer, and who may ask. Does not know: what the answers say.

Whoever reaches the port may read it, so it listens on loopback unless node.toml says otherwise, and
the Host header must name this machine: a web page that a browser here has open cannot read it by
pointing its own name at 127.0.0.1.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8192
"""Of request line and headers; a scrape's are some hundred bytes."""

REQUEST_TIMEOUT_S = 5.0

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"

    @classmethod
    def of_json(cls, value: Mapping[str, object], status: HTTPStatus = HTTPStatus.OK) -> "Answer":
        return cls((json.dumps(value) + "\n").encode(), status, "application/json")


Page = Callable[[], Awaitable[Answer]]


class MetricsServer:
    """Serves a few pages.

    Args:
        host: address to listen on.
        port: TCP port.
        pages: path to what answers it.
        allowed_hosts: names in the Host header besides those of loopback and `host`.
    """

    def __init__(
        self, host: str, port: int, pages: Mapping[str, Page], allowed_hosts: Collection[str] = ()
    ) -> None:
        self._host = host
        self._port = port
        self._pages = pages
        self._names = {name.lower() for name in (*LOOPBACK_NAMES, host, *allowed_hosts)}
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that it listens on; 0 while it does not."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server else 0

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be had.
        """
        self._server = await asyncio.start_server(
            self._serve, self._host, self._port, limit=MAX_HEAD_BYTES
        )

    async def stop(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                answer = await self._answer(head)
                writer.write(_packed(answer, head_only=head.startswith(b"HEAD ")))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            log.debug("metrics connection ended: %r", error)
        except asyncio.LimitOverrunError:
            writer.write(_packed(_refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)))
        finally:
            writer.close()

    async def _answer(self, head: bytes) -> Answer:
        request_line, *lines = head.decode("latin-1").split("\r\n")
        words = request_line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _refusal(HTTPStatus.BAD_REQUEST)
        method, target, _ = words
        fields = [line.partition(":") for line in lines if line]
        hosts = [value.strip() for name, _, value in fields if name.lower() == "host"]
        if len(hosts) != 1 or _without_port(hosts[0]) not in self._names:
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST)
        if method not in ("GET", "HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED)
        page = self._pages.get(target.partition("?")[0])
        return await page() if page is not None else _refusal(HTTPStatus.NOT_FOUND)


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _refusal(status: HTTPStatus) -> Answer:
    return Answer(f"{status.value} {status.phrase}\n".encode(), status)


def _packed(answer: Answer, *, head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    ).encode("latin-1")
    return head if head_only else head + answer.body
