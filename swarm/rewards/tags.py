"""Finding marked parts of a text, each in one pass: `<answer>...</answer>`, `\\boxed{...}`.

Knows no reward: what the parts mean is theirs.
"""

MAX_BOX_CHARS = 200

_BOXES = ("\\boxed{", "\\fbox{")


def last(text: str, tag: str) -> str | None:
    """What stands between the last closing tag and the opening tag nearest before it."""
    stop = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, stop) if stop >= 0 else -1
    return text[start + len(tag) + 2 : stop] if start >= 0 else None


def last_box(text: str, max_chars: int = MAX_BOX_CHARS) -> tuple[int, str | None]:
    """Where the last box begins, -1 for none, and its content.

    The content is None where its closing brace does not come within `max_chars`.
    """
    place, opening = max((text.rfind(opening), opening) for opening in _BOXES)
    if place < 0:
        return -1, None
    return place, _braced(text, place + len(opening), max_chars)


def _braced(text: str, start: int, max_chars: int) -> str | None:
    """What stands between the brace before `start` and its partner, if that is near."""
    depth = 1
    for place in range(start, min(len(text), start + max_chars)):
        if text[place] == "{":
            depth += 1
        elif text[place] == "}":
            depth -= 1
            if depth == 0:
                return text[start:place]
    return None
