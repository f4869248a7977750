"""Prompt templates: Jinja text from the manifest, rendered as transformers would.

Owns: the sandbox, what a template sees, and the size limit. Knows no tokenizer and no time limit.
Templates come from an organizer, so the node renders them only inside a killable worker
(swarm.rewards.workers); here is what runs there.

A template sees `messages` (a list of role and content), `prompt` (the text, undefined where a
prompt was given as messages), `system` (text, perhaps empty) and `add_generation_prompt` (true);
`tools` and `documents` are none. `raise_exception(text)` refuses a prompt. Nothing that differs
from node to node or from time to time is there: no clock, no randomness.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from swarm.errors import DataError

MAX_RENDERED_CHARS = 1_000_000

Message = Mapping[str, Any]

# What an expression of a template can raise; a lack of memory is the process's to handle.
_EXPRESSION_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateFault(StrEnum):
    """Why a template does not render."""

    SYNTAX = "syntax"
    FAILED = "failed"
    EMPTY = "empty"
    SIZE = "size"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    CRASHED = "crashed"
    CLOSED = "closed"


class TemplateError(DataError):
    """A template does not render.

    Args:
        reason: one of `TemplateFault`; anything else (a worker's word) becomes "failed".
        detail: what happened, with the number of the prompt where it is one prompt's.
    """

    def __init__(self, reason: str, detail: str) -> None:
        known = reason in set(TemplateFault)
        self.reason = TemplateFault(reason) if known else TemplateFault.FAILED
        super().__init__(f"template: {self.reason}: {detail}")
        self.detail = detail


def render(
    text: str,
    system: str,
    prompts: Sequence[str | Sequence[Message]],
    max_chars: int = MAX_RENDERED_CHARS,
    first: int = 0,
) -> list[str]:
    """Render every prompt.

    Args:
        text: the template.
        system: system text; put before the messages of prompts that do not begin with one.
        prompts: each a text, which becomes one user message, or messages.
        max_chars: largest result per prompt.
        first: number of the first prompt, for error messages.

    Raises:
        TemplateError: the template does not compile, fails on a prompt, or yields nothing or
            too much for one.
    """
    template = _compile(text)
    rendered = []
    for number, prompt in enumerate(prompts, first):
        try:
            result = _join(template.generate(_variables(system, prompt)), max_chars)
        except _EXPRESSION_ERRORS as error:
            detail = f"prompt {number}: {type(error).__name__}: {error}"
            raise TemplateError("failed", detail) from None
        if not result:
            raise TemplateError("empty", f"prompt {number} renders to nothing")
        if len(result) > max_chars:
            raise TemplateError("size", f"prompt {number}: more than {max_chars} characters")
        rendered.append(result)
    return rendered


def _variables(system: str, prompt: str | Sequence[Message]) -> dict[str, Any]:
    variables: dict[str, Any] = {
        "system": system,
        "add_generation_prompt": True,
        "tools": None,
        "documents": None,
    }
    if isinstance(prompt, str):
        variables["prompt"] = prompt
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        messages = list(prompt)
    if system and not (messages and messages[0].get("role") == "system"):
        messages.insert(0, {"role": "system", "content": system})
    variables["messages"] = messages
    return variables


def _join(pieces: Iterator[str], max_chars: int) -> str:
    """All pieces together; those behind `max_chars` characters and one are never made."""
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece[: max_chars + 1 - size])
        size += len(kept[-1])
        if size > max_chars:
            break
    return "".join(kept)


@lru_cache(maxsize=4)
def _compile(text: str) -> jinja2.Template:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError("syntax", f"line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, ValueError, OverflowError) as error:
        raise TemplateError("syntax", f"does not compile: {error}") from None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    del environment.filters["random"]
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _namespace
    environment.globals["dict"] = _make_dict
    return environment


class _Generation(Extension):
    """`{% generation %}`, which marks an assistant's words for training: renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _SafeNamespace(Namespace):
    """A namespace without dunder names, which jinja2 calls outside its sandbox (`__html__`)."""

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    values = dict(*args, **kwargs)
    for name in values:
        _refuse_private(name)
    return _SafeNamespace(values)


def _refuse_private(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' `tojson`: without HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
