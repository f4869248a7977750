"""A member of a swarm: identity, overlay, charter, heartbeats, blobs served to others, control.

Owns: start order, stop order, what all members have in common. What a volunteer or an organizer
does besides stands in swarm.node.volunteer and swarm.node.organizer.
Does not know: torch.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import psutil

from swarm import __version__
from swarm.config import NodeConfig
from swarm.control import ControlServer, Handler
from swarm.errors import RemoteProtocolError, TryAgainError
from swarm.ledger import Ledger
from swarm.metrics.http import Answer, MetricsServer
from swarm.net.dialing import MAX_CLOCK_SKEW_S
from swarm.net.exchange import Exchange
from swarm.net.overlay import Overlay
from swarm.node.admission import Admission
from swarm.node.amending import amend
from swarm.node.membership import Membership, off_the_roster
from swarm.node.peer_view import peers_snapshot
from swarm.node.store import BlobStore
from swarm.paths import DataDir, write_atomic
from swarm.protocol.charter import Charter
from swarm.protocol.identity import Identity
from swarm.protocol.invite import Invite
from swarm.protocol.peers import PeerTable
from swarm.protocol.reasons import Reason
from swarm.protocol.receipts import Reception, complaint
from swarm.protocol.records import PROTOCOL_VERSIONS, Heartbeat
from swarm.service import notify

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
"""A step that takes longer is dropped at stop; the last checkpoint stays."""

MAX_INVITE_ADDRESSES = 6

RESOURCES_PERIOD_S = 5.0

LEDGER_PEERS = 50
"""Rows in the status; `swarm-node ledger` has all."""

T = TypeVar("T")


class Stopped(BaseException):
    """The node was asked to stop; unwinds what waits. Not an error, so not an Exception."""


class Node:
    """One process that takes part in a swarm.

    Args:
        config: the resolved configuration.
        data_dir: held by the caller (`DataDir.locked`) for as long as `run` goes on.
        swarm_id: of the swarm to be in.
        addresses: members' addresses from the invite.
        fail_fast: give up when no member answers instead of retrying for ever.
    """

    role = "observer"
    identity: Identity
    overlay: Overlay
    exchange: Exchange
    membership: Membership
    store: BlobStore
    ledger: Ledger

    def __init__(
        self,
        config: NodeConfig,
        data_dir: DataDir,
        *,
        swarm_id: bytes,
        addresses: tuple[str, ...] = (),
        fail_fast: bool = False,
    ) -> None:
        self.config = config
        self.data_dir = data_dir
        self.swarm_id = swarm_id
        self.swarm_dir = data_dir.swarm(swarm_id)
        self._addresses = addresses
        self._fail_fast = fail_fast
        self._stop = asyncio.Event()
        self._amending = asyncio.Lock()
        self.started_s = time.time()
        self._metrics: MetricsServer | None = None
        self._resources_read: dict[str, Any] = {}
        self._resources_read_s = float("-inf")
        self.peers = PeerTable()
        self.reception = Reception()
        self.admission = Admission(data_dir.bans_path, follow_bans=config.network.follow_bans)
        self.name = config.node.name or socket.gethostname().split(".")[0][:64]

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, work until stopped, and close everything in order."""
        self.open_stores()
        await self._take_part()

    def open_stores(self) -> None:
        """Open what is another node's as long as the data directory is not locked for this one."""
        self.store = BlobStore(
            self.swarm_dir.rollouts_dir,
            quota_bytes=self.config.limits.blob_store_mb * 1_000_000,
            min_free_bytes=self.config.limits.min_free_mb * 1_000_000,
        )
        self.ledger = Ledger(self.swarm_dir.ledger_path)

    async def _take_part(self) -> None:
        try:
            self._handle_signals()
            self.identity = Identity.load_or_create(self.data_dir.identity_path)
            self.overlay = Overlay(
                self.identity,
                self.data_dir.identity_path,
                host=self.config.network.host,
                port=self.config.network.port,
                last_port=self._last_port(),
                announce=self.config.network.announce,
                runtime_dir=self.data_dir.runtime_dir,
                bootstrap=[
                    *self._addresses,
                    *self.config.network.bootstrap,
                    *self.swarm_dir.load_peers(),
                ],
                use_relay=self.config.network.use_relay,
                refusal=self.admission.refusal,
            )
            limit = self.config.limits.upload_mb_per_s
            self.exchange = Exchange(
                self.overlay,
                self.swarm_id,
                charter=self._charter_bytes,
                blob=self._find_blob,
                on_notice=self.on_notice,
                on_sent=self.ledger.given,
                max_streams=self.config.network.serve_streams,
                upload_bytes_per_s=limit * 1e6 or None,
                refusal=self.admission.refusal,
                receipt=lambda peer: self.peers.receipt(peer, time.monotonic()),
                on_receipt=lambda peer, receipt: self.reception.record(
                    peer, receipt, time.monotonic()
                ),
                on_refused=self._on_refused,
                on_malformed=self.on_malformed,
            )
            self.membership = Membership(
                self.overlay,
                self.exchange,
                self.swarm_dir,
                self.admission,
                heartbeat_s=self.config.network.heartbeat_s,
                describe=self._heartbeat,
                ledger=self.ledger,
                on_charter=self.on_charter,
            )
            control = ControlServer(self.data_dir.place_control_socket(), self.handlers())
            # Each part that was started is stopped, the last one first, whatever the others raise.
            async with AsyncExitStack() as started:
                await self.overlay.start()
                started.push_async_callback(self.overlay.stop)
                write_atomic(self.data_dir.port_path, f"{self.overlay.port}\n".encode())
                await self.exchange.start()
                await control.start()
                started.push_async_callback(control.stop)
                await self._start_metrics(started)
                started.push_async_callback(self._say_farewell)
                started.callback(notify, "STOPPING=1")
                notify("READY=1\nSTATUS=looking for members")
                try:
                    await self.work()
                except Stopped:
                    log.info("stopping")
        finally:
            self.ledger.close()

    async def _start_metrics(self, started: AsyncExitStack) -> None:
        settings = self.config.metrics
        if not settings.enabled:
            return
        server = MetricsServer(
            settings.host,
            settings.port,
            {"/metrics": self._metrics_page, "/livez": self._livez, "/readyz": self._readyz},
            settings.allowed_hosts,
        )
        try:
            await server.start()
        except OSError as error:
            raise TryAgainError(
                f"metrics.port {settings.port} on {settings.host} cannot be had: "
                f"{error.strerror or error}; choose another, or 0 for any"
            ) from None
        self._metrics = server
        started.push_async_callback(server.stop)
        log.info("metrics at http://%s:%d/metrics", settings.host, server.port)

    async def work(self) -> None:
        """What this member does; returns or raises Stopped when `stopped` is set."""
        await self.join()
        await self.unless_stopped(self.membership.run())

    async def _say_farewell(self) -> None:
        """Tell the others that this node leaves."""
        if self.membership.charter_bytes is not None:
            try:
                async with asyncio.timeout(3.0):
                    await self.membership.send_heartbeat()
            except TimeoutError:
                log.info("the farewell did not get through in 3 s")

    async def join(self) -> Charter:
        """Get the charter; remember the swarm as the current one."""
        charter = await self.unless_stopped(
            self.membership.join(self.swarm_id, fail_fast=self._fail_fast)
        )
        self.data_dir.current = self.swarm_id
        terms, sampling = charter.manifest, charter.manifest.sampling
        log.info(
            "in the swarm %r (%s): %d prompts, %d held out; groups of %d completions of up to %d "
            "tokens, reward %s, tokenizer %s",
            *(terms.name, self.swarm_id.hex()[:16]),
            sum(ref.count for ref in charter.prompt_sets),
            terms.held_out.count if terms.held_out else 0,
            *(sampling.group_size, sampling.max_completion_tokens),
            *(terms.reward.name, terms.tokenizer.name),
        )
        return charter

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something, but no longer than until the node is asked to stop.

        Raises:
            Stopped: the node was asked to stop first.
        """
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped
        finally:
            stop.cancel()
            task.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def stop(self) -> None:
        """Ask the node to stop; a second time, it ends at once."""
        if self._stop.is_set():
            os._exit(130)
        log.info("asked to stop; a second time ends the node at once, without a checkpoint")
        self._stop.set()

    @property
    def stopped(self) -> asyncio.Event:
        """Set when the node was asked to stop."""
        return self._stop

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        # The terminal is gone; under nohup the signal is ignored, and stays so. It often comes
        # together with another one, so it never counts as asking again.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._stop.set)

    def _last_port(self) -> int:
        """The port of the last run, so that old invites still work; 0: none is known."""
        try:
            port = int(self.data_dir.port_path.read_text())
        except (OSError, ValueError):
            return 0
        return port if 0 < port < 65_536 else 0

    # -- what others see -------------------------------------------------------------------------

    async def on_charter(self) -> None:
        """The charter was extended."""

    def on_notice(self, peer_id: str, body: bytes) -> None:
        """A notice arrived."""

    def on_malformed(self, peer_id: str, error: RemoteProtocolError) -> None:
        """A peer sent a request that breaks the protocol."""
        self.peers.rejected(peer_id, error.reason, time.monotonic())

    def on_ban(self, peer_id: str) -> None:
        """A peer is kept out from now on."""

    def _on_refused(self, peer_id: str) -> None:
        if self.admission.refusal(peer_id) is Reason.NOT_MEMBER:
            self.membership.knocked(peer_id)

    def fill_heartbeat(self, fields: dict[str, Any]) -> None:
        """Add what this role has to say."""

    async def _heartbeat(self) -> Heartbeat:
        charter = self.membership.charter
        fields: dict[str, Any] = {
            "versions": PROTOCOL_VERSIONS,
            "addresses": tuple((await self.overlay.addresses())[:4]),
            "name": self.name,
            "software": __version__,
            "model": "",
            "parameters": 0,
            "mode": "",
            "role": self.role,
            "step": 0,
            "sampling": False,
            "state": "serving",
            "accuracy": None,
            "reward": None,
            "tokens_per_s": 0.0,
            "groups_made": 0,
            "groups_used": 0,
            "amendments": len(charter.amendments),
            "peers": len(self.overlay.connected()),
            "started_s": self.started_s,
        }
        self.fill_heartbeat(fields)
        if self._stop.is_set():
            fields.update(state="left", sampling=False)
        return Heartbeat(**fields)

    def _charter_bytes(self) -> bytes | None:
        return self.membership.charter_bytes

    def _find_blob(self, digest: bytes) -> bytes | Path | None:
        """Rollouts and prompt sets, by content hash."""
        prompts = self.swarm_dir.prompt_set_path(digest.hex())
        return prompts if prompts.exists() else self.store.path(digest)

    async def invite(self) -> str:
        """A fresh invite: this node's addresses first, then those of members seen now."""
        addresses = await self.overlay.addresses()
        for member in self.membership.members.values():
            addresses.extend(member.heartbeat.addresses[:1])
        return Invite(
            self.swarm_id,
            tuple(dict.fromkeys(addresses))[:MAX_INVITE_ADDRESSES],
            self.membership.charter.manifest.name,
        ).encode()

    # -- probes ----------------------------------------------------------------------------------

    def not_ready(self) -> list[str]:
        """Why this node does not do its work now; empty: it does."""
        if self.overlay.fault:
            return [f"the network daemon is down: {self.overlay.fault}"]
        if self.membership.charter_bytes is None:
            return ["looking for members: no manifest yet"]
        return []

    async def _metrics_page(self) -> Answer:
        from swarm.metrics import exposition

        return Answer(exposition.render(await self.status()), content_type=exposition.CONTENT_TYPE)

    async def _livez(self) -> Answer:
        return Answer(b"ok\n")

    async def _readyz(self) -> Answer:
        reasons = self.not_ready()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return Answer.of_json({"ready": not reasons, "reasons": reasons}, status)

    # -- control socket --------------------------------------------------------------------------

    def handlers(self) -> dict[str, Handler]:
        """Commands of the control socket."""
        return {
            "status": self._status,
            "invite": self._invite,
            "stop": self._stop_command,
            "peers": self._peers_command,
            "amend": self._amend,
            "ban": self._ban,
            "unban": self._unban,
        }

    async def _peers_command(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return peers_snapshot(
            self.peers,
            self.membership.members,
            self.admission,
            self.reception,
            time.monotonic(),
        )

    async def _amend(self, request: Mapping[str, Any]) -> dict[str, Any]:
        async with self._amending:  # two at once would both follow the same amendment
            charter = amend(self.membership.charter, self.swarm_dir, self.identity, request)
            await self.membership.amend(charter)
        return {"amendments": len(charter.amendments)}

    async def _ban(self, request: Mapping[str, Any]) -> dict[str, Any]:
        for peer in request["peers"]:
            self.admission.ban(peer)
            self.on_ban(peer)
            log.info("%s is banned here", peer)
        return self.admission.view()

    async def _unban(self, request: Mapping[str, Any]) -> dict[str, Any]:
        for peer in request["peers"]:
            self.admission.unban(peer)
            self.peers.pardon(peer)
            log.info("%s is no longer banned here", peer)
        return self.admission.view()

    async def _invite(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"invite": await self.invite()}

    async def _stop_command(self, _: Mapping[str, Any]) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.05, self._stop.set)
        return {"pid": os.getpid()}

    async def _status(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return await self.status()

    def fill_status(self, status: dict[str, Any]) -> None:
        """Add what this role has to say."""

    def _resources(self) -> dict[str, Any]:
        """Memory and disk; read seldom, because finding the children walks all processes."""
        now = time.monotonic()
        if now - self._resources_read_s > RESOURCES_PERIOD_S:
            process = psutil.Process()
            children = process.children(recursive=True)
            self._resources_read_s = now
            self._resources_read = {
                "node_memory_bytes": process.memory_info().rss,
                "children_memory_bytes": sum(_memory_bytes(child) for child in children),
                "disk_free_bytes": psutil.disk_usage(str(self.data_dir.root)).free,
            }
        return {**self._resources_read, "rollouts_bytes": self.store.used_bytes}

    def _awaited(self) -> str:
        if self.membership.outside:
            return "the swarm's organizer to let this node in"
        return "a member that has the manifest"

    def _reception(self) -> dict[str, Any]:
        """What peers say of this node's groups: those that are here, or, at first, all."""
        now_s = time.monotonic()
        members = self.membership.members or self.reception.current(now_s)
        return self.reception.view(members, now_s)

    def _reception_problem(self) -> str:
        if self.membership.outside:
            return self.membership.outside
        view = self._reception()
        problem = complaint(view)
        if problem and next(iter(view["verdicts"])) == Reason.NOT_MEMBER:
            return off_the_roster(self.overlay.peer_id)
        return problem

    async def status(self) -> dict[str, Any]:
        """A snapshot for `swarm-node status`."""
        membership = self.membership
        known = membership.charter_bytes is not None
        connected = self.overlay.connected()
        skew = self.overlay.clock_skew_s
        unreadable = Counter(membership.unreadable.values())
        problems = []
        if self.overlay.fault:
            problems.append(f"the network daemon is down: {self.overlay.fault}")
        if not connected and self.overlay.dial_results:
            problems.append("no connection to any member")
        if skew is not None and abs(skew) > MAX_CLOCK_SKEW_S:
            problems.append(f"this machine's clock is {-skew:+.1f} s off its peers': set it by NTP")
        if problem := self._reception_problem():
            problems.append(problem)
        if self.store.trouble:
            problems.append(f"rollouts are not stored: {self.store.trouble}")
        if self.ledger.trouble:
            problems.append(f"the ledger is not written: {self.ledger.trouble}")
        status: dict[str, Any] = {
            "schema": "swarm-node/status/1",
            "node": {
                "name": self.name,
                "peer_id": self.overlay.peer_id,
                "role": self.role,
                "version": __version__,
                "pid": os.getpid(),
                "data_dir": str(self.data_dir.root),
                "metrics_port": self._metrics.port if self._metrics else None,
                "started_s": self.started_s,
            },
            "swarm": {"id": self.swarm_id.hex()},
            "activity": {
                "doing": "serving" if known else "looking for members",
                "since_s": self.started_s,
                "waiting_for": "" if known else self._awaited(),
            },
            "problems": problems,
            "not_ready": self.not_ready(),
            "network": {
                "addresses": await self.overlay.addresses(),
                "connected": len(connected),
                "dial": dict(self.overlay.dial_results),
                "records_rejected": dict(self.overlay.records_rejected),
                "p2pd_restarts": self.overlay.restarts,
                "clock_skew_s": skew,
                "incompatible_members": unreadable[Reason.INCOMPATIBLE],
                "heartbeats_rejected": dict(unreadable),
            },
            "members": [
                member_row(m.peer_id, m.heartbeat, m.changed_s) for m in membership.members.values()
            ],
            "ledger": self.ledger.view(self.overlay.peer_id, LEDGER_PEERS),
            "resources": self._resources(),
            "reception": self._reception(),
        }
        if known:
            charter = membership.charter
            status["swarm"] |= {
                "name": charter.manifest.name,
                "prompts": sum(ref.count for ref in charter.prompt_sets),
                "amendments": len(charter.amendments),
                "closes_at_s": charter.closes_at_s,
                "open": charter.members is None,
                "roster": None if charter.members is None else len(charter.members),
            }
        self.fill_status(status)
        return status


def member_row(peer_id: str, heartbeat: Heartbeat, seen_s: float) -> dict[str, Any]:
    """One member as the status shows it; the values are the member's own claims."""
    return {
        "peer_id": peer_id,
        "name": heartbeat.name,
        "role": heartbeat.role,
        "model": heartbeat.model,
        "parameters": heartbeat.parameters,
        "mode": heartbeat.mode,
        "state": heartbeat.state,
        "sampling": heartbeat.sampling,
        "step": heartbeat.step,
        "accuracy": heartbeat.accuracy,
        "reward": heartbeat.reward,
        "tokens_per_s": heartbeat.tokens_per_s,
        "groups_made": heartbeat.groups_made,
        "groups_used": heartbeat.groups_used,
        "software": heartbeat.software,
        "peers": heartbeat.peers,
        "addresses": list(heartbeat.addresses),
        "seen_s": seen_s,
    }


def _memory_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
