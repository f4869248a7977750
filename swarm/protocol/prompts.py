"""Prompt sets: their JSONL, their canonical bytes, the order in which each epoch visits them.

Owns: what a prompt may contain, the hash that names a set, the order that all members share and
a publisher's place in it. Does not know: tokenizers and templates (it hashes token ids that others
made), rewards, who owns a prompt (the caller says).

A prompt id counts through all sets of a swarm in turn: the genesis set, then the appended ones.
"""

import codecs
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from swarm.errors import DataError, RemoteProtocolError
from swarm.protocol.manifest import PromptSetRef, RewardSpec
from swarm.protocol.reasons import Reason

MAX_PROMPT_CHARS = 65_536
MAX_ANSWER_CHARS = 65_536
MAX_MESSAGES = 64
MAX_ID_CHARS = 256
MAX_TAGS = 32
MAX_TAG_CHARS = 64
MAX_LINE_BYTES = 4 << 20
"""More than any prompt takes with every character escaped; a longer line is no prompt file's."""

# Enough to find own prompts where a small set is shared by hundreds of peers; 60 ms of hashing.
VISITS_PER_CALL = 4096

FIELDS = ("prompt", "messages", "answer", "reward", "id", "tags")

_ORDER_DOMAIN = b"swarm-node order 1\0"
_PLACE = struct.Struct("<QI")
_KEY_BYTES = 8
_ROLE_PATTERN = r"[a-z][a-z_]{0,31}"
_BLANKS = " \t\r\n"
_QUOTED_CHARS = 60


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task: what the model reads, and the answer that rewards compare with.

    Attributes:
        prompt: plain text; None when `messages` is given.
        messages: a conversation, each {"role": ..., "content": ...}; None when `prompt` is given.
        answer: never empty.
        id: the author's own name for it; empty: none.
        tags: the author's own labels.
        reward: scores this prompt in place of the manifest's; None: the manifest's does.
    """

    prompt: str | None
    messages: tuple[Mapping[str, str], ...] | None
    answer: str
    id: str = ""
    tags: tuple[str, ...] = ()
    reward: RewardSpec | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """A publisher's place in its pass over the prompts.

    Attributes:
        epoch: how many passes came before this one.
        after: order key of the last prompt that was visited in this epoch; -1 at its start.
    """

    epoch: int = 0
    after: int = -1


class _NumberText(str):
    """A JSON number as it was written, so that 0.50 stays 0.50 in an answer."""

    __slots__ = ()


def read_jsonl(path: Path) -> list[Prompt]:
    """Read a user's prompt file: one JSON object a line; lines without content are skipped.

    Fields: exactly one of `prompt` (text) and `messages` ([{"role", "content"}, ...]); `answer`
    (text, or a number, which becomes text as written); optional `id` (text), `tags` ([text]) and
    `reward` ({"name", "version", "params"}, or its name alone).

    Raises:
        DataError: "FILE:LINE: reason"; also an unreadable or an empty file.
    """
    prompts = []
    first_line: dict[bytes, int] = {}
    for number, prompt in read_lines(path):
        if isinstance(prompt, str):
            raise DataError(f"{path}:{number}: {prompt}")
        if (line := first_line.setdefault(content_digest(prompt), number)) != number:
            raise DataError(f"{path}:{number}: the same prompt as in line {line}")
        prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path}: holds no prompts; one JSON object a line is right")
    return prompts


def read_lines(path: Path) -> Iterator[tuple[int, Prompt | str]]:
    """The lines of a user's prompt file: number, and the prompt or what is wrong with the line.

    Raises:
        DataError: the file cannot be read, or has a line that is no prompt file's.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
                if len(line) == MAX_LINE_BYTES:
                    raise DataError(
                        f"{path}:{number}: a line of {MAX_LINE_BYTES >> 20} MiB or more; one JSON "
                        "object a line is right"
                    )
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if text.strip():
                    yield number, _prompt_or_problem(text)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def content_digest(prompt: Prompt) -> bytes:
    """Equal for two prompts that a model reads alike: the sha256 of the text or the messages."""
    content = _canonical(prompt.prompt if prompt.messages is None else prompt.messages)
    return hashlib.sha256(content.encode("utf-8")).digest()


def encode_prompt_set(prompts: Sequence[Prompt]) -> bytes:
    """The canonical JSONL of a set: keys sorted, absent fields left out, "\\n" after each line."""
    return b"".join(_encode_line(prompt) for prompt in prompts)


def decode_prompt_set(data: bytes, ref: PromptSetRef) -> list[Prompt]:
    """Read the set that a manifest or an amendment names.

    Raises:
        RemoteProtocolError: reason "prompt_set": size, hash, count or contents are not as named.
    """
    if len(data) != ref.size_bytes:
        raise RemoteProtocolError(Reason.PROMPT_SET, f"{len(data)} bytes, not {ref.size_bytes}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != ref.sha256:
        raise RemoteProtocolError(Reason.PROMPT_SET, f"sha256 {digest}, not {ref.sha256}")
    lines = data.count(b"\n")
    if lines != ref.count:
        raise RemoteProtocolError(Reason.PROMPT_SET, f"{lines} lines, not {ref.count}")
    try:
        prompts = list(_parse(data))
    except _LineError as error:
        raise RemoteProtocolError(Reason.PROMPT_SET, f"line {error.line}: {error.reason}") from None
    if encode_prompt_set(prompts) != data:
        raise RemoteProtocolError(Reason.PROMPT_SET, "not canonical JSONL")
    return prompts


def prompt_tokens_sha256(token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """sha256 over the token ids of a rendered prompt as little-endian int32: a prompt's hash."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).digest()


def prompt_set_ref(data: bytes, prompt_hashes: Sequence[bytes]) -> PromptSetRef:
    """How a manifest names a set.

    Args:
        data: from `encode_prompt_set`.
        prompt_hashes: `prompt_tokens_sha256` of each prompt, in the set's order.
    """
    return PromptSetRef(
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        count=len(prompt_hashes),
        tokens_sha256=hashlib.sha256(b"".join(prompt_hashes)).hexdigest(),
    )


def order_key(swarm_id: bytes, epoch: int, prompt_id: int) -> int:
    """Where an epoch visits a prompt: below 2^64, visited in rising order."""
    place = _PLACE.pack(epoch, prompt_id)
    digest = hashlib.sha256(_ORDER_DOMAIN + swarm_id + place).digest()
    return int.from_bytes(digest[:_KEY_BYTES], "big")


def epoch_order(swarm_id: bytes, epoch: int, count: int) -> NDArray[np.int64]:
    """The order in which an epoch visits the prompts.

    Returns:
        (count,) int64, read-only: prompt ids by rising `order_key`, equal keys by id. A prompt's
        key depends on nothing else, so prompts that are appended never move the others.
    """
    return _epoch_keys(swarm_id, epoch, count)[1]


def next_prompts(
    swarm_id: bytes,
    cursor: Cursor,
    count: int,
    owns: Callable[[int, int], bool],
    limit: int,
) -> tuple[list[tuple[int, int]], Cursor]:
    """Take the next own prompts, over the end of an epoch into the next one where need be.

    Visits at most max(`count`, VISITS_PER_CALL) prompts, so it returns with fewer than `limit`
    (even none) when very little is owned; the next call goes on from there. Prompts appended
    meanwhile are met in this epoch if their key lies after the cursor, else in the next one.

    Args:
        swarm_id: 32 bytes.
        cursor: where the last call ended.
        count: prompts in all sets.
        owns: (epoch, prompt_id) -> whether this node samples it.
        limit: prompts wanted.

    Returns:
        ([(epoch, prompt_id), ...], the cursor behind the last prompt visited).
    """
    taken: list[tuple[int, int]] = []
    epoch, after = cursor.epoch, cursor.after
    visits_left = max(count, VISITS_PER_CALL) if count else 0
    while visits_left > 0 and len(taken) < limit:
        keys, ids = _epoch_keys(swarm_id, epoch, count)
        start = 0 if after < 0 else int(np.searchsorted(keys, np.uint64(after), side="right"))
        if start == count:
            epoch, after = epoch + 1, -1
            continue
        for place in range(start, min(count, start + visits_left)):
            visits_left -= 1
            prompt_id, after = int(ids[place]), int(keys[place])
            if owns(epoch, prompt_id):
                taken.append((epoch, prompt_id))
                if len(taken) == limit:
                    break
    return taken, Cursor(epoch, after)


# A node walks one epoch at a time; over an epoch's end it needs two.
@lru_cache(maxsize=2)
def _epoch_keys(
    swarm_id: bytes, epoch: int, count: int
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Order keys (count,) uint64 rising, and the prompt ids (count,) int64 that they belong to."""
    keys = np.fromiter(
        (order_key(swarm_id, epoch, prompt_id) for prompt_id in range(count)),
        dtype=np.uint64,
        count=count,
    )
    ids = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    keys = keys[ids]
    keys.flags.writeable = ids.flags.writeable = False
    return keys, ids


class _LineError(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(line, reason)
        self.line = line
        self.reason = reason


def _encode_line(prompt: Prompt) -> bytes:
    fields: dict[str, object] = {"answer": prompt.answer}
    if prompt.prompt is not None:
        fields["prompt"] = prompt.prompt
    if prompt.messages is not None:
        fields["messages"] = [dict(message) for message in prompt.messages]
    if prompt.id:
        fields["id"] = prompt.id
    if prompt.reward is not None:
        fields["reward"] = prompt.reward.model_dump(mode="json")
    if prompt.tags:
        fields["tags"] = list(prompt.tags)
    return _canonical(fields).encode("utf-8") + b"\n"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _parse(data: bytes) -> Iterator[Prompt]:
    """The prompts of a JSONL text.

    Raises:
        _LineError: a line is no prompt, or repeats an earlier one.
    """
    first_line: dict[bytes, int] = {}
    for number, line in _lines(data):
        try:
            prompt = prompt_of(_load(line))
        except ValueError as error:
            raise _LineError(number, str(error)) from None
        digest = content_digest(prompt)
        if digest in first_line:
            raise _LineError(number, f"the same prompt as in line {first_line[digest]}")
        first_line[digest] = number
        yield prompt


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines with content, and their numbers from 1."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _load(line: bytes) -> Any:
    """One line's JSON; numbers become `_NumberText`.

    Raises:
        ValueError: says what is malformed.
    """
    try:
        text = line.decode("utf-8")
        return json.loads(
            text,
            object_pairs_hook=_unique_fields,
            parse_int=_NumberText,
            parse_float=_NumberText,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deep") from None


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("malformed JSON: a field is given twice")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"malformed JSON: {name} is no number")


def _prompt_or_problem(line: bytes) -> Prompt | str:
    try:
        return prompt_of(_load(line))
    except ValueError as error:
        return str(error)


def prompt_of(value: Any) -> Prompt:
    """A prompt from its fields, as a line of a prompt file has them.

    Raises:
        ValueError: says which field, what it is and what would be right.
    """
    if not isinstance(value, dict):
        raise ValueError(
            f'must be an object such as {{"prompt": ..., "answer": ...}}, not {_quote(value)}'
        )
    for name in value:
        if name not in FIELDS:
            raise ValueError(f"unknown field {_quote(name)}; known: {', '.join(FIELDS)}")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("exactly one of 'prompt' and 'messages' must be given")
    if "answer" not in value:
        raise ValueError("'answer' is missing")
    prompt = messages = None
    if "prompt" in value:
        prompt = _text("prompt", value["prompt"], MAX_PROMPT_CHARS)
    else:
        messages = _messages(value["messages"])
    answer = value["answer"]
    return Prompt(
        prompt=prompt,
        messages=messages,
        answer=_text(
            "answer", str(answer) if isinstance(answer, _NumberText) else answer, MAX_ANSWER_CHARS
        ),
        id=_text("id", value["id"], MAX_ID_CHARS) if "id" in value else "",
        tags=_tags(value["tags"]) if "tags" in value else (),
        reward=_reward(value["reward"]) if "reward" in value else None,
    )


def _reward(value: Any) -> RewardSpec:
    try:
        if type(value) is str:
            return RewardSpec(name=value, params={})
        return RewardSpec.model_validate_json(json.dumps(_plain(value)))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(["reward", *map(str, problem["loc"])])
        raise ValueError(f"{where!r}: {problem['msg']}") from None


def _plain(value: Any) -> Any:
    """A value with its numbers as numbers again."""
    if isinstance(value, _NumberText):
        return json.loads(str(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise ValueError(
            f"'messages' must be a list of 1 to {MAX_MESSAGES} objects, not {_quote(value)}"
        )
    messages = []
    for place, message in enumerate(value):
        name = f"messages[{place}]"
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f"{name!r} must have 'role' and 'content', not {_quote(message)}")
        role = message["role"]
        if type(role) is not str or not re.fullmatch(_ROLE_PATTERN, role):
            raise ValueError(f"'{name}.role' must be a word such as 'user', not {_quote(role)}")
        content = _text(f"{name}.content", message["content"], MAX_PROMPT_CHARS, may_be_empty=True)
        messages.append({"role": role, "content": content})
    size = sum(len(message["content"]) for message in messages)
    if not 1 <= size <= MAX_PROMPT_CHARS:
        raise ValueError(f"'messages' hold {size} characters; 1 to {MAX_PROMPT_CHARS} are right")
    return tuple(messages)


def _tags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_TAGS:
        raise ValueError(f"'tags' must be a list of at most {MAX_TAGS} texts, not {_quote(value)}")
    return tuple(_text(f"tags[{i}]", tag, MAX_TAG_CHARS) for i, tag in enumerate(value))


def _text(name: str, value: Any, max_chars: int, *, may_be_empty: bool = False) -> str:
    if type(value) is not str:  # a _NumberText is a str, too
        raise ValueError(f"{name!r} must be text, not {_quote(value)}")
    if len(value) > max_chars:
        raise ValueError(f"{name!r} has {len(value)} characters, above {max_chars}")
    if not value.strip(_BLANKS) and not may_be_empty:
        raise ValueError(f"{name!r} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} holds half a surrogate pair, which is no character") from None
    return value


def _quote(value: Any) -> str:
    """A value as JSON, cut, for a message."""
    text = value if isinstance(value, _NumberText) else json.dumps(value)
    return text if len(text) <= _QUOTED_CHARS else f"{text[:_QUOTED_CHARS]}..."
