"""The model that a node trains: loading it, and the log-probs that it gives to completions.

Owns: which folder becomes which model, full or LoRA; what is trainable; the one place that shifts
logits against tokens. Does not know: text, tokenizers, rewards, losses, optimizers, sampling.
"""

import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarm import model_files
from swarm.config import ModelSection
from swarm.errors import MALFORMED, ConfigError, DataError, first_line
from swarm.paths import parse_json
from swarm.rl import adapters
from swarm.rl.device import choose_device, choose_dtype
from swarm.rl.host_memory import one_out_of_memory
from swarm.rl.token_logprobs import Head, scaled_logits, token_logprobs

log = logging.getLogger(__name__)

TokenIds = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids of one prompt or completion."""

MERGE_LIMIT_BYTES = 1 << 30
"""Adapted weights larger than this together are not copied to fold the adapter into them."""

_MULTIPLIES_LOGITS = ("logit_scale", "lm_head_multiplier")
_DIVIDES_LOGITS = ("logits_scaling",)
_SOFTCAPS_LOGITS = ("final_logit_softcapping",)
"""Names in a model's config of what is done to logits after the head, and is done here too."""

_CHANGES_LOGITS = re.compile(
    r"(?<!attn_)logits?_(soft_?cap|scal|mult)|output_mult|lm_head_mult|output_logit"
)
"""Names for a message; whether a model is computed rightly is tried, not read from them."""


class _AdaptedLayer:
    """Where in the model a linear layer with an adapter stands, and a plain one to take its place.

    Args:
        parent: the module that holds it.
        name: its name there.
        layer: peft's layer.
    """

    def __init__(self, parent: nn.Module, name: str, layer: Any) -> None:
        self._parent = parent
        self._name = name
        self.layer = layer
        base = layer.get_base_layer()
        self._plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        self._plain.bias = base.bias

    def merge(self) -> None:
        with torch.no_grad():
            delta = self.layer.get_delta_weight(self.layer.active_adapters[0])
            weight = self.layer.get_base_layer().weight + delta
        self._plain.weight = nn.Parameter(weight, requires_grad=False)
        setattr(self._parent, self._name, self._plain)

    def restore(self) -> None:
        setattr(self._parent, self._name, self.layer)
        self._plain.register_parameter("weight", None)


class Policy:
    """A causal language model, and which of its parameters are trained.

    Token ids 0 .. vocab_size - 1 have a probability; rows that the model has beyond them (padding
    of its embedding) do not, neither here nor in sampling.

    The model stays in evaluation mode: with dropout, sampling and training would see different
    distributions.

    Attributes:
        model: as it is saved: a transformers model, or a peft model around one.
        mode: "full" or "lora".
        source: the folder that the model came from.
        device, dtype: of the weights (an adapter on shorter weights is float32).
        vocab_size: number of token ids.
    """

    def __init__(self, model: Any, *, mode: str, source: Path, vocab_size: int | None) -> None:
        """Take a loaded model; see `load`.

        Raises:
            ConfigError: the model is of a kind that this class would compute wrongly.
            DataError: it has fewer token ids than `vocab_size`.
        """
        self.model = model.eval()
        self.mode = mode
        self.source = source
        self.causal_lm = model.get_base_model() if mode == "lora" else model
        self._backbone: Any = self.causal_lm.base_model
        self._head = self.causal_lm.get_output_embeddings()
        kind = type(self.causal_lm).__name__
        if self._backbone is self.causal_lm or not isinstance(self._head, nn.Linear):
            raise ConfigError(
                f"{source}: {kind} has a head of type {type(self._head).__name__}; only models "
                "whose head is one linear layer after a backbone are supported"
            )
        self.device: torch.device = self._head.weight.device
        self.dtype: torch.dtype = self._head.weight.dtype
        rows = self._head.weight.shape[0]
        self.vocab_size = rows if vocab_size is None else vocab_size
        if self.vocab_size > rows:
            raise DataError(
                f"{source}: the model has {rows} token ids, the swarm's tokenizer {vocab_size}"
            )
        self.config = self.causal_lm.config.get_text_config(decoder=True)
        limit = getattr(self.config, "max_position_embeddings", None)
        self._max_tokens: int | None = limit if isinstance(limit, int) and limit > 0 else None
        # transformers renamed the argument in 5.x.
        names = inspect.signature(self._backbone.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"
        self._adapted = [
            _AdaptedLayer(parent, name, layer)
            for parent in list(model.modules())
            for name, layer in parent.named_children()
            if hasattr(layer, "lora_A") and type(layer.get_base_layer()) is nn.Linear
        ]
        self._logit_scale, self._softcap = _logit_adjustment(self.config)
        self._refuse_what_would_be_wrong(kind)

    @classmethod
    def load(
        cls,
        section: ModelSection,
        seed: int,
        *,
        vocab_size: int | None = None,
        resume: Path | None = None,
    ) -> Self:
        """Load what node.toml names.

        Args:
            section: names the model, the mode, precision and device.
            seed: of an adapter's initial weights.
            vocab_size: number of the swarm's token ids; None: as many as the model has.
            resume: a folder that `save` wrote, whose weights are taken instead of the initial ones.

        Raises:
            ConfigError: the section cannot be obeyed, or the kind of model is not supported.
            DataError: the model's files are incomplete or damaged.
        """
        section = model_files.settle(section)
        source = Path(section.path)
        device = choose_device(section.device)
        dtype = choose_dtype(section.precision, device)
        weights = source if resume is None or section.mode == "lora" else resume
        model = _load_causal_lm(weights, section, dtype).to(device)
        begin = Path(section.adapter) if section.adapter else None
        if section.mode == "lora":
            model = adapters.add(model, section, seed, resume or begin)
        elif begin is not None and resume is None:
            model = adapters.merge(model, begin)
        if section.gradient_checkpointing == "on":
            _checkpoint_layers(model, source)
        return cls(model, mode=section.mode, source=source, vocab_size=vocab_size)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def max_tokens(self) -> int | None:
        """The model's context; None: not limited."""
        return self._max_tokens

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that training changes, by stable names."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def count_parameters(self) -> tuple[int, int]:
        """How many numbers the model has, and how many of them are trained."""
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model folder, or an adapter folder, without a tokenizer."""
        if self.mode == "lora":
            self.model.save_pretrained(folder, save_embedding_layers=False)
        else:
            self.model.save_pretrained(folder)

    # -- log-probs -------------------------------------------------------------------------------

    def completion_logprobs(
        self,
        prompt_ids: Sequence[TokenIds],
        completion_ids: Sequence[TokenIds],
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of N completions, each after its own prompt.

        Args:
            prompt_ids: N prompts of at least one token.
            completion_ids: N completions of at least one token.
            temperature: of the softmax; log_softmax(logits / temperature).

        Returns:
            Log-probs (N, T) float32 in nats, differentiable, 0 at padding; T is the longest
            completion's length. Mask (N, T) bool: True at completion tokens.

        Raises:
            ValueError: the numbers of prompts and completions differ, one is empty, or an id is
                none of the model's.
            DataError: a sequence is longer than the model's context.
        """
        if len(prompt_ids) != len(completion_ids) or not len(prompt_ids):
            raise ValueError(
                f"expected as many prompts as completions, at least one: "
                f"{len(prompt_ids)} and {len(completion_ids)}"
            )
        prompts = self.check_ids("prompt", prompt_ids)
        completions = self.check_ids("completion", completion_ids)
        starts = np.array([len(ids) for ids in prompts])
        lengths = np.array([len(ids) for ids in completions])
        # The last token predicts nothing. Padding stands right of it, where, attention being
        # causal, no token that counts sees it: no mask is needed.
        width = int((starts + lengths).max()) - 1
        self.check_length(width + 1)
        inputs = np.zeros((len(prompts), width), np.int64)
        for row, prompt, completion in zip(inputs, prompts, completions, strict=True):
            row[: len(prompt)] = prompt
            row[len(prompt) : len(prompt) + len(completion) - 1] = completion[:-1]
        # The logits at the position before a token are that token's.
        position = np.arange(int(lengths.max()))
        mask = position < lengths[:, None]
        predicting = (np.arange(len(prompts)) * width + starts - 1)[:, None] + position

        hidden = self.hidden_states(self._tensor(inputs))
        chosen = hidden.reshape(-1, hidden.shape[-1])[self._tensor(predicting[mask])]
        targets = self._tensor(np.concatenate(completions))
        values = token_logprobs(chosen, self._current_head(), targets, temperature)
        mask_tensor = self._tensor(mask)
        padded = torch.zeros(mask.shape, dtype=values.dtype, device=self.device)
        return padded.masked_scatter(mask_tensor, values), mask_tensor

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """The head's inputs.

        Args:
            input_ids: (N, L) int64.
            attention_mask: (N, cached + L) bool, False at padding; None: no padding on the left.
            position_ids: (N, L) int64; None: from 0, or from the cache's length, on.
            cache: a transformers cache, which grows by L; None: without.

        Returns:
            (N, L, H) in the model's dtype, differentiable.
        """
        states: Tensor = self._backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        ).last_hidden_state
        return states

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Logits / temperature, (..., vocab_size) float32, of the tokens after `hidden`'s."""
        return scaled_logits(hidden, self._current_head(), temperature)

    def check_ids(self, name: str, sequences: Sequence[TokenIds]) -> list[NDArray[np.int64]]:
        """Sequences as arrays.

        Raises:
            ValueError: one is empty, or an id is none of the model's; `name` is for the message.
        """
        arrays = [np.asarray(ids, dtype=np.int64) for ids in sequences]
        for index, ids in enumerate(arrays):
            if ids.ndim != 1 or not len(ids):
                raise ValueError(f"{name} {index}: expected at least one token, got {ids.shape}")
        together = np.concatenate(arrays)
        if together.min() < 0 or together.max() >= self.vocab_size:
            raise ValueError(
                f"{name}s: token ids {together.min()} to {together.max()}; the model has ids 0 to "
                f"{self.vocab_size - 1}"
            )
        return arrays

    def check_length(self, tokens: int) -> None:
        """Refuse sequences that the model has no positions for.

        Raises:
            DataError: names both numbers.
        """
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise DataError(
                f"{self.source}: a sequence of {tokens} tokens is longer than the model's context "
                f"of {self._max_tokens} (max_position_embeddings)"
            )

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Put plain layers, with the adapter added to their weights, in place of adapted ones.

        Sampling is much faster so. Nothing is done in full mode, for weights shorter than float32
        (rounding would change the distribution), and where the weights' copy would be too large.
        """
        size = sum(place.layer.get_base_layer().weight.nbytes for place in self._adapted)
        if self.dtype != torch.float32 or size > MERGE_LIMIT_BYTES:
            yield
            return
        try:
            for place in self._adapted:
                place.merge()
            yield
        finally:
            for place in self._adapted:
                place.restore()

    # -- internals -------------------------------------------------------------------------------

    def _current_head(self) -> Head:
        """The head with the weights of now, of the tokenizer's ids only."""
        weight, bias = self._head.weight, self._head.bias
        if weight.shape[0] != self.vocab_size:
            weight = weight[: self.vocab_size]
            bias = None if bias is None else bias[: self.vocab_size]
        return Head(weight, bias, self._logit_scale, self._softcap)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    @torch.no_grad()
    def _refuse_what_would_be_wrong(self, kind: str) -> None:
        """Run the model once, with a known tensor in place of the head's output.

        Whatever its forward does to hidden states before the head or to logits after it shows as a
        difference, and so does attention to later tokens.
        """
        rows = self._head.weight.shape[0]
        ramp = torch.linspace(-64.0, 64.0, rows, device=self.device).to(self.dtype)
        seen: dict[str, Tensor] = {}

        def after_backbone(_module: Any, _arguments: Any, output: Any) -> None:
            seen["backbone"] = output.last_hidden_state

        def at_head(_module: Any, arguments: tuple[Tensor, ...], _output: Tensor) -> Tensor:
            seen["head"] = arguments[0]
            return ramp.expand(*arguments[0].shape[:-1], rows)

        hooks = [
            self._backbone.register_forward_hook(after_backbone),
            self._head.register_forward_hook(at_head),
        ]
        try:
            last = min(3, rows - 1)
            inputs = torch.tensor([[0, 1, 0, 1], [0, 1, 0, last]], device=self.device)
            logits = self.causal_lm(input_ids=inputs, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        named = ", ".join(
            f"{name} = {value!r}"
            for name, value in sorted(self.config.to_dict().items())
            if _CHANGES_LOGITS.search(name) and value not in (None, 1, 0, False)
        )
        cause = f" ({named})" if named else ""
        if "backbone" in seen and not seen["backbone"].isfinite().all():
            raise DataError(
                f"{self.source}: computes NaN or infinite numbers: its weights are damaged, or too "
                f"large for model.precision ({self.dtype})"
            )
        if "head" not in seen or not torch.equal(seen["head"], seen["backbone"]):
            raise ConfigError(
                f"{self.source}: {kind} changes the hidden states before its head{cause}; "
                "log-probs would be wrong, so this kind of model is not supported"
            )
        expected = Head(ramp, None, self._logit_scale, self._softcap).adjust(ramp.float())
        short = self.dtype != torch.float32
        if not torch.allclose(logits.float(), expected, rtol=2e-2 if short else 1e-5, atol=1e-6):
            raise ConfigError(
                f"{self.source}: {kind} changes the logits after its head{cause}; log-probs would "
                "be wrong, so this kind of model is not supported"
            )
        first, second = seen["backbone"][:, :-1].float()
        if not torch.allclose(first, second, rtol=1e-2, atol=1e-3 * float(first.abs().max())):
            raise ConfigError(
                f"{self.source}: {kind} attends to later tokens; it is no causal language model"
            )


def _logit_adjustment(config: Any) -> tuple[float, float | None]:
    """Scale and softcap that the config's names stand for."""

    def number(name: str) -> float | None:
        value = getattr(config, name, None)
        return float(value) if isinstance(value, int | float) and value else None

    scale = 1.0
    for name in _MULTIPLIES_LOGITS:
        scale *= number(name) or 1.0
    for name in _DIVIDES_LOGITS:
        scale /= number(name) or 1.0
    return scale, next((cap for name in _SOFTCAPS_LOGITS if (cap := number(name))), None)


def _check_weight_files(folder: Path) -> None:
    """Every file of the weights must be there, as safetensors."""
    if (folder / "model.safetensors").is_file():
        return
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        pickles = sorted(p.name for p in [*folder.glob("*.bin"), *folder.glob("*.pt*")])
        found = f"; it has {', '.join(pickles[:3])}, which can hold code" if pickles else ""
        raise DataError(
            f"{folder}: no model.safetensors and no {index.name}{found}. "
            "Weights must be in safetensors format"
        )
    try:
        shards = set(parse_json(index.read_text())["weight_map"].values())
    except MALFORMED as error:
        raise DataError(f"{index}: not a weight index: {error!r}") from None
    missing = sorted(name for name in shards if not (folder / str(name)).is_file())
    if missing:
        raise DataError(f"{folder}: weight files are missing: {', '.join(missing[:3])}")


_UNLOADABLE = (*MALFORMED, RuntimeError, StrictDataclassError, SafetensorError)
"""What transformers raises over a folder that does not hold what it should."""


def _load_causal_lm(folder: Path, section: ModelSection, dtype: torch.dtype) -> Any:
    _check_weight_files(folder)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with one_out_of_memory():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=None if section.attention == "auto" else section.attention,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise ConfigError(
            f"{folder}: needs a package that is not installed "
            f"(model.attention = {section.attention!r}): {first_line(error)}"
        ) from None
    except _UNLOADABLE as error:
        why = repr(error) if isinstance(error, LookupError) else first_line(error)
        if "ignore_mismatched_sizes" in why:
            why = "its weights have other shapes than config.json says"
        raise DataError(f"{folder}: cannot be loaded as a causal language model: {why}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} weights are not in the files: {', '.join(missing[:3])}"
        )
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        if section.attention == "sdpa":
            raise ConfigError(
                f"model.attention = 'sdpa' leaves out this model's attention softcap "
                f"({config.attn_logit_softcapping}); use 'eager' or 'auto'"
            )
        model.set_attn_implementation("eager")
    return model


def _checkpoint_layers(model: Any, source: Path) -> None:
    """Have every layer compute its activations again in the backward pass.

    Not by transformers' own switch, which works in training mode only, where dropout is on.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{source}: {type(model).__name__} has no layers for gradient checkpointing; set "
            "model.gradient_checkpointing = 'off'"
        )
    for layer in layers:
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    # Nothing random in it: the model is in evaluation mode.
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)
