"""Rewards and accuracy of completions, as every node computes them for itself.

Owns: from token ids to a score. Does not know: where completions come from, what a reward is
(swarm.rewards), what is trained on.
"""

from collections.abc import Sequence

import numpy as np

from swarm.learner_calls import Completion
from swarm.protocol.manifest import RewardSpec
from swarm.protocol.prompts import Prompt
from swarm.rewards.workers import WorkerPool
from swarm.text import Tokenizer


class Grader:
    """Scores completions with the swarm's reward.

    Args:
        workers: compute the rewards.
        tokenizer: the swarm's.
        reward: the manifest's.
    """

    def __init__(self, workers: WorkerPool, tokenizer: Tokenizer, reward: RewardSpec) -> None:
        self._workers = workers
        self._tokenizer = tokenizer
        self._reward = reward

    async def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> np.ndarray:
        """Rewards of the completions of one prompt, float32 (N,).

        Raises:
            RewardError: they cannot be computed.
        """
        values = await self._workers.score(
            self._reward,
            completions=[self._tokenizer.decode(ids.tolist()) for ids, _ in completions],
            finished=[finished for _, finished in completions],
            answer=prompt.answer,
            prompt=prompt.prompt or "",
        )
        return np.asarray(values, dtype=np.float32)

    async def accuracy(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> float:
        """Share of prompts, with one completion each, whose completion earns the full reward.

        Raises:
            RewardError: a reward cannot be computed.
        """
        right = [
            (await self.rewards(prompt, [completion]))[0] >= 1.0
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return round(float(np.mean(right)), 4)
