"""`swarm-node seed`: serve a swarm.

Owns: that terms and prompts are here for newcomers. Does not know: how a swarm is made
(swarm.node.genesis) or amended (swarm.node.amending), torch.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.config import NodeConfig
from swarm.control import Handler
from swarm.errors import UsageError
from swarm.node.member import Node
from swarm.paths import DataDir
from swarm.protocol.manifest import PromptSetRef

log = logging.getLogger(__name__)

PROMPTS_PERIOD_S = 10.0
"""Between two looks whether the prompt sets are whole."""


class Organizer(Node):
    """Serves manifest and prompts, is a bootstrap address, signs amendments; trains nothing."""

    role = "organizer"

    def __init__(
        self,
        config: NodeConfig,
        data_dir: DataDir,
        *,
        swarm_id: bytes,
        addresses: tuple[str, ...] = (),
        announce_invite: asyncio.Future[str] | None = None,
    ) -> None:
        super().__init__(config, data_dir, swarm_id=swarm_id, addresses=addresses)
        self._announce_invite = announce_invite
        self._lost: list[PromptSetRef] = []

    async def work(self) -> None:
        charter = await self.join()
        charter.check_organizer(self.identity.peer_id)
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
            self._lost = await self._missing(self.membership.charter.all_sets)
            if self._lost:
                log.error("%s", self._lost_prompts())
                try:
                    async with asyncio.timeout(PROMPTS_PERIOD_S):
                        for ref in self._lost:
                            await self.membership.prompt_set(ref, ref.size_bytes)
                except TimeoutError:
                    continue
                if not await self._missing(self._lost):
                    continue
            # Also after a set that was fetched and could not be written: the disk may be full.
            await asyncio.sleep(PROMPTS_PERIOD_S)

    async def _missing(self, sets: Sequence[PromptSetRef]) -> list[PromptSetRef]:
        stored = self.membership.stored_set
        return [ref for ref in sets if await asyncio.to_thread(stored, ref) is None]

    def _lost_prompts(self) -> str:
        if not self._lost:
            return ""
        return (
            f"{len(self._lost)} of {len(self.membership.charter.all_sets)} prompt sets are missing "
            "or damaged here, and newcomers wait for them; members are asked, or put back "
            + ", ".join(str(self.swarm_dir.prompt_set_path(ref.sha256)) for ref in self._lost)
        )

    def not_ready(self) -> list[str]:
        return [*super().not_ready(), *filter(None, [self._lost_prompts()])]

    def fill_status(self, status: dict[str, Any]) -> None:
        status["problems"] += filter(None, [self._lost_prompts()])

    def handlers(self) -> dict[str, Handler]:
        return {
            **super().handlers(),
            "pause": self._nothing_to_pause,
            "resume": self._nothing_to_pause,
        }

    async def _nothing_to_pause(self, _: Mapping[str, Any]) -> dict[str, Any]:
        raise UsageError(
            "the node that runs here is an organizer: it has no model to pause; "
            "`swarm-node stop` ends it"
        )
