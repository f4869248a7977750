"""`swarm-node demo`: a whole swarm on this machine, of real nodes in processes of their own.

Owns: starting organizer and volunteers through the command line, watching them through their
control sockets, the live view, the summary and the picture; the built-in task's settings.
Does not know: how a node works; it uses what any user uses.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swarm import tasks
from swarm.cli.arguments import method_flags
from swarm.control import control_request
from swarm.errors import ExitCode, NotRunningError, SwarmError, UsageError
from swarm.evil.attacks import PROOF, Attack
from swarm.paths import DataDir, default_data_dir, user_path, write_atomic, write_json
from swarm.status import console as status_console
from swarm.status import share
from swarm.terminal import sparkline

SHIPPED = Path(__file__).parent / "models"

START_TIMEOUT_S = 120.0

LOCAL: Mapping[str, str] = {
    "network.host": "127.0.0.1",
    "network.heartbeat_s": "2",
    "network.use_relay": "false",
}
"""How all nodes of a swarm on one machine meet."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a swarm on this machine trains on, and how.

    Attributes:
        name: the swarm's.
        prompts: what `swarm-node seed` reads: prompts, `--held-out` and so on.
        swarm_flags: further flags of `swarm-node seed`.
        settings: of all volunteers.
        lora_settings: besides, of those that train an adapter.
        steps: of the slowest node, where nobody asks for another number.
        eval_every_steps: between evaluations.
        limit_s: a swarm that takes longer is ended with an error.
    """

    name: str
    prompts: Sequence[str]
    swarm_flags: Mapping[str, str]
    settings: Mapping[str, str]
    lora_settings: Mapping[str, str]
    steps: int
    eval_every_steps: int
    limit_s: float


def arithmetic(folder: Path, seed: int) -> Task:
    """The shipped models' task, its prompts written to a folder; measured in docs/RESULTS.md."""
    for name, records in asdict(tasks.arithmetic_prompts(seed)).items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_atomic(folder / f"{name}.jsonl", lines.encode())
    held_out, ood = folder / "held_out.jsonl", folder / "out_of_distribution.jsonl"
    return Task(
        name="arithmetic demo",
        prompts=(str(folder / "train.jsonl"), "--held-out", str(held_out), "--ood", str(ood)),
        swarm_flags={
            "--reward": "number",
            "--group-size": "16",
            "--max-prompt-tokens": "16",
            "--max-completion-tokens": "10",
            "--record-shards": "1",
        },
        settings={
            "model.threads": "1",
            "model.device": "cpu",
            "model.precision": "fp32",
            "engine.prompts_per_call": "8",
            "train.groups_per_step": "16",
            "train.learning_rate": "3.5e-4",
            "eval.max_prompts": "200",
            "checkpoint.every_steps": "100",
        },
        lora_settings={"model.lora_rank": "8", "train.learning_rate": "1.4e-3"},
        steps=150,
        eval_every_steps=25,
        limit_s=1800.0,
    )


MAX_NODES = 64
"""Each has a learner, a daemon and a worker of its own."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the command line asks for.

    `nodes` are honest, and `steps` counts those of the slowest of them; `evil` further ones attack.
    """

    nodes: int = 3
    evil: int = 0
    attack: Attack = Attack.POISON
    steps: int | None = None
    seed: int = 0
    method: str = "ftis"
    models: tuple[Path, ...] = ()
    out: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Volunteer:
    """One node of the demo: a name, a model, a mode; `attack` where it is malicious."""

    name: str
    model: Path
    mode: str
    attack: Attack | None = None


@dataclass(slots=True)
class Running:
    """A volunteer's process and what it said last."""

    volunteer: Volunteer
    process: subprocess.Popen[bytes]
    data_dir: DataDir
    status: dict[str, Any] = field(default_factory=dict)
    quarantined_s: dict[str, float] = field(default_factory=dict)
    """Peers that it was seen to have in quarantine, and when first (monotonic)."""
    published_s: float | None = None
    """When it was first seen to have made a group."""

    @property
    def training(self) -> dict[str, Any]:
        return dict(self.status.get("training", {}))

    @property
    def peer_id(self) -> str:
        return str(self.status.get("node", {}).get("peer_id", ""))

    @property
    def peers(self) -> dict[str, dict[str, Any]]:
        """What it knows of its peers, by id."""
        return {row["peer_id"]: row for row in self.status.get("peers", [])}

    @property
    def doing(self) -> str:
        return str(self.status.get("activity", {}).get("doing", "starting"))

    def poll(self) -> None:
        """Read the node's status.

        Raises:
            SwarmError: the process ended; the message ends with its last log lines.
        """
        if self.process.poll() is not None:
            raise SwarmError(
                f"{self.volunteer.name} ended with code {self.process.returncode}:\n"
                + tail(console_log(self.data_dir))
            )
        with contextlib.suppress(NotRunningError):
            self.status = control_request(self.data_dir.control_socket, "status", timeout_s=5.0)
        now_s = time.monotonic()
        if self.published_s is None and self.training.get("groups_made"):
            self.published_s = now_s
        for peer_id, row in self.peers.items():
            if row["quarantined"]:
                self.quarantined_s.setdefault(peer_id, now_s)


def volunteers(options: DemoOptions) -> list[Volunteer]:
    """The nodes: small full, large full, large LoRA, and again, or one for each given model.

    Malicious ones come last, with the first one's model.
    """
    if not 1 <= options.nodes <= MAX_NODES:
        raise UsageError(f"--nodes {options.nodes}: 1 to {MAX_NODES}")
    if not 0 <= options.evil <= MAX_NODES:
        raise UsageError(f"--evil {options.evil}: 0 to {MAX_NODES}")
    kinds: Sequence[tuple[str, Path, str]] = [
        ("small", SHIPPED / "arith-small", "full"),
        ("large", SHIPPED / "arith-large", "full"),
        ("lora", SHIPPED / "arith-large", "lora"),
    ]
    if options.models:
        kinds = [_kind(model) for model in options.models]
    chosen = []
    for index in range(options.nodes):
        name, model, mode = kinds[index % len(kinds)]
        round_number = index // len(kinds)
        chosen.append(Volunteer(f"{name}{round_number + 1 if round_number else ''}", model, mode))
    for index in range(options.evil):
        name = f"evil{index + 1 if index else ''}"
        chosen.append(Volunteer(name, chosen[0].model, chosen[0].mode, options.attack))
    return chosen


def _kind(model: Path) -> tuple[str, Path, str]:
    """Name, folder and mode of `FOLDER` or `FOLDER:lora`."""
    folder, _, mode = str(model).rpartition(":")
    adapter = bool(folder) and mode == "lora"
    path = Path(folder) if adapter else model
    if not (path / "config.json").is_file():
        raise UsageError(f"--model {model}: no model folder (it has no config.json)")
    return path.name + "-lora" * adapter, path.absolute(), "lora" if adapter else "full"


def run_demo(options: DemoOptions, task_of: Callable[[Path, int], Task] = arithmetic) -> int:
    """Run the demo to its end or to Ctrl-C; write the results; leave no process behind.

    Args:
        options: from the command line.
        task_of: makes the task, given a folder for its files and the seed.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if options.steps is not None and options.steps < 1:
        raise UsageError(f"--steps {options.steps}: at least 1")
    if not 0 <= options.seed < 2**31:
        raise UsageError(f"--seed {options.seed}: 0 to {2**31 - 1}")
    nodes = volunteers(options)
    out = options.out or default_data_dir() / "demo" / time.strftime("%Y%m%d-%H%M%S")
    out = user_path(out)
    out.mkdir(parents=True, exist_ok=True)
    task = task_of(out, options.seed)
    steps = task.steps if options.steps is None else options.steps
    overrides = {
        **method_flags(options.method),
        "node.seed": str(options.seed),
        "eval.every_steps": str(min(steps, task.eval_every_steps)),
    }
    console = status_console(stderr=options.json)
    started = time.monotonic()
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="swarm-demo-") as scratch, processes() as children:
        console.print(f"results and logs go to {out}")
        invite = start_organizer(out, task, nodes[0], Path(scratch), children)
        running = [
            start_volunteer(out, task, volunteer, invite, overrides, Path(scratch), children)
            for volunteer in nodes
        ]
        try:
            watch(console, running, steps, started, options.method, task.limit_s)
        except KeyboardInterrupt:
            interrupted = True
            console.print("stopping ...")
        stop_all(children)
    results = summarize(running, options, time.monotonic() - started, interrupted)
    write_json(out / "results.json", results)
    if any(node["accuracies"] for node in results["nodes"]):
        draw_curves(results, out / "curves.png")
        console.print(f"curves: {out / 'curves.png'}")
    if options.json:
        print(json.dumps(results, indent=2, sort_keys=True))  # noqa: T201 - the result
    else:
        console.print(summary_table(results))
    return 130 if interrupted else ExitCode.OK


# -- processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of children that are all gone when the block ends, however it ends."""
    children: list[subprocess.Popen[bytes]] = []
    try:
        yield children
    finally:
        try:
            stop_all(children)
        finally:
            for child in children:
                child.kill()  # after a second Ctrl-C


def stop_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all children to stop, and kill those that have not after 30 s."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 30.0
    for child in children:
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, so that no child starts that nobody knows of."""
    arrived: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _frame: arrived.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            raise KeyboardInterrupt


def spawn(
    arguments: Sequence[str],
    log_path: Path,
    scratch: Path,
    children: list[subprocess.Popen[bytes]],
    stdout: int | None = None,
    program: str = "swarm.cli",
) -> subprocess.Popen[bytes]:
    """Start `swarm-node ARGUMENTS`; a Ctrl-C at the terminal reaches only this process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SWARM_")}
    environment |= {"XDG_RUNTIME_DIR": str(scratch), "OMP_NUM_THREADS": "1"}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log, uninterrupted():
        child = subprocess.Popen(
            [sys.executable, "-m", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        children.append(child)
    return child


def node_data_dir(out: Path, name: str) -> DataDir:
    """The data directory of one node of the demo."""
    return DataDir(out / name)


def start_organizer(
    out: Path,
    task: Task,
    first: Volunteer,
    scratch: Path,
    children: list[subprocess.Popen[bytes]],
) -> str:
    """Seed the swarm; returns its invite."""
    data_dir = node_data_dir(out, "organizer")
    child = spawn(
        [
            "seed",
            *task.prompts,
            "--tokenizer",
            str(first.model),
            "--swarm-name",
            task.name,
            *[part for flag, value in task.swarm_flags.items() for part in (flag, value)],
            "--data-dir",
            str(data_dir.root),
            "--name",
            "organizer",
            *as_flags(LOCAL),
        ],
        console_log(data_dir),
        scratch,
        children,
        stdout=subprocess.PIPE,
    )
    if child.stdout is None:
        raise SwarmError("the organizer's output is not connected")
    invite = child.stdout.readline().decode().strip()
    if not invite:
        raise SwarmError("the organizer did not start:\n" + tail(console_log(data_dir)))
    return invite


def start_volunteer(
    out: Path,
    task: Task,
    volunteer: Volunteer,
    invite: str,
    overrides: Mapping[str, str],
    scratch: Path,
    children: list[subprocess.Popen[bytes]],
) -> Running:
    """`swarm-node join` for one volunteer, or what does the same with malice."""
    attack = [str(volunteer.attack)] if volunteer.attack else []
    data_dir = node_data_dir(out, volunteer.name)
    settings = {**LOCAL, "model.mode": volunteer.mode, **task.settings, **overrides}
    if volunteer.mode == "lora":
        settings |= task.lora_settings
    process = spawn(
        [
            *attack,
            "join",
            invite,
            "--model",
            str(volunteer.model),
            "--name",
            volunteer.name,
            "--data-dir",
            str(data_dir.root),
            *as_flags(settings),
        ],
        console_log(data_dir),
        scratch,
        children,
        program="swarm.evil" if attack else "swarm.cli",
    )
    return Running(volunteer, process, data_dir)


def as_flags(settings: Mapping[str, str]) -> list[str]:
    """`--set section.key=value` for each."""
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def console_log(data_dir: DataDir) -> Path:
    """What a node printed, its last words before it had a log among them."""
    return data_dir.log_path.with_name("console.log")


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"({path}: {error})"


# -- watching ------------------------------------------------------------------------------------


def watch(
    console: Console,
    running: Sequence[Running],
    steps: int,
    started: float,
    method: str,
    limit_s: float,
) -> None:
    """Poll until every node has made its steps and evaluated once more."""
    with Live(console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        last_line = 0.0
        while True:
            for node in running:
                node.poll()
            elapsed = time.monotonic() - started
            live.update(live_view(running, steps, elapsed, method), refresh=console.is_terminal)
            if not console.is_terminal and elapsed - last_line >= 15.0:
                last_line = elapsed
                console.print(progress_line(running, elapsed))
            if all(done(node, steps) for node in running if node.volunteer.attack is None):
                return
            if elapsed > limit_s or (
                elapsed > START_TIMEOUT_S and not any(n.status for n in running)
            ):
                raise SwarmError(f"the demo is not done after {elapsed:.0f} s; see the logs")
            time.sleep(1.0)


def done(node: Running, steps: int) -> bool:
    """Whether a node has trained `steps` steps and evaluated at or after the last of them."""
    curve = node.training.get("accuracies", [])
    return bool(curve) and curve[-1]["step"] >= steps


def progress_line(running: Sequence[Running], elapsed: float) -> str:
    """One line for logs where there is no terminal."""
    return f"{elapsed:4.0f} s  " + "   ".join(
        f"{node.volunteer.name} "
        + (
            f"step {node.training['step']} accuracy {share(node.training['accuracy'])}"
            if node.training.get("accuracy") is not None
            else node.doing
        )
        for node in running
    )


def live_view(
    running: Sequence[Running], steps: int, elapsed: float, method: str
) -> RenderableType:
    """The table that is refreshed in place."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column, justify in (
        ("node", "left"),
        ("model", "left"),
        ("mode", "left"),
        ("doing", "left"),
        ("step", "right"),
        ("accuracy", "right"),
        ("", "left"),
        ("reward", "right"),
        ("made", "right"),
        ("fetched", "right"),
        ("filtered", "right"),
        ("rejected", "right"),
        ("B/token", "right"),
        ("tokens/s", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for node in running:
        training, exchange = node.training, node.status.get("exchange", {})
        curve = [p["held_out"] for p in training.get("accuracies", []) if "held_out" in p]
        rewards = training.get("rewards", [])
        recent = rewards[-16:]
        table.add_row(
            node.volunteer.name,
            node.volunteer.model.name,
            node.volunteer.mode,
            f"attacking: {node.volunteer.attack}" if node.volunteer.attack else node.doing,
            f"{training.get('step', 0)}/{steps}",
            share(training.get("accuracy")),
            Text(sparkline(curve, 16), "green"),
            share(sum(recent) / len(recent) if recent else None),
            str(training.get("groups_made", 0)),
            str(exchange.get("groups_accepted", 0)),
            str(training.get("samples_filtered", 0)),
            str(exchange.get("groups_rejected", 0)),
            f"{exchange.get('bytes_per_token') or 0:.1f}",
            f"{training.get('tokens_per_s', 0):.0f}",
        )
    head = Text(
        f"{len(running)} volunteers and an organizer, method {method}, {elapsed:.0f} s", "bold"
    )
    return Group(head, Text(), table)


# -- results -------------------------------------------------------------------------------------


def summarize(
    running: Sequence[Running], options: DemoOptions, seconds: float, interrupted: bool
) -> dict[str, Any]:
    """The demo's result as data."""
    honest = [node for node in running if node.volunteer.attack is None]
    nodes = []
    for node in honest:
        training, exchange = node.training, node.status.get("exchange", {})
        nodes.append(
            {
                "name": node.volunteer.name,
                "model": node.volunteer.model.name,
                "mode": node.volunteer.mode,
                "steps": training.get("step", 0),
                "accuracy_start": training.get("accuracy_start"),
                "accuracy_end": training.get("accuracy"),
                "accuracies": training.get("accuracies", []),
                "groups_made": training.get("groups_made", 0),
                "groups_fetched": exchange.get("groups_accepted", 0),
                "groups_rejected": exchange.get("groups_rejected", 0),
                "rejected_by_reason": exchange.get("rejected_by_reason", {}),
                "own_samples_trained": training.get("own_samples_trained", 0),
                "foreign_samples_trained": training.get("foreign_samples_trained", 0),
                "foreign_share": training.get("foreign_share", 0.0),
                "samples_filtered": training.get("samples_filtered", 0),
                "bytes_per_token": exchange.get("bytes_per_token"),
                "tokens_sampled": training.get("tokens_sampled", 0),
                "seconds": training.get("seconds", {}),
            }
        )
    return {
        "schema": "swarm-node/demo/1",
        "method": options.method,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "interrupted": interrupted,
        "nodes": nodes,
        "evil": [fate(node, honest) for node in running if node.volunteer.attack is not None],
    }


def fate(evil: Running, honest: Sequence[Running]) -> dict[str, Any]:
    """What the honest nodes made of a malicious one."""
    began_s = evil.published_s
    quarantined = {
        node.volunteer.name: None if began_s is None else max(0.0, round(seen_s - began_s, 1))
        for node in honest
        if (seen_s := node.quarantined_s.get(evil.peer_id)) is not None
    }
    rows = [node.peers.get(evil.peer_id, {}) for node in honest]
    rejected: Counter[str] = Counter()
    for row in rows:
        rejected.update(row.get("rejected", {}))
    attack = evil.volunteer.attack
    return {
        "name": evil.volunteer.name,
        "attack": attack,
        "peer_id": evil.peer_id,
        "proof": PROOF.get(attack) if attack else None,
        "quarantined_after_s": quarantined,
        "honest_nodes": len(honest),
        "groups_made": evil.training.get("groups_made", 0),
        "groups_accepted": sum(row.get("accepted", 0) for row in rows),
        "rejected_by_reason": dict(rejected),
        "fetches_failed": sum(row.get("fetch_failures", 0) for row in rows),
        "samples_trained": sum(row.get("samples_trained", 0) for row in rows),
    }


def summary_table(results: Mapping[str, Any]) -> Table:
    """Start and end of every node, and what it trained on."""
    table = Table(
        title=f"after {results['seconds']:.0f} s, method {results['method']}",
        caption="start, end: greedy accuracy on held-out prompts; filtered: samples that were not "
        "trained on, since they teach nothing or are too far from the model's own"
        + "".join(f"\n{in_words(evil)}" for evil in results["evil"]),
    )
    for column, justify in (
        ("node", "left"),
        ("model", "left"),
        ("mode", "left"),
        ("steps", "right"),
        ("start", "right"),
        ("end", "right"),
        ("own samples", "right"),
        ("peers' samples", "right"),
        ("peers' share", "right"),
        ("filtered", "right"),
        ("B/token", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for node in results["nodes"]:
        table.add_row(
            node["name"],
            node["model"],
            node["mode"],
            str(node["steps"]),
            share(node["accuracy_start"]),
            share(node["accuracy_end"]),
            str(node["own_samples_trained"]),
            str(node["foreign_samples_trained"]),
            f"{node['foreign_share']:.0%}",
            str(node["samples_filtered"]),
            f"{node['bytes_per_token'] or 0:.1f}",
        )
    return table


def in_words(evil: Mapping[str, Any]) -> str:
    """One line on a malicious node."""
    after = evil["quarantined_after_s"]
    latest = max((seconds for seconds in after.values() if seconds is not None), default=None)
    when = "" if latest is None else f", all of these within {latest:.0f} s of its first group"
    reasons = ", ".join(f"{count} {reason}" for reason, count in evil["rejected_by_reason"].items())
    return (
        f"{evil['name']} ({evil['attack']}): quarantined by {len(after)} of "
        f"{evil['honest_nodes']}{when}; groups accepted {evil['groups_accepted']}, "
        f"rejected {reasons or 'none'}; {evil['samples_trained']} of its samples were trained on"
    )


def draw_curves(results: Mapping[str, Any], path: Path) -> None:
    """Held-out accuracy over steps, one line a node, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.0, 4.2), layout="constrained")
    for node in results["nodes"]:
        points = [(p["step"], p["held_out"]) for p in node["accuracies"] if "held_out" in p]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                label=f"{node['name']} ({node['model']}, {node['mode']})",
            )
    axes.set(
        xlabel="training step",
        ylabel="greedy accuracy on held-out prompts",
        ylim=(0.0, 1.0),
        title=f"{len(results['nodes'])} nodes, method {results['method']}",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
