"""A run's checkpoints: `swarm-node checkpoint list`, `swarm-node checkpoint export`."""

import argparse
from pathlib import Path

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, run_dir_of
from swarm.cli.output import out, out_json
from swarm.errors import ExitCode


def add(verbs: Verbs) -> None:
    """Declare the verb and its two parts."""
    parent = verbs.add_parser(
        "checkpoint",
        help="list a run's checkpoints, or export one",
        description="List a run's checkpoints, or export one.",
        epilog="examples:\n  swarm-node checkpoint list\n"
        "  swarm-node checkpoint export --out ~/models/mine --merge\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parent.add_subparsers(metavar="list|export", required=True, parser_class=type(parent))
    listing = add_verb(
        parts,
        "list",
        _list,
        "list a run's checkpoints, with their held-out accuracy",
        "  swarm-node checkpoint list\n  swarm-node checkpoint list RUN --json\n",
    )
    export = add_verb(
        parts,
        "export",
        _export,
        "write a checkpoint's model as a plain Hugging Face folder; by default the best one's",
        "  swarm-node checkpoint export --out ~/models/mine\n"
        "  swarm-node checkpoint export --out ~/models/mine --merge   a LoRA adapter merged\n"
        "  swarm-node checkpoint export RUN --step 500 --out ~/models/mine-500\n",
    )
    for part in (listing, export):
        part.add_argument(
            "run",
            nargs="?",
            type=Path,
            metavar="RUN",
            help="a run's folder; default: the newest of the swarm that was joined last",
        )
        part.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    add_data_dir(parent, listing, export)
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its model")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    which.add_argument("--last", action="store_true", help="the newest one")


def _list(arguments: Arguments) -> int:
    from swarm.export import SCHEMA, kept
    from swarm.status import share, size

    run = run_dir_of(arguments)
    rows = kept(run)
    if arguments.json:
        out_json({"schema": SCHEMA, "run": str(run.root), "checkpoints": rows})
        return ExitCode.OK
    if not rows:
        out(f"{run.root} has no checkpoints yet")
    for row in rows:
        note = row["problem"] or ("best" if row["best"] else "")
        out(
            f"step {row['step']:>7}  accuracy {share(row['accuracy'])}  {size(row['bytes']):>9}  "
            f"{row['path']}  {note}".rstrip()
        )
    return ExitCode.OK


def _export(arguments: Arguments) -> int:
    from swarm.export import export, held
    from swarm.paths import user_path

    run = run_dir_of(arguments)
    folder = user_path(arguments.out)
    with held(run, arguments.step, last=arguments.last) as (row, checkpoint):
        export(run, checkpoint, folder, merge=arguments.merge)
    if arguments.json:
        out_json({"schema": "swarm-node/export/1", "out": str(folder), "checkpoint": row})
    else:
        out(str(folder))
    return ExitCode.OK
