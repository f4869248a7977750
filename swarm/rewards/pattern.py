"""Reward `regex` 1: what does the organizer's regular expression find?

The last match of parameter `pattern` counts (Python's `re`). Parameter `compare`: "text": what was
found, without white space around it, is the answer; "number": its final number (see `number`) is
the answer's; "none": that something was found is enough. What was found is the group named
`answer`, else the first group, else the whole match.

A backtracking expression can take time without end on a text made for it. No rule tells those
expressions apart, so they are tried: whoever seeds a swarm runs them on repeated texts under the
worker's time limit, and every member has that limit for the texts that come.
"""

import re
from collections import deque
from functools import lru_cache

from swarm.rewards import number
from swarm.rewards.reward import COMMON, Params, Reward

PROBE_CHARS = 4000

_LITERAL = re.compile(r"[A-Za-z0-9<>/ _#:=-]{2,}")


def score(completion: str, answer: str, prompt: str, params: Params) -> float:
    """1.0 where the last match is as the answer asks, else 0.0."""
    found = _last(str(params["pattern"]), completion)
    if found is None or params["compare"] == "none":
        return float(found is not None)
    if params["compare"] == "number":
        wanted = number.final_number(answer)
        return float(wanted is not None and number.final_number(found) == wanted)
    return float(found.strip() == answer.strip())


def check_answer(answer: str, params: Params) -> str | None:
    """Why nothing that is found could be this answer, or None."""
    if params["compare"] == "number":
        return number.check_answer(answer, params)
    return None


def check_params(params: Params) -> str | None:
    """Compile the pattern and run it on texts of PROBE_CHARS characters; hangs where it would."""
    pattern = str(params["pattern"])
    if not pattern:
        return "pattern is missing; e.g. --reward-param 'pattern=Answer: (.*)'"
    try:
        _compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"pattern {pattern!r:.200}: {error}"
    for probe in _probes(pattern):
        _last(pattern, probe)
    return None


def _probes(pattern: str) -> list[str]:
    """Runs of the pattern's own characters and words, each with an end that does not fit."""
    characters = sorted(set(pattern) | set("a0 \n"))
    words = sorted(set(_LITERAL.findall(pattern)))
    pieces = [*characters, *words, *(f"{character}a" for character in characters)]
    return [(piece * (PROBE_CHARS // len(piece) + 1))[:PROBE_CHARS] + "\0" for piece in pieces]


def _last(pattern: str, text: str) -> str | None:
    match = next(iter(deque(_compile(pattern).finditer(text), maxlen=1)), None)
    if match is None:
        return None
    group: str | int = 0
    if match.re.groups:
        group = "answer" if "answer" in match.re.groupindex else 1
    return match[group] or ""


@lru_cache(maxsize=8)
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


REWARD = Reward(
    score,
    check_answer,
    {**COMMON, "compare": ("text", "number", "none")},
    {"pattern": ""},
    check_params,
)
