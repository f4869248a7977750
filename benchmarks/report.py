"""docs/BENCHMARKS.md, from the result of `benchmarks.suite`.

Owns: how rows are shown. Does not know: how they were measured; it says what the result says.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = "swarm-bench/1"

_HEAD = """# Benchmarks

Written by `make bench`, which measures all of this on CPUs; do not edit. `make bench
ARGS="--only codec"` measures one group. Ours is swarm-node, the peer is what one would use instead,
the limit what cannot be beaten. Where the three are compared they ran in turns, in rounds that
begin with another one each time; figures are medians, ratios are medians of the rounds' ratios.
{machine}
What needs a GPU is not among these rows: `python -m benchmarks.gpu` measures it where there is one,
in eight minutes, and **has not been run** yet. [RESULTS.md](RESULTS.md) has what is learned rather
than how fast.
"""


def render(result: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    parts = [_HEAD.format(machine=_machine(result["groups"]))]
    if result["quick"]:
        parts.append("\n**A quick run: small sizes, few rounds; no figure here means anything.**\n")
    missed = []
    for group in result["groups"].values():
        parts.append(f"\n## {group['title']}\n")
        if group["error"]:
            parts.append(f"\nNot measured: {group['error']}\n")
        if group["rows"]:
            parts.append("\n| what | ours | peer | limit | ratio | aim | how measured |\n")
            parts.append("|---|---|---|---|---|---|---|\n")
            parts.extend(f"| {' | '.join(_cells(row))} |\n" for row in group["rows"])
        missed += [row for row in group["rows"] if row["met"] is False]
    if missed:
        parts.append("\n## Not reached\n\n")
        parts.extend(f"- **{row['what']}**, {row['aim']}. {row['cause']}\n" for row in missed)
    return "".join(parts)


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    unit = row["unit"]
    verdict = {True: "yes", False: "**no**", None: ""}[row["met"]]
    return [
        row["what"],
        _figure(row["ours"], unit),
        _named(row["peer"], unit, row["peer_name"]),
        _named(row["limit"], unit, row["limit_name"]),
        f"{_number(row['ratio'])} ({row['ratio_of']})" if row["ratio"] is not None else "",
        f"{row['aim']}: {verdict}" if verdict else row["aim"],
        row["how"],
    ]


def _named(value: float | None, unit: str, name: str) -> str:
    return f"{_figure(value, unit)}, {name}" if value is not None and name else name


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_number(value)} {unit}"


def _number(value: float) -> str:
    """Three digits that matter, without an exponent."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def _machine(groups: Mapping[str, Any]) -> str:
    machines = [group["machine"] for group in groups.values()]
    if not machines:
        return ""
    one = machines[0]
    busiest = max(m["load_at_start"] for m in machines)
    versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    shared = (
        f" **Other work shared the cores**: the load was up to {busiest} when a group began, so "
        "ratios say more than times."
        if busiest > one["cores"] / 2
        else ""
    )
    return (
        f"\nMachine: {one['cpu']}, {one['cores']} cores, {one['memory_gb']} GB, {one['system']}; "
        f"Python {one['python']}, {versions}.{shared}\n"
    )
