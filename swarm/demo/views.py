"""What the demo shows: the live table, the summary, the curves.

Owns: words, tables and the picture. Does not know: where the figures come from.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.demo.nodes import Running
from swarm.status import share
from swarm.terminal import sparkline


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
            str(exchange.get("groups_fetched", 0)),
            str(training.get("samples_filtered", 0)),
            str(exchange.get("groups_rejected", 0)),
            f"{exchange.get('bytes_per_token') or 0:.1f}",
            f"{training.get('tokens_per_s', 0):.0f}",
        )
    head = Text(
        f"{len(running)} volunteers and an organizer, method {method}, {elapsed:.0f} s", "bold"
    )
    return Group(head, Text(), table)


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
