"""Where an organizer's prompts come from: JSONL files, data sets of the Hub, reasoning-gym.

Owns: reading each kind into prompts, and saying where each one stands. A source is written
`FILE.jsonl`, `hf:OWNER/NAME` (or `hf:FOLDER`), or `reasoning-gym:TASK`, and may end in options,
`?key=value&key=value`. Does not know: tokenizers, manifests, which prompts can be used.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from swarm.errors import DataError, UsageError
from swarm.paths import parse_json, user_path
from swarm.protocol.prompts import FIELDS, MAX_TAG_CHARS, Prompt, prompt_of, read_lines
from swarm.rewards import gym
from swarm.rewards.combined import parse as parse_reward
from swarm.rewards.reward import PlainSpec

HUB = "hf:"
GYM = "reasoning-gym:"
COMMON_OPTIONS = ("reward", "tag", "limit")
HUB_OPTIONS = ("split", "config", "map", "revision")
DEFAULT_MAP = "prompt=prompt,answer=answer"
DEFAULT_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Sourced:
    """A prompt, or what is wrong with it, and where it stands.

    Attributes:
        where: "FILE:LINE" or alike, for messages.
        prompt: None where `wrong` says why there is none.
        wrong: empty where there is a prompt.
        reward: the source's own, for prompts that name none; None: the swarm's.
    """

    where: str
    prompt: Prompt | None = None
    wrong: str = ""
    reward: PlainSpec | None = None


def is_file(source: str) -> bool:
    """Whether a source is a path of this machine."""
    return not source.startswith((HUB, GYM))


def title(sources: Sequence[str]) -> str:
    """A name for a swarm that is made of these."""
    return _short(sources[0])


def read(sources: Sequence[str], defaults: Mapping[str, str] | None = None) -> list[Sourced]:
    """Read sources in turn.

    Args:
        sources: as on the command line.
        defaults: options (split, map, size, seed ...) of sources that do not name them.

    Returns:
        All prompts in order. Those of several sources are tagged with the source's name, unless
        `tag` says otherwise.

    Raises:
        DataError, UsageError: a source that cannot be read, holds nothing, or has a wrong option.
    """
    found: list[Sourced] = []
    for source in sources:
        name, given = _split(source)
        options = {**(defaults or {}), **given}
        reward = parse_reward(options["reward"]) if options.get("reward") else None
        tag = options.get("tag", _short(source) if len(sources) > 1 else "")
        limit = _number(source, options, "limit", 0)
        if name.startswith(GYM):
            rows = _from_gym(name, given, options)
            task = {"task": name.removeprefix(GYM)}
            reward = reward or PlainSpec("reasoning-gym", 1, task)
        else:
            known = COMMON_OPTIONS + (HUB_OPTIONS if name.startswith(HUB) else ())
            _refuse_unknown(source, given, known)
            rows = _from_hub(name, options) if name.startswith(HUB) else _from_file(name)
        count = 0
        for row in rows:
            count += 1
            found.append(replace(_tagged(row, tag), reward=reward))
            if count == limit:
                break
        if not count:
            raise DataError(f"{source}: holds no prompts; one JSON object a line is right")
    return found


def _from_file(name: str) -> Iterator[Sourced]:
    path = user_path(name)
    for number, item in read_lines(path):
        where = f"{path}:{number}"
        yield Sourced(where, wrong=item) if isinstance(item, str) else Sourced(where, item)


def _from_hub(name: str, options: Mapping[str, str]) -> Iterator[Sourced]:
    """Rows of a data set, their columns mapped to a prompt's fields. Never runs its code."""
    columns = _columns(name, options.get("map") or DEFAULT_MAP)
    path, split = name.removeprefix(HUB), options.get("split") or "train"
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{name}: data sets need the extra `data`: pip install 'swarm-node[data]'"
        ) from None
    from datasets.exceptions import DatasetsError

    folder = user_path(path)
    place = str(folder) if folder.is_dir() else path
    config, revision = options.get("config") or None, options.get("revision") or None
    try:
        rows = datasets.load_dataset(place, config, split=split, revision=revision)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        if config is None and isinstance(error, ValueError):
            _refuse_ambiguous(name, place, revision)
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{name}: split {split!r} is neither in the cache here nor to be had from the Hub "
            f"(needs the network, the right name and split): {type(error).__name__}: {reason}"
        ) from None
    missing = [column for column in columns.values() if column not in rows.column_names]
    if missing:
        raise UsageError(
            f"{name}: no column {', '.join(missing)}; it has {', '.join(rows.column_names)}. "
            "Say which is which: --map prompt=COLUMN,answer=COLUMN"
        )
    for number, row in enumerate(rows, start=1):
        fields = {field: _plain(row[column]) for field, column in columns.items()}
        yield _made(f"{name}/{split}:{number}", fields)


def _refuse_ambiguous(name: str, place: str, revision: str | None) -> None:
    """Of a data set that could not be read without `config`: whether that is what it lacks."""
    from datasets import get_dataset_config_names, get_dataset_default_config_name

    if get_dataset_default_config_name(place, revision=revision) is None:
        configs = get_dataset_config_names(place, revision=revision)
        raise UsageError(
            f"{name}: the data set has the configurations {', '.join(configs)}; name one: "
            f"'{name}?config={configs[0]}'"
        )


def _columns(name: str, text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",")]
    columns = {field.strip(): column.strip() for field, _, column in pairs}
    wrong = [field for field in columns if field not in FIELDS or field == "reward"]
    if wrong or not all(columns.values()) or len(columns) != len(pairs):
        raise UsageError(
            f"{name}: --map {text}: expected FIELD=COLUMN,..., the fields being prompt or "
            "messages, answer, id, tags"
        )
    return columns


def _plain(value: Any) -> Any:
    """A column's value as a prompt's field: numbers as text, messages with what a prompt holds."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return [
            {key: item.get(key) for key in ("role", "content")} if isinstance(item, dict) else item
            for item in value
        ]
    return value


def _from_gym(name: str, given: Mapping[str, str], options: Mapping[str, str]) -> Iterator[Sourced]:
    """Tasks made by reasoning-gym, all of them from `seed`; further options are the task's own."""
    task = name.removeprefix(GYM)
    if task not in gym.TASKS:
        raise UsageError(f"{name}: not among the tasks that can be scored: {', '.join(gym.TASKS)}")
    size = _number(name, options, "size", DEFAULT_SIZE)
    seed = _number(name, options, "seed", 0)
    own = {
        key: _parsed(value)
        for key, value in given.items()
        if key not in (*COMMON_OPTIONS, "size", "seed")
    }
    try:
        from reasoning_gym.factory import create_dataset
    except ImportError:
        raise UsageError(
            f"{name}: needs the extra `reasoning-gym`: pip install 'swarm-node[reasoning-gym]'"
        ) from None
    try:
        made = create_dataset(task, size=size, seed=seed, **own)
    except (TypeError, ValueError, AssertionError) as error:
        raise UsageError(f"{name}: {error}") from None
    for number in range(size):
        entry = made[number]
        fields = {
            "prompt": entry["question"],
            "answer": str(entry["answer"]),
            "id": f"{task}/{seed}/{number}",
        }
        yield _made(f"{name}#{number}", fields)


def _made(where: str, fields: dict[str, Any]) -> Sourced:
    try:
        return Sourced(where, prompt_of(fields))
    except ValueError as error:
        return Sourced(where, wrong=str(error))


def _tagged(row: Sourced, tag: str) -> Sourced:
    if row.prompt is None or not tag or tag in row.prompt.tags:
        return row
    return replace(row, prompt=replace(row.prompt, tags=(*row.prompt.tags, tag)))


def _split(source: str) -> tuple[str, dict[str, str]]:
    name, question, query = source.partition("?")
    if not question or (is_file(source) and user_path(source).exists()):
        return source, {}
    try:
        # A plus sign is a reward's, not a blank.
        pairs = parse_qsl(query.replace("+", "%2B"), strict_parsing=True)
    except ValueError:
        raise UsageError(f"{source}: expected {name}?key=value&key=value") from None
    return name, dict(pairs)


def _short(source: str) -> str:
    name = _split(source)[0]
    stem = Path(name).stem if is_file(source) else name.rpartition(":")[2].rpartition("/")[2]
    return stem[:MAX_TAG_CHARS] or "prompts"


def _number(source: str, options: Mapping[str, str], key: str, default: int) -> int:
    text = options.get(key) or str(default)
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(f"{source}: {key} = {text!r}; a whole number is right")
    return int(text)


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _refuse_unknown(source: str, given: Mapping[str, str], known: Sequence[str]) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise UsageError(f"{source}: no option {', '.join(unknown)}; there are {', '.join(known)}")
