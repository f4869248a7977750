"""`swarm-node demo`: run a swarm on this machine to its end, and report.

Owns: the order of things, when it is done, the results as data. Does not know: processes
(`swarm.demo.nodes`), how anything is shown (`swarm.demo.views`).
"""

import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from swarm.cli.arguments import method_flags
from swarm.demo.nodes import (
    Running,
    processes,
    start_organizer,
    start_volunteer,
    stop_all,
    volunteers,
)
from swarm.demo.task import DemoOptions, Task, arithmetic
from swarm.demo.views import draw_curves, live_view, progress_line, summary_table
from swarm.errors import ExitCode, SwarmError, UsageError
from swarm.evil.attacks import PROOF
from swarm.paths import default_data_dir, user_path, write_json
from swarm.status import console as status_console

START_TIMEOUT_S = 120.0

RESULTS = "results.json"


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
    if any((out / name).exists() for name in (RESULTS, "organizer")):
        raise UsageError(f"{out} holds an earlier demo; name another folder with --out")
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
    write_json(out / RESULTS, results)
    if any(node["accuracies"] for node in results["nodes"]):
        draw_curves(results, out / "curves.png")
        console.print(f"curves: {out / 'curves.png'}")
    if options.json:
        print(json.dumps(results, indent=2, sort_keys=True))  # noqa: T201 - the result
    else:
        console.print(summary_table(results))
    return 130 if interrupted else ExitCode.OK


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
                "rewards": training.get("rewards", []),
                "groups_made": training.get("groups_made", 0),
                "groups_fetched": exchange.get("groups_fetched", 0),
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
