"""What a swarm is: the manifest whose hash is its id.

Owns: its fields and bounds. Does not know: how it is amended (`swarm.protocol.charter`), how its
bytes travel, what the prompts say. JSON here is canonical (`swarm.protocol.canonical`).
"""

import hashlib
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from swarm.protocol.canonical import (
    CanonicalModel,
    HexHash,
    PeerId,
    SafeInt,
    Text,
    UnixTime,
    decode,
    encode,
)
from swarm.protocol.reasons import Reason

# Room for the longest texts and parameters, each character written with six bytes ("\u0001").
MAX_MANIFEST_BYTES = 512 * 1024
# Of all prompt sets together. A prompt id is a u32; an epoch's order takes 16 bytes a prompt.
MAX_PROMPTS = 2**24

NAME_PATTERN = r"[A-Za-z0-9 ._-]{1,64}"

_MANIFEST_DOMAIN = b"swarm-node manifest 1\0"


class PromptSetRef(CanonicalModel):
    """A prompt set by content: what `swarm.protocol.prompts.encode_prompt_set` made.

    Attributes:
        sha256: hash of the encoded set.
        size_bytes: its length.
        count: prompts in it.
        tokens_sha256: sha256 over each prompt's `prompt_tokens_sha256` in turn. Two tokenizers
            that split any rendered prompt differently give different values.
    """

    sha256: HexHash
    size_bytes: Annotated[int, Field(ge=1, le=2**36)]
    count: Annotated[int, Field(ge=1, le=MAX_PROMPTS)]
    tokens_sha256: HexHash


class TokenizerSpec(CanonicalModel):
    """The one tokenizer of the swarm.

    Attributes:
        fingerprint: hash over the id-to-token map.
        vocab_size: token ids are below it.
        name: for people, e.g. "Qwen/Qwen2.5-1.5B".
    """

    fingerprint: HexHash
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    name: Annotated[Text, Field(max_length=256)]


class TemplateSpec(CanonicalModel):
    """How a prompt becomes text.

    Attributes:
        text: Jinja source; variables `messages`, `prompt`, `system`.
        system: the system prompt; empty: none.
    """

    text: Annotated[Text, Field(min_length=1)]
    system: Text = ""


class SamplingSpec(CanonicalModel):
    """How every member samples: members compare only what was drawn alike.

    Attributes:
        temperature: of the softmax.
        group_size: completions per prompt.
        max_prompt_tokens: longest rendered prompt.
        max_completion_tokens: a completion of this length without a stop token was cut.
        stop_token_ids: rising; a completion ends with the first of them.
    """

    temperature: Annotated[float, Field(ge=0.01, le=10.0)]
    group_size: Annotated[int, Field(ge=2, le=4096)]
    max_prompt_tokens: Annotated[int, Field(ge=1, le=2**20)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**20)]
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)]

    @model_validator(mode="after")
    def _stop_tokens_rise(self) -> Self:
        if list(self.stop_token_ids) != sorted(set(self.stop_token_ids)):
            raise ValueError("stop_token_ids must rise, each once")
        return self


def _no_int(value: object) -> object:
    if isinstance(value, int):  # pydantic would make a float of it
        raise ValueError("not a float")
    return value


RewardParam = (
    Annotated[Text, Field(max_length=1024)]
    | SafeInt
    | Annotated[float, BeforeValidator(_no_int)]
    | bool
)


class RewardSpec(CanonicalModel):
    """The reward that every member computes for itself, by name and version."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
    version: Annotated[int, Field(ge=1, le=65_535)] = 1
    params: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], RewardParam],
        Field(default_factory=dict, max_length=32),
    ]


class Manifest(CanonicalModel):
    """What a swarm trains on, fixed for its whole life; the hash of its bytes is the swarm's id.

    Attributes:
        schema_id: written as "schema".
        name: for people.
        created_s: Unix time at which the organizer made it.
        organizers: peer ids whose signature an amendment needs (one of them).
        prompts: the genesis prompt set.
        held_out: the prompts of the evaluation, in distribution.
        out_of_distribution: prompts of a second evaluation.
        record_shards: parts into which the keys of the DHT's records are split.
    """

    schema_id: Annotated[Literal["swarm-manifest/1"], Field(alias="schema")] = "swarm-manifest/1"
    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
    created_s: UnixTime
    organizers: Annotated[tuple[PeerId, ...], Field(min_length=1, max_length=16)]
    prompts: PromptSetRef
    held_out: PromptSetRef | None = None
    out_of_distribution: PromptSetRef | None = None
    template: TemplateSpec
    tokenizer: TokenizerSpec
    sampling: SamplingSpec
    reward: RewardSpec
    record_shards: Annotated[int, Field(ge=1, le=256)] = 4

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if len(set(self.organizers)) != len(self.organizers):
            raise ValueError("organizers must differ")
        if any(token >= self.tokenizer.vocab_size for token in self.sampling.stop_token_ids):
            raise ValueError(f"stop_token_ids must be below vocab_size {self.tokenizer.vocab_size}")
        return self

    @property
    def swarm_id(self) -> bytes:
        """The 32 bytes that name the swarm everywhere."""
        return hashlib.sha256(_MANIFEST_DOMAIN + self.to_bytes()).digest()

    @property
    def evaluation_sets(self) -> dict[str, PromptSetRef]:
        """Field to set, those that there are."""
        named = {"held_out": self.held_out, "out_of_distribution": self.out_of_distribution}
        return {name: ref for name, ref in named.items() if ref is not None}

    def to_bytes(self) -> bytes:
        """The canonical JSON."""
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode the canonical JSON.

        Raises:
            RemoteProtocolError: reason "manifest"; "incompatible" for another schema version.
        """
        return decode(cls, data, Reason.MANIFEST, MAX_MANIFEST_BYTES)
