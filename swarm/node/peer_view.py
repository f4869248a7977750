"""All that this node knows of its peers, for `swarm-node peers` and `swarm-node status`.

Owns: putting together what several tables say. Does not know: where it is shown.
"""

from collections.abc import Mapping
from typing import Any

from swarm.node.admission import Admission
from swarm.node.membership import Member
from swarm.protocol.peers import PeerTable
from swarm.protocol.receipts import Reception

SCHEMA = "swarm-node/peers/1"


def peers_snapshot(
    table: PeerTable,
    members: Mapping[str, Member],
    admission: Admission,
    reception: Reception,
    now_s: float,
) -> dict[str, Any]:
    """One row a peer: what came of it, what it is now, what it says of this node.

    Args:
        now_s: of the clock that `table` and `reception` go by.
    """
    known = {row["peer_id"]: row for row in table.view(now_s)}
    receipts = reception.current(now_s)
    banned = admission.view()["banned_here"]
    rows = []
    for peer_id in dict.fromkeys([*known, *members, *banned]):
        row = known.get(peer_id) or table.unknown(peer_id)
        member, receipt = members.get(peer_id), receipts.get(peer_id)
        rows.append(
            {
                **row,
                "name": member.heartbeat.name if member else "",
                "here": member is not None,
                "state": _state(row, admission.refusal(peer_id)),
                "receipt": receipt
                and {
                    "verdict": receipt.verdict,
                    "judged": receipt.judged,
                    "taken": receipt.taken,
                    "quarantine_s": receipt.quarantine_s,
                },
            }
        )
    return {"schema": SCHEMA, "admission": admission.view(), "peers": rows}


def _state(row: Mapping[str, Any], refusal: str | None) -> str:
    if refusal is not None:
        return str(refusal)
    if row["quarantined"]:
        return "quarantined"
    return "backoff" if row["retry_in_s"] > 0 else "ok"
