"""The run's result for others: `swarm-node publish`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, run_dir_of
from swarm.cli.output import out, out_json
from swarm.errors import DataError, ExitCode
from swarm.paths import parse_json


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
    from swarm.export import choose, export, model_part
    from swarm.ledger import read_ledger
    from swarm.publish import card, public_record, upload
    from swarm.stored import load_charter

    run = run_dir_of(arguments, "--run DIR")
    record = run.record()
    if record is None:
        raise DataError(f"{run.record_path}: no run is recorded there")
    result = choose(run, arguments.step)
    charter = load_charter(run.swarm_dir, bytes.fromhex(record["swarm"]))
    path = run.swarm_dir.ledger_path
    text = card(
        record,
        result["step"],
        _evaluations(run.metrics_path),
        read_ledger(path, record["peer_id"]) if path.exists() else None,
        swarm_name=charter.manifest.name,
        merged=arguments.merge,
    )
    if arguments.card:
        out(text.rstrip("\n"))
        return ExitCode.OK
    checkpoint = Path(result["path"])
    with TemporaryDirectory(prefix=".publishing-", dir=run.root) as temporary:
        folder = checkpoint
        if arguments.merge:
            folder = Path(temporary) / "model"
            export(run, checkpoint, folder, merge=True)
        url = upload(
            folder,
            model_part(checkpoint) if folder == checkpoint else _files(folder),
            text,
            public_record(record),
            arguments.repository,
            private=not arguments.public,
            message=f"Step {result['step']}",
        )
    if arguments.json:
        out_json({"schema": "swarm-node/published/1", "url": url, "step": result["step"]})
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
