"""Rewards and accuracy of completions, as every node computes them for itself.

Owns: from token ids to a score. Does not know: where completions come from, what a reward is
(swarm.rewards), what is trained on.
"""

import logging
from collections.abc import Sequence

import numpy as np

from swarm.learner.calls import Completion
from swarm.protocol.prompts import Prompt
from swarm.protocol.rollout import Finish, Rollout
from swarm.rewards.combined import main_part
from swarm.rewards.reward import RewardError, Spec
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Grader:
    """Scores completions with the swarm's reward, or the prompt's own.

    Args:
        workers: compute the rewards.
        tokenizer: the swarm's.
        reward: the manifest's, for prompts that name none.

    Attributes:
        trouble: why the last completions could not be scored; empty when they could.
    """

    def __init__(self, workers: WorkerPool, tokenizer: Tokenizer, reward: Spec) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._reward = reward
        self.trouble = ""

    async def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> np.ndarray | None:
        """Rewards of the completions of one prompt, float32 (N,).

        None where they cannot be computed: a text that hangs or kills the worker costs its own
        group and nothing else.
        """
        return await self._scored(prompt.reward or self._reward, prompt, completions)

    async def group_rewards(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> np.ndarray | None:
        """`rewards` of a group's completions."""
        return await self.rewards(
            prompt, [(item.token_ids, item.finish is Finish.STOP) for item in rollouts]
        )

    async def _scored(
        self, reward: Spec, prompt: Prompt, completions: Sequence[Completion]
    ) -> np.ndarray | None:
        try:
            values = await self._workers.score(
                reward,
                completions=[self._tokenizer.decode(ids.tolist()) for ids, _ in completions],
                finished=[finished for _, finished in completions],
                answer=prompt.answer,
                prompt=prompt.prompt or "",
            )
        except RewardError as error:
            self.trouble = str(error)
            log.warning("a group without rewards: %s", error)
            return None
        self.trouble = ""
        return np.asarray(values, dtype=np.float32)

    async def accuracy(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> float:
        """Share of prompts, with one completion each, whose completion is right.

        Right is what earns 1 or more: of a sum, in its first part, so that a form that was not kept
        does not make an answer wrong. One whose reward cannot be computed is not right.
        """
        right = []
        for prompt, completion in zip(prompts, completions, strict=True):
            reward = main_part(prompt.reward or self._reward)
            rewards = await self._scored(reward, prompt, [completion])
            right.append(rewards is not None and rewards[0] >= 1.0)
        return round(float(np.mean(right)), 4)
