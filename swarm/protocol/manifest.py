"""What a swarm is: the manifest whose hash is its id, signed amendments, the invite.

Owns: their fields and bounds, their one canonical byte form, the rule by which two members that
know different amendments come to agree. Does not know: how these bytes travel, what the prompts
say, what time it is. JSON here is canonical (`swarm.protocol.canonical`).
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self, TypeVar

import base58
import msgpack
from pydantic import BeforeValidator, Field, model_validator

from swarm.errors import IdentityError, RemoteProtocolError, UsageError
from swarm.protocol.canonical import (
    CanonicalModel,
    HexHash,
    PeerId,
    SafeInt,
    Text,
    UnixTime,
    decode,
    encode,
)
from swarm.protocol.identity import Identity, public_key_of, verify_signature
from swarm.protocol.reasons import Reason
from swarm.protocol.roster import BanChange, RosterChange, after

# Room for the longest texts and parameters, each character written with six bytes ("\u0001").
MAX_MANIFEST_BYTES = 512 * 1024
MAX_AMENDMENT_BYTES = 4096
# Each costs a signature check (0.2 ms) when a charter is read.
MAX_AMENDMENTS = 1024
MAX_CHARTER_BYTES = MAX_MANIFEST_BYTES + MAX_AMENDMENTS * (MAX_AMENDMENT_BYTES + 3) + 16
# Of all prompt sets together. A prompt id is a u32; an epoch's order takes 16 bytes a prompt.
MAX_PROMPTS = 2**24
MAX_INVITE_CHARS = 8192
MAX_INVITE_ADDRESSES = 16
MAX_ADDRESS_CHARS = 256

INVITE_PREFIX = "swarm1"

_MANIFEST_DOMAIN = b"swarm-node manifest 1\0"
_AMENDMENT_DOMAIN = b"swarm-node amendment 1\0"
_SIGNATURE_DOMAIN = b"swarm-node amendment signature 1\0"
_INVITE_DOMAIN = b"swarm-node invite 1\0"
_CHECKSUM_BYTES = 4
_HASH_BYTES = 32
_NAME_PATTERN = r"[A-Za-z0-9 ._-]{1,64}"
_ADDRESS_PATTERN = r"/[!-~]+"


class PromptSetRef(CanonicalModel):
    """A prompt set by content: what `swarm.protocol.prompts.encode_prompt_set` made.

    Attributes:
        sha256: hash of the encoded set.
        size_bytes: its length.
        count: prompts in it.
        tokens_sha256: sha256 over each prompt's `prompt_tokens_sha256` in turn. Two tokenizers
            that split any rendered prompt differently give different values.
    """

    sha256: HexHash
    size_bytes: Annotated[int, Field(ge=1, le=2**36)]
    count: Annotated[int, Field(ge=1, le=MAX_PROMPTS)]
    tokens_sha256: HexHash


class TokenizerSpec(CanonicalModel):
    """The one tokenizer of the swarm.

    Attributes:
        fingerprint: hash over the id-to-token map.
        vocab_size: token ids are below it.
        name: for people, e.g. "Qwen/Qwen2.5-1.5B".
    """

    fingerprint: HexHash
    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    name: Annotated[Text, Field(max_length=256)]


class TemplateSpec(CanonicalModel):
    """How a prompt becomes text.

    Attributes:
        text: Jinja source; variables `messages`, `prompt`, `system`.
        system: the system prompt; empty: none.
    """

    text: Annotated[Text, Field(min_length=1)]
    system: Text = ""


class SamplingSpec(CanonicalModel):
    """How every member samples: members compare only what was drawn alike.

    Attributes:
        temperature: of the softmax.
        group_size: completions per prompt.
        max_prompt_tokens: longest rendered prompt.
        max_completion_tokens: a completion of this length without a stop token was cut.
        stop_token_ids: rising; a completion ends with the first of them.
    """

    temperature: Annotated[float, Field(ge=0.01, le=10.0)]
    group_size: Annotated[int, Field(ge=2, le=4096)]
    max_prompt_tokens: Annotated[int, Field(ge=1, le=2**20)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**20)]
    stop_token_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)]

    @model_validator(mode="after")
    def _stop_tokens_rise(self) -> Self:
        if list(self.stop_token_ids) != sorted(set(self.stop_token_ids)):
            raise ValueError("stop_token_ids must rise, each once")
        return self


def _no_int(value: object) -> object:
    if isinstance(value, int):  # pydantic would make a float of it
        raise ValueError("not a float")
    return value


RewardParam = (
    Annotated[Text, Field(max_length=1024)]
    | SafeInt
    | Annotated[float, BeforeValidator(_no_int)]
    | bool
)


class RewardSpec(CanonicalModel):
    """The reward that every member computes for itself, by name and version."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
    version: Annotated[int, Field(ge=1, le=65_535)] = 1
    params: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], RewardParam],
        Field(default_factory=dict, max_length=32),
    ]


class Manifest(CanonicalModel):
    """What a swarm trains on, fixed for its whole life; the hash of its bytes is the swarm's id.

    Attributes:
        schema_id: written as "schema".
        name: for people.
        created_s: Unix time at which the organizer made it.
        organizers: peer ids whose signature an amendment needs (one of them).
        prompts: the genesis prompt set.
        held_out: the prompts of the evaluation, in distribution.
        out_of_distribution: prompts of a second evaluation.
        record_shards: parts into which the keys of the DHT's records are split.
    """

    schema_id: Annotated[Literal["swarm-manifest/1"], Field(alias="schema")] = "swarm-manifest/1"
    name: Annotated[str, Field(pattern=f"^{_NAME_PATTERN}$")]
    created_s: UnixTime
    organizers: Annotated[tuple[PeerId, ...], Field(min_length=1, max_length=16)]
    prompts: PromptSetRef
    held_out: PromptSetRef | None = None
    out_of_distribution: PromptSetRef | None = None
    template: TemplateSpec
    tokenizer: TokenizerSpec
    sampling: SamplingSpec
    reward: RewardSpec
    record_shards: Annotated[int, Field(ge=1, le=256)] = 4

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if len(set(self.organizers)) != len(self.organizers):
            raise ValueError("organizers must differ")
        if any(token >= self.tokenizer.vocab_size for token in self.sampling.stop_token_ids):
            raise ValueError(f"stop_token_ids must be below vocab_size {self.tokenizer.vocab_size}")
        return self

    @property
    def swarm_id(self) -> bytes:
        """The 32 bytes that name the swarm everywhere."""
        return hashlib.sha256(_MANIFEST_DOMAIN + self.to_bytes()).digest()

    @property
    def evaluation_sets(self) -> dict[str, PromptSetRef]:
        """Field to set, those that there are."""
        named = {"held_out": self.held_out, "out_of_distribution": self.out_of_distribution}
        return {name: ref for name, ref in named.items() if ref is not None}

    def to_bytes(self) -> bytes:
        """The canonical JSON."""
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Decode the canonical JSON.

        Raises:
            RemoteProtocolError: reason "manifest"; "incompatible" for another schema version.
        """
        return decode(cls, data, Reason.MANIFEST, MAX_MANIFEST_BYTES)


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


@dataclass(frozen=True, slots=True)
class Invite:
    """All that a newcomer needs: the swarm's id and addresses of a few members.

    Attributes:
        swarm_id: 32 bytes; what the addressed members serve is checked against it.
        addresses: 1 to 16 multiaddresses that end in a peer id.
        name: the swarm's name, for people; nothing is derived from it.

    Raises:
        UsageError: a field is out of bounds.
    """

    swarm_id: bytes
    addresses: tuple[str, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.swarm_id) != _HASH_BYTES:
            raise UsageError(f"invite: a swarm id has {_HASH_BYTES} bytes")
        if not 1 <= len(self.addresses) <= MAX_INVITE_ADDRESSES:
            raise UsageError(
                f"invite: {len(self.addresses)} addresses; 1 to {MAX_INVITE_ADDRESSES} are right"
            )
        for address in self.addresses:
            if not _is_address(address):
                raise UsageError(
                    f"invite: {address[:MAX_ADDRESS_CHARS]!r} is no multiaddress of a peer, "
                    "e.g. /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo..."
                )
        if self.name and not re.fullmatch(_NAME_PATTERN, self.name):
            raise UsageError(f"invite: {self.name[:64]!r} is no name of a swarm")

    def encode(self) -> str:
        """The invite as one word of ASCII letters and digits."""
        payload = msgpack.packb([self.swarm_id, self.name, list(self.addresses)])
        return INVITE_PREFIX + base58.b58encode(payload + _checksum(payload)).decode("ascii")

    @classmethod
    def decode(cls, text: str) -> Self:
        """Read an invite; blanks and line breaks that copying put in are ignored.

        Raises:
            UsageError: names what is wrong: prefix, length, character, checksum, contents.
        """
        word = "".join(text.split())
        if not word.startswith(INVITE_PREFIX):
            if re.match(r"swarm[2-9]", word):
                raise UsageError(f"invite {word[:12]}...: made by a newer version of swarm-node")
            raise UsageError(f"{word[:12]!r} is no invite: one begins with {INVITE_PREFIX!r}")
        if len(word) > MAX_INVITE_CHARS:
            raise UsageError(f"invite: {len(word)} characters, above {MAX_INVITE_CHARS}")
        try:
            data = base58.b58decode(word.removeprefix(INVITE_PREFIX))
        except ValueError:
            raise UsageError(
                "invite: holds a character that invites never have "
                "(only letters and digits without 0, O, I, l); copy it again"
            ) from None
        payload, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if checksum != _checksum(payload):
            raise UsageError(
                "invite: damaged: its checksum does not match, so a character was lost or changed; "
                "copy the whole invite again"
            )
        try:
            match msgpack.unpackb(
                payload, max_array_len=MAX_INVITE_ADDRESSES, max_map_len=0, max_ext_len=0
            ):
                case [bytes() as swarm_id, str() as name, [*addresses]] if all(
                    isinstance(address, str) for address in addresses
                ):
                    return cls(swarm_id, tuple(addresses), name)
                case _:
                    raise ValueError("not [swarm id, name, [address, ...]]")
        except ValueError as error:
            raise UsageError(
                f"invite: its checksum is right but not its contents: {error}"
            ) from None


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


def _is_address(address: str) -> bool:
    if len(address) > MAX_ADDRESS_CHARS or not re.fullmatch(_ADDRESS_PATTERN, address):
        return False
    try:
        public_key_of(address.rpartition("/p2p/")[2])
    except RemoteProtocolError:
        return False
    return True


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(_INVITE_DOMAIN + payload).digest()[:_CHECKSUM_BYTES]


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
