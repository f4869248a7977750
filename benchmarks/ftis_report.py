"""What the F-TIS benchmark found: results.json, a Markdown table, plots.

Owns: means and spreads over seeds, the differences between methods, the paper's figures beside
them, and the pictures. Does not know: how a result came about, or which cells were planned; it
reports what it is given.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.paths import write_atomic, write_json

Result = dict[str, Any]
"""What `benchmarks.ftis_lab.run_cell` returns."""

PAPER: Mapping[str, str] = {
    "alone-seen": "the reference: on-policy training",
    "nois": "degrades or collapses",
    "vis": "below TIS at 3B",
    "tis": "above VIS at 3B",
    "f-vis": "faster early, worse late",
    "ftis": "same final score as on-policy training in every pairing; out of distribution often "
    "above it: 3B coder +5.2 % (with a base model), +12 % (with a smaller coder), 3B LoRA +7 %",
    "ftis-horizontal": "below vertical",
}
"""arXiv:2605.22537: Qwen2.5 1.5B and 3B, GSM8K, out of distribution MATH-500, 2 nodes, G = 12,
lr 1e-6, 50 iterations."""

BASELINE = "ftis"
"""What all methods of a table are compared with."""

MEASURES = (("in_distribution", "in"), ("out_of_distribution", "out"))

BIN_STEPS = 10
"""Steps that become one point of a plot."""

COLUMNS = (
    ("trained_share", "trained on"),
    ("dropped_kl_share", "dropped by KL"),
    ("foreign_kl_p50", "KL p50"),
    ("foreign_kl_p90", "KL p90"),
    ("foreign_kl_p99", "KL p99"),
    ("model_token_share", "tokens in the model"),
)


def write_report(results: Sequence[Result], out: Path, machine: Mapping[str, Any]) -> Path:
    """Write OUT/results.json, OUT/results.md and OUT/*.png.

    Args:
        results: of any pairs, settings, methods and seeds.
        out: the folder.
        machine: what it ran on, for the reader.

    Returns:
        The Markdown file.
    """
    tables = _tables(results)
    write_json(
        out / "results.json",
        {
            "schema": "ftis-bench/1",
            "machine": dict(machine),
            "tables": {
                name: {method: _summary(cells) for method, cells in table.items()}
                for name, table in tables.items()
            },
        },
    )
    path = out / "results.md"
    write_atomic(path, render_markdown(results, machine).encode())
    for name, table in tables.items():
        slug = name.replace("/", "-")
        plot_accuracy(table, out / f"{slug}-accuracy.png", name)
        plot_training(table, out / f"{slug}-training.png", name)
    return path


def render_markdown(results: Sequence[Result], machine: Mapping[str, Any]) -> str:
    """The tables as text."""
    lines = ["# F-TIS benchmark", "", ", ".join(f"{k} {v}" for k, v in machine.items()), ""]
    lines += [
        "Accuracy of greedy decoding after the last step, mean ± standard deviation over seeds "
        "(without ± for one seed). Training figures are means over steps and nodes; "
        "KL: quantiles of the filter's statistic over other nodes' scored samples, median over "
        "steps. CPU s: of one run, all nodes, without loading.",
        "",
    ]
    for name, table in _tables(results).items():
        lines += [f"## {name}", "", _setting_line(table), "", *_table(table), ""]
        lines += _differences(table)
    return "\n".join(lines).rstrip() + "\n"


def _tables(results: Sequence[Result]) -> dict[str, dict[str, list[Result]]]:
    """Results by "pair/setting" or "pair/setting/study", and by method, in the order given.

    A study's table begins with the method that it varies.
    """
    tables: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        cell = result["cell"]
        main = f"{cell['pair']}/{cell['setting']['name']}"
        name = f"{main}/{cell['method']['study']}".rstrip("/")
        table = tables.setdefault(name, {})
        if name != main and not table and BASELINE in tables.get(main, {}):
            table[BASELINE] = tables[main][BASELINE]
        table.setdefault(cell["method"]["name"], []).append(result)
    return tables


def _setting_line(table: Mapping[str, Sequence[Result]]) -> str:
    cells = next(iter(table.values()))
    setting = cells[0]["cell"]["setting"]
    members = ", ".join(
        f"{node['name']} ({node['trained_parameters']:,} of {node['parameters']:,} parameters)"
        for node in cells[0]["nodes"]
    )
    return (
        f"{members}; learning rate {setting['learning_rate']:g}, {setting['steps']} steps of "
        f"{setting['groups']} x {setting['group_size']} samples."
    )


def _table(table: Mapping[str, Sequence[Result]]) -> list[str]:
    """One Markdown table: a row for the start and for each method."""
    first = next(iter(table.values()))[0]
    keys = [
        (index, measure, f"{node['name']}, {short}")
        for measure, short in MEASURES
        if measure in first["nodes"][0]["evaluations"][0]
        for index, node in enumerate(first["nodes"])
    ]
    header = ["method", "seeds", *(title for _, _, title in keys)]
    header += [*(title for _, title in COLUMNS), "CPU s", "the paper"]
    everything = [result for cells in table.values() for result in cells]
    starts = {result["cell"]["seed"]: result for result in everything}.values()
    rows = [
        ["start", str(len(starts))]
        + [_spread([accuracy(r, i, m, 0) for r in starts]) for i, m, _ in keys]
        + [""] * (len(COLUMNS) + 2)
    ]
    for method, cells in table.items():
        row = [method, str(len(cells))]
        row += [_spread([accuracy(r, i, m) for r in cells]) for i, m, _ in keys]
        row += [_short(_level(cells, name)) for name, _ in COLUMNS]
        row += [f"{statistics.mean(map(cpu_seconds, cells)):.0f}", PAPER.get(method, "")]
        rows.append(row)
    return [_line(header), _line(["---"] * len(header)), *map(_line, rows)]


def _differences(table: Mapping[str, Sequence[Result]]) -> list[str]:
    """F-TIS minus each other method, paired by seed, mean over nodes."""
    base = {result["cell"]["seed"]: result for result in table.get(BASELINE, ())}
    rows = []
    for method, cells in table.items():
        pairs = [(base[r["cell"]["seed"]], r) for r in cells if r["cell"]["seed"] in base]
        if method == BASELINE or not pairs:
            continue
        row = [f"{BASELINE} - {method}", str(len(pairs))]
        for measure, _ in MEASURES:
            values = [
                node_mean(ours, measure) - node_mean(theirs, measure)
                for ours, theirs in pairs
                if measure in theirs["nodes"][0]["evaluations"][-1]
            ]
            row.append(_spread(values, signed=True) if values else "")
        rows.append(row)
    if not rows:
        return []
    header = ["difference", "seeds", "in distribution", "out of distribution"]
    return [
        "Paired by seed, mean over nodes:",
        "",
        _line(header),
        _line(["---"] * len(header)),
        *map(_line, rows),
        "",
    ]


def accuracy(result: Result, node: int, measure: str, evaluation: int = -1) -> float:
    """Greedy accuracy of one node at one of its evaluations, the last by default."""
    return float(result["nodes"][node]["evaluations"][evaluation][measure])


def node_mean(result: Result, measure: str, evaluation: int = -1) -> float:
    """`accuracy`, mean over nodes."""
    count = len(result["nodes"])
    return statistics.mean(accuracy(result, i, measure, evaluation) for i in range(count))


def cpu_seconds(result: Result) -> float:
    """What a run cost, without loading."""
    return float(sum(s for what, s in result["cpu_s"].items() if what != "loading"))


def _summary(cells: Sequence[Result]) -> dict[str, Any]:
    """One method's figures over seeds, for results.json."""
    nodes = {}
    for index, node in enumerate(cells[0]["nodes"]):
        nodes[node["name"]] = {
            measure: {
                "start": _moments([accuracy(r, index, measure, 0) for r in cells]),
                "end": _moments([accuracy(r, index, measure) for r in cells]),
            }
            for measure, _ in MEASURES
            if measure in node["evaluations"][0]
        }
    return {
        "seeds": [r["cell"]["seed"] for r in cells],
        "nodes": nodes,
        "training": {name: _level(cells, name) for name in cells[0]["nodes"][0]["steps"]},
        "cpu_s": round(statistics.mean(map(cpu_seconds, cells)), 1),
        "setting": cells[0]["cell"]["setting"],
        "method": cells[0]["cell"]["method"],
    }


def _moments(values: Sequence[float]) -> dict[str, Any]:
    return {
        "mean": round(statistics.mean(values), 4),
        "std": round(statistics.stdev(values), 4) if len(values) > 1 else None,
        "values": [round(value, 4) for value in values],
    }


def _level(cells: Sequence[Result], name: str) -> float | None:
    """A training figure over all seeds, nodes and steps: KL as the median, others as the mean."""
    values = _known(value for r in cells for node in r["nodes"] for value in node["steps"][name])
    if not len(values):
        return None
    return float(f"{np.median(values) if 'kl_p' in name else values.mean():.4g}")


def _known(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _spread(values: Sequence[float], *, signed: bool = False) -> str:
    mean = f"{statistics.mean(values):{'+' if signed else ''}.3f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.3f}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _line(fields: Sequence[str]) -> str:
    return f"| {' | '.join(fields)} |"


# -- plots ---------------------------------------------------------------------------------------


def plot_accuracy(table: Mapping[str, Sequence[Result]], path: Path, title: str) -> None:
    """Accuracy over steps: a panel for each node and measure, a line for each method."""
    first = next(iter(table.values()))[0]
    measures = [m for m, _ in MEASURES if m in first["nodes"][0]["evaluations"][0]]
    count = len(first["nodes"])
    figure, axes = _figure(len(measures), count, title)
    for row, measure in enumerate(measures):
        for index in range(count):
            panel = axes[row][index]
            panel.set_title(f"{first['nodes'][index]['name']}: {measure.replace('_', ' ')}")
            for place, (method, cells) in enumerate(table.items()):
                steps = [e["step"] for e in cells[0]["nodes"][index]["evaluations"]]
                values = np.array(
                    [[e[measure] for e in r["nodes"][index]["evaluations"]] for r in cells]
                )
                color = _color(place)
                panel.plot(steps, values.mean(0), color=color, label=method, marker=".", lw=1.2)
                panel.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.08)
            panel.set_xlabel("step")
            panel.set_ylim(0, 1)
    _save(figure, axes, path)


def plot_training(table: Mapping[str, Sequence[Result]], path: Path, title: str) -> None:
    """Share trained on, KL quantiles and entropy over steps, by node and method."""
    panels = (
        ("share trained on", ("trained_share",), False),
        ("KL of others' samples, p50 and p90 (thin) and p99 (dotted)",
         ("foreign_kl_p50", "foreign_kl_p90", "foreign_kl_p99"), True),
        ("entropy, nats a token", ("entropy",), False),
    )  # fmt: skip
    first = next(iter(table.values()))[0]
    count = len(first["nodes"])
    figure, axes = _figure(len(panels), count, title)
    styles: Sequence[Mapping[str, Any]] = ({"lw": 1.4}, {"lw": 0.7}, {"lw": 0.7, "ls": ":"})
    for row, (name, metrics, logarithmic) in enumerate(panels):
        for index in range(count):
            panel = axes[row][index]
            panel.set_title(f"{first['nodes'][index]['name']}: {name}", fontsize=9)
            for place, (method, cells) in enumerate(table.items()):
                for metric, style in zip(metrics, styles, strict=False):
                    values = binned([r["nodes"][index]["steps"][metric] for r in cells])
                    steps = (np.arange(len(values)) + 0.5) * BIN_STEPS
                    label = method if metric == metrics[0] else None
                    panel.plot(steps, values, color=_color(place), label=label, **style)
            panel.set_xlabel("step")
            if logarithmic:
                panel.set_yscale("symlog", linthresh=0.1)
    _save(figure, axes, path)


def binned(runs: Sequence[Sequence[float | None]]) -> NDArray[np.float64]:
    """Median over runs and over every `BIN_STEPS` steps; NaN where nothing is known."""
    length = max(map(len, runs))
    bins = [
        _known(value for run in runs for value in run[start : start + BIN_STEPS])
        for start in range(0, length, BIN_STEPS)
    ]
    return np.array([np.median(values) if len(values) else np.nan for values in bins])


def _color(place: int) -> Any:
    from matplotlib import colormaps

    return colormaps["tab20"](place % 20)


def _figure(rows: int, columns: int, title: str) -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.5 * columns + 2, 3.2 * rows), squeeze=False
    )
    figure.suptitle(title)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    import io

    from matplotlib import pyplot

    for panel in axes.flat:
        panel.grid(alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.86, 1))
    image = io.BytesIO()
    figure.savefig(image, dpi=110, format="png")
    pyplot.close(figure)
    write_atomic(path, image.getvalue())
