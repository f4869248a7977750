"""Who the node deals with: `swarm-node peers` (this node), `swarm-node members` (the swarm)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.cli.arguments import (
    Arguments,
    Verbs,
    add_data_dir,
    add_verb,
    data_dir_of,
)
from swarm.cli.output import out, out_json
from swarm.cli.seed import sign_amendment
from swarm.errors import DataError, ExitCode, NotRunningError, UsageError


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    _add_peers(verbs)
    _add_members(verbs)


def _add_peers(verbs: Verbs) -> None:
    peers = add_verb(
        verbs,
        "peers",
        _peers,
        "show what came of each peer, and keep some out of this node",
        "  swarm-node peers\n"
        "  swarm-node peers --json\n"
        "  swarm-node peers ban 12D3KooW...     nothing of it is read any more\n"
        "  swarm-node peers unban 12D3KooW...   also where the organizers advise against it\n",
    )
    peers.add_argument("action", nargs="?", choices=["ban", "unban"], help="default: show them")
    peers.add_argument("peers", nargs="*", metavar="PEER", help="peer ids")
    peers.add_argument("--json", action="store_true", help="as JSON")
    add_data_dir(peers)


def _add_members(verbs: Verbs) -> None:
    members = add_verb(
        verbs,
        "members",
        _members,
        "show who may take part in the swarm, and, as its organizer, change it",
        "  swarm-node members\n"
        "  swarm-node members add 12D3KooW...     the first one closes an open swarm\n"
        "  swarm-node members add --file ids.txt  one id a line, then a name if you like\n"
        "  swarm-node members remove 12D3KooW...\n"
        "  swarm-node members ban 12D3KooW...     advice to all members\n",
    )
    members.add_argument(
        "action", nargs="?", choices=["add", "remove", "ban", "unban"], help="default: show them"
    )
    members.add_argument("peers", nargs="*", metavar="PEER", help="peer ids")
    members.add_argument("--file", type=Path, metavar="FILE", help="more peer ids, one a line")
    members.add_argument("--json", action="store_true", help="as JSON")
    add_data_dir(members)


# -- peers ---------------------------------------------------------------------------------------


def _peers(arguments: Arguments) -> int:
    from swarm.control import control_request

    socket = data_dir_of(arguments).control_socket
    if arguments.action is None:
        if arguments.peers:
            raise UsageError(f"peers {arguments.peers[0]}: expected ban or unban")
        snapshot = control_request(socket, "peers")
        if arguments.json:
            out_json(snapshot)
        else:
            _print_view(lambda views: views.peers_view(snapshot))
        return ExitCode.OK
    if not arguments.peers:
        raise UsageError(f"peers {arguments.action}: name at least one peer id")
    _check_peers(arguments)
    try:
        lists = control_request(socket, arguments.action, peers=arguments.peers)
    except NotRunningError:
        lists = _change_on_disk(arguments)
    _report_lists(arguments, lists)
    return ExitCode.OK


def _change_on_disk(arguments: Arguments) -> dict[str, Any]:
    """Bans for the next start."""
    from swarm.node.admission import Admission
    from swarm.stored import current_charter

    data_dir = data_dir_of(arguments)
    with data_dir.locked():
        admission = Admission(data_dir.bans_path, follow_bans=True)
        charter = current_charter(data_dir)
        if charter is not None:
            admission.obey(charter)
        for peer in arguments.peers:
            (admission.ban if arguments.action == "ban" else admission.unban)(peer)
        return admission.view()


def _report_lists(arguments: Arguments, lists: dict[str, Any]) -> None:
    if arguments.json:
        out_json({"schema": "swarm-node/bans/1", **lists})
        return
    for peer in arguments.peers:
        out(f"{peer} is {'banned' if peer in lists['banned_here'] else 'not banned'} here")


# -- members -------------------------------------------------------------------------------------


def _members(arguments: Arguments) -> int:
    data_dir = data_dir_of(arguments)
    peers = _check_peers(arguments)
    if arguments.file is not None:
        peers += read_members(arguments.file)
    if arguments.action is None:
        if peers:
            raise UsageError("members: expected add, remove, ban or unban before peer ids")
        return _show_members(arguments, data_dir)
    if not peers:
        raise UsageError(f"members {arguments.action}: name at least one peer id, or --file FILE")
    what = "roster" if arguments.action in ("add", "remove") else "ban_list"
    change = "add" if arguments.action in ("add", "ban") else "remove"
    return sign_amendment(data_dir, {what: {change: peers}})


def _show_members(arguments: Arguments, data_dir: Any) -> int:
    from swarm.stored import current_charter

    charter = current_charter(data_dir)
    if charter is None:
        raise UsageError(f"no swarm was joined or seeded in {data_dir.root} yet")
    organizers = list(charter.manifest.organizers)
    members = None if charter.members is None else sorted(charter.members)
    if arguments.json:
        out_json(
            {
                "schema": "swarm-node/members/1",
                "swarm": charter.swarm_id.hex(),
                "open": members is None,
                "organizers": organizers,
                "members": members,
                "banned": sorted(charter.banned),
            }
        )
        return ExitCode.OK
    if members is None:
        out("open swarm: whoever has the invite may take part")
    for peer in organizers if members is None else members:
        out(f"{peer}{'  organizer' if peer in organizers else ''}")
    for peer in sorted(charter.banned):
        out(f"{peer}  banned by the organizers")
    return ExitCode.OK


def read_members(path: Path) -> list[str]:
    """Peer ids of a file: the first word of each line; `#` begins a comment.

    Raises:
        DataError: names the file and line that is wrong.
    """
    from swarm.paths import user_path

    try:
        lines = user_path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    words = [line.partition("#")[0].split() for line in lines]
    return [
        checked_peer_id(found[0], f"{path}, line {number}")
        for number, found in enumerate(words, start=1)
        if found
    ]


def _check_peers(arguments: Arguments) -> list[str]:
    """The peer ids that are named.

    Raises:
        UsageError: one is no peer id.
    """
    try:
        return [checked_peer_id(peer, "PEER") for peer in arguments.peers]
    except DataError as error:
        raise UsageError(str(error)) from None


def checked_peer_id(text: str, where: str) -> str:
    """The peer id that a person wrote.

    Raises:
        DataError: it is none; `where` it stood.
    """
    from swarm.errors import RemoteProtocolError
    from swarm.protocol.identity import public_key_of

    try:
        public_key_of(text)
    except RemoteProtocolError as error:
        raise DataError(
            f"{where}: {text[:80]!r}: {error.detail}; a peer id is like 12D3Koo..., "
            "`swarm-node status` shows a node's own"
        ) from None
    return text


def _print_view(view: Callable[[Any], Any]) -> None:
    from swarm import status

    status.console().print(view(status))
