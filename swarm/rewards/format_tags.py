"""Reward `format` 1: does the completion have the form that the prompt asked for?

Parameter `tags`: "answer": one `<answer>...</answer>` at the end, anything before it; "think
answer": `<think>...</think>`, then `<answer>...</answer>`, nothing else; "boxed": a `\\boxed{...}`.
Each tag stands there once, with something between. Parameter `opened` (false): the prompt ends
with the first opening tag, so the completion begins behind it.
"""

from swarm.rewards import tags
from swarm.rewards.reward import TRUNCATED, Params, Reward


def score(completion: str, answer: str, prompt: str, params: Params) -> float:
    """1.0 where the form is as asked, else 0.0."""
    kind = params["tags"]
    if kind == "boxed":
        content = tags.last_box(completion)[1]
        return float(content is not None and bool(content.strip()))
    names = str(kind).split(" ")
    text = f"<{names[0]}>{completion}" if params["opened"] else completion
    rest = text if kind == "answer" else text.lstrip()
    for place, name in enumerate(names):
        opening, closing = f"<{name}>", f"</{name}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        before, _, rest = rest.partition(opening)
        content, found, rest = rest.partition(closing)
        if not found or not content.strip():
            return 0.0
        if before.strip() and not (kind == "answer" and place == 0):
            return 0.0
    return float(not rest.strip())


def check_answer(answer: str, params: Params) -> str | None:
    """None: the form does not depend on the answer."""
    return None


REWARD = Reward(
    score,
    check_answer,
    {**TRUNCATED, "tags": ("answer", "think answer", "boxed"), "opened": (False, True)},
)
