"""`swarm-node`: the entry point.

Owns: which verbs there are, exit codes, errors as one line on stderr.
Does not know: what a verb does. Heavy modules are imported by the verb that needs them, so that
`--help` and `status` answer at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from swarm import __version__
from swarm.cli import (
    bugreport,
    checkpoint,
    demo,
    doctor,
    evaluate,
    identity,
    invite,
    join,
    ledger,
    logs,
    peers,
    publish,
    replay,
    rollouts,
    running,
    seed,
    service,
    setup,
    status,
)
from swarm.cli.arguments import Parser, data_dir_of
from swarm.errors import ExitCode, NotRunningError, SwarmError, of_os_error
from swarm.terminal import printable

log = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  swarm-node demo                              a swarm on this machine that learns while you watch
  swarm-node seed prompts.jsonl --tokenizer DIR  start a swarm; prints its invite
  swarm-node join INVITE --model DIR           train your model in it
  swarm-node join                              go on where the last join was
  swarm-node status                            what the node here is doing
  swarm-node status INVITE                     all members of a swarm, from anywhere
  swarm-node checkpoint export --out DIR       the best model so far, as a plain folder
  swarm-node eval                              how good it is
  swarm-node replay --method nois              the last run's groups, another method
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `swarm-node`; ends the process with one of `ExitCode`."""
    _check_text(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(argv)
    if not hasattr(arguments, "verb"):
        _parser().print_help()
        raise SystemExit(int(ExitCode.USAGE))
    try:
        code = arguments.verb(arguments)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the interpreter's flush at exit
        code = ExitCode.OK
    except (SwarmError, OSError, BaseExceptionGroup) as error:
        known = _explained(error)
        if known is None:
            raise
        log.debug("ended by", exc_info=error)
        if isinstance(known, NotRunningError):
            known = NotRunningError(f"{known} (data directory: {data_dir_of(arguments).root})")
        print(printable(f"swarm-node: {known}"), file=sys.stderr)  # noqa: T201 - the CLI prints
        code = known.exit_code
    raise SystemExit(int(code))


def _check_text(argv: Sequence[str]) -> None:
    """Nothing that is stored, sent or printed could hold what is no text."""
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            text = printable(f"swarm-node: {argument!r}: an argument that is not valid UTF-8")
            print(text, file=sys.stderr)  # noqa: T201 - the CLI prints
            raise SystemExit(int(ExitCode.CONFIG)) from None


def _explained(error: BaseException) -> SwarmError | None:
    """What a person can act on: an error of ours, or a file that cannot be used; else None."""
    if isinstance(error, BaseExceptionGroup):
        found = [_explained(inner) for inner in error.exceptions]
        return found[0] if None not in found else None
    if isinstance(error, SwarmError):
        return error
    return of_os_error(error) if isinstance(error, OSError) else None


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
        invite.add,
        running.add,
        logs.add,
        rollouts.add,
        identity.add,
        service.add,
        bugreport.add,
        ledger.add,
        peers.add,
        doctor.add,
        replay.add,
        publish.add,
        checkpoint.add,
        evaluate.add,
        demo.add,
        setup.add_version,
    ):
        add(verbs)
    return parser
