"""The steps of reaching a member, each with a failure in words that a user understands.

Owns: TCP, libp2p handshake and DHT ping as separate steps. Does not know: whom to dial or when
(`swarm.net.overlay`), nor what was dialled before (`swarm.net.address_book`).
"""

import asyncio
import time
from typing import Any

from swarm.net.daemon import Daemon, NetworkError, RefusedByDaemonError
from swarm.net.hivemind_lean import (
    DHTID,
    DecodeError,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    dht_pb2,
)

MAX_CLOCK_SKEW_S = 3.0
"""hivemind's limit; records expire by the clock, so larger differences would eat their life."""
TCP_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 10.0

# After a failed dial of its own, libp2p refuses others to the same address for 5 s or more.
_BACKOFF_ATTEMPTS = 8
_BACKOFF_WAIT_S = 1.0

_DIRECT = ("ip4", "ip6", "dns", "dns4", "dns6")


class ClockSkewError(NetworkError):
    """A peer's clock and this machine's are too far apart.

    Args:
        skew_s: how far the peer's is ahead.
    """

    def __init__(self, skew_s: float) -> None:
        super().__init__(
            f"clock skew: the peer's clock is {abs(skew_s):.1f} s "
            f"{'ahead of' if skew_s > 0 else 'behind'} this machine's; at most "
            f"{MAX_CLOCK_SKEW_S:.0f} s is allowed; set the wrong one (NTP)"
        )
        self.skew_s = skew_s


async def probe_tcp(transport: str) -> None:
    """Tell a closed port, a silent host and an unknown name apart before libp2p dials.

    Args:
        transport: multiaddr without peer id; only TCP ones are probed.

    Raises:
        NetworkError: in words.
    """
    parts = transport.split("/")
    if len(parts) != 5 or parts[1] not in _DIRECT or parts[3] != "tcp":
        return
    host, port = parts[2], int(parts[4])
    try:
        async with asyncio.timeout(TCP_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise NetworkError(
            f"TCP timed out: {host}:{port} did not answer in {TCP_TIMEOUT_S:.0f} s; "
            "the host is down, or a firewall drops the connection"
        ) from None
    except ConnectionRefusedError:
        raise NetworkError(f"TCP refused: nothing listens at {host}:{port}") from None
    except OSError as error:
        raise NetworkError(f"TCP failed: {host}:{port}: {error.strerror or error}") from None
    except UnicodeError as error:  # a label that is empty or has more than 63 characters
        raise NetworkError(f"TCP failed: {host!r} is no host's name: {error}") from None
    writer.close()


async def connect(daemon: Daemon, peer: str, transport: str) -> None:
    """Open a libp2p connection, which proves that the peer has the key of its id.

    Raises:
        NetworkError: in words.
    """
    for attempts_left in reversed(range(_BACKOFF_ATTEMPTS)):
        try:
            return await daemon.connect(peer, transport, CONNECT_TIMEOUT_S)
        except RefusedByDaemonError as error:
            if "dial backoff" not in str(error) or not attempts_left:
                raise NetworkError(_explain(str(error))) from None
        await asyncio.sleep(_BACKOFF_WAIT_S)


async def ping(protocol: Any, peer: str, *, client: bool, timeout_s: float) -> float:
    """DHT ping in both directions, with the clocks compared; enters the peer in the routing table.

    Args:
        protocol: hivemind's DHTProtocol.
        client: the peer need not be able to ping back.

    Returns:
        How far the peer's clock is ahead of this machine's, in seconds.

    Raises:
        ClockSkewError: the clocks differ by more than `MAX_CLOCK_SKEW_S`.
        NetworkError: in words.
    """
    request = dht_pb2.PingRequest(peer=protocol.node_info, validate=not client)
    remote = PeerID.from_base58(peer)
    asked_s = time.time()
    try:
        response = await protocol.get_stub(remote).rpc_ping(request, timeout=timeout_s)
    except (TimeoutError, P2PDaemonError, P2PHandlerError, DecodeError) as error:
        why = f"no answer in {timeout_s:.0f} s" if isinstance(error, TimeoutError) else repr(error)
        raise NetworkError(
            f"DHT ping failed: connected, but the peer answers no DHT request: {why[:300]}"
        ) from None
    answered_s = time.time()
    skew_s: float = response.dht_time - (asked_s + answered_s) / 2
    if not abs(skew_s) <= MAX_CLOCK_SKEW_S + (answered_s - asked_s) / 2:
        raise ClockSkewError(skew_s)
    if not response.available and not client:
        raise NetworkError(
            "DHT ping failed: the peer answers, but cannot open a stream back to this node"
        )
    if len(response.peer.node_id) != DHTID.HASH_NBYTES:
        raise NetworkError("DHT ping failed: the peer is a client of the network, no member")
    node_id = DHTID.from_bytes(response.peer.node_id)
    await protocol.update_routing_table(node_id, remote, responded=True)
    return skew_s


def _explain(text: str) -> str:
    """What p2pd's message about a failed connection means."""
    if "peer id mismatch" in text:
        return "wrong peer id: another node answers at this address"
    if "deadline exceeded" in text or "timeout" in text:
        return f"libp2p timed out: the port is open, but no handshake in {CONNECT_TIMEOUT_S:.0f} s"
    if "negotiate security" in text or "EOF" in text or "reset by peer" in text:
        return "no libp2p node: the port is open, but does not speak libp2p"
    if "dial backoff" in text:
        return "libp2p failed before and waits: the port is open now; it is tried again"
    return f"libp2p failed: {text[:300]!r}"
