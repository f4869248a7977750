"""How good a model is: `swarm-node eval`."""

import logging
from pathlib import Path
from typing import Any

from swarm.cli.arguments import (
    Arguments,
    Verbs,
    add_data_dir,
    add_set,
    add_verb,
    count,
    method_and_settings,
    run_dir_of,
    swarm_dir_of,
)
from swarm.cli.output import out, out_json, run_async
from swarm.errors import ExitCode, UsageError


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    verb = add_verb(
        verbs,
        "eval",
        _eval,
        "greedy pass@1 of a run's checkpoint, or of a model, on a swarm's evaluation sets",
        "  swarm-node eval                      the last run's best checkpoint\n"
        "  swarm-node eval RUN --step 100 --json\n"
        "  swarm-node eval ~/models/Qwen2.5-1.5B --max-prompts 200\n",
    )
    verb.add_argument(
        "subject",
        nargs="?",
        metavar="RUN|MODEL",
        help="a run's folder, a model's folder or Hub id; default: the last run",
    )
    which = verb.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step")
    which.add_argument("--last", action="store_true", help="the run's newest checkpoint")
    verb.add_argument("--max-prompts", type=count, metavar="N", help="of each set; default: all")
    verb.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    add_set(verb)
    add_data_dir(verb)


def _eval(arguments: Arguments) -> int:
    from swarm.evaluation import EvalOptions, evaluate
    from swarm.intervals import with_interval

    logging.basicConfig(level=logging.WARNING)
    changes = method_and_settings(arguments)
    run = _run(arguments)
    if run is None:
        if arguments.step is not None or arguments.last:
            raise UsageError("--step and --last choose a run's checkpoint; a model has none")
        swarm = swarm_dir_of(arguments)
        changes = {"model.path": arguments.subject, **changes}
    else:
        swarm = run.swarm_dir
    result = run_async(
        evaluate(
            EvalOptions(swarm, run, arguments.step, arguments.last, changes, arguments.max_prompts)
        )
    )
    if arguments.json:
        out_json(result)
        return ExitCode.OK
    out(result["checkpoint"] or result["model"])
    for name, found in result["sets"].items():
        interval = with_interval(found["accuracy"], found["prompts"])
        out(
            f"{name.replace('_', ' '):<20} {interval} of {found['prompts']} prompts, "
            f"{found['truncated']} cut at the length limit"
        )
    return ExitCode.OK


def _run(arguments: Arguments) -> Any:
    """The run that is meant; None: a model."""
    from swarm.paths import RunDir, user_path

    if arguments.subject is None:
        arguments.run = None
        return run_dir_of(arguments)
    folder = Path(arguments.subject)
    if (user_path(folder) / "run.json").is_file():
        return RunDir(user_path(folder))
    return None
