"""`swarm-node`: the entry point.

Owns: which verbs there are, exit codes, errors as one line on stderr.
Does not know: what a verb does. Heavy modules are imported by the verb that needs them, so that
`--help` and `status` answer at once.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from swarm import __version__
from swarm.cli import demo, join, ledger, peers, replay, running, seed, setup, status
from swarm.cli.arguments import Parser
from swarm.errors import ExitCode, SwarmError, TryAgainError

EXAMPLES = """\
examples:
  swarm-node demo                              a swarm on this machine that learns while you watch
  swarm-node seed prompts.jsonl --tokenizer DIR  start a swarm; prints its invite
  swarm-node join INVITE --model DIR           train your model in it
  swarm-node join                              go on where the last join was
  swarm-node status                            what the node here is doing
  swarm-node status INVITE                     all members of a swarm, from anywhere
  swarm-node replay --method nois              the last run's groups, another method
"""


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `swarm-node`; ends the process with one of `ExitCode`."""
    arguments = _parser().parse_args(argv)
    if not hasattr(arguments, "verb"):
        _parser().print_help()
        raise SystemExit(int(ExitCode.USAGE))
    try:
        code = arguments.verb(arguments)
    except SwarmError as error:
        code = _report(error)
    except BaseExceptionGroup as group:
        known = group.subgroup(SwarmError)
        if known is None or group.split(SwarmError)[1] is not None:
            raise
        code = _report(_first(known))
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's flush at exit
        code = ExitCode.OK
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        code = _report(TryAgainError(f"{where}{error.strerror}: nothing can be written there"))
    raise SystemExit(int(code))


def _report(error: SwarmError) -> ExitCode:
    print(f"swarm-node: {error}", file=sys.stderr)  # noqa: T201 - the CLI prints
    return error.exit_code


def _first(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, SwarmError):
        raise error
    return error


def _parser() -> Parser:
    parser = Parser(
        prog="swarm-node",
        description="Train your own language model together with others, without a server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"swarm-node {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", parser_class=Parser)
    for add in (
        setup.add_init,
        join.add,
        seed.add,
        status.add,
        running.add,
        ledger.add,
        peers.add,
        replay.add,
        demo.add,
        setup.add_version,
    ):
        add(verbs)
    return parser
