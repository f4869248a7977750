"""The exception tree of the project and the exit codes that the command line maps it to.

Owns: which kinds of failure there are. Knows nothing of how they come about.
"""

import errno
import os
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `swarm-node`; 64 and above follow BSD's sysexits.h."""

    OK = 0
    ERROR = 1
    USAGE = 2
    NOT_RUNNING = 3
    DEGRADED = 4
    UNREACHABLE = 69
    TRY_AGAIN = 75
    PERMISSION = 77
    CONFIG = 78


class SwarmError(Exception):
    """Anything that the program reports in one line instead of a traceback.

    The message names what was wrong (file, field, value) and what would be right.
    """

    exit_code: ExitCode = ExitCode.ERROR


class UsageError(SwarmError):
    """The command line asks for something that does not exist or does not fit together."""

    exit_code = ExitCode.USAGE


class ConfigError(SwarmError):
    """node.toml, the environment, a flag or a file that they name cannot be used."""

    exit_code = ExitCode.CONFIG


class DataError(SwarmError):
    """A file that the user gave (prompts, model, checkpoint) does not hold what it should."""

    exit_code = ExitCode.CONFIG


class IdentityError(SwarmError):
    """The identity key is missing, damaged, readable by others, or in use by another process."""

    exit_code = ExitCode.PERMISSION


class NotRunningError(SwarmError):
    """No node answers at the control socket of this data directory."""

    exit_code = ExitCode.NOT_RUNNING


class UnreachableError(SwarmError):
    """No member of the swarm could be reached."""

    exit_code = ExitCode.UNREACHABLE


class TryAgainError(SwarmError):
    """Something is held by another process now (a port, a data directory)."""

    exit_code = ExitCode.TRY_AGAIN


class LearnerError(SwarmError):
    """The learner process reported an error or died."""


class EngineDriftError(LearnerError):
    """The sampling engine's log-probs are not those of the model that is trained."""


class RemoteProtocolError(SwarmError):
    """A peer sent bytes that do not decode or a statement that its signature does not cover.

    Args:
        reason: one of `swarm.protocol.verify.Reason`; it is also the log field and metric label.
        detail: what was found and what would be right, for the log; never shown unescaped.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = str(reason)
        self.detail = detail


MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What reading raises over a file that cannot be read, or does not hold what it should."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def of_os_error(error: OSError) -> SwarmError | None:
    """What a person can act on: a full disk, a file that cannot be used; None: another error."""
    if error.errno in _NO_ROOM:
        place = error.filename2 or error.filename  # of a copy, where it goes
        where = f"{os.fsdecode(place)}: " if place else ""
        return TryAgainError(f"{where}{error.strerror}: nothing can be written there")
    if error.filename is None:
        return None
    known = SwarmError(f"{os.fsdecode(error.filename)}: {error.strerror or error}")
    forbidden = error.errno in (errno.EACCES, errno.EPERM)
    known.exit_code = ExitCode.PERMISSION if forbidden else ExitCode.CONFIG
    return known


def first_line(error: BaseException) -> str:
    """The first line with text of another library's message."""
    return next((line for line in str(error).splitlines() if line.strip()), repr(error))
