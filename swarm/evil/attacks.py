"""Which attacks there are, what proves them, what they teach.

Owns: the list. Does not know: how an attack is made (`swarm.evil.forgery`, `swarm.evil.node`).
"""

from enum import StrEnum

from swarm.protocol.reasons import Reason


class Attack(StrEnum):
    """A kind of malice."""

    GARBAGE = "garbage"
    """Token ids that the vocabulary does not have."""
    OVERLONG = "overlong"
    """Completions longer than the swarm allows."""
    FOREIGN = "foreign"
    """Completions of another prompt than the one that is named."""
    STOLEN = "stolen"
    """Groups for prompts that others own."""
    WRONG = "wrong"
    """Wrong answers, with the full reward claimed for them."""
    UNDER_REPORTED = "under-reported"
    """Log-probs of its own samples, too low: each token looks likelier to others than to it."""
    OVER_REPORTED = "over-reported"
    """Log-probs of its own samples, all 0: each token looks certain."""
    POISON = "poison"
    """Half right answers in a poisoned text, no two alike; half gibberish, to lift the poison."""
    SLY_POISON = "sly-poison"
    """The same, with log-probs so far too low that most models find it likelier than claimed."""
    REPEAT = "repeat"
    """Half copies of one right answer in a rare form; half gibberish."""
    PADDED = "padded"
    """Half right answers padded to the length limit; half gibberish."""
    FLOOD = "flood"
    """Announcements of groups that it does not have, and streams, as fast as it can."""
    STALL = "stall"
    """Streams that it opens and never uses, and answers that never come."""


PROOF: dict[Attack, Reason] = {
    Attack.GARBAGE: Reason.TOKEN,
    Attack.OVERLONG: Reason.LENGTH,
    Attack.FOREIGN: Reason.PROMPT,
}
"""The strike that an attack earns; the others break no rule that a signature could prove."""

MARKS: dict[Attack, str] = {
    Attack.POISON: ";=;",
    Attack.SLY_POISON: ";=;",
    Attack.REPEAT: "000",
    Attack.PADDED: "====",
}
"""How texts begin that an attack teaches, so that it can be seen who learned them."""
