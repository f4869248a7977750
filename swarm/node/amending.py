"""From a command to signed amendments.

Owns: what may be asked for, and that it is stored before anybody hears of it. Does not know: how
members come to know of it (swarm.node.membership).
"""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.errors import TryAgainError, UsageError
from swarm.paths import SwarmDir, write_atomic
from swarm.protocol.charter import Action, AppendPrompts, Charter, CloseSwarm, MinimumVersion
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.roster import BanChange, RosterChange, changes_to


def parse_actions(request: Mapping[str, Any]) -> Sequence[Action]:
    """The amendments that a command asks for.

    Raises:
        UsageError: it is none of append, close, minimum_version, roster, ban_list.
    """
    if "append" in request:
        return [AppendPrompts(prompts=PromptSetRef.model_validate(request["append"]))]
    if "close_at_s" in request:
        return [CloseSwarm(at_s=float(request["close_at_s"]))]
    if "minimum_version" in request:
        version = str(request["minimum_version"])
        if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,5}){0,3}", version):
            raise UsageError(f"minimum version {version!r}: expected numbers such as 1.2.0")
        return [MinimumVersion(version=version)]
    try:
        if "roster" in request:
            return changes_to(RosterChange, **request["roster"])
        if "ban_list" in request:
            return changes_to(BanChange, **request["ban_list"])
    except (ValueError, TypeError) as error:  # pydantic's is a ValueError
        raise UsageError(f"a list of peers that cannot be: {error}") from None
    raise UsageError(
        "an amendment appends prompts, closes the swarm, sets a minimum version, or changes the "
        "roster or the list of bans"
    )


def amend(
    charter: Charter, swarm_dir: SwarmDir, identity: Identity, request: Mapping[str, Any]
) -> Charter:
    """Sign what a command asks for.

    Args:
        request: one of {"append": a `PromptSetRef`'s fields, "sets": how many sets of prompts the
            swarm had when these were checked} (`swarm.node.genesis.append_set` makes and stores
            the set), {"close_at_s": Unix time}, {"minimum_version": text},
            {"roster" or "ban_list": {"add": peer ids, "remove": peer ids}}.

    Raises:
        IdentityError: `identity` is no organizer of this swarm.
        TryAgainError: prompts were added since the new ones were checked against the others.
        UsageError: what is asked for cannot be.
    """
    charter.check_organizer(identity.peer_id)
    if request.get("sets", len(charter.prompt_sets)) != len(charter.prompt_sets):
        raise TryAgainError("other prompts were added to the swarm meanwhile; run this once more")
    extended = charter
    for action in parse_actions(request):
        extended = extended.amended(action, time.time(), identity)
    write_atomic(swarm_dir.charter_path, extended.to_bytes())
    return extended
