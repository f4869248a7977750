"""The run's result for others: `swarm-node publish`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, run_dir_of
from swarm.cli.output import out, out_json
from swarm.errors import DataError, ExitCode
from swarm.paths import parse_json

if TYPE_CHECKING:
    from swarm.paths import RunDir


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    publish = add_verb(
        verbs,
        "publish",
        _publish,
        "put the run's best checkpoint on the Hugging Face Hub, with a model card",
        "  swarm-node publish me/qwen-gsm8k\n"
        "  swarm-node publish me/qwen-gsm8k --step 400 --public\n"
        "  swarm-node publish me/qwen-gsm8k --merge   a LoRA adapter merged into its model\n"
        "  swarm-node publish me/qwen-gsm8k --card    print the card, publish nothing\n",
    )
    publish.add_argument("repository", metavar="OWNER/NAME")
    publish.add_argument("--step", type=int, metavar="N", help="default: the best by accuracy")
    publish.add_argument("--run", type=Path, metavar="DIR", help="default: the newest")
    publish.add_argument("--merge", action="store_true", help="merge a LoRA adapter into its model")
    publish.add_argument("--public", action="store_true", help="default: a private repository")
    publish.add_argument("--card", action="store_true", help="print the model card and stop")
    publish.add_argument("--json", action="store_true", help="as JSON")
    add_data_dir(publish)


def _publish(arguments: Arguments) -> int:
    from swarm.export import held

    run = run_dir_of(arguments, "--run DIR")
    record = run.record()
    if record is None:
        raise DataError(f"{run.record_path}: no run is recorded there")
    with held(run, arguments.step) as (row, checkpoint):
        return _publish_checkpoint(arguments, run, record, row["step"], checkpoint)


def _publish_checkpoint(
    arguments: Arguments, run: "RunDir", record: dict[str, Any], step: int, checkpoint: Path
) -> int:
    from swarm.export import export, model_part
    from swarm.ledger import read_ledger
    from swarm.publish import card, public_record, upload
    from swarm.stored import load_charter

    charter = load_charter(run.swarm_dir, bytes.fromhex(record["swarm"]))
    path = run.swarm_dir.ledger_path
    text = card(
        record,
        step,
        _evaluations(run.metrics_path),
        read_ledger(path, record["peer_id"]) if path.exists() else None,
        swarm_name=charter.manifest.name,
        merged=arguments.merge,
    )
    if arguments.card:
        out(text.rstrip("\n"))
        return ExitCode.OK
    folder, names = checkpoint, model_part(checkpoint)
    if arguments.merge:
        folder = checkpoint.parent / "merged"
        export(run, checkpoint, folder, merge=True)
        names = _files(folder)
    url = upload(
        folder,
        names,
        text,
        public_record(record),
        arguments.repository,
        private=not arguments.public,
        message=f"Step {step}",
    )
    if arguments.json:
        out_json({"schema": "swarm-node/published/1", "url": url, "step": step})
    else:
        out(url)
    return ExitCode.OK


def _files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _evaluations(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = [parse_json(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line.get("evaluation")]
