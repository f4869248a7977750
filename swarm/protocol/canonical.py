"""What is signed or hashed as JSON: strict models and their one canonical byte form.

Owns: the base of such models, the field types that several of them have, encoding and decoding.
Does not know: any particular model.

Canonical: keys sorted, no blanks, UTF-8 without escapes that JSON does not force. A decoder encodes
what it read again and refuses bytes that differ, so one meaning has one hash.
"""

import json
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from swarm.errors import RemoteProtocolError
from swarm.protocol.identity import public_key_of
from swarm.protocol.reasons import Reason

MAX_TEXT_CHARS = 16_384

# Where and how pydantic finds a schema version or an action that this version does not know.
_NEWER = {("schema", "literal_error"), ("action", "union_tag_invalid")}
_DETAIL_CHARS = 200


def _encodable(text: str) -> str:
    text.encode("utf-8")  # UnicodeEncodeError, a ValueError, on a lone surrogate
    return text


def _peer_id(text: str) -> str:
    try:
        public_key_of(text)
    except RemoteProtocolError as error:
        raise ValueError(error.detail) from None
    return text


Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS), AfterValidator(_encodable)]
HexHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PeerId = Annotated[str, AfterValidator(_peer_id)]
# A whole number that every JSON reader holds exactly.
SafeInt = Annotated[int, Field(ge=-(2**53 - 1), le=2**53 - 1)]
UnixTime = Annotated[float, Field(ge=0.0, le=2.0**40)]


class CanonicalModel(BaseModel):
    """Immutable; unknown fields, conversions between types, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


ModelT = TypeVar("ModelT", bound=CanonicalModel)


def encode(model: CanonicalModel, exclude: set[str] | None = None) -> bytes:
    """The canonical JSON of a model."""
    value = model.model_dump(mode="json", by_alias=True, exclude=exclude)
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def decode(kind: type[ModelT], data: bytes, reason: Reason, max_bytes: int) -> ModelT:
    """Read canonical JSON.

    Raises:
        RemoteProtocolError: `reason`; "incompatible" for a schema or an action not known here.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(reason, f"{len(data)} bytes, above {max_bytes}")
    try:
        model = kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "JSON"
        raise RemoteProtocolError(
            Reason.INCOMPATIBLE if (where, problem["type"]) in _NEWER else reason,
            f"{where}: {problem['msg']}"[:_DETAIL_CHARS],
        ) from None
    if encode(model) != data:
        raise RemoteProtocolError(reason, "not canonical JSON")
    return model
