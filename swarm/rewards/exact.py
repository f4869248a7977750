"""Reward `exact` 1: is the text, without white space around it, the answer?

Parameter `ignore_case` (false by default): compare without regard to case.
"""

from swarm.rewards.reward import COMMON, Params, Reward


def score(completion: str, answer: str, prompt: str, params: Params) -> float:
    """1.0 where the stripped texts are equal, else 0.0."""
    got, wanted = completion.strip(), answer.strip()
    if params["ignore_case"]:
        got, wanted = got.casefold(), wanted.casefold()
    return float(got == wanted)


def check_answer(answer: str, params: Params) -> str | None:
    """Why no completion should be compared with this answer, or None."""
    return None if answer.strip() else "it is empty"


REWARD = Reward(score, check_answer, {**COMMON, "ignore_case": (False, True)})
