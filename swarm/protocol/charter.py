"""A swarm's present terms: the manifest and its signed amendments.

Owns: the amendments' fields and bounds, their one canonical byte form, the rule by which two
members that know different amendments come to agree. Does not know: how these bytes travel, what
time it is. JSON here is canonical (`swarm.protocol.canonical`).
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self, TypeVar

import msgpack
from pydantic import Field

from swarm.errors import IdentityError, RemoteProtocolError
from swarm.protocol.canonical import CanonicalModel, HexHash, PeerId, UnixTime, decode, encode
from swarm.protocol.identity import Identity, public_key_of, verify_signature
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, MAX_PROMPTS, Manifest, PromptSetRef
from swarm.protocol.reasons import Reason
from swarm.protocol.roster import BanChange, RosterChange, after

MAX_AMENDMENT_BYTES = 4096
# Each costs a signature check (0.2 ms) when a charter is read.
MAX_AMENDMENTS = 1024
MAX_CHARTER_BYTES = MAX_MANIFEST_BYTES + MAX_AMENDMENTS * (MAX_AMENDMENT_BYTES + 3) + 16

_AMENDMENT_DOMAIN = b"swarm-node amendment 1\0"
_SIGNATURE_DOMAIN = b"swarm-node amendment signature 1\0"
_HASH_BYTES = 32


class AppendPrompts(CanonicalModel):
    """More prompts; their ids follow those of all earlier sets."""

    kind: Literal["append_prompts"] = "append_prompts"
    prompts: PromptSetRef


class CloseSwarm(CanonicalModel):
    """Training ends at `at_s` (Unix time); of several such amendments the last one holds."""

    kind: Literal["close"] = "close"
    at_s: UnixTime


class MinimumVersion(CanonicalModel):
    """Members with older software stop training; of several the last one holds."""

    kind: Literal["minimum_version"] = "minimum_version"
    version: Annotated[str, Field(pattern=r"^[0-9]{1,5}(\.[0-9]{1,5}){0,3}$")]


Action = AppendPrompts | CloseSwarm | MinimumVersion | RosterChange | BanChange
_ActionT = TypeVar("_ActionT", AppendPrompts, CloseSwarm, MinimumVersion, RosterChange, BanChange)


class Amendment(CanonicalModel):
    """A change of a swarm's terms that keeps its id, signed by one of its organizers.

    Attributes:
        schema_id: written as "schema".
        swarm_id: hex.
        number: 1 for the first.
        previous: `hash` of amendment `number - 1`, hex; the swarm's id for the first.
        action: what changes.
        created_s: Unix time.
        organizer: peer id of the signer.
        signature: hex; empty until signed.
    """

    schema_id: Annotated[Literal["swarm-amendment/1"], Field(alias="schema")] = "swarm-amendment/1"
    swarm_id: HexHash
    number: Annotated[int, Field(ge=1, le=MAX_AMENDMENTS)]
    previous: HexHash
    action: Annotated[Action, Field(discriminator="kind")]
    created_s: UnixTime
    organizer: PeerId
    signature: Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")] = ""

    @property
    def hash(self) -> bytes:
        """32 bytes over everything, the signature included."""
        return hashlib.sha256(_AMENDMENT_DOMAIN + self.to_bytes()).digest()

    def sign(self, identity: Identity) -> Self:
        """A copy with the signature of `identity`.

        Raises:
            IdentityError: `organizer` is another peer.
        """
        if identity.peer_id != self.organizer:
            raise IdentityError(
                f"the amendment names organizer {self.organizer}, the key is of {identity.peer_id}"
            )
        signature = identity.sign(self._signed_bytes()).hex()
        return self.model_copy(update={"signature": signature})

    def verify(self) -> bool:
        """Whether the signature is the named organizer's; not whether the swarm knows them."""
        return verify_signature(
            public_key_of(self.organizer), self._signed_bytes(), bytes.fromhex(self.signature)
        )

    def to_bytes(self) -> bytes:
        """The canonical JSON."""
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode the canonical JSON; the signature is `verify`'s to check.

        Raises:
            RemoteProtocolError: reason "amendment"; "incompatible" for another schema version or
                an action that this version does not know.
        """
        return decode(cls, data, Reason.AMENDMENT, MAX_AMENDMENT_BYTES)

    def _signed_bytes(self) -> bytes:
        return _SIGNATURE_DOMAIN + encode(self, exclude={"signature"})


@dataclass(frozen=True, slots=True)
class Charter:
    """A swarm's present terms: its manifest and the valid chain of its amendments.

    A charter that exists is valid: every link, organizer and signature was checked.

    Attributes:
        manifest: the genesis terms.
        amendments: from number 1 on.
        swarm_id: 32 bytes.
        prompt_sets: the genesis set and the appended ones; prompt ids count through them in turn.
        members: who may take part, the organizers included; None: everybody.
        banned: whom the organizers advise against, never one of them.

    Raises:
        RemoteProtocolError: reason "amendment": the chain does not hold.
    """

    manifest: Manifest
    amendments: tuple[Amendment, ...] = ()
    swarm_id: bytes = field(init=False, repr=False, compare=False)
    prompt_sets: tuple[PromptSetRef, ...] = field(init=False, repr=False, compare=False)
    members: frozenset[str] | None = field(init=False, repr=False, compare=False)
    banned: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "swarm_id", self.manifest.swarm_id)
        if len(self.amendments) > MAX_AMENDMENTS:
            raise RemoteProtocolError(Reason.AMENDMENT, f"more than {MAX_AMENDMENTS} amendments")
        previous = self.swarm_id
        for number, amendment in enumerate(self.amendments, start=1):
            self._check_link(number, amendment, previous)
            previous = amendment.hash
        sets = (self.manifest.prompts, *(a.prompts for a in self._actions(AppendPrompts)))
        if sum(ref.count for ref in sets) > MAX_PROMPTS:
            raise RemoteProtocolError(Reason.AMENDMENT, f"more than {MAX_PROMPTS} prompts together")
        object.__setattr__(self, "prompt_sets", sets)
        organizers = frozenset(self.manifest.organizers)
        rosters, bans = self._actions(RosterChange), self._actions(BanChange)
        object.__setattr__(self, "members", after(rosters) | organizers if rosters else None)
        object.__setattr__(self, "banned", after(bans) - organizers)

    @classmethod
    def from_genesis(cls, manifest: Manifest) -> Self:
        """The terms before any amendment."""
        return cls(manifest)

    @property
    def all_sets(self) -> list[PromptSetRef]:
        """What a member downloads: training sets, then those of the evaluation."""
        return [*self.prompt_sets, *self.manifest.evaluation_sets.values()]

    @property
    def prompt_count(self) -> int:
        """Prompts in all sets; prompt ids are below it."""
        return sum(ref.count for ref in self.prompt_sets)

    def is_member(self, peer_id: str) -> bool:
        """Whether the swarm is open, or the peer on its roster."""
        return self.members is None or peer_id in self.members

    @property
    def closes_at_s(self) -> float | None:
        """Unix time at which training ends; None: open."""
        closings = self._actions(CloseSwarm)
        return closings[-1].at_s if closings else None

    @property
    def minimum_version(self) -> str | None:
        """Oldest software that may train; None: any."""
        minima = self._actions(MinimumVersion)
        return minima[-1].version if minima else None

    def admits(self, version: str) -> bool:
        """Whether software of this version ("1.2.3", further parts ignored) may train."""
        minimum = self.minimum_version
        return minimum is None or _version_numbers(version) >= _version_numbers(minimum)

    def extended(self, amendments: Iterable[Amendment]) -> "Charter":
        """The charter with another member's chain in place of this one's.

        Args:
            amendments: the whole chain, from number 1.

        Returns:
            The new charter; this very one when the chains are the same.

        Raises:
            RemoteProtocolError: reason "amendment": the chain does not hold; reason
                "charter_behind": it is valid, but shorter than ours, or as long with a larger last
                hash (concurrent amendments of two organizers: all members keep the smaller one).
                The latter is nothing against the peer; it is the one that should fetch ours.
        """
        other = Charter(self.manifest, tuple(amendments))
        if other.amendments == self.amendments:
            return self
        if other._rank() < self._rank():
            raise RemoteProtocolError(
                Reason.CHARTER_BEHIND,
                f"{len(other.amendments)} amendments against our {len(self.amendments)}",
            )
        return other

    def check_organizer(self, peer_id: str) -> None:
        """Refuse who may not amend this swarm.

        Raises:
            IdentityError: `peer_id` is no organizer of this swarm.
        """
        if peer_id not in self.manifest.organizers:
            raise IdentityError(
                f"{peer_id} is no organizer of swarm {self.swarm_id.hex()[:16]}; "
                f"they are {', '.join(self.manifest.organizers)}"
            )

    def amended(self, action: Action, created_s: float, identity: Identity) -> "Charter":
        """The charter with one more amendment, signed by an organizer.

        Raises:
            IdentityError: `identity` is no organizer of this swarm.
        """
        self.check_organizer(identity.peer_id)
        amendment = Amendment(
            swarm_id=self.swarm_id.hex(),
            number=len(self.amendments) + 1,
            previous=(self.amendments[-1].hash if self.amendments else self.swarm_id).hex(),
            action=action,
            created_s=created_s,
            organizer=identity.peer_id,
        )
        return Charter(self.manifest, (*self.amendments, amendment.sign(identity)))

    def to_bytes(self) -> bytes:
        """What is served to members: msgpack [manifest bytes, [amendment bytes, ...]]."""
        chain = [amendment.to_bytes() for amendment in self.amendments]
        data: bytes = msgpack.packb([self.manifest.to_bytes(), chain])
        return data

    @classmethod
    def from_bytes(cls, data: bytes, swarm_id: bytes) -> Self:
        """Decode and check what a member served for `swarm_id`.

        Raises:
            RemoteProtocolError: reason "charter" (framing), "manifest" (not the one of
                `swarm_id`), "amendment", "incompatible" (a newer schema).
        """
        if len(data) > MAX_CHARTER_BYTES:
            raise RemoteProtocolError(
                Reason.CHARTER, f"{len(data)} bytes, above {MAX_CHARTER_BYTES}"
            )
        manifest_bytes, chain = _unpack_charter(data)
        manifest = Manifest.from_bytes(manifest_bytes)
        if manifest.swarm_id != swarm_id:
            raise RemoteProtocolError(
                Reason.MANIFEST, f"hash {manifest.swarm_id.hex()}, asked for {swarm_id.hex()}"
            )
        charter = cls(manifest, tuple(Amendment.from_bytes(item) for item in chain))
        if charter.to_bytes() != data:
            raise RemoteProtocolError(Reason.CHARTER, "msgpack not in its shortest form")
        return charter

    def _check_link(self, number: int, amendment: Amendment, previous: bytes) -> None:
        if amendment.swarm_id != self.swarm_id.hex():
            problem = f"is of swarm {amendment.swarm_id}"
        elif amendment.number != number:
            problem = f"is numbered {amendment.number}"
        elif amendment.previous != previous.hex():
            problem = f"follows {amendment.previous}, not {previous.hex()}"
        elif amendment.organizer not in self.manifest.organizers:
            problem = f"is by {amendment.organizer}, who is no organizer"
        elif not amendment.verify():
            problem = "has a wrong signature"
        else:
            return
        raise RemoteProtocolError(Reason.AMENDMENT, f"amendment {number} {problem}")

    def _actions(self, kind: type[_ActionT]) -> list[_ActionT]:
        return [a.action for a in self.amendments if isinstance(a.action, kind)]

    def _rank(self) -> tuple[int, int]:
        """The greater chain is the one to keep."""
        last = self.amendments[-1].hash if self.amendments else bytes(_HASH_BYTES)
        return len(self.amendments), -int.from_bytes(last, "big")


def _unpack_charter(data: bytes) -> tuple[bytes, list[bytes]]:
    try:
        match msgpack.unpackb(
            data, max_array_len=MAX_AMENDMENTS, max_map_len=0, max_ext_len=0, max_str_len=0
        ):
            case [bytes() as manifest, [*chain]] if all(isinstance(item, bytes) for item in chain):
                return manifest, chain
            case _:
                raise ValueError("not [manifest, [amendment, ...]]")
    except ValueError as error:
        raise RemoteProtocolError(Reason.CHARTER, f"does not decode: {error}") from None


def _version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, four of them: "1.2rc1" -> (1, 2, 0, 0)."""
    numbers = []
    for part in version.split(".")[:4]:
        digits = re.match(r"[0-9]{1,9}", part)
        if digits is None:
            break
        numbers.append(int(digits.group()))
        if digits.group() != part:
            break
    return tuple(numbers + [0] * (4 - len(numbers)))
