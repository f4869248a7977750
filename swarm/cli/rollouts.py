"""Groups as people read them: `swarm-node rollouts list`, `show`, `verify`."""

import itertools
from typing import Any

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, count, swarm_dir_of
from swarm.cli.output import out, out_json, run_async
from swarm.errors import ExitCode


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    rollouts = add_verb(
        verbs,
        "rollouts",
        _list,
        "read the groups that the node here made and got",
        "  swarm-node rollouts list --peer 3fQz9a\n"
        "  swarm-node rollouts show 4be1\n"
        "  swarm-node rollouts verify\n",
    )
    rollouts.set_defaults(peer="", limit=20, json=False)
    kinds = rollouts.add_subparsers(metavar="list|show|verify", parser_class=type(rollouts))

    listing = add_verb(
        kinds, "list", _list, "list groups, the newest first", "  swarm-node rollouts list\n"
    )
    listing.add_argument("--peer", default="", metavar="ID", help="of this publisher; its end does")
    listing.add_argument("--limit", type=count, default=20, metavar="N")

    show = add_verb(
        kinds,
        "show",
        _show,
        "show a group: prompt, completions, log-probs, rewards, what became of each",
        "  swarm-node rollouts show 4be1\n  swarm-node rollouts show 4be1 --tokens\n",
    )
    show.add_argument("hash", metavar="HASH", help="of the group; its beginning does")
    show.add_argument("--tokens", action="store_true", help="each token's id and log-prob")

    verify = add_verb(
        kinds,
        "verify",
        _verify,
        "check groups on disk as when they came, and compute their rewards again",
        "  swarm-node rollouts verify           the newest 100\n"
        "  swarm-node rollouts verify 4be1 77a0\n",
    )
    verify.add_argument("hashes", nargs="*", metavar="HASH")
    verify.add_argument("--limit", type=count, default=100, metavar="N", help="without HASH")
    for verb in (listing, show, verify):
        verb.add_argument("--json", action="store_true", help="as JSON")
    add_data_dir(rollouts, listing, show, verify)


def _groups(arguments: Arguments) -> Any:
    from swarm.rollouts import StoredGroups

    return StoredGroups(swarm_dir_of(arguments))


def _list(arguments: Arguments) -> int:
    rows = list(itertools.islice(_groups(arguments).rows(arguments.peer), arguments.limit))
    if arguments.json:
        out_json({"schema": "swarm-node/rollouts/1", "groups": rows})
        return ExitCode.OK
    from rich.table import Table

    from swarm.status import console, number, share
    from swarm.terminal import safe

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("hash", "publisher", "epoch", "prompt", "completions", "tokens", "reward", "step"):
        table.add_column(name, justify="left" if name in ("hash", "publisher") else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["hash"][:12], safe(row["error"], 80))
            continue
        reward = row["claimed_reward"] if row["reward"] is None else row["reward"]
        table.add_row(
            row["hash"][:12],
            f"..{row['publisher'][-6:]}",
            str(row["epoch"]),
            str(row["prompt_id"]),
            str(row["completions"]),
            number(row["tokens"]),
            share(reward) + (" (claimed)" if row["reward"] is None else ""),
            "-" if row["step"] is None else str(row["step"]),
        )
    console().print(table)
    return ExitCode.OK


def _show(arguments: Arguments) -> int:
    groups = _groups(arguments)
    shown = groups.show(groups.find(arguments.hash))
    if arguments.json:
        out_json(shown)
        return ExitCode.OK
    from swarm.terminal import safe

    used = (
        f"trained on in step {shown['step']} of run {shown['run']}"
        if shown["step"]
        else ("not trained on")
    )
    lines = [
        f"group      {shown['hash']}",
        f"publisher  {shown['publisher']}, at its step {shown['policy_step']}",
        f"prompt     {shown['prompt_id']} in epoch {shown['epoch']}: "
        + (safe(shown["prompt"], 4000) if shown["prompt"] is not None else "not here"),
        f"answer     {safe(shown['answer'] or '', 400)}",
        f"here       {used}",
    ]
    for index, item in enumerate(shown["completions"]):
        reward = "not computed" if item["reward"] is None else f"{item['reward']:g}"
        outcome = (item["outcome"] or "unknown").replace("_", " ")
        lines += [
            "",
            f"completion {index}: reward {reward} (claimed {item['claimed_reward']:g}), "
            f"{len(item['tokens'])} tokens, ends by {item['finish']}, "
            f"mean log-prob {item['logprob_mean']:.3f}",
        ]
        if item["outcome"]:
            kl = item["kl"]
            lines[-1] += f"; {outcome}, advantage {item['advantage']:.3f}" + (
                f", KL {kl['grpo']:.3g} nats" if kl else ""
            )
        lines.append(f"  {safe(item['text'], 4000)}")
        if arguments.tokens:
            lines.append("  " + " ".join(f"{i}:{p:.3f}" for i, p in item["tokens"]))
    out("\n".join(lines))
    return ExitCode.OK


def _verify(arguments: Arguments) -> int:
    groups = _groups(arguments)
    if arguments.hashes:
        digests = [groups.find(prefix) for prefix in arguments.hashes]
    else:
        digests = groups.hashes()[: arguments.limit]
    found = run_async(groups.verify(digests))
    bad = [row for row in found if not row["ok"]]
    if arguments.json:
        out_json({"schema": "swarm-node/rollouts-verified/1", "groups": found, "bad": len(bad)})
    else:
        from swarm.terminal import safe

        for row in bad:
            out(f"{row['hash'][:12]}  {safe(row['reason'], 300)}")
        same = sum(row["rewards_as_logged"] is True for row in found)
        out(f"{len(found) - len(bad)} of {len(found)} groups hold; rewards of {same} as logged")
    return ExitCode.ERROR if bad else ExitCode.OK
