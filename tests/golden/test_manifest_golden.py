"""Frozen bytes of identity, manifest, amendments, invite, prompt sets, order and ownership.

A change of any value here breaks every swarm that exists: it needs new schema names and a line in
docs/PROTOCOL.md, not a new expectation.
"""

import hashlib

from swarm.protocol.charter import Amendment, Charter, CloseSwarm
from swarm.protocol.identity import Identity, peer_id_of, public_key_of, verify_signature
from swarm.protocol.invite import Invite
from swarm.protocol.manifest import (
    Manifest,
    PromptSetRef,
    RewardSpec,
    SamplingSpec,
    TemplateSpec,
    TokenizerSpec,
)
from swarm.protocol.ownership import candidates, owner, score
from swarm.protocol.prompts import (
    Prompt,
    decode_prompt_set,
    encode_prompt_set,
    epoch_order,
    order_key,
    prompt_set_ref,
    prompt_tokens_sha256,
)
from swarm.protocol.roster import BanChange, RosterChange

# The Ed25519 test vector of libp2p's peer id specification, and its peer id as other
# implementations give it.
KEY_FILE = bytes.fromhex(
    "08011240"
    "7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
PEER_ID = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
ORGANIZER = Identity(KEY_FILE[4:36])

PROMPTS = [
    Prompt("1+1=", None, "2"),
    Prompt(
        None,
        (
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "¿2·3?"},
        ),
        "6",
        "b-2",
        ("product",),
    ),
]
PROMPT_SET = (
    '{"answer":"2","prompt":"1+1="}\n'
    '{"answer":"6","id":"b-2","messages":[{"content":"Be brief.","role":"system"},'
    '{"content":"¿2·3?","role":"user"}],"tags":["product"]}\n'
).encode()
PROMPT_SET_REF = PromptSetRef(
    sha256="8d2e2a78ddae94c90bb16e61f6a5c6a48dfa1b5123f2924d844eb8fdd8201a18",
    size_bytes=165,
    count=2,
    tokens_sha256="ecb9ed117ed062bcc0c0b2a22d6b29e65f2d97cb7eec0f2e318cf3b415ba40b2",
)

MANIFEST = Manifest(
    name="Sums 1",
    created_s=1_700_000_000.5,
    organizers=(PEER_ID,),
    prompts=PROMPT_SET_REF,
    template=TemplateSpec(text="{{ system }}\n{{ prompt }}\x01\u2028", system="Réponds."),
    tokenizer=TokenizerSpec(
        fingerprint="0123456789abcdef" * 4, vocab_size=151_936, name="tiny/tokenizer"
    ),
    sampling=SamplingSpec(
        temperature=1.0,
        group_size=8,
        max_prompt_tokens=64,
        max_completion_tokens=256,
        stop_token_ids=(0, 151_643),
    ),
    reward=RewardSpec(
        name="number",
        version=1,
        params={"tolerance": 1e-6, "strict": True, "mode": "last", "max": 1e16, "n": -3},
    ),
)
MANIFEST_BYTES = (
    b'{"created_s":1700000000.5,"held_out":null,"name":"Sums 1",'
    b'"organizers":["12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"],'
    b'"out_of_distribution":null,"prompts":{"count":2,'
    b'"sha256":"8d2e2a78ddae94c90bb16e61f6a5c6a48dfa1b5123f2924d844eb8fdd8201a18",'
    b'"size_bytes":165,'
    b'"tokens_sha256":"ecb9ed117ed062bcc0c0b2a22d6b29e65f2d97cb7eec0f2e318cf3b415ba40b2"},'
    b'"record_shards":4,"reward":{"name":"number","params":{"max":1e+16,"mode":"last","n":-3,'
    b'"strict":true,"tolerance":1e-06},"version":1},"sampling":{"group_size":8,'
    b'"max_completion_tokens":256,"max_prompt_tokens":64,"stop_token_ids":[0,151643],'
    b'"temperature":1.0},"schema":"swarm-manifest/1","template":{"system":"R\xc3\xa9ponds.",'
    b'"text":"{{ system }}\\n{{ prompt }}\\u0001\xe2\x80\xa8"},"tokenizer":{'
    b'"fingerprint":"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",'
    b'"name":"tiny/tokenizer","vocab_size":151936}}'
)
SWARM_ID = bytes.fromhex("5dfdf3e94a05cb18532bc3101d6e9e40276103c1bb034510cfd334f9982633d9")

AMENDMENT_BYTES = (
    b'{"action":{"at_s":1800000000.0,"kind":"close"},"created_s":1700000100.25,"number":1,'
    b'"organizer":"12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq",'
    b'"previous":"5dfdf3e94a05cb18532bc3101d6e9e40276103c1bb034510cfd334f9982633d9",'
    b'"schema":"swarm-amendment/1","signature":"'
    b"a8a3c97b4c05660b1fae835c44622095df3c5b63193c66b4c24cc6feac2a16c3"
    b"0f161bcdf6e6be4f87de5c70af2e0e20956e0e5a51212e0546258dcd33bc5901"
    b'","swarm_id":"5dfdf3e94a05cb18532bc3101d6e9e40276103c1bb034510cfd334f9982633d9"}'
)
AMENDMENT_HASH = "8bc7e9bcaff68956223841c020a6aa25e754e384bb4a8fe1eb250789c6fc0e91"
CHARTER_BYTES = b"\x92\xc5\x03\x59" + MANIFEST_BYTES + b"\x91\xc5\x01\xdf" + AMENDMENT_BYTES

INVITE = Invite(SWARM_ID, (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}",), "Sums 1")
INVITE_TEXT = (
    "swarm12hwtHkFgaXtFh21v4JkYHH9tSE5grB7pFcmsDKLSy6FAaBt1VFKJoehB4vJSL4FSJoodb6SqkXd73mbrNBWup"
    "BSuE2JmsgohcVQ1MCYKhtgeQjHKQi5BBUiRGohNbPrNAeXufb3UZaHDqagZg5SwCZErsvoZRg6Reox17sxj5SpBdBCVE"
    "RZqQ"
)

COUNTING = bytes(range(32))


def test_peer_id_and_key_file() -> None:
    assert ORGANIZER.peer_id == PEER_ID
    assert ORGANIZER.to_key_file() == KEY_FILE
    assert public_key_of(PEER_ID) == KEY_FILE[36:]


def test_signature_is_rfc_8032s() -> None:
    # RFC 8032, 7.1, test 2.
    key = Identity(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    assert key.sign(b"\x72") == signature
    assert verify_signature(key.public_key, b"\x72", signature)


def test_prompt_set() -> None:
    assert encode_prompt_set(PROMPTS) == PROMPT_SET
    assert decode_prompt_set(PROMPT_SET, PROMPT_SET_REF) == PROMPTS
    hashes = [prompt_tokens_sha256([5, 6]), prompt_tokens_sha256([7, 150_000])]
    assert hashes[1] == hashlib.sha256(bytes.fromhex("07000000f0490200")).digest()
    assert prompt_set_ref(PROMPT_SET, hashes) == PROMPT_SET_REF


def test_manifest() -> None:
    assert MANIFEST.to_bytes() == MANIFEST_BYTES
    assert MANIFEST.swarm_id == SWARM_ID
    assert Manifest.from_bytes(MANIFEST_BYTES) == MANIFEST


def test_amendment() -> None:
    charter = Charter.from_genesis(MANIFEST).amended(
        CloseSwarm(at_s=1_800_000_000.0), 1_700_000_100.25, ORGANIZER
    )
    (amendment,) = charter.amendments
    assert amendment.to_bytes() == AMENDMENT_BYTES
    assert amendment.hash.hex() == AMENDMENT_HASH
    assert Amendment.from_bytes(AMENDMENT_BYTES) == amendment
    assert charter.to_bytes() == CHARTER_BYTES
    assert Charter.from_bytes(CHARTER_BYTES, SWARM_ID) == charter


ROSTER_AND_BAN = (
    (
        RosterChange(add=(PEER_ID,)),
        b'{"action":{"add":["12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"],'
        b'"kind":"roster","remove":[]},"created_s":1700000100.25,"number":1,',
        "9b93509f69e31c7cf0c08c8f6fbe2d00c339bf5777e4c3b58e3864638d749642",
    ),
    (
        BanChange(remove=(PEER_ID,)),
        b'{"action":{"add":[],"kind":"ban_list",'
        b'"remove":["12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"]},'
        b'"created_s":1700000100.25,"number":2,',
        "8032fb5613e9642b7d316d5287f53811bc194032942afd761478b1f448bc6f6b",
    ),
)


def test_roster_and_bans() -> None:
    charter = Charter.from_genesis(MANIFEST)
    for action, head, digest in ROSTER_AND_BAN:
        charter = charter.amended(action, 1_700_000_100.25, ORGANIZER)
        amendment = charter.amendments[-1]
        assert amendment.to_bytes().startswith(head)
        assert amendment.hash.hex() == digest  # covers every byte, the signature too
        assert Amendment.from_bytes(amendment.to_bytes()) == amendment


def test_invite() -> None:
    assert INVITE.encode() == INVITE_TEXT
    assert Invite.decode(INVITE_TEXT) == INVITE


def test_order() -> None:
    assert order_key(COUNTING, 3, 7) == 18_280_160_290_214_478_635
    assert epoch_order(COUNTING, 3, 8).tolist() == [2, 5, 6, 1, 0, 4, 3, 7]


def test_ownership() -> None:
    assert score(COUNTING, 3, 7, KEY_FILE[36:]) == 15_564_044_688_001_573_768
    peers = [peer_id_of(bytes([i]) * 32) for i in range(5)]
    line = [peers.index(peer) for peer in candidates(COUNTING, 3, 7, peers, 5)]
    assert line == [1, 0, 4, 2, 3]
    assert owner(COUNTING, 3, 7, peers) == peers[1]
