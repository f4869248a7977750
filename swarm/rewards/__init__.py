"""Rewards: text in, number out, computed by every node for itself in killable processes.

Completions are text that strangers' models wrote. Nothing here evaluates it, matches it against
a backtracking expression, or parses it beyond a single pass over its characters.

    registry.py  which rewards there are, by name and version; how a group is scored
    number.py    the final number of a text
    exact.py     equality of the whole text
    workers.py   the node's side of the worker processes
    child.py     what runs inside one
"""
