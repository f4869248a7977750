"""Sampling completions: what an engine is, and the one that samples in the learner itself.

Owns: the decoding loop, random numbers, and why a completion ends. Does not know: text, rewards,
training; it sees token ids only, and the model through `swarm.rl.policy`. The other engine is in
`swarm.rl.vllm_engine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from swarm.protocol.rollout import Finish, Rollout
from swarm.rl.policy import Policy, TokenIds

if TYPE_CHECKING:
    from transformers import DynamicCache

COMPACT_BELOW = 0.75
"""Finished rows are dropped from the batch when at most this share of it is unfinished: dropping
copies the cache, which costs about as much as one step does."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: of the softmax, above 0. The log-probs are those of the distribution that is
            drawn from, log_softmax(logits / temperature).
        max_new_tokens: length limit, the stop token included.
        stop_token_ids: each ends a completion, and is its last token.
        greedy: take the most probable token; its log-prob is at temperature 1, which must be given.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    greedy: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and above 0, not {self.temperature}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.greedy and self.temperature != 1.0:
            raise ValueError(f"greedy: temperature must be 1, not {self.temperature}")


class Engine(Protocol):
    """What samples from a policy.

    Attributes:
        syncs: rises whenever it takes over the policy's weights; 0 where they are the same tensors.
    """

    @property
    def syncs(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[TokenIds],
        n: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> list[list[Rollout]]:
        """Sample n completions for each prompt.

        Args:
            prompts: token ids, at least one each.
            n: completions per prompt.
            sampling: how.
            seeds: one for each prompt. What a prompt gets depends on the weights, the prompt and
                its seed, and, but for float rounding, not on what it is batched with.

        Returns:
            For each prompt, in order, its n completions.

        Raises:
            ValueError: a prompt is empty or holds an id that is none of the model's, n is not
                positive, or the number of seeds is another one than that of prompts.
            DataError: prompt and completion do not fit into the model's context.
            LearnerError: the engine died or failed, and again when it was started anew.
        """

    def sync(self) -> None:
        """The policy's weights have changed: what is sampled from now on comes from these."""

    def sleep(self) -> None:
        """Give up what memory it can of a device that the training shares; sampling wakes it."""

    def restart(self) -> None:
        """Begin anew, with the policy's weights of now, whatever state it is in."""

    def close(self) -> None:
        """End; no process or file of it stays."""

    def describe(self) -> dict[str, Any]:
        """What it is and how it fares, as JSON has it: `kind`, `syncs`, and more."""


def check_request(
    policy: Policy, prompts: Sequence[TokenIds], n: int, sampling: SamplingParams, seeds: int
) -> list[np.ndarray]:
    """What every engine refuses; see `Engine.generate`. Returns the prompts, int64 (L,) each."""
    if n < 1 or seeds != len(prompts):
        raise ValueError(
            f"expected n >= 1 and a seed for each prompt: n = {n}, "
            f"{len(prompts)} prompts, {seeds} seeds"
        )
    if not len(prompts):
        return []
    checked = policy.check_ids("prompt", prompts)
    policy.check_length(max(map(len, checked)) + sampling.max_new_tokens)
    return list(checked)


class TransformersEngine:
    """Samples from the model that is trained, in the same process."""

    syncs = 0

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def sync(self) -> None:
        """Nothing: the weights are the policy's own."""

    def sleep(self) -> None:
        """Nothing: between calls it holds nothing."""

    def restart(self) -> None:
        """Nothing: between calls it has no state."""

    def close(self) -> None:
        """Nothing: it ends with its process."""

    def describe(self) -> dict[str, Any]:
        return {"kind": "transformers", "syncs": self.syncs}

    def generate(
        self,
        prompts: Sequence[TokenIds],
        n: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> list[list[Rollout]]:
        """See `Engine.generate`."""
        checked = check_request(self._policy, prompts, n, sampling, len(seeds))
        if not checked:
            return []
        with self._policy.merged(), torch.inference_mode():
            tokens, logprobs = self._decode(checked, n, sampling, seeds)
        rollouts = _cut(tokens, logprobs, sampling)
        return [rollouts[start : start + n] for start in range(0, len(rollouts), n)]

    def _decode(
        self,
        prompts: Sequence[np.ndarray],
        n: int,
        sampling: SamplingParams,
        seeds: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and log-probs, (rows, max_new_tokens); meaningless after a stop token.

        A row is a completion; the n rows of a prompt stand together.
        """
        policy, device = self._policy, self._policy.device
        limit, width = sampling.max_new_tokens, max(map(len, prompts))
        rows = len(prompts) * n
        tokens = torch.zeros((limit, rows), dtype=torch.int64, device=device)
        logprobs = torch.zeros((limit, rows), dtype=torch.float32, device=device)
        stops = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=device)
        uniforms = None if sampling.greedy else _uniforms(seeds, n, limit).to(device)

        hidden, cache = self._prefill(prompts)
        if n > 1:
            hidden = hidden.repeat_interleave(n, dim=0)
            cache.batch_repeat_interleave(n)
        lengths = torch.tensor([len(ids) for ids in prompts], device=device).repeat_interleave(n)
        mask = None  # (rows, width + limit) bool, False at the padding left of short prompts
        if min(map(len, prompts)) < width:
            mask = torch.arange(width + limit, device=device) >= (width - lengths)[:, None]
        active = torch.arange(rows, device=device)
        done = torch.zeros(rows, dtype=torch.bool, device=device)
        for step in range(limit):
            distribution = policy.logits(hidden, sampling.temperature).log_softmax(dim=-1)
            if uniforms is None:
                chosen = distribution.argmax(dim=-1)
            else:
                chosen = _draw(distribution, uniforms[step, active])
            tokens[step, active] = chosen
            logprobs[step, active] = distribution.gather(-1, chosen[:, None])[:, 0].float()
            done |= torch.isin(chosen, stops)
            unfinished = len(done) - int(done.sum())
            if not unfinished or step == limit - 1:
                break
            if unfinished <= COMPACT_BELOW * len(done):
                kept = (~done).nonzero()[:, 0]
                cache.batch_select_indices(kept)
                active, chosen, lengths, done = (x[kept] for x in (active, chosen, lengths, done))
                mask = None if mask is None else mask[kept]
            hidden = policy.hidden_states(
                chosen[:, None],
                attention_mask=None if mask is None else mask[:, : width + step + 1],
                position_ids=(lengths + step)[:, None],
                cache=cache,
            )[:, 0]
        return tokens.t().cpu().numpy(), logprobs.t().cpu().numpy()

    def _prefill(self, prompts: Sequence[np.ndarray]) -> tuple[Tensor, "DynamicCache"]:
        """Hidden states (prompts, H) at each prompt's end, and the cache of all prompts.

        Shorter prompts are padded on the left.
        """
        from transformers import DynamicCache

        device, width = self._policy.device, max(map(len, prompts))
        cache = DynamicCache(config=self._policy.config)
        inputs = np.zeros((len(prompts), width), np.int64)
        for row, ids in zip(inputs, prompts, strict=True):
            row[width - len(ids) :] = ids
        mask = positions = None
        if min(map(len, prompts)) < width:
            offsets = torch.tensor([width - len(ids) for ids in prompts], device=device)[:, None]
            positions = torch.arange(width, device=device) - offsets
            mask = positions >= 0
            positions = positions.clamp(min=0)
        hidden = self._policy.hidden_states(
            torch.from_numpy(inputs).to(device),
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
        )
        return hidden[:, -1], cache


def _uniforms(seeds: Sequence[int], n: int, limit: int) -> Tensor:
    """Random numbers in [0, 1), (limit, prompts * n) float64; each prompt's from its own seed.

    Drawn on the CPU, so that a seed means the same on every device.
    """
    columns = [
        torch.rand((limit, n), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in seeds
    ]
    return torch.cat(columns, dim=1)


def _draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """The token at which the cumulative probability passes a uniform random number.

    One random number a token, whatever the vocabulary's size, and a rounding difference of the
    logits changes the token only when the number lies that close to a boundary.

    Args:
        distribution: (N, V) log-probs.
        uniforms: (N,) in [0, 1).

    Returns:
        (N,) int64; never a token of probability 0.
    """
    exact = distribution.device.type != "mps"  # which has no float64
    cumulative = distribution.exp().cumsum(dim=-1, dtype=torch.float64 if exact else None)
    total = cumulative[:, -1:]
    wanted = (uniforms[:, None].to(cumulative.dtype) * total).minimum(
        torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cumulative, wanted, right=True)[:, 0]


def _cut(tokens: np.ndarray, logprobs: np.ndarray, sampling: SamplingParams) -> list[Rollout]:
    """Rows to completions: each ends with its first stop token, or at the length limit."""
    is_stop = np.asarray(np.isin(tokens, sampling.stop_token_ids))
    stopped: np.ndarray = is_stop.max(axis=1)
    lengths = np.where(stopped, is_stop.argmax(axis=1) + 1, sampling.max_new_tokens)
    return [
        Rollout(
            token_ids=tokens[row, :length].astype(np.int32),
            logprobs=logprobs[row, :length].astype(np.float32),
            finish=Finish.STOP if stopped[row] else Finish.LENGTH,
        )
        for row, length in enumerate(lengths.tolist())
    ]
