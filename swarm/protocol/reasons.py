"""Why something from a peer was turned down: one name for the error, the log and the metric.

Owns: the list of reasons and which of them count against the peer. Does not know: how they are
found out (`swarm.protocol.verify`, `codec`, `records`, `manifest`) nor what follows from them
(`swarm.protocol.peers`).
"""

from enum import StrEnum


class Reason(StrEnum):
    """A reject reason. `provable` ones are strikes against the peer that announced the group."""

    # What the announcer's own signature contradicts, or puts its name under.
    SIZE = "size"
    ANNOUNCEMENT = "announcement"
    MALFORMED = "malformed"
    SIGNATURE = "signature"
    SWARM = "swarm"
    PUBLISHER = "publisher"
    GROUP_SIZE = "group_size"
    LENGTH = "length"
    TEMPERATURE = "temperature"
    PROMPT = "prompt"
    TOKEN = "token"
    FINISH = "finish"
    LOGPROB = "logprob"

    # What honest peers differ in, or what cannot be laid at the door of the peer that is named.
    HASH = "hash"
    INCOMPATIBLE = "incompatible"
    PROMPT_UNKNOWN = "prompt_unknown"
    OWNERSHIP = "ownership"
    DUPLICATE = "duplicate"
    NO_ROOM = "no_room"
    AGE = "age"
    RECORD_SIZE = "record_size"
    RECORD_SUBKEY = "record_subkey"
    RECORD_EXPIRY = "record_expiry"
    RECORD_SIGNATURE = "record_signature"
    PEER_ID = "peer_id"
    MANIFEST = "manifest"
    AMENDMENT = "amendment"
    CHARTER = "charter"
    CHARTER_BEHIND = "charter_behind"
    PROMPT_SET = "prompt_set"
    NOT_MEMBER = "not_member"
    BANNED = "banned"

    @property
    def provable(self) -> bool:
        """Whether the announcer's own signature proves it: it costs the announcer a strike."""
        return self in PROVABLE_REASONS


PROVABLE_REASONS: frozenset[str] = frozenset(
    {
        Reason.SIZE,
        Reason.ANNOUNCEMENT,
        Reason.MALFORMED,
        Reason.SIGNATURE,
        Reason.SWARM,
        Reason.PUBLISHER,
        Reason.GROUP_SIZE,
        Reason.LENGTH,
        Reason.TEMPERATURE,
        Reason.PROMPT,
        Reason.TOKEN,
        Reason.FINISH,
        Reason.LOGPROB,
    }
)
