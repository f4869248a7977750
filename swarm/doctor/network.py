"""Checks between this machine and a swarm: each address, clocks, reachability, terms, tokenizer.

Owns: what is asked of members, and what the answers mean. Does not know: this machine's own parts.
"""

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm import model_files
from swarm.config import NodeConfig
from swarm.doctor.findings import Finding, failed, ok, skipped, warning
from swarm.errors import (
    ConfigError,
    DataError,
    ExitCode,
    IdentityError,
    RemoteProtocolError,
    UnreachableError,
)
from swarm.net.dialing import MAX_CLOCK_SKEW_S
from swarm.node.observe import fetch_charter, visiting
from swarm.node.prompt_table import check_limits, check_tokenizer
from swarm.protocol.charter import Charter
from swarm.text.tokenizer import Tokenizer

MAX_ADDRESSES = 16
SKEW_TO_MENTION_S = 1.0


@dataclass(frozen=True, slots=True)
class Examination:
    """What members answered.

    Attributes:
        results: address to what came of it, in words; "connected" where a member answers.
        skew_s: how far their clocks are ahead of this machine's, in the median.
        charter: the swarm's terms; None: nobody gave them.
        trouble: why there are none.
        seconds: until the terms were here.
    """

    results: Mapping[str, str]
    skew_s: float | None
    charter: Charter | None
    trouble: str
    seconds: float


async def examine(swarm_id: bytes, addresses: Sequence[str], timeout_s: float) -> Examination:
    """Dial each address by TCP, libp2p and DHT ping, and fetch the swarm's terms."""
    started = time.monotonic()
    charter, trouble, took_s = None, "", 0.0
    async with visiting(swarm_id, ()) as (overlay, exchange):
        results = await overlay.dial(addresses[:MAX_ADDRESSES])
        if "connected" in results.values():
            try:
                charter = await fetch_charter(overlay, exchange, swarm_id, timeout_s)
            except (UnreachableError, IdentityError, RemoteProtocolError) as error:
                trouble = str(error)
            took_s = time.monotonic() - started
        skew_s = overlay.clock_skew_s
    return Examination(results, skew_s, charter, trouble, took_s)


def bootstrap(examination: Examination) -> list[Finding]:
    """A finding for each address: one that answers is enough."""
    results = examination.results
    reached = any(result == "connected" for result in results.values())
    findings = []
    for address, result in results.items():
        name = f"address {address}"
        if result == "connected":
            findings.append(ok(name, "TCP, libp2p handshake and DHT ping answered"))
        elif reached:
            findings.append(warning(name, result, "others answer; this member may be gone"))
        else:
            fix = (
                "ask a member for a fresh invite (`swarm-node invite`); see that this network "
                "lets outgoing TCP through"
            )
            findings.append(failed(name, result, fix, ExitCode.UNREACHABLE))
    return findings


def terms(examination: Examination) -> Finding:
    """Whether the swarm's terms came."""
    charter = examination.charter
    if charter is not None:
        return ok(
            "swarm",
            f"{charter.manifest.name!r}, {charter.prompt_count} prompts, "
            f"terms fetched in {examination.seconds:.1f} s",
        )
    if "connected" not in examination.results.values():
        return skipped("swarm", "no member answers")
    return failed(
        "swarm",
        examination.trouble,
        "the members that answer are of another swarm, or refuse this node: ask the organizer",
        ExitCode.UNREACHABLE,
    )


def clock(skew_s: float | None) -> Finding:
    """This machine's clock against its peers'."""
    if skew_s is None:
        return skipped("clock", "no member answers")
    figure = f"{-skew_s:+.2f} s against the members in the median"
    fix = "synchronize it: `timedatectl set-ntp true`; in WSL2 `sudo hwclock -s`"
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        return failed("clock", figure, fix)
    if abs(skew_s) > SKEW_TO_MENTION_S:
        return warning("clock", figure, fix)
    return ok("clock", figure)


def reachability(status: Mapping[str, Any] | None, config: NodeConfig) -> Finding:
    """How others reach the running node, by the addresses that its network daemon has confirmed."""
    if status is None:
        return skipped("reachable", "known once the node has run for some minutes")
    addresses = status["network"]["addresses"]
    public = [a for a in addresses if _is_public(a) and "/p2p-circuit" not in a]
    relayed = [a for a in addresses if "/p2p-circuit" in a]
    if public:
        return ok("reachable", f"directly: {public[0]}")
    if relayed:
        return ok("reachable", f"through {len(relayed)} relays: {relayed[0]}")
    private = [a for a in addresses if not _is_loopback(a)]
    if private:
        return warning(
            "reachable",
            f"only within the local network: {private[0]}",
            f"forward a TCP port on the router and set network.announce; or set "
            f"network.use_relay = true (is {str(config.network.use_relay).lower()}) and have a "
            "member with a public address",
        )
    host = config.network.host
    if ipaddress.IPv4Address(host).is_loopback:
        fix = f"set network.host to 0.0.0.0 (is {host})"
    else:
        fix = f"connect this machine to a network: it listens on {host} and has no other address"
    return warning("reachable", "only from this machine", fix)


def tokenizer(charter: Charter | None, config: NodeConfig) -> Finding:
    """Whether the model's tokenizer is the swarm's, and its terms within this node's limits."""
    if charter is None:
        return skipped("tokenizer", "the swarm's manifest is not known")
    manifest = charter.manifest
    if not config.model.path:
        return skipped("tokenizer", f"no model is named; the swarm's: {manifest.tokenizer.name}")
    try:
        folder = model_files.resolve(config.model)
        check_tokenizer(manifest, Tokenizer.from_folder(Path(folder)), config.model.path)
        check_limits(manifest, charter.all_sets, config.limits)
    except DataError as error:
        return failed("tokenizer", str(error), "join with a model of that family", error.exit_code)
    except ConfigError as error:
        return failed("tokenizer", str(error), "name a model that is here", error.exit_code)
    return ok("tokenizer", f"{config.model.path} has the swarm's ({manifest.tokenizer.name})")


def _host(address: str) -> str:
    parts = address.split("/")
    return parts[2] if len(parts) > 2 else ""


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(_host(address)).is_global
    except ValueError:
        return address.startswith("/dns")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(_host(address)).is_loopback
    except ValueError:
        return False
