"""Invites: `swarm-node invite`, `swarm-node invite show`."""

import logging
from collections.abc import Mapping
from typing import Any

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of, seconds
from swarm.cli.output import out, out_json, run_async
from swarm.errors import ExitCode


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    invite = add_verb(
        verbs,
        "invite",
        _invite,
        "print a fresh invite to the swarm of the running node; or show what one invites to",
        "  swarm-node invite\n  swarm-node invite show swarm1...\n",
    )
    invite.add_argument("--json", action="store_true", help="as JSON")
    add_data_dir(invite)
    kinds = invite.add_subparsers(metavar="show", parser_class=type(invite))
    show = add_verb(
        kinds,
        "show",
        _show,
        "show what one would join: task, terms, models, traffic, what others see",
        "  swarm-node invite show swarm1...\n  swarm-node invite show swarm1... --json\n",
    )
    show.add_argument("invite", metavar="INVITE")
    show.add_argument("--timeout", type=seconds, default=20.0, metavar="S", help="for members")
    show.add_argument("--json", action="store_true", help="as JSON")


def _invite(arguments: Arguments) -> int:
    from swarm.control import control_request

    answer = control_request(data_dir_of(arguments).control_socket, "invite")
    if arguments.json:
        out_json({"schema": "swarm-node/invite/1", **answer})
    else:
        out(answer["invite"])
    return ExitCode.OK


def _show(arguments: Arguments) -> int:
    from swarm.node.observe import offer
    from swarm.protocol.invite import Invite

    logging.basicConfig(level=logging.ERROR)
    shown = run_async(offer(Invite.decode(arguments.invite), arguments.timeout))
    if arguments.json:
        out_json(shown)
    else:
        out(_text(shown))
    return ExitCode.OK


def _text(shown: Mapping[str, Any]) -> str:
    from swarm.status import number, size
    from swarm.terminal import safe

    task, sampling, traffic = shown["task"], shown["sampling"], shown["traffic"]
    totals = shown["totals"]
    lines = [
        f"swarm      {safe(shown['name'], 64)}  {shown['id'][:16]}",
        f"organizer  {', '.join(shown['organizers'])}",
        f"members    {totals['members']}, {totals['sampling']} sampling, "
        f"{number(totals['tokens_per_s'])} tokens/s",
        f"task       {task['prompts']} prompts ({size(task['prompt_bytes'])}), "
        f"{task['held_out']} held out; reward {safe(task['reward'], 64)}",
        f"sampling   {sampling['group_size']} completions a prompt, at most "
        f"{sampling['max_completion_tokens']} tokens, temperature {sampling['temperature']:g}",
        f"model      any with the tokenizer of {safe(shown['tokenizer']['name'], 80)} "
        f"({shown['tokenizer']['vocab_size']} tokens); size, architecture, full or LoRA are yours",
    ]
    for model in shown["models"]:
        lines.append(f"           {model['name']:<28} {_taken(model, shown['room'])}")
    lines += [
        f"traffic    about {size(traffic['group_bytes'])} a group at most; now "
        f"{size(traffic['swarm_bytes_per_hour'])} an hour made by all",
        "others see your peer id, addresses, name, model name and size, step, accuracy, speed, "
        "completions",
        "           not your weights",
    ]
    return "\n".join(lines)


def _taken(model: Mapping[str, Any], room: Mapping[str, Any]) -> str:
    """What a model takes at least, in each mode, and whether that is here."""
    from swarm.model_memory import gigabytes

    ways = [
        f"{name} from {gigabytes(taken)}{'' if taken <= room['memory_bytes'] else ' (too large)'}"
        for name, taken in (("full", model["full_bytes"]), ("LoRA", model["lora_bytes"]))
    ]
    return f"{', '.join(ways)} of {gigabytes(room['memory_bytes'])} {room['where']} here"
