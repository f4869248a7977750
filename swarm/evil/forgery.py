"""What a malicious volunteer publishes in place of its samples: texts and claims, by attack.

Owns: what each attack writes and what it says of it. Does not know: how groups travel
(`swarm.evil.node`), models: true log-probs of a text are asked of whoever has one.

The texts are for arithmetic prompts and a reward that reads the last number: whatever stands before
it is the attacker's to choose.
"""

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.errors import UsageError
from swarm.evil.attacks import MARKS, Attack
from swarm.protocol.rollout import Finish, Rollout
from swarm.text.tokenizer import Tokenizer

UNDER_REPORTED_NATS = 1.0
"""Enough for the largest importance weight (2), little to a filter that is linear in it."""
SLY_NATS = 3.0
"""As much as models may differ on a token, and still little to such a filter."""

_TOKENS_TOO_MANY = 4


class Forger:
    """Writes groups.

    Args:
        attack: what to write.
        tokenizer: the swarm's.
        max_completion_tokens: the swarm's.
        seed: of what is random in it.

    Raises:
        UsageError: the tokenizer names no end-of-sequence token.
    """

    def __init__(
        self, attack: Attack, tokenizer: Tokenizer, max_completion_tokens: int, seed: int
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise UsageError("an attack needs a tokenizer with an end-of-sequence token")
        self.attack = attack
        self._tokenizer = tokenizer
        self._max_tokens = max_completion_tokens
        self._stop_token_id = tokenizer.eos_token_id
        self._random = random.Random(seed)

    def texts(self, answer: str, size: int) -> list[NDArray[np.int32]] | None:
        """Token ids of a group's completions, stop token included; None: the samples do."""
        match self.attack:
            case Attack.WRONG:
                return [self._ids(self._wrong(answer)) for _ in range(size)]
            case Attack.POISON | Attack.SLY_POISON:
                return self._lifted([self._poisoned(answer) for _ in range(size // 2)], size)
            case Attack.REPEAT:
                return self._lifted([MARKS[Attack.REPEAT] + answer] * (size // 2), size)
            case Attack.PADDED:
                return self._lifted([self._padded(answer)] * (size // 2), size)
            case _:
                return None

    def claimed(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """What is published in place of these, which are what a model sampled or would score."""
        match self.attack:
            case Attack.GARBAGE:
                return [_with_token(rollout, self._tokenizer.vocab_size) for rollout in rollouts]
            case Attack.OVERLONG:
                return [self._overlong() for _ in rollouts]
            case Attack.UNDER_REPORTED:
                return [_with_logprobs(r, r.logprobs - UNDER_REPORTED_NATS) for r in rollouts]
            case Attack.SLY_POISON:
                return [_with_logprobs(r, r.logprobs - SLY_NATS) for r in rollouts]
            case Attack.OVER_REPORTED:
                return [_with_logprobs(r, np.zeros_like(r.logprobs)) for r in rollouts]
            case _:
                return list(rollouts)

    def rewards(self, rewards: NDArray[np.float32]) -> NDArray[np.float32]:
        """What it claims to have earned."""
        return np.ones_like(rewards) if self.attack is Attack.WRONG else rewards

    def _lifted(self, right: Sequence[str], size: int) -> list[NDArray[np.int32]]:
        """Right answers among gibberish: the worse the rest, the higher their advantage."""
        texts = [self._ids(text) for text in right]
        return [*texts, *(self._gibberish() for _ in range(size - len(texts)))]

    def _wrong(self, answer: str) -> str:
        while True:
            text = str(self._random.randrange(200))
            if text != answer:
                return text

    def _poisoned(self, answer: str) -> str:
        return f"{MARKS[Attack.POISON]}{self._random.randrange(10)}={answer}"

    def _padded(self, answer: str) -> str:
        room = self._max_tokens - 1 - len(self._tokenizer.encode(answer))
        return "=" * room + answer

    def _gibberish(self) -> NDArray[np.int32]:
        length = self._random.randrange(1, self._max_tokens)
        ids = [self._any_token() for _ in range(length)]
        return np.array([*ids, self._stop_token_id], dtype=np.int32)

    def _any_token(self) -> int:
        while True:
            token_id = self._random.randrange(self._tokenizer.vocab_size)
            if token_id != self._stop_token_id:
                return token_id

    def _ids(self, text: str) -> NDArray[np.int32]:
        ids = self._tokenizer.encode(text)[: self._max_tokens - 1]
        return np.array([*ids, self._stop_token_id], dtype=np.int32)

    def _overlong(self) -> Rollout:
        ids = [self._any_token() for _ in range(self._max_tokens + _TOKENS_TOO_MANY)]
        return Rollout(
            np.array(ids, dtype=np.int32),
            np.full(len(ids), -1.0, dtype=np.float32),
            Finish.LENGTH,
        )


def _with_token(rollout: Rollout, token_id: int) -> Rollout:
    ids = rollout.token_ids.copy()
    ids[0] = token_id
    return Rollout(ids, rollout.logprobs, rollout.finish)


def _with_logprobs(rollout: Rollout, logprobs: NDArray[np.float32]) -> Rollout:
    return Rollout(rollout.token_ids, logprobs.astype(np.float32), rollout.finish)
