"""`swarm-node seed`: serve a swarm, amend it.

Owns: from a command to a signed amendment, and the member that signs. Does not know: how a swarm
is made (swarm.node.genesis), torch.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.config import NodeConfig
from swarm.control import Handler
from swarm.errors import UsageError
from swarm.node.genesis import append_set
from swarm.node.member import Node
from swarm.paths import DataDir, SwarmDir, write_atomic
from swarm.protocol.charter import Action, AppendPrompts, Charter, CloseSwarm, MinimumVersion
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.roster import BanChange, RosterChange, changes_to

log = logging.getLogger(__name__)

PROMPTS_PERIOD_S = 10.0
"""Between two looks whether the prompt sets are whole."""


def parse_actions(request: Mapping[str, Any], append: PromptSetRef | None) -> Sequence[Action]:
    """The amendments that a command asks for.

    Raises:
        UsageError: it is none of append, close, minimum_version, roster, ban_list.
    """
    if append is not None:
        return [AppendPrompts(prompts=append)]
    if "close_at_s" in request:
        return [CloseSwarm(at_s=float(request["close_at_s"]))]
    if "minimum_version" in request:
        version = str(request["minimum_version"])
        if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}", version):
            raise UsageError(f"minimum version {version!r}: expected numbers such as 1.2.0")
        return [MinimumVersion(version=version)]
    try:
        if "roster" in request:
            return changes_to(RosterChange, **request["roster"])
        if "ban_list" in request:
            return changes_to(BanChange, **request["ban_list"])
    except (ValueError, TypeError) as error:  # pydantic's is a ValueError
        raise UsageError(f"a list of peers that cannot be: {error}") from None
    raise UsageError(
        "an amendment appends prompts, closes the swarm, sets a minimum version, or changes the "
        "roster or the list of bans"
    )


async def amend(
    charter: Charter, swarm_dir: SwarmDir, identity: Identity, request: Mapping[str, Any]
) -> Charter:
    """Sign what a command asks for; appended prompts are rendered and stored first.

    Args:
        request: one of {"append": sources, "drop_bad": bool}, {"close_at_s": Unix time},
            {"minimum_version": text},
            {"roster" or "ban_list": {"add": peer ids, "remove": peer ids}}.
    """
    append = None
    charter.check_organizer(identity.peer_id)
    if "append" in request:
        sources, drop_bad = request["append"], bool(request.get("drop_bad"))
        append = await append_set(charter, swarm_dir, sources, drop_bad=drop_bad)
    extended = charter
    for action in parse_actions(request, append):
        extended = extended.amended(action, time.time(), identity)
    write_atomic(swarm_dir.charter_path, extended.to_bytes())
    return extended


class Organizer(Node):
    """Serves manifest and prompts, is a bootstrap address, signs amendments; trains nothing."""

    role = "organizer"

    def __init__(
        self,
        config: NodeConfig,
        data_dir: DataDir,
        *,
        swarm_id: bytes,
        announce_invite: asyncio.Future[str] | None = None,
    ) -> None:
        super().__init__(config, data_dir, swarm_id=swarm_id)
        self._announce_invite = announce_invite
        self._amending = asyncio.Lock()
        self._lost: list[PromptSetRef] = []

    async def work(self) -> None:
        charter = await self.join()
        if charter.members is None:
            log.info("an open swarm: whoever has the invite may take part; see `members add`")
        if self._announce_invite is not None:
            self._announce_invite.set_result(await self.invite())
            log.info("serving; others join with: swarm-node join INVITE --model DIR")
        await self.unless_stopped(self._serve())

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.membership.run())
            tasks.create_task(self._keep_prompts())

    async def _keep_prompts(self) -> None:
        """Fetch prompt sets that are lost here back from any member: newcomers need them."""
        while True:
            sets = self.membership.charter.all_sets
            self._lost = [ref for ref in sets if not await asyncio.to_thread(self._holds, ref)]
            if self._lost:
                log.error("%s", self._lost_prompts())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROMPTS_PERIOD_S):
                        for ref in self._lost:
                            await self.membership.prompt_set(ref, ref.size_bytes)
                        continue
            else:
                await asyncio.sleep(PROMPTS_PERIOD_S)

    def _holds(self, ref: PromptSetRef) -> bool:
        return self.membership.stored_set(ref) is not None

    def _lost_prompts(self) -> str:
        if not self._lost:
            return ""
        return (
            f"{len(self._lost)} of {len(self.membership.charter.all_sets)} prompt sets are lost or "
            "damaged here, and newcomers wait for them; members are asked, or put back "
            + ", ".join(str(self.swarm_dir.prompt_set_path(ref.sha256)) for ref in self._lost)
        )

    def not_ready(self) -> list[str]:
        return [*super().not_ready(), *filter(None, [self._lost_prompts()])]

    def fill_status(self, status: dict[str, Any]) -> None:
        status["problems"] += filter(None, [self._lost_prompts()])

    def handlers(self) -> dict[str, Handler]:
        return {
            **super().handlers(),
            "amend": self._amend,
            "pause": self._nothing_to_pause,
            "resume": self._nothing_to_pause,
        }

    async def _nothing_to_pause(self, _: Mapping[str, Any]) -> dict[str, Any]:
        raise UsageError(
            "the node that runs here is an organizer: it has no model to pause; "
            "`swarm-node stop` ends it"
        )

    async def _amend(self, request: Mapping[str, Any]) -> dict[str, Any]:
        async with self._amending:  # two at once would both follow the same amendment
            charter = await amend(self.membership.charter, self.swarm_dir, self.identity, request)
            await self.membership.amend(charter)
        return {"amendments": len(charter.amendments)}
