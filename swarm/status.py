"""What `swarm-node status` shows: one node's snapshot, or the members of a swarm.

Owns: rendering of snapshots for a terminal, and the health verdict.
Does not know: where a snapshot comes from. Everything that a peer wrote passes `terminal.safe`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from swarm.errors import ExitCode
from swarm.intervals import with_interval
from swarm.terminal import safe, sparkline


def health(status: Mapping[str, Any]) -> ExitCode:
    """0 where all is well, 4 where the status names a problem."""
    return ExitCode.DEGRADED if status["problems"] else ExitCode.OK


def console(*, stderr: bool = False) -> Console:
    """A console that does not squeeze tables where nobody watches a narrow window."""
    probe = Console(stderr=stderr, highlight=False)
    return probe if probe.is_terminal else Console(stderr=stderr, highlight=False, width=160)


def ago(seconds: float) -> str:
    """A duration as people say it: 12 s, 5 min, 3 h, 2 d."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def size(count: float) -> str:
    """Bytes in decimal units: 512 B, 3.1 MB."""
    for divisor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= divisor:
            return f"{count / divisor:.1f} {unit}"
    return f"{count:.0f} B"


def number(count: float | None) -> str:
    """A count in few characters: 812, 3.4k, 1.5M; `-` for none."""
    if count is None:
        return "-"
    for divisor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= divisor:
            return f"{count / divisor:.1f}{unit}"
    return f"{count:.0f}"


def share(value: float | None) -> str:
    """A fraction with three digits; `-` for none."""
    return "-" if value is None else f"{value:.3f}"


def gave_line(ledger: Mapping[str, Any]) -> str:
    """What a node gave to its peers, in words."""
    gave = ledger["gave"]
    return (
        f"{number(gave['groups_made'])} groups, {number(gave['tokens_made'])} tokens sampled; "
        f"{size(gave['bytes_sent'])} sent; {number(gave['groups_accepted_by_peers'])} groups "
        f"accepted by {gave['peers_that_accepted']} peers as they say"
    )


def got_line(ledger: Mapping[str, Any]) -> str:
    """What a node got from its peers, in words."""
    got = ledger["got"]
    updates = got["update_share"]
    return (
        f"{number(got['groups_accepted'])} groups accepted, {number(got['groups_rejected'])} "
        f"rejected, {number(got['tokens'])} tokens, {size(got['bytes'])}"
        + (f"; {updates:.0%} of the samples trained on" if updates is not None else "")
    )


def node_view(
    status: Mapping[str, Any], now_s: float | None = None, width: int = 160
) -> RenderableType:
    """The screen for one node, on a terminal with so many columns."""
    now = time.time() if now_s is None else now_s
    node, activity, network = status["node"], status["activity"], status["network"]
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    if status["problems"]:
        rows.add_row("health", Text("; ".join(safe(p, 300) for p in status["problems"]), "red"))
    else:
        alone = status.get("alone") and "training" in status
        rows.add_row("health", Text("ok, training alone" if alone else "ok", "green"))
    reason = safe(activity["waiting_for"], 200)
    if reason:
        reason = f": {reason}" if activity["doing"] == "finished" else f", waiting for {reason}"
    doing = f"{activity['doing']} for {ago(now - activity['since_s'])}{reason}"
    rows.add_row("doing", f"{doing}{progress(status, now)}")
    swarm = status["swarm"]
    terms = f", {swarm['prompts']} prompts" if "prompts" in swarm else ""
    if swarm.get("closes_at_s") is not None:
        closes = swarm["closes_at_s"]
        terms += ", closed" if closes <= now else f", closes in {ago(closes - now)}"
    if "open" in swarm:
        terms += ", open swarm" if swarm["open"] else f", roster of {swarm['roster']}"
    rows.add_row("swarm", f"{safe(swarm.get('name', ''), 64)} {swarm['id'][:16]}{terms}")
    rows.add_row(
        "node",
        f"{safe(node['name'], 64)} ({node['role']}), {node['peer_id']}, pid {node['pid']}, "
        f"version {node['version']}, up {ago(now - node['started_s'])}",
    )
    if "model" in status:
        model = status["model"]
        loaded = "parameters" in model
        about = (
            f"{number(model['trainable'])} of {number(model['parameters'])} parameters trained, "
            f"{model['dtype']} on {model['device']}"
            if loaded
            else "not loaded"
        )
        rows.add_row("model", f"{safe(model['path'], 200)}, {model['mode']}, {about}")
    engine = status.get("engine", {})
    if engine.get("kind") == "vllm":
        rows.add_row("engine", _engine_line(engine))
    if engine.get("max_completions"):
        rows.add_row(
            "sampling",
            f"{engine['max_completions']} completions at a time; memory ran out with more",
        )
    # Before the model is loaded, step and counts of a run that is resumed are not known yet.
    if "training" in status and ("parameters" in status["model"] or status["training"]["step"]):
        _training_rows(rows, status)
    resources = status["resources"]
    rows.add_row(
        "uses",
        f"memory {size(resources['node_memory_bytes'])} + "
        f"{size(resources['children_memory_bytes'])} in child processes, rollouts on disk "
        f"{size(resources['rollouts_bytes'])}, disk free {size(resources['disk_free_bytes'])}",
    )
    rows.add_row("connected", f"{network['connected']} members")
    if not network["connected"]:
        for address, result in network["dial"].items():
            rows.add_row("", f"{safe(address, 120)}: {safe(result, 200)}")
    reception = status.get("reception", {})
    if reception.get("reporting"):
        verdicts = ", ".join(f"{safe(k, 32)} {v}" for k, v in reception["verdicts"].items())
        rows.add_row("peers say", f"{verdicts} (of our groups, lately)")
    parts: list[RenderableType] = [rows]
    useful = useful_peers(status["ledger"], status["members"])
    if useful is not None:
        parts += [Text(), useful]
    if status["members"]:
        parts += [Text(), members_table(status["members"], now, width)]
    return Group(*parts)


def _engine_line(engine: Mapping[str, Any]) -> str:
    probe = "not probed yet"
    if engine["drift_tokens"]:
        found = "not finite" if engine["drift"] is None else f"{engine['drift']:.1e}"
        probe = f"drift {found} (limit {engine['drift_limit']:g})"
    again = f", started again {engine['restarts']} times" if engine["restarts"] else ""
    return f"vLLM {safe(engine['version'], 32)}, {probe}, {engine['syncs']} syncs{again}"


def _training_rows(rows: Table, status: Mapping[str, Any]) -> None:
    training, exchange = status["training"], status["exchange"]
    limit = f" of {training['max_steps']}" if training["max_steps"] else ""
    rows.add_row(
        "step", f"{training['step']}{limit}, {training['tokens_per_s']:.0f} tokens/s sampled"
    )
    curve = [point["held_out"] for point in training["accuracies"] if "held_out" in point]
    rows.add_row(
        "accuracy",
        f"{_accuracy(training)} (start {share(training['accuracy_start'])}) {sparkline(curve, 32)}",
    )
    rewards = training["rewards"]
    rows.add_row("reward", f"{share(rewards[-1] if rewards else None)} {sparkline(rewards, 32)}")
    rows.add_row("gave", gave_line(status["ledger"]))
    rejected = exchange["rejected_by_reason"]
    why = f"; lately rejected: {', '.join(f'{k} {v}' for k, v in rejected.items())}"
    rows.add_row("got", got_line(status["ledger"]) + (why if rejected else ""))
    rows.add_row(
        "trained on",
        f"{training['own_samples_trained']} own and {training['foreign_samples_trained']} foreign "
        f"samples ({training['foreign_share']:.0%} foreign), "
        f"{training['samples_filtered']} filtered, "
        f"{training['steps_without_signal']} steps without a signal",
    )
    own = status["ledger"]["own"]
    if own and own["kl_p50"] is not None:
        rows.add_row(
            "own KL",
            f"{own['kl_p50']:.2g} nats a completion in the median, {own['kl_p99']:.2g} in the "
            "worst of a hundred",
        )


def _accuracy(training: Mapping[str, Any]) -> str:
    """The last accuracies with their intervals, of the held-out set first."""
    if not training["accuracies"]:
        return "-"
    newest, counts = training["accuracies"][-1], training.get("evaluation_prompts", {})
    shown = [
        with_interval(newest[name], count) + ("" if name == "held_out" else f" {name}")
        for name, count in counts.items()
        if name in newest and count
    ]
    return ", ".join(shown).replace("_", " ") or share(training["accuracy"])


def progress(status: Mapping[str, Any], now_s: float) -> str:
    """How far it is: a bar by the time that this took before, or the stage of the start."""
    activity, training = status["activity"], status.get("training")
    if status["node"]["role"] == "volunteer" and not (training and training["last_step"]):
        doing = activity["doing"]
        stage = next((i for i, names in enumerate(STAGES, 1) if doing in names), 0)
        if not stage:
            return ""
        return f"  {bar(stage / len(STAGES))} {stage} of {len(STAGES)} to the first step"
    parts = ""
    expected_s = activity.get("expected_s")
    if expected_s and expected_s >= WORTH_A_BAR_S:
        done = min(1.0, (now_s - activity["since_s"]) / expected_s)
        parts = f"  {bar(done)} of about {ago(expected_s)}"
    if training and activity["doing"] == "sampling":
        groups, wanted = status["exchange"]["pool_groups"], training["groups_per_step"]
        parts += f", {min(groups, wanted)} of {wanted} groups for the next step"
    return parts


STAGES = (
    ("starting", "looking for members"),
    ("fetching prompts",),
    ("loading the model",),
    ("evaluating", "sampling"),
    ("training",),
)
"""What a volunteer does until its first step, in order."""

WORTH_A_BAR_S = 3.0


def bar(done: float, width: int = 16) -> str:
    """A share as a bar."""
    full = round(max(0.0, min(1.0, done)) * width)
    return "█" * full + "░" * (width - full)


def useful_peers(ledger: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> Table | None:
    """The peers whose samples this node learned most from, and how they fit."""
    names = {member["peer_id"]: member["name"] for member in members}
    rows = [row for row in ledger["peers"] if row["samples_trained"]][:MAX_USEFUL]
    if not rows:
        return None
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("peers that matter", no_wrap=True)
    for column in ("of updates", "accepted", "rate", "reward", "KL p50", "took of mine"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{safe(names.get(row['peer_id'], 'gone'), 24)} ..{row['peer_id'][-6:]}",
            "-" if row["update_share"] is None else f"{row['update_share']:.1%}",
            number(row["groups_accepted"]),
            share(row["accept_rate"]),
            share(row["mean_reward"]),
            "-" if row["kl_p50"] is None else f"{row['kl_p50']:.2g}",
            number(row["accepted_of_mine"]),
        )
    return table


MAX_USEFUL = 5


@dataclass(frozen=True, slots=True)
class _Column:
    """Of the members' table; where there is no room the highest `rank` goes first."""

    name: str
    rank: int
    width: int
    cell: Callable[[Mapping[str, Any], float], str]
    right: bool = False


_COLUMNS = (
    _Column("member", 0, 14, lambda m, _: safe(m["name"], 24)),
    _Column("peer", 5, 8, lambda m, _: f"..{m['peer_id'][-6:]}"),
    _Column("role", 9, 9, lambda m, _: safe(m["role"], 10)),
    _Column("model", 4, 16, lambda m, _: safe(m["model"], 24)),
    _Column("size", 8, 6, lambda m, _: number(m["parameters"] or None), right=True),
    _Column("mode", 10, 5, lambda m, _: safe(m["mode"], 8)),
    _Column("step", 1, 6, lambda m, _: number(m["step"]), right=True),
    _Column("accuracy", 2, 8, lambda m, _: share(m["accuracy"]), right=True),
    _Column("tokens/s", 7, 8, lambda m, _: number(m["tokens_per_s"]), right=True),
    _Column("made", 6, 6, lambda m, _: number(m["groups_made"]), right=True),
    _Column("used", 12, 6, lambda m, _: number(m["groups_used"]), right=True),
    _Column("useful", 11, 6, lambda m, _: number(m.get("groups_accepted_by_others")), right=True),
    _Column("state", 3, 14, lambda m, _: safe(m["state"], 24)),
    _Column("seen", 13, 6, lambda m, now: ago(now - m["seen_s"]), right=True),
    _Column("version", 14, 7, lambda m, _: safe(m["software"], 12)),
)


def members_table(
    members: Sequence[Mapping[str, Any]], now_s: float, width: int = 160, *, totals: bool = False
) -> Table:
    """All members with what they say of themselves, in as many columns as there is room for.

    `useful`, seen from outside, is how many groups of a member the others say they accepted.
    """
    columns = [
        column
        for column in _COLUMNS
        if column.name != "useful" or any("groups_accepted_by_others" in m for m in members)
    ]
    while sum(column.width + 2 for column in columns) > width and len(columns) > 1:
        columns.remove(max(columns, key=lambda column: column.rank))
    table = Table(box=None, padding=(0, 1), header_style="bold", show_footer=totals)
    sums = _footer(members) if totals else {}
    for column in columns:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            no_wrap=True,
            footer=sums.get(column.name, ""),
        )
    for member in sorted(members, key=lambda m: (m["role"], m["name"], m["peer_id"])):
        table.add_row(*(column.cell(member, now_s) for column in columns))
    return table


def _footer(members: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the table's last row says."""
    return {"member": f"{len(members)} in all"} | {
        name: number(sum(member[key] or 0 for member in members))
        for name, key in (
            ("tokens/s", "tokens_per_s"),
            ("made", "groups_made"),
            ("used", "groups_used"),
            ("useful", "groups_accepted_by_others"),
        )
        if all(key in member for member in members)
    }


def swarm_view(
    snapshot: Mapping[str, Any], now_s: float | None = None, width: int = 160
) -> RenderableType:
    """The screen for a whole swarm (`swarm-node status INVITE`)."""
    now = time.time() if now_s is None else now_s
    swarm, totals = snapshot["swarm"], snapshot["totals"]
    head = Text(
        f"{safe(swarm['name'], 64)}  {swarm['id'][:16]}  {swarm['prompts']} prompts  "
        f"{totals['members']} members, {totals['sampling']} sampling, "
        f"{number(totals['tokens_per_s'])} tokens/s, {number(totals['groups_made'])} groups made"
    )
    closes = swarm["closes_at_s"]
    if closes is not None:
        head.append("  closed" if closes <= now else f"  closes in {ago(closes - now)}")
    return Group(head, Text(), members_table(snapshot["members"], now, width, totals=True))


def peers_view(snapshot: Mapping[str, Any]) -> RenderableType:
    """The screen of `swarm-node peers`."""
    lists = snapshot["admission"]
    if lists["open"]:
        head = "open swarm: whoever has the invite may take part"
    else:
        head = f"roster of {lists['members']} members"
    if not lists["follows_bans"]:
        head += "; the organizers' bans are not followed here"
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for column, justify in (
        ("member", "left"),
        ("peer", "left"),
        ("state", "left"),
        ("accepted", "right"),
        ("rejected", "right"),
        ("trained", "right"),
        ("drifted", "right"),
        ("failed", "right"),
        ("strikes", "right"),
        ("fetched", "right"),
        ("why", "left"),
        ("says of us", "left"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for peer in snapshot["peers"]:
        rejected = peer["rejected"]
        table.add_row(
            safe(peer["name"], 24),
            peer["peer_id"],
            peer["state"],
            number(peer["accepted"]),
            number(sum(rejected.values())),
            number(peer["samples_trained"]),
            number(peer["samples_drifted"]),
            number(peer["fetch_failures"]),
            f"{peer['strikes']:.1f}",
            size(peer["fetched_bytes"]),
            ", ".join(f"{reason} {count}" for reason, count in rejected.items()),
            safe(peer["receipt"]["verdict"], 32) if peer["receipt"] else "-",
        )
    return Group(Text(head), Text(), table)
