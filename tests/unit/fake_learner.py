"""A learner without a model, for tests of how the node calls it: `python -m fake_learner FD`."""

import os
import signal
import sys
import time
from typing import Any

from swarm.errors import ConfigError, LearnerError
from swarm.rl.learner import Operations, main


def echo(**arguments: Any) -> dict[str, Any]:
    return {"echo": arguments, "pid": os.getpid()}


def sleep(*, seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {"slept": seconds}


def spin() -> dict[str, Any]:
    """Work in Python code, without end."""
    while True:
        pass


def say(*, text: str) -> dict[str, Any]:
    print(text)
    return {}


def kill() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leave(*, status: int) -> dict[str, Any]:
    os._exit(status)


def garble() -> dict[str, Any]:
    os.write(int(sys.argv[1]), b"\xff" * 8)
    return {}


def refuse(*, kind: str) -> dict[str, Any]:
    raise {"config": ConfigError, "learner": LearnerError}[kind](f"refused: {kind}")


def fail() -> dict[str, Any]:
    raise ZeroDivisionError("a bug")


def prepare() -> Operations:
    return {f.__name__: f for f in (echo, sleep, spin, say, kill, leave, garble, refuse, fail)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], prepare))
