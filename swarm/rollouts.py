"""Groups on disk as people read them: whose, which prompt, what was said, what became of it.

Owns: finding, decoding and checking stored groups beside a running node, without writing.
Does not know: the network, models; how it is printed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from swarm import model_files
from swarm.config import load_config
from swarm.errors import DataError, RemoteProtocolError, UsageError
from swarm.node.prompt_table import render_set
from swarm.node.store import blob_path
from swarm.paths import SwarmDir
from swarm.protocol.codec import blob_hash, decode_group
from swarm.protocol.prompts import Prompt
from swarm.protocol.records import GroupRef
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.protocol.verify import codec_limits, verify_group
from swarm.replay.step_log import LoggedGroup, StepLog
from swarm.rewards.grading import Grader
from swarm.rewards.workers import WorkerPool
from swarm.stored import load_charter, load_prompt_set, load_prompts
from swarm.text.tokenizer import Tokenizer

_SUFFIX = ".blob"


@dataclass(frozen=True, slots=True)
class _Use:
    """The step that trained on a group, in which run."""

    run: str
    step: int
    logged: LoggedGroup


class StoredGroups:
    """The groups that a node keeps of one swarm.

    Args:
        swarm_dir: of the swarm.

    Raises:
        DataError: the swarm's terms are not here.
    """

    def __init__(self, swarm_dir: SwarmDir) -> None:
        self._dir = swarm_dir
        self.charter = load_charter(swarm_dir, swarm_dir.swarm_id)

    def hashes(self) -> list[bytes]:
        """Of all groups, the newest first."""
        folder = self._dir.rollouts_dir
        paths = folder.glob(f"*{_SUFFIX}") if folder.is_dir() else ()
        dated = []
        for path in paths:
            try:
                dated.append((path.stat().st_mtime_ns, bytes.fromhex(path.name[: -len(_SUFFIX)])))
            except (OSError, ValueError):  # deleted meanwhile, or no group of ours
                continue
        return [digest for _, digest in sorted(dated, reverse=True)]

    def find(self, prefix: str) -> bytes:
        """The one group whose hash begins so.

        Raises:
            UsageError: none or several do.
        """
        wanted = prefix.lower()
        found = [digest for digest in self.hashes() if digest.hex().startswith(wanted)]
        if not wanted or len(found) != 1:
            some = "no group has" if not found else f"{len(found)} groups have"
            raise UsageError(
                f"{some} a hash that begins with {prefix!r}; see `swarm-node rollouts list`"
            )
        return found[0]

    def rows(self, peer_id: str = "") -> Iterator[dict[str, Any]]:
        """One for each group, the newest first; `peer_id`: of this publisher only."""
        uses = self._uses()
        for digest in self.hashes():
            try:
                group = self._decode(digest)
            except (DataError, RemoteProtocolError) as error:
                yield {"hash": digest.hex(), "error": str(error)}
                continue
            if peer_id and not group.publisher.endswith(peer_id):
                continue
            use = uses.get(digest)
            yield {
                "hash": digest.hex(),
                "publisher": group.publisher,
                "epoch": group.epoch,
                "prompt_id": group.prompt_id,
                "completions": len(group.rollouts),
                "tokens": group.n_tokens,
                "claimed_reward": round(float(group.claimed_rewards.mean()), 4),
                "reward": round(float(use.logged.rewards.mean()), 4) if use else None,
                "step": use.step if use else None,
                "run": use.run if use else None,
            }

    def show(self, digest: bytes) -> dict[str, Any]:
        """A group in full; texts are as strangers wrote them.

        Raises:
            DataError: it is damaged, or this node's tokenizer is not here.
        """
        try:
            group = self._decode(digest)
        except RemoteProtocolError as error:
            raise DataError(f"group {digest.hex()}: {error}") from None
        use = self._uses().get(digest)
        tokenizer = self.tokenizer()
        prompts = self.prompts()
        prompt = prompts[group.prompt_id] if group.prompt_id < len(prompts) else None
        return {
            "schema": "swarm-node/rollout/1",
            "hash": digest.hex(),
            "publisher": group.publisher,
            "epoch": group.epoch,
            "prompt_id": group.prompt_id,
            "policy_step": group.policy_step,
            "temperature": group.temperature,
            "created_ms": group.created_ms,
            "run": use.run if use else None,
            "step": use.step if use else None,
            "prompt": _prompt_text(prompt),
            "answer": prompt.answer if prompt else None,
            "completions": [
                {
                    **_completion(rollout, tokenizer),
                    "claimed_reward": round(float(claimed), 6),
                    **_fate(use, index),
                }
                for index, (rollout, claimed) in enumerate(
                    zip(group.rollouts, group.claimed_rewards, strict=True)
                )
            ],
        }

    async def verify(self, digests: list[bytes]) -> list[dict[str, Any]]:
        """Check groups as a node checks them when they come, and compute their rewards again.

        Returns:
            For each: {"hash", "publisher", "ok", "reason", "rewards", "rewards_as_logged"};
            "rewards_as_logged" is None where no step used the group.
        """
        tokenizer, manifest = self.tokenizer(), self.charter.manifest
        uses = self._uses()
        found: list[dict[str, Any]] = []
        async with WorkerPool(1, 60.0) as workers:
            prompts: list[Prompt] = []
            hashes: list[bytes] = []
            for ref in self.charter.prompt_sets:
                data = load_prompt_set(self._dir, ref)
                rendered = await render_set(data, ref, manifest, tokenizer, "model", workers)
                prompts.extend(rendered.prompts)
                hashes.extend(rendered.hashes)
            grader = Grader(workers, tokenizer, manifest.reward)
            for digest in digests:
                row: dict[str, Any] = {"hash": digest.hex(), "publisher": None, "rewards": None}
                found.append(row)
                try:
                    group = self._verified(digest, hashes)
                except (DataError, RemoteProtocolError) as error:
                    row |= {"ok": False, "reason": str(error), "rewards_as_logged": None}
                    continue
                rewards = await grader.group_rewards(prompts[group.prompt_id], group.rollouts)
                use = uses.get(digest)
                same = (
                    bool(np.array_equal(rewards, use.logged.rewards))
                    if use is not None and rewards is not None
                    else None
                )
                row |= {
                    "publisher": group.publisher,
                    "ok": rewards is not None and same is not False,
                    "reason": grader.trouble
                    if rewards is None
                    else ""
                    if same is not False
                    else "the rewards are others than the log's",
                    "rewards": None if rewards is None else rewards.tolist(),
                    "rewards_as_logged": same,
                }
        return found

    def tokenizer(self) -> Tokenizer:
        """The swarm's tokenizer: the one that was joined with, or an organizer's copy."""
        kept = self._dir.root / "tokenizer"
        if kept.is_dir():
            return Tokenizer.from_folder(kept)
        saved = self._dir.saved_config()
        if saved is None:
            raise DataError(f"{self._dir.root}: no model was joined with, so no tokenizer")
        config = load_config(None, {}, environ={}, saved=saved)
        return Tokenizer.from_folder(model_files.resolve(config.model))

    def prompts(self) -> list[Prompt]:
        """All training prompts; the index is the prompt id. Sets that are not here end the list."""
        prompts: list[Prompt] = []
        for ref in self.charter.prompt_sets:
            if not self._dir.prompt_set_path(ref.sha256).exists():
                break
            prompts.extend(load_prompts(self._dir, ref))
        return prompts

    def _read(self, digest: bytes) -> bytes:
        path = blob_path(self._dir.rollouts_dir, digest)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        if blob_hash(data) != digest:
            raise DataError(f"{path}: damaged: its bytes are not those of its name")
        return data

    def _decode(self, digest: bytes) -> RolloutGroup:
        return decode_group(self._read(digest), codec_limits(self.charter))

    def _verified(self, digest: bytes, prompt_hashes: list[bytes]) -> RolloutGroup:
        blob = self._read(digest)
        group = decode_group(blob, codec_limits(self.charter))
        return verify_group(
            blob,
            expected=GroupRef.of(group, digest, len(blob)),
            publisher=group.publisher,
            charter=self.charter,
            prompt_hashes=prompt_hashes,
            # Who was there when it was sampled is not known any more.
            sampling_peers={group.publisher},
        )

    def _uses(self) -> dict[bytes, _Use]:
        uses = {}
        for run in self._dir.runs():
            if not run.steps_path.exists():
                continue
            log = StepLog(run.steps_path)
            for number in log.steps:
                for group in log.read(number).groups:
                    uses[group.hash] = _Use(run.root.name, number, group)
        return uses


def _prompt_text(prompt: Prompt | None) -> str | None:
    if prompt is None:
        return None
    if prompt.prompt is not None:
        return prompt.prompt
    return "\n".join(f"{m['role']}: {m['content']}" for m in prompt.messages or ())


def _completion(rollout: Rollout, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "text": tokenizer.decode(rollout.token_ids.tolist()),
        "finish": "stop" if rollout.finish is Finish.STOP else "length",
        "tokens": [
            [int(token_id), round(float(logprob), 4)]
            for token_id, logprob in zip(rollout.token_ids, rollout.logprobs, strict=True)
        ],
        "logprob_mean": round(float(rollout.logprobs.mean()), 4),
    }


def _fate(use: _Use | None, index: int) -> dict[str, Any]:
    """What this node made of a sample."""
    if use is None:
        return {"reward": None, "outcome": None, "advantage": None, "kl": None}
    sample = use.logged.samples[index] if use.logged.samples else None
    divergence = sample.divergence if sample else None
    return {
        "reward": float(use.logged.rewards[index]),
        "outcome": sample.outcome if sample else None,
        "advantage": sample.advantage if sample else None,
        "kl": dict(divergence.kl) if divergence else None,
    }
