"""What the node here gave and got: `swarm-node ledger`."""

from collections.abc import Mapping, Sequence
from typing import Any

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of, swarm_dir_of
from swarm.cli.output import out_json
from swarm.errors import ExitCode


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    ledger = add_verb(
        verbs,
        "ledger",
        _ledger,
        "show what the node here gave and got, and of what use each peer was",
        "  swarm-node ledger\n  swarm-node ledger --days\n  swarm-node ledger --json\n",
    )
    ledger.add_argument("--days", action="store_true", help="sums by day (UTC) in place of peers")
    ledger.add_argument("--json", action="store_true", help="all of it as JSON")
    add_data_dir(ledger)


def _ledger(arguments: Arguments) -> int:
    from swarm.ledger import read_ledger
    from swarm.protocol.identity import Identity

    path = swarm_dir_of(arguments).ledger_path
    me = Identity.load_or_create(data_dir_of(arguments).identity_path).peer_id
    view = read_ledger(path, me)
    if arguments.json:
        out_json(view)
        return ExitCode.OK
    from swarm.status import console

    console().print(_days(view["days"]) if arguments.days else _peers(view))
    return ExitCode.OK


def _peers(view: Mapping[str, Any]) -> Any:
    """Totals and a row for each peer."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from swarm.status import gave_line, got_line, number, share

    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("peer", no_wrap=True)
    for column in (
        "accepted", "rejected", "rate", "reward", "KL p50", "p90", "trained", "of updates",
        "took", "accepted of mine", "trained of mine",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in ([view["own"]] if view["own"] else []) + view["peers"]:
        own = row is view["own"]
        table.add_row(
            "this node" if own else row["peer_id"],
            *(["-", "-", "-"] if own else [
                number(row["groups_accepted"]),
                number(row["groups_rejected"]),
                share(row["accept_rate"]),
            ]),
            share(row["mean_reward"]),
            nats(row["kl_p50"]),
            nats(row["kl_p90"]),
            number(row["samples_trained"]),
            "-" if row["update_share"] is None else f"{row['update_share']:.1%}",
            *(["-", "-", "-"] if own else [
                number(row["blobs_given"]),
                number(row["accepted_of_mine"]),
                number(row["trained_of_mine"]),
            ]),
        )  # fmt: skip
    return Group(Text(f"gave  {gave_line(view)}"), Text(f"got   {got_line(view)}"), Text(), table)


def _days(days: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    from swarm.status import number, size

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("day", "steps", "made", "sampled", "sent", "accepted", "tokens got", "received"):
        table.add_column(name, justify="left" if name == "day" else "right", no_wrap=True)
    for day in days:
        table.add_row(
            day["day"],
            number(day["steps"]),
            number(day["groups_made"]),
            number(day["tokens_made"]),
            size(day["bytes_given"]),
            number(day["groups_accepted"]),
            number(day["tokens_got"]),
            size(day["bytes_got"]),
        )
    return table


def nats(value: float | None) -> str:
    """A divergence with two digits; `-` for none."""
    return "-" if value is None else f"{value:.2g}"
