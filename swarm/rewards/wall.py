"""What code in a worker may do while what others wrote is judged or rendered: compute only.

Owns: an audit hook (PEP 578), which no code can take away again. While the wall stands, compiling
or executing code, importing, opening files or connections and starting processes raise (templates
are compiled, so for them executing is allowed). So a
scorer that handed a text to `eval`, its library's fault or its own, would fail and not run it.
Does not know: rewards. Memory and time are limited elsewhere (swarm.rewards.child).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

_DENIED = (
    "exec", "open", "import", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "tempfile.",
    "pty.", "mmap.", "fcntl.", "signal.", "marshal.", "pickle.", "code.", "sys.addaudithook",
    "sys.setprofile", "sys.settrace", "gc.get", "resource.", "syslog.", "webbrowser.", "ensurepip.",
)  # fmt: skip

# sympy makes even the number 5 by executing "Integer (5 )" and its own star import.
_NUMBER_NAMES = frozenset({"Integer", "Float", "Rational"})
_STAR_IMPORT = (("sympy",), (0, ("*",), None))
MAX_NUMBER_CHARS = 400

# jinja2 executes what it compiled; for an error's traceback it makes code objects, too.
_EXECUTING = ("exec", "code.")

_denied: tuple[str, ...] = ()
_installed = False


class WallError(RuntimeError):
    """Something was tried that judging a text never needs."""


@contextmanager
def standing(*, executing: bool = False) -> Iterator[None]:
    """Everything above is refused until the end of the block, or all but executing code."""
    global _denied, _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    _denied = tuple(name for name in _DENIED if not (executing and name in _EXECUTING))
    try:
        yield
    finally:
        _denied = ()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not event.startswith(_denied):
        return
    if event == "exec" and _is_number(arguments[0]):
        return
    if event == "import":
        raise ImportError(f"{arguments[0]} is not imported here")
    raise WallError(f"{event} is refused while what others wrote is judged or rendered")


def _is_number(code: object) -> bool:
    """Whether code can do nothing but make one number of sympy's, or its star import."""
    if not isinstance(code, CodeType):
        return False
    if (code.co_names, code.co_consts) == _STAR_IMPORT:
        return True
    return (
        len(code.co_names) == 1
        and _NUMBER_NAMES.issuperset(code.co_names)
        and len(code.co_code) <= MAX_NUMBER_CHARS
        and all(
            value is None
            or isinstance(value, int)
            or (isinstance(value, str) and set(value) <= _DIGITS)
            for value in code.co_consts
        )
    )


_DIGITS = frozenset("0123456789.eE+-")
