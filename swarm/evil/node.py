"""The malicious volunteer: a real one, but for what it publishes and how it uses streams.

Owns: putting forged groups in the place of samples; floods; streams that stall. Does not know: what
a forged group holds (`swarm.evil.forgery`).

It joins, samples, trains, announces and serves as any volunteer does, over the same wire.
"""

import asyncio
import logging
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from swarm.config import NodeConfig
from swarm.errors import LearnerError, SwarmError
from swarm.evil.attacks import Attack
from swarm.evil.forgery import Forger
from swarm.learner.calls import CALL_TIMEOUT_S
from swarm.learner.process import LearnerProcess
from swarm.net.exchange import OPEN_TIMEOUT_S, PROTOCOL_PREFIX
from swarm.node.volunteer import Volunteer
from swarm.paths import RunDir
from swarm.protocol.codec import blob_bytes, blob_hash, encode_group
from swarm.protocol.ownership import is_candidate
from swarm.protocol.records import (
    MAX_GROUPS_PER_ANNOUNCEMENT,
    PROTOCOL_VERSIONS,
    Announcement,
    GroupRef,
)
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.protocol.verify import OWNER_CANDIDATES

log = logging.getLogger(__name__)

FLOOD_STREAMS = 32
"""Opened at once to each member, again and again."""
FLOOD_PERIOD_S = 0.05
STALL_STREAMS = 8
"""Held open without a word to each member."""
STALL_PERIOD_S = 5.0


class EvilVolunteer(Volunteer):
    """A volunteer with one attack; the other arguments are `Volunteer`'s."""

    def __init__(self, attack: Attack, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._attack = attack
        self._forger: Forger | None = None
        self._learner: LearnerProcess | None = None
        self._random = random.Random(self.config.node.seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def work(self) -> None:
        if self._attack is Attack.STALL:
            self.exchange._answer = _never_answer  # type: ignore[method-assign, assignment]
        pest = {Attack.FLOOD: self._flood, Attack.STALL: self._stall}.get(self._attack)
        if pest is not None:
            self._start(pest())
        try:
            await super().work()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _train(self, run_dir: RunDir, config: NodeConfig, learner: LearnerProcess) -> None:
        sampling = self.membership.charter.manifest.sampling
        self._learner = learner
        self._forger = Forger(
            self._attack, self.tokenizer, sampling.max_completion_tokens, config.node.seed
        )
        await super()._train(run_dir, config, learner)

    def _publish(self, published: list[tuple[bytes, bytes, RolloutGroup]]) -> None:
        self._start(self._publish_forged([group for _, _, group in published]))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publish_forged(self, groups: Sequence[RolloutGroup]) -> None:
        forged = []
        for group in groups:
            try:
                lie = await self._forged(group)
            except LearnerError as error:
                log.info("nothing forged: %s", error)
                return
            blob = encode_group(lie, self.identity)
            forged.append((blob_hash(blob), blob, lie))
        super()._publish(forged)

    async def _forged(self, group: RolloutGroup) -> RolloutGroup:
        forger = self._forger
        if forger is None:
            return group
        prompt_id, prompt_sha256 = group.prompt_id, group.prompt_sha256
        if self._attack is Attack.STOLEN:
            prompt_id = self._prompt_of_others(group)
            prompt_sha256 = self.prompts.prompt_hash(prompt_id)
        if self._attack is Attack.FOREIGN:
            prompt_sha256 = self.prompts.prompt_hash((prompt_id + 1) % len(self.prompts))
        answer = self.prompts.prompts[prompt_id].answer
        texts = forger.texts(answer, len(group.rollouts))
        rollouts = group.rollouts if texts is None else await self._scored(prompt_id, texts)
        return replace(
            group,
            prompt_id=prompt_id,
            prompt_sha256=prompt_sha256,
            rollouts=tuple(forger.claimed(rollouts)),
            claimed_rewards=forger.rewards(group.claimed_rewards),
        )

    async def _scored(self, prompt_id: int, texts: Sequence[np.ndarray]) -> tuple[Rollout, ...]:
        """The texts with the log-probs that this node's model gives to them."""
        if self._learner is None:
            raise LearnerError("there is no learner")
        answer = await self._learner.call(
            "logprobs",
            timeout_s=CALL_TIMEOUT_S,
            prompt_ids=[self.prompts.token_ids(prompt_id).tolist()] * len(texts),
            completions=[ids.astype("<i4").tobytes() for ids in texts],
            temperature=self.membership.charter.manifest.sampling.temperature,
        )
        return tuple(
            Rollout(ids, np.frombuffer(packed, "<f4"), Finish.STOP)
            for ids, packed in zip(texts, answer["logprobs"], strict=True)
        )

    def _prompt_of_others(self, group: RolloutGroup) -> int:
        """One that this node is not among the first in line for, where there is one."""
        peers = self._sampling_peers()
        count = len(self.prompts)
        start = self._random.randrange(count)
        for prompt_id in (*range(start, count), *range(start)):
            if not is_candidate(
                self.swarm_id, group.epoch, prompt_id, peers, group.publisher, OWNER_CANDIDATES
            ):
                return int(prompt_id)
        return group.prompt_id

    # -- streams ---------------------------------------------------------------------------------

    async def _flood(self) -> None:
        while True:
            await asyncio.sleep(FLOOD_PERIOD_S)
            if self.announcer is None:
                continue
            await asyncio.gather(
                *(self._notify(peer) for peer in self._recipients() for _ in range(FLOOD_STREAMS))
            )

    async def _notify(self, peer: str) -> None:
        with suppress(SwarmError):
            await self.exchange.notify(peer, self._invented().pack())

    def _invented(self) -> Announcement:
        """Groups that could be, of a run that could be; nobody has them."""
        size = self.membership.charter.manifest.sampling.group_size
        refs = [
            GroupRef(
                os.urandom(32),
                blob_bytes(size, 2 * size),
                self._random.randrange(2**32),
                self._random.randrange(len(self.prompts)),
                size,
                2 * size,
            )
            for _ in range(MAX_GROUPS_PER_ANNOUNCEMENT)
        ]
        return Announcement(PROTOCOL_VERSIONS, tuple(refs), 0, 0)

    async def _stall(self) -> None:
        held: list[asyncio.StreamWriter] = []
        try:
            while True:
                await asyncio.sleep(STALL_PERIOD_S)
                for peer in self._recipients():
                    for _ in range(STALL_STREAMS):
                        with suppress(SwarmError):
                            _, _, writer = await self.overlay.open_stream(
                                peer,
                                [f"{PROTOCOL_PREFIX}{v}" for v in PROTOCOL_VERSIONS],
                                OPEN_TIMEOUT_S,
                            )
                            held.append(writer)
                while len(held) > STALL_STREAMS * len(self._recipients()):
                    held.pop(0).close()
        finally:
            for writer in held:
                writer.close()


async def _never_answer(
    _peer: str, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter
) -> None:
    with suppress(OSError):
        while await reader.read(1024):
            pass
