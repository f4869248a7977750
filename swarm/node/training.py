"""The loop of a node: sample own prompts, publish, compose a batch, train, evaluate, checkpoint.

Owns: the order of these, the publisher's cursor, the run's logs.
Does not know: how groups travel (a `publish` callback), tensors (the learner's).
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgpack
import numpy as np

from swarm.config import NodeConfig
from swarm.errors import EngineDriftError, LearnerError
from swarm.intervals import with_interval
from swarm.learner.calls import (
    Completion,
    greedy_arguments,
    greedy_completions,
    init_arguments,
    sample_arguments,
    sampled,
    step_report,
    train_arguments,
)
from swarm.learner.process import LearnerProcess
from swarm.ledger import Ledger
from swarm.node.progress import Progress
from swarm.node.run_log import RunLog
from swarm.paths import RunDir, write_atomic
from swarm.protocol.charter import Charter
from swarm.protocol.codec import blob_hash, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.ownership import is_candidate
from swarm.protocol.pool import Pool, PooledGroup
from swarm.protocol.prompts import Cursor, next_prompts
from swarm.protocol.rollout import RolloutGroup
from swarm.replay.step_log import step_record

log = logging.getLogger(__name__)

PAUSE_S = 120.0
"""Until the next look whether an engine that drifted samples the trained model again."""


class Prompts(Protocol):
    """The rendered prompts of the swarm (swarm.node.prompt_table.PromptTable)."""

    def __len__(self) -> int: ...
    def token_ids(self, prompt_id: int) -> np.ndarray: ...
    def prompt_hash(self, prompt_id: int) -> bytes: ...


class TrainingLoop:
    """Drives the learner.

    Args:
        samplers: live peers that sample, this node not included.
        publish: makes a stored blob known to the others.
        score: rewards of groups, computed here.
        grade: accuracy of greedy completions of an evaluation set: (its name, completions).
        on_progress: called after each step and evaluation.
        ledger: is told what was made and trained on.
    """

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        run_dir: RunDir,
        learner: LearnerProcess,
        pool: Pool,
        *,
        charter: Callable[[], Charter],
        prompts: Prompts,
        evaluation: Mapping[str, Sequence[np.ndarray]],
        samplers: Callable[[], list[str]],
        publish: Callable[[list[tuple[bytes, bytes, RolloutGroup]]], None],
        score: Callable[[Sequence[RolloutGroup]], Awaitable[list[np.ndarray | None]]],
        grade: Callable[[str, Sequence[Completion]], Awaitable[float]],
        on_progress: Callable[[], None],
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._identity = identity
        self._run_dir = run_dir
        self._learner = learner
        self.pool = pool
        self._charter = charter
        self._prompts = prompts
        self._evaluation = evaluation
        self._samplers = samplers
        self._publish = publish
        self._score = score
        self._grade = grade
        self._on_progress = on_progress
        self._ledger = ledger
        self._config_digest = config.digest()
        self.log = RunLog(run_dir, config.limits.run_log_mb * 1_000_000)
        self._cursor = Cursor()
        self._noted_epoch = -1
        self._checkpointed = (-1, -1)
        self.closing = asyncio.Event()
        self.outdated = asyncio.Event()
        self.stopping = asyncio.Event()
        self.held = asyncio.Event()
        self.progress = Progress()
        self.model: dict[str, Any] = {}
        self.engine: dict[str, Any] = {}
        self.finished = ""
        self.paused = ""
        """Why neither is sampled nor trained now; empty when it is."""
        self.learner_trouble = ""
        """Why there is no learner, until there is one again; empty else."""
        self.checkpoint_trouble = ""
        """Why the last checkpoint was not written; empty when it was."""

    # -- state -----------------------------------------------------------------------------------

    @property
    def sampling(self) -> bool:
        """Whether others should leave prompts to this node."""
        working = not (self.finished or self.paused)
        return bool(self.model) and working and self._learner.alive

    @property
    def max_age_s(self) -> float:
        """How old a group may be, in seconds."""
        pool = self._config.pool
        return max(pool.max_age_s, pool.max_age_steps * self.progress.step_s)

    def _node_state(self) -> bytes:
        state = {
            "cursor": [self._cursor.epoch, self._cursor.after],
            "seen": self.pool.export_seen(),
            **self.progress.export(),
        }
        packed: bytes = msgpack.packb(state)
        return packed

    def _restore(self, packed: bytes) -> None:
        state = msgpack.unpackb(packed)
        self._cursor = Cursor(*state["cursor"])
        self.pool.import_seen(state["seen"])
        self.progress.restore(state)

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until `stopping` is set; then write a checkpoint and return.

        While `held` is set no learner runs: its memory is its owner's.

        A dead or failing learner is restarted from its last checkpoint, with backoff.
        """
        self.log.open()
        try:
            await self._run()
        finally:
            self.log.close()

    async def _run(self) -> None:
        delay = 1.0
        while not self.stopping.is_set():
            if self.held.is_set():
                await self._rest()
                continue
            first_step = self.progress.step
            try:
                await self._start_learner()
                first_step = self.progress.step
                while not (self.stopping.is_set() or self.held.is_set()):
                    try:
                        await self._turn()
                    except EngineDriftError as error:
                        await self._pause(error)
                await self._checkpoint()
            except LearnerError as error:
                if self.stopping.is_set():
                    log.warning("the learner failed while stopping: %s", error)
                    return
                # One that fails before its first step waits longer.
                if self.progress.step > first_step:
                    delay = 1.0
                log.error("learner failed: %s; restarting it in %.0f s", error, delay)
                self.model = {}
                self.learner_trouble = f"the learner failed and is started again: {error}"[:500]
                self.progress.resting("learner down", f"restart in {delay:.0f} s: {error}"[:500])
                self._on_progress()
                await self._wait(self.stopping, delay)
                delay = min(delay * 2, 60.0)

    async def _rest(self) -> None:
        """Leave the device to its owner, until it is given back."""
        await self._learner.close()
        self.model, self.finished = {}, ""
        self.progress.resting("paused by its owner", "`swarm-node resume`")
        log.info("paused at step %d: the learner has ended, its memory is free", self.progress.step)
        self._on_progress()
        while self.held.is_set() and not self.stopping.is_set():
            await self._wait(self.stopping, 0.5)

    async def _turn(self) -> None:
        """One thing: a step, a call to the engine, or the end of the run."""
        reason = self.end_reason()
        if reason and self.finished:
            await self._wait(self.stopping, 1.0)
            return
        self.finished = ""
        if reason:
            await self._finish(reason)
            return
        if self.paused:
            await self._sample(1)
            log.info("the engine samples the trained model again: training goes on")
            self.paused = ""
        if self.progress.evaluated_step < 0:
            await self._evaluate()
        self.pool.expire(time.monotonic(), self.max_age_s)
        live = 1 + len(self._samplers())
        missing = self.pool.own_missing(live)
        batch = None if missing else self.pool.compose(live)
        if batch is None:
            await self._sample(max(missing, 1))
            return
        await self._train(batch)
        every = self._config.eval.every_steps
        if every and self.progress.step % every == 0:
            await self._evaluate()
        if self.progress.step % self._config.checkpoint.every_steps == 0 or self.progress.is_best():
            await self._checkpoint()

    async def _pause(self, error: EngineDriftError) -> None:
        """Neither sample nor train for a while; then `_turn` looks again."""
        self.paused = f"training is paused: {error}"
        log.error("%s; looking again in %.0f s", self.paused, PAUSE_S)
        await self._checkpoint()
        self.progress.resting("paused", str(error))
        self._on_progress()
        await self._wait(self.stopping, PAUSE_S)

    def end_reason(self) -> str:
        """Why no further step is taken; empty: training goes on."""
        if self.outdated.is_set():
            return f"the swarm asks for version {self._charter().minimum_version} or newer: update"
        if self.closing.is_set():
            return "the swarm is closed"
        if 0 < self._config.train.max_steps <= self.progress.step:
            return "step limit reached"
        return ""

    async def _finish(self, reason: str) -> None:
        log.info("%s: evaluating and keeping the result", reason)
        if self.progress.evaluated_step != self.progress.step and not self.paused:
            await self._evaluate()
        await self._checkpoint()
        self.finished = reason
        self.progress.resting("finished", reason)
        self._on_progress()

    async def _start_learner(self) -> None:
        self.progress.resting("loading the model")
        manifest = self._charter().manifest
        await self._learner.start()
        self.model, self.paused = {}, ""
        answer = await self._learner.call(
            "init",
            timeout_s=self._config.limits.call_timeout_s,
            **init_arguments(self._config, manifest, self._run_dir.root),
        )
        first = not self.progress.step
        self.progress.step = answer["step"]
        if first and answer["node_state"]:
            self._restore(answer["node_state"])
            log.info("resumed at step %d", self.progress.step)
        elif first:
            self._cursor = self._beyond_earlier_runs()
        if self._config.metrics.tensorboard:
            self.log.draw_curves(self.progress.step)
        saved = answer["node_state"] is not None
        self._checkpointed = self._state() if saved else (-1, -1)
        self.engine = answer["engine"]
        others = ("id", "ok", "node_state", "step", "checkpoint", "engine")
        self.model = {k: v for k, v in answer.items() if k not in others}
        self.learner_trouble = ""
        log.info(
            "model ready: %s, %s, %d of %d parameters trained, %s on %s, loaded in %.0f s",
            *(self.model[key] for key in ("model", "mode", "trainable", "parameters")),
            *(self.model[key] for key in ("dtype", "device", "seconds")),
        )
        self._on_progress()

    async def _call(self, phase: str, op: str, **arguments: Any) -> dict[str, Any]:
        with self.progress.working(phase):
            answer: dict[str, Any] = await self._learner.call(
                op, timeout_s=self._config.limits.call_timeout_s, **arguments
            )
        return answer

    # -- sampling --------------------------------------------------------------------------------

    async def _sample(self, wanted: int) -> None:
        """Sample this node's next prompts, publish the groups, and put them into the pool."""
        charter, sampling = self._charter(), self._charter().manifest.sampling
        swarm_id, me = charter.manifest.swarm_id, self._identity.peer_id
        peers = [*self._samplers(), me]
        chosen, cursor = next_prompts(
            swarm_id,
            self._cursor,
            len(self._prompts),
            lambda epoch, prompt_id: is_candidate(swarm_id, epoch, prompt_id, peers, me),
            limit=min(wanted, self._config.engine.prompts_per_call),
        )
        self._cursor = cursor
        self._note_epoch(cursor.epoch)
        if not chosen:
            return  # among very many members; the next call goes on from there
        answer = await self._call(
            "sampling",
            "sample",
            **sample_arguments(
                [self._prompts.token_ids(prompt_id) for _, prompt_id in chosen],
                [self._seed(epoch, prompt_id) for epoch, prompt_id in chosen],
                sampling,
            ),
        )
        self.engine = answer["engine"]
        groups = [
            RolloutGroup(
                swarm_id=swarm_id,
                publisher=me,
                epoch=epoch,
                prompt_id=prompt_id,
                prompt_sha256=self._prompts.prompt_hash(prompt_id),
                policy_step=answer["policy_step"],
                created_ms=int(time.time() * 1000),
                temperature=sampling.temperature,
                rollouts=rollouts,
                claimed_rewards=np.zeros(len(rollouts), np.float32),
            )
            for (epoch, prompt_id), rollouts in zip(chosen, sampled(answer), strict=True)
        ]
        scored = [
            (group, reward)
            for group, reward in zip(groups, await self._score(groups), strict=True)
            if reward is not None
        ]
        if not scored:
            await self._wait(self.stopping, 1.0)
            return
        published = []
        for group, reward in scored:
            group = replace(group, claimed_rewards=reward)
            blob = encode_group(group, self._identity)
            digest = blob_hash(blob)
            published.append((digest, blob, group))
            self.pool.add(
                PooledGroup(
                    hash=digest,
                    publisher=me,
                    own=True,
                    group=group,
                    rewards=reward,
                    prompt_token_ids=self._prompts.token_ids(group.prompt_id),
                    arrived_s=time.monotonic(),
                )
            )
        self._publish(published)
        blob_bytes = sum(len(blob) for _, blob, _ in published)
        self._ledger.made(
            len(published), sum(group.n_tokens for _, _, group in published), blob_bytes
        )
        self.progress.sampled(
            [group for _, _, group in published],
            [reward for _, reward in scored],
            blob_bytes=blob_bytes,
            tokens_per_s=answer["tokens"] / max(answer["seconds"], 1e-6),
        )

    def _beyond_earlier_runs(self) -> Cursor:
        """Where a run without a checkpoint begins: others have this node's groups of the epochs
        before, and would take its new ones for the same again."""
        try:
            return Cursor(epoch=int(self._run_dir.swarm_dir.epoch_path.read_text()) + 1)
        except (OSError, ValueError):
            return Cursor()

    def _note_epoch(self, epoch: int) -> None:
        if epoch <= self._noted_epoch:
            return
        self._noted_epoch = epoch
        try:
            write_atomic(self._run_dir.swarm_dir.epoch_path, f"{epoch}\n".encode())
        except OSError as error:
            log.warning("the epoch is not kept: %s", error)

    def _seed(self, epoch: int, prompt_id: int) -> int:
        text = f"{self._config.node.seed} {self._identity.peer_id} {epoch} {prompt_id}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    # -- training --------------------------------------------------------------------------------

    async def _train(self, batch: Sequence[PooledGroup]) -> None:
        started = time.monotonic()
        answer = await self._call("training", "train", **train_arguments(batch))
        report = step_report(answer)
        self._note_in_ledger(answer, batch)
        self.progress.trained(report, batch, time.monotonic() - started)
        self.log.step(
            step_record(
                answer,
                batch,
                config=self._config_digest,
                amendments=len(self._charter().amendments),
                time_s=time.time(),
            )
        )
        self.log.metrics({"time_s": round(time.time(), 3), **report})
        log.info(
            "step %d: loss %.4f, kept %d of %d samples (%d of peers), reward %.3f",
            self.progress.step,
            report["loss"],
            report["own_trained"] + report["foreign_trained"],
            sum(len(item.rewards) for item in batch),
            report["foreign_trained"],
            self.progress.rewards[-1] if self.progress.rewards else 0.0,
        )
        self._on_progress()

    def _note_in_ledger(self, answer: Mapping[str, Any], batch: Sequence[PooledGroup]) -> None:
        estimator = self._config.ftis.kl_estimator
        rewards: dict[str, list[float]] = {}
        divergences: dict[str, list[float]] = {}
        start = 0
        for item in batch:
            end = start + len(item.rewards)
            rewards.setdefault(item.publisher, []).extend(item.rewards.tolist())
            divergences.setdefault(item.publisher, []).extend(
                sample["divergence"]["kl"][estimator]
                for sample in answer["per_sample"][start:end]
                if sample["divergence"] is not None
            )
            start = end
        me = self._identity.peer_id
        for publisher, theirs in rewards.items():
            report = answer["per_peer"]["own" if publisher == me else publisher]
            self._ledger.trained(
                publisher,
                samples=report["samples"],
                samples_trained=report["trained"],
                rewards=theirs,
                divergences=divergences[publisher],
            )
        self._ledger.stepped()

    async def _evaluate(self) -> None:
        """Greedy accuracy on the evaluation sets; the share of prompts with the full reward."""
        sampling = self._charter().manifest.sampling
        point: dict[str, float] = {"step": self.progress.step, "time_s": round(time.time(), 3)}
        for name, prompts in self._evaluation.items():
            answer = await self._call(
                "evaluating",
                "greedy",
                **greedy_arguments(prompts, sampling),
            )
            point[name] = await self._grade(name, greedy_completions(answer, sampling))
        self.progress.evaluated_step = self.progress.step
        if len(point) > 2:
            self.progress.accuracies.append(point)
            self.log.metrics({"evaluation": True, **point})
            shares = ", ".join(
                f"{name.replace('_', ' ')} {with_interval(point[name], len(prompts))}"
                for name, prompts in self._evaluation.items()
            )
            log.info("step %d: accuracy %s", self.progress.step, shares)
        self._on_progress()

    def _state(self) -> tuple[int, int]:
        """Differs where a checkpoint would keep something new."""
        return self.progress.step, self.progress.evaluated_step

    async def _checkpoint(self) -> None:
        state = self._state()
        if state == self._checkpointed:
            return
        try:
            answer = await self._call(
                "writing a checkpoint",
                "checkpoint",
                path=str(self._run_dir.checkpoints_dir),
                node_state=self._node_state(),
                accuracy=self.progress.accuracy_of_step,
            )
        except LearnerError as error:
            if not self._learner.alive:
                raise
            # The disk is full or fails. What the learner holds is sound; the next one may succeed.
            self.checkpoint_trouble = str(error)
            log.error("%s; training goes on", error)
            return
        self.checkpoint_trouble = ""
        self._checkpointed = state
        await asyncio.to_thread(self.log.shorten)
        log.info("checkpoint of step %d: %s", self.progress.step, answer["path"])

    # -- small things ----------------------------------------------------------------------------

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return
