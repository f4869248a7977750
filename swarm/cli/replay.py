"""Learn again from what a run logged: `swarm-node replay`."""

from pathlib import Path

from swarm.cli.arguments import (
    METHOD_HELP,
    Arguments,
    Verbs,
    add_data_dir,
    add_set,
    add_verb,
    count,
    method_and_settings,
    run_dir_of,
)
from swarm.cli.output import configure_logging, out_json, run_async
from swarm.errors import ExitCode, UsageError


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    replay = add_verb(
        verbs,
        "replay",
        _replay,
        "train again on the groups that a run logged, or ask what another filter would have done",
        "  swarm-node replay                    the last run, from its first checkpoint\n"
        "  swarm-node replay --method nois --from 0\n"
        "  swarm-node replay RUN --set ftis.kl_threshold=5 --set ftis.clip_max=3 --steps 100\n"
        "  swarm-node replay --what-if g=5 --what-if g=5,estimator=k3,clip_max=3,filter=and\n",
    )
    replay.add_argument(
        "run",
        nargs="?",
        type=Path,
        metavar="RUN",
        help="a run's folder; default: the newest of the swarm that was joined last",
    )
    replay.add_argument(
        "--method",
        metavar="NAME",
        help="default: the run's; " + METHOD_HELP.replace(" (default)", ""),
    )
    add_set(replay)
    replay.add_argument(
        "--from",
        dest="start",
        type=int,
        metavar="STEP",
        help="begin after this step, from its checkpoint; 0: from the model's own weights; "
        "default: the first checkpoint that was kept",
    )
    replay.add_argument("--steps", type=count, metavar="N", help="at most N steps")
    replay.add_argument(
        "--out", type=Path, metavar="DIR", help="the replay's folder; default: one beside RUN"
    )
    replay.add_argument(
        "--rollouts", type=Path, metavar="DIR", help="folder of the rollouts; default: the swarm's"
    )
    replay.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="g=..,clip_max=..,filter=..",
        help="train nothing; tell what this would have dropped and truncated (repeatable); also "
        "estimator, scope, mask_truncated",
    )
    replay.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    add_data_dir(replay)


def _replay(arguments: Arguments) -> int:
    from swarm.replay.logged_run import LoggedRun

    if arguments.start is not None and arguments.start < 0:
        raise UsageError(f"--from {arguments.start}: at least 0")
    changes = method_and_settings(arguments)
    if arguments.what_if and (changes or arguments.out or arguments.rollouts):
        raise UsageError(
            "--what-if trains nothing: it takes --from and --steps, but no --method, --set, --out "
            "or --rollouts"
        )
    run = LoggedRun(run_dir_of(arguments))
    if arguments.what_if:
        from swarm.replay import what_if

        result = what_if.answer(run, arguments.what_if, arguments.start or 0, arguments.steps)
        view = what_if.view
    else:
        from swarm.replay import retrain

        configure_logging("info", None)
        options = retrain.ReplayOptions(
            changes=changes,
            method=arguments.method or "",
            start=arguments.start,
            steps=arguments.steps,
            out=arguments.out,
            rollouts=arguments.rollouts,
        )
        result = run_async(retrain.replay(run, options))
        view = retrain.view
    if arguments.json:
        out_json(result)
        return ExitCode.OK
    from swarm.status import console

    console().print(view(result))
    return ExitCode.OK
