"""One p2pd process, hivemind's libp2p daemon, and its control socket.

Owns: the process, its command line, the connections to it, the incoming streams that it hands over.
Does not know: the DHT, who is a member, what a stream carries, nor what to do when the daemon dies
(`swarm.net.overlay` restarts it).
"""

import asyncio
import errno
import logging
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError, SwarmError, TryAgainError
from swarm.net.hivemind_lean import (
    P2P,
    P2PD_PATH,
    Multiaddr,
    P2PDaemonError,
    PeerID,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)

STREAM_BUFFER_BYTES = 256 * 1024
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""One unary message, the DHT's, in either direction; the daemon's own limit."""

_START_TIMEOUT_S = 60.0  # measured 0.4 s; machines under load took more than 15 s
_STOP_TIMEOUT_S = 2.0
_CONTROL_TIMEOUT_S = 5.0
_IDLE_EXIT_S = 30  # the daemon exits when nobody connects to it for so long
_KEPT_LINES = 20
_MAX_LINE_BYTES = 1 << 20
# struct sockaddr_un; the longest name below is 16 characters.
_MAX_SOCKET_PATH_BYTES = 103
_SOCKET_PREFIXES = ("p2pd-", "strm-")

logger = logging.getLogger(__name__)

StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Called with the peer's id (proven by the transport's handshake), reader and writer."""


class NetworkError(SwarmError):
    """The network failed: peer gone or silent, connection refused or cut, daemon down.

    Nobody's bytes were wrong; the same call may succeed later.
    """


class RefusedByDaemonError(NetworkError):
    """The daemon answered a request with an error; the message is its text."""


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """What p2pd is started with."""

    runtime_dir: Path
    identity_path: Path | None
    """Key file; None: a new identity for the life of the process."""
    host: str
    port: int
    announce: tuple[str, ...]
    use_relay: bool
    relays: tuple[str, ...]
    client: bool
    """Open no listening port and answer no DHT requests."""

    def arguments(self, control: Path) -> list[str]:
        """The command line after the program's name."""
        arguments = [
            f"-listen=/unix{control}",
            f"-idleTimeout={_IDLE_EXIT_S}s",
            f"-persistentConnMaxMsgSize={MAX_MESSAGE_BYTES}",
            "-b=0",
            "-connManager=1",
            "-tls=1",
            f"-relay={self.use_relay:d}",
            f"-autoRelay={self.use_relay and bool(self.relays):d}",
            f"-autonat={self.use_relay:d}",
            f"-natPortMap={self.use_relay and not self.client:d}",
        ]
        if self.use_relay and self.relays:
            arguments.append(f"-trustedRelays={','.join(self.relays)}")
        if self.identity_path is not None:
            arguments.append(f"-id={self.identity_path}")
        if self.client:
            return [*arguments, "-dhtClient=1", "-noListenAddrs=1"]
        if self.announce:
            arguments.append(f"-announceAddrs={','.join(self.announce)}")
        return [*arguments, "-dhtServer=1", f"-hostAddrs=/ip4/{self.host}/tcp/{self.port}"]


class Daemon:
    """A running p2pd; made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, control: Path, streams: Path) -> None:
        self.pid = process.pid
        self.p2p: Any = None
        """hivemind's P2P, connected to this daemon: what its DHT node talks through."""
        self._process = process
        self._control = control
        self._streams = streams
        self._server: asyncio.Server | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._stream_tasks: set[asyncio.Task[None]] = set()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready = asyncio.Event()
        self._output_task = asyncio.create_task(self._read_output())

    @classmethod
    async def start(cls, options: DaemonOptions) -> "Daemon":
        """Start p2pd and connect to it.

        Raises:
            TryAgainError: the port is in use.
            ConfigError: the runtime folder's path is too long, or host or an address is unusable.
            NetworkError: the daemon did not start.
        """
        tag = secrets.token_hex(3)
        control, streams = (options.runtime_dir / f"{p}{tag}.sock" for p in _SOCKET_PREFIXES)
        if len(os.fsencode(control)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{options.runtime_dir}: the path of a socket in it has more than "
                f"{_MAX_SOCKET_PATH_BYTES} bytes; choose a shorter runtime folder"
            )
        options.runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_stale_sockets(options.runtime_dir)
        if not options.client:
            check_port_free(options.host, options.port)
        process = await asyncio.create_subprocess_exec(
            P2PD_PATH,
            *options.arguments(control),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_MAX_LINE_BYTES,
            env={**os.environ, "GOLOG_LOG_LEVEL": "warn", "GOLOG_LOG_FMT": "json"},
            start_new_session=True,  # Ctrl-C in the terminal is for the node alone
        )
        daemon = cls(process, control, streams)
        try:
            await daemon._connect(options.port)
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    async def _connect(self, port: int) -> None:
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait(
                {ready, self._output_task},
                timeout=_START_TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            ready.cancel()
        if not self._ready.is_set():
            said = " | ".join(list(self._lines)[-3:]) or "nothing"
            if "address already in use" in said:
                raise TryAgainError(f"port {port} is in use by another program; choose another")
            raise NetworkError(
                f"the network daemon p2pd did not start within {_START_TIMEOUT_S:.0f} s; "
                f"it said: {said}"
            )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                self.p2p = await P2P.replicate(Multiaddr(f"/unix{self._control}"))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, P2PDaemonError) as error:
            raise NetworkError(
                f"the network daemon p2pd started but does not answer: {error!r}"
            ) from None
        self._server = await asyncio.start_unix_server(
            self._accept, path=self._streams, limit=STREAM_BUFFER_BYTES
        )

    @property
    def peer_id(self) -> str:
        """The peer id of the key that the daemon uses."""
        return str(self.p2p.peer_id)

    async def wait(self) -> int:
        """Wait until the process ends; its exit code, negative for a signal."""
        return await self._process.wait()

    def kill(self) -> None:
        """End the process at once."""
        if self._process.returncode is None:
            self._process.kill()

    async def addresses(self) -> list[str]:
        """The multiaddrs at which others reach the daemon, without the peer id."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        return [str(Multiaddr(address)) for address in response.identify.addrs]

    async def peers(self, timeout_s: float) -> list[str]:
        """The ids of the peers with an open connection."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS), timeout_s)
        return sorted({str(PeerID(peer.id)) for peer in response.peers})

    async def connect(self, peer: str, address: str, timeout_s: float) -> None:
        """Open a connection to `peer` at `address` (without /p2p/), unless there is one."""
        await self._ask(
            p2pd_pb2.Request(
                type=p2pd_pb2.Request.CONNECT,
                connect=p2pd_pb2.ConnectRequest(
                    peer=PeerID.from_base58(peer).to_bytes(),
                    addrs=[Multiaddr(address).to_bytes()],
                    timeout=max(1, int(timeout_s)),
                ),
            ),
            timeout_s + _CONTROL_TIMEOUT_S,
        )

    async def open_stream(
        self, peer: str, protocols: Sequence[str], timeout_s: float
    ) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a stream to `peer` in the first of `protocols` that it speaks."""
        response, reader, writer = await self._request(
            p2pd_pb2.Request(
                type=p2pd_pb2.Request.STREAM_OPEN,
                streamOpen=p2pd_pb2.StreamOpenRequest(
                    peer=PeerID.from_base58(peer).to_bytes(),
                    proto=list(protocols),
                    timeout=max(1, int(timeout_s)),
                ),
            ),
            timeout_s + _CONTROL_TIMEOUT_S,
        )
        return str(response.streamInfo.proto), reader, writer

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Have incoming streams of `protocol` handled; the handler need not close the writer."""
        self._handlers[protocol] = handler
        await self._ask(
            p2pd_pb2.Request(
                type=p2pd_pb2.Request.STREAM_HANDLER,
                streamHandler=p2pd_pb2.StreamHandlerRequest(
                    addr=Multiaddr(f"/unix{self._streams}").to_bytes(),
                    proto=[protocol],
                    balanced=False,
                ),
            )
        )

    async def stop(self) -> None:
        """End the process, close every socket and end every task; bounded also when it hangs."""
        if self._server is not None:
            self._server.close()
        for task in self._stream_tasks:
            task.cancel()
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
        await self._output_task
        if self.p2p is not None:
            await self._close_p2p()
        if self._stream_tasks:
            await asyncio.wait(self._stream_tasks)
        for path in (self._control, self._streams):
            path.unlink(missing_ok=True)

    async def _close_p2p(self) -> None:
        """Fail the calls that wait for the daemon, so that hivemind's tasks end by themselves."""
        control = self.p2p._client.control
        error = P2PDaemonError("the network daemon has stopped")

        async def refuse(*_: Any) -> Any:
            raise error

        control.call_unary_handler = refuse
        for call in list(control._pending_calls.values()):
            if not call.done():
                call.set_exception(error)
        tasks = [control._read_task, control._write_task, *control._handler_tasks.values()]
        self.p2p._terminate()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, request: Any, timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        response, _, writer = await self._request(request, timeout_s)
        writer.close()
        return response

    async def _request(
        self, request: Any, timeout_s: float
    ) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Send one request over a connection of its own, which stays open when it succeeds."""
        response = p2pd_pb2.Response()
        writer = None
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(
                    self._control, limit=STREAM_BUFFER_BYTES
                )
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise RefusedByDaemonError(response.error.msg)
            done = True
        except TimeoutError:
            raise NetworkError(f"no answer from the network daemon in {timeout_s:.0f} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise NetworkError("the network daemon is down") from None
        finally:
            if writer is not None and not done:
                writer.close()
        return response, reader, writer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One incoming stream: the daemon says who and what, the rest belongs to the handler."""
        task = asyncio.current_task()
        if task is not None:
            self._stream_tasks.add(task)
            task.add_done_callback(self._stream_tasks.discard)
        info = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S):
                await read_pbmsg_safe(reader, info)
            await self._handlers[info.proto](str(PeerID(info.peer)), reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.debug("stream ended early: %r", error)
        except asyncio.CancelledError:
            logger.debug("stream cut: the daemon stops")
        except Exception:
            logger.exception("the handler of a stream failed")
        finally:
            writer.close()

    async def _read_output(self) -> None:
        """Keep the daemon's last lines; ends with the process."""
        output = self._process.stdout
        while output is not None:
            try:
                line = await output.readline()
            except ValueError:  # longer than the buffer
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            logger.debug("p2pd: %.500r", text)
            if text.startswith("Peer ID:"):
                self._ready.set()


def check_port_free(host: str, port: int) -> None:
    """Fail when another program listens on the port.

    libp2p listens with SO_REUSEPORT: two daemons of one user would share a port in silence.

    Raises:
        TryAgainError: the port is in use.
        ConfigError: the host is no IPv4 address of this machine, or the port is not allowed.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TryAgainError(
                    f"port {port} on {host} is in use by another program; "
                    "stop it, or choose another port (network.port; 0: a free one)"
                ) from None
            raise ConfigError(
                f"cannot listen on {host} port {port}: {error.strerror or error}; network.host "
                "must be an IPv4 address of this machine (0.0.0.0: all), network.port one that "
                "this user may listen on (1024 and up)"
            ) from None


def free_port(host: str) -> int:
    """A TCP port that nobody uses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}: {error.strerror or error}; "
                "network.host must be an IPv4 address of this machine (0.0.0.0: all)"
            ) from None
        return int(probe.getsockname()[1])


def _remove_stale_sockets(folder: Path) -> None:
    """Remove what a killed process left; a socket that somebody serves stays."""
    for path in folder.iterdir():
        if not path.name.startswith(_SOCKET_PREFIXES) or not path.is_socket():
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(os.fspath(path))
            except OSError:
                path.unlink(missing_ok=True)
