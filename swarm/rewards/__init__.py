"""Rewards: text in, number out, computed by every node for itself in killable processes.

Completions are text that strangers' models wrote. Nothing here evaluates it, and nothing could
while one is judged (wall.py). What may take long on a text made for it (regex, math) is ended by
the workers' limits.

    reward.py       what a reward is; registry.py: which there are, by name and version
    number.py       the final number of a text
    exact.py        equality of the whole text
    pattern.py      the organizer's regular expression
    format_tags.py  the form that was asked for
    gym.py          answers of reasoning-gym's tasks
    math_answer.py  mathematical equality, by math-verify
    combined.py     weighted sums
    tags.py         finding marked parts of a text
    workers.py      the node's side of the worker processes
    child.py        what runs inside one; wall.py: what it may not do meanwhile
    grading.py      rewards and accuracy of completions
"""
