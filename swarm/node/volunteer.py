"""`swarm-node join`: a member that samples, exchanges and trains.

Owns: what a volunteer does beside being a member: prompts, learner, pool, gathering, announcing.
Does not know: torch; the learner process does.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from swarm import __version__, model_files
from swarm.config import NodeConfig
from swarm.control import Handler
from swarm.errors import ConfigError, DataError, RemoteProtocolError
from swarm.learner.calls import Completion
from swarm.learner.process import LearnerProcess
from swarm.node.announce import Announcer
from swarm.node.gather import Gatherer
from swarm.node.member import STOP_TIMEOUT_S, Node, Stopped
from swarm.node.prompt_table import (
    PromptTable,
    RenderedSet,
    check_limits,
    check_tokenizer,
    render_set,
)
from swarm.node.run_record import open_run
from swarm.node.training import TrainingLoop
from swarm.paths import DataDir, RunDir, write_atomic, write_json
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.pool import Pool
from swarm.protocol.records import GroupRef
from swarm.protocol.rollout import RolloutGroup
from swarm.protocol.verify import verify_group, verify_ref
from swarm.rewards.grading import Grader
from swarm.rewards.workers import RewardError, WorkerPool
from swarm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PROMPTS_LATE_S = 60.0
"""Time after which prompts that were added and cannot be fetched are a problem."""


class Volunteer(Node):
    """A node with a model.

    Args:
        new_run: start from the model's own weights even where an earlier run could be resumed.
    """

    role = "volunteer"

    def __init__(
        self,
        config: NodeConfig,
        data_dir: DataDir,
        *,
        swarm_id: bytes,
        addresses: tuple[str, ...] = (),
        fail_fast: bool = False,
        new_run: bool = False,
    ) -> None:
        super().__init__(
            config, data_dir, swarm_id=swarm_id, addresses=addresses, fail_fast=fail_fast
        )
        self._new_run = new_run
        self.prompts = PromptTable()
        self.pool = Pool(config.train.groups_per_step, config.pool.max_peer_share)
        self._evaluation: dict[str, RenderedSet] = {}
        self._stage = "looking for members"
        self._stage_since_s = time.time()
        self._close_timer: asyncio.TimerHandle | None = None
        self._charter_changed = asyncio.Event()
        self._prompts_refused = ""
        self._prompts_awaited_s: float | None = None
        self._said_alone = False
        self.loop: TrainingLoop | None = None
        self.gatherer: Gatherer | None = None
        self.announcer: Announcer | None = None

    # -- life ------------------------------------------------------------------------------------

    async def work(self) -> None:
        model = await asyncio.to_thread(model_files.settle, self.config.model)
        folder = Path(model.path)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder)
        self.tokenizer = tokenizer
        charter = await self.join()
        manifest = charter.manifest
        check_limits(manifest, charter.all_sets, self.config.limits)
        check_tokenizer(manifest, tokenizer, self.config.model.path)
        self._context = model_files.context_tokens(folder)
        resolved = self.config.model_copy(update={"model": model})
        run_dir = open_run(
            self.swarm_dir,
            self.config,
            resolved,
            peer_id=self.identity.peer_id,
            started_s=self.started_s,
            new_run=self._new_run,
        )
        settings_path = self.swarm_dir.config_path
        earlier = settings_path.read_bytes() if settings_path.exists() else None
        write_json(settings_path, self.config.model_dump(mode="json"))
        learner = LearnerProcess(run_dir.learner_log_path, threads=self.config.model.threads)
        reward = self.config.reward
        try:
            async with WorkerPool(reward.workers, reward.timeout_s) as self.workers:
                self.grader = Grader(self.workers, tokenizer, manifest.reward)
                await learner.start()  # torch loads while the prompts are fetched and rendered
                await self.unless_stopped(self._load_prompts())
                await self._train(run_dir, resolved, learner)
        except Exception:
            # Settings with which no model was ever loaded must not be those of the next start.
            if self.loop is None or not self.loop.engine:
                if earlier is None:
                    settings_path.unlink(missing_ok=True)
                else:
                    write_atomic(settings_path, earlier)
            raise
        finally:
            await learner.close()
            run_dir.delete_handover()

    async def _train(self, run_dir: RunDir, config: NodeConfig, learner: LearnerProcess) -> None:
        manifest = self.membership.charter.manifest
        self.gatherer = Gatherer(
            self.exchange,
            self.pool,
            self.peers,
            streams=config.network.fetch_streams,
            live_peers=lambda: len(self._sampling_peers()),
            check=self._check,
            verify=self._verify,
            score=self.score,
            prompt_ids=self.prompts.token_ids,
            keep=self.store.put,
            ledger=self.ledger,
        )
        self.announcer = Announcer(
            self.overlay,
            self.exchange,
            self.swarm_id,
            manifest.record_shards,
            recipients=self._recipients,
            offer=self.gatherer.offer,
            reject=self.gatherer.reject,
        )
        self.loop = TrainingLoop(
            config,
            self.identity,
            run_dir,
            learner,
            self.pool,
            charter=lambda: self.membership.charter,
            prompts=self.prompts,
            evaluation={name: item.token_ids for name, item in self._evaluation.items()},
            samplers=self.membership.samplers,
            publish=self._publish,
            score=self.score,
            grade=self._grade,
            on_progress=self._on_progress,
            ledger=self.ledger,
        )
        self._obey_charter()
        loop = self.loop
        if self.data_dir.paused_path.exists():
            loop.held.set()
        async with asyncio.TaskGroup() as tasks:
            services = [
                tasks.create_task(self.membership.run()),
                tasks.create_task(self.gatherer.run(lambda: loop.max_age_s)),
                tasks.create_task(self.announcer.run()),
                tasks.create_task(self._follow_charter()),
            ]
            training = tasks.create_task(loop.run())
            await self.stopped.wait()
            loop.stopping.set()
            # While the model is loading there is nothing to keep.
            patience_s = STOP_TIMEOUT_S if loop.model or loop.held.is_set() else 0.0
            done, _ = await asyncio.wait({training}, timeout=patience_s)
            if not done:
                log.warning("dropped after %.0f s: %s", patience_s, loop.progress.activity.doing)
                training.cancel()
            for service in services:
                service.cancel()
        raise Stopped

    # -- prompts ---------------------------------------------------------------------------------

    async def _load_prompts(self) -> None:
        self._enter("fetching prompts")
        manifest = self.membership.charter.manifest
        for name, ref in manifest.evaluation_sets.items():
            rendered = await self._rendered(ref)
            self._evaluation[name] = rendered.first(self.config.eval.max_prompts)
        self._sets_loaded = 0
        await self._append_new_sets()

    async def _append_new_sets(self) -> None:
        for ref in self.membership.charter.prompt_sets[self._sets_loaded :]:
            self._prompts_awaited_s = time.time()
            try:
                self.prompts.append(await self._rendered(ref))
            finally:
                self._prompts_awaited_s = None
            self._sets_loaded += 1

    async def _rendered(self, ref: PromptSetRef) -> RenderedSet:
        manifest = self.membership.charter.manifest
        max_bytes = self.config.limits.max_download_mb * 1_000_000
        data = await self.membership.prompt_set(ref, max_bytes)
        return await render_set(
            data,
            ref,
            manifest,
            self.tokenizer,
            self.config.model.path,
            self.workers,
            context=self._context,
        )

    async def on_charter(self) -> None:
        self._obey_charter()
        self._charter_changed.set()
        for publisher in self.pool.publishers():
            if self.admission.refusal(publisher) is not None:
                self.on_ban(publisher)

    def on_ban(self, peer_id: str) -> None:
        if self.gatherer is not None:
            self.gatherer.forget(peer_id)
        self.pool.drop(peer_id)

    def on_malformed(self, peer_id: str, error: RemoteProtocolError) -> None:
        if self.gatherer is not None:
            self.gatherer.reject(peer_id, error)
        else:
            super().on_malformed(peer_id, error)

    async def _follow_charter(self) -> None:
        """Fetch prompts as they are added; heartbeats go on meanwhile, and so does the training."""
        while True:
            await self._charter_changed.wait()
            self._charter_changed.clear()
            charter = self.membership.charter
            try:
                check_limits(charter.manifest, charter.all_sets, self.config.limits)
                await self._append_new_sets()
            except (ConfigError, DataError, RewardError) as error:
                self._prompts_refused = f"prompts added to the swarm are not used: {error}"
                log.error("%s", self._prompts_refused)
            else:
                self._prompts_refused = ""

    def _obey_charter(self) -> None:
        """Act on what amendments say: close, minimum version."""
        charter, loop = self.membership.charter, self.loop
        if self._close_timer is not None:
            self._close_timer.cancel()
        if loop is not None:
            loop.outdated.clear()
            loop.closing.clear()
            if not charter.admits(__version__):
                loop.outdated.set()
        if loop is not None and charter.closes_at_s is not None:
            delay = max(0.0, charter.closes_at_s - time.time())
            self._close_timer = asyncio.get_running_loop().call_later(delay, loop.closing.set)

    # -- rollouts --------------------------------------------------------------------------------

    def _sampling_peers(self) -> set[str]:
        return {*self.membership.samplers(), self.overlay.peer_id}

    def _check(self, ref: GroupRef, publisher: str) -> None:
        verify_ref(
            ref,
            publisher=publisher,
            charter=self.membership.charter,
            prompt_count=len(self.prompts),
            sampling_peers=self._sampling_peers(),
        )

    def _verify(self, blob: bytes, ref: GroupRef, publisher: str) -> RolloutGroup:
        return verify_group(
            blob,
            expected=ref,
            publisher=publisher,
            charter=self.membership.charter,
            prompt_hashes=self.prompts.hashes,
            sampling_peers=self._sampling_peers(),
        )

    async def score(self, groups: Sequence[RolloutGroup]) -> list[np.ndarray | None]:
        """This node's own rewards: one float32 array (G,) a group; None: not to be computed."""
        return list(
            await asyncio.gather(
                *(
                    self.grader.group_rewards(self.prompts.prompts[group.prompt_id], group.rollouts)
                    for group in groups
                )
            )
        )

    async def _grade(self, name: str, completions: Sequence[Completion]) -> float:
        return await self.grader.accuracy(self._evaluation[name].prompts, completions)

    def _publish(self, published: list[tuple[bytes, bytes, RolloutGroup]]) -> None:
        refs = []
        for digest, blob, group in published:
            self.store.put(digest, blob)
            refs.append(GroupRef.of(group, digest, len(blob)))
        if self.announcer is not None and refs:
            self.announcer.publish(refs, published[0][2].policy_step)

    def _recipients(self) -> list[str]:
        """Members that train: those that sample, and that this node is or can be connected to."""
        return self.membership.samplers()

    def on_notice(self, peer_id: str, body: bytes) -> None:
        if self.announcer is not None:
            self.announcer.receive(peer_id, body)

    def _on_progress(self) -> None:
        if self.gatherer is not None:
            self.gatherer.wake()
        if self.loop is not None and self.loop.progress.step > self._judged_step:
            self._judged_step = self.loop.progress.step
            self._judge(self.loop.progress.last_report.get("per_peer", {}))
        alone = self._trains_alone()
        # Before its first step a node cannot tell whether the others are only still loading.
        if self._said_alone != alone and self.loop is not None and self.loop.progress.last_report:
            self._said_alone = alone
            log.info("training alone" if alone else "no longer training alone")
        if self.loop is not None and self.loop.sampling != self._said_sampling:
            self.membership.beat()

    _judged_step = 0

    def _judge(self, per_peer: Mapping[str, Mapping[str, int]]) -> None:
        """Note what the filter made of each peer's samples, for their receipts."""
        for peer_id, theirs in per_peer.items():
            if peer_id != "own":
                self.peers.trained(
                    peer_id, theirs["trained"], theirs["dropped_kl"], time.monotonic()
                )

    # -- control socket --------------------------------------------------------------------------

    def handlers(self) -> dict[str, Handler]:
        return {**super().handlers(), "pause": self._pause, "resume": self._resume}

    async def _pause(self, _: Mapping[str, Any]) -> dict[str, Any]:
        """Rest from now on, also after a restart."""
        self.data_dir.paused_path.touch()
        if self.loop is not None:
            self.loop.held.set()
        return {}

    async def _resume(self, _: Mapping[str, Any]) -> dict[str, Any]:
        was_paused = self.data_dir.paused_path.exists()
        self.data_dir.paused_path.unlink(missing_ok=True)
        if self.loop is not None:
            self.loop.held.clear()
        return {"was_paused": was_paused}

    def _trains_alone(self) -> bool:
        """Whether this node trains and no other member samples."""
        return self.loop is not None and self.loop.sampling and not self.membership.samplers()

    # -- what others see -------------------------------------------------------------------------

    _said_sampling = False

    def fill_heartbeat(self, fields: dict[str, Any]) -> None:
        loop = self.loop
        self._said_sampling = bool(loop and loop.sampling)
        fields.update(
            sampling=self._said_sampling,
            state=loop.progress.activity.doing if loop else self._stage,
            model=Path(self.config.model.path).name,
            mode=self.config.model.mode,
        )
        if loop is not None and self.gatherer is not None:
            progress = loop.progress
            fields.update(
                step=progress.step,
                parameters=int(loop.model.get("parameters", 0)),
                accuracy=progress.accuracy,
                reward=progress.rewards[-1] if progress.rewards else None,
                tokens_per_s=progress.tokens_per_s,
                groups_made=progress.counts.groups_made,
                groups_used=progress.counts.foreign_groups,
            )

    def _enter(self, stage: str) -> None:
        self._stage, self._stage_since_s = stage, time.time()

    def not_ready(self) -> list[str]:
        reasons = super().not_ready()
        loop = self.loop
        if loop is None:
            reasons.append(self._stage)
        elif not loop.model:
            activity = loop.progress.activity
            reasons.append(f"{activity.doing} {activity.waiting_for}".strip())
        elif loop.paused:
            reasons.append(loop.paused)
        return reasons

    def fill_status(self, status: dict[str, Any]) -> None:
        loop, gatherer = self.loop, self.gatherer
        if loop is None or gatherer is None:
            status["activity"] = {
                "doing": self._stage,
                "since_s": self._stage_since_s,
                "waiting_for": status["activity"]["waiting_for"],
            }
            return
        if self.grader.trouble:
            status["problems"].append(f"rewards fail: {self.grader.trouble}")
        if loop.paused:
            status["problems"].append(loop.paused)
        troubles = (
            loop.learner_trouble,
            loop.checkpoint_trouble,
            loop.log.trouble,
            loop.progress.trouble,
        )
        status["problems"] += filter(None, troubles)
        if self._prompts_refused:
            status["problems"].append(self._prompts_refused)
        awaited_s = self._prompts_awaited_s
        if awaited_s is not None and time.time() - awaited_s > PROMPTS_LATE_S:
            status["problems"].append(
                f"prompts added to the swarm could not be fetched for {time.time() - awaited_s:.0f}"
                " s; no member in reach has them; training goes on with the others"
            )
        if loop.outdated.is_set():
            status["problems"].append(f"training has ended: {loop.end_reason()}")
        status["alone"] = self._trains_alone()
        progress = loop.progress
        status["activity"] = asdict(progress.activity)
        status["model"] = {
            "path": self.config.model.path,
            "mode": self.config.model.mode,
            **loop.model,
        }
        status["engine"] = loop.engine
        counts, got = progress.counts, gatherer.counts
        status["training"] = {
            **progress.status(),
            "max_steps": self.config.train.max_steps or None,
            "groups_per_step": self.config.train.groups_per_step,
            "finished": loop.finished or None,
            "evaluation_prompts": {k: len(v.prompts) for k, v in self._evaluation.items()},
        }
        status["exchange"] = {
            "groups_announced": got.announced,
            "groups_fetched": got.fetched,
            "groups_accepted": got.accepted,
            "groups_rejected": got.rejected,
            "rejected_by_reason": got.rejected_by_reason,
            "left_out": got.left_out,
            "bytes_fetched": got.bytes,
            "tokens_fetched": got.tokens,
            "bytes_per_token": round(
                (got.bytes + counts.bytes_published) / (got.tokens + counts.tokens_sampled), 3
            )
            if got.tokens + counts.tokens_sampled
            else None,
            "pool_groups": len(self.pool.pooled()),
            "notices_sent": self.announcer.notices_sent if self.announcer else 0,
            "notices_failed": self.announcer.notices_failed if self.announcer else 0,
        }
        status["peers"] = self.peers.view(time.monotonic())
