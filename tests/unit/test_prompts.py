"""Prompt files, prompt sets, the epoch's order and a publisher's place in it."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from swarm.errors import DataError, RemoteProtocolError
from swarm.protocol.manifest import PromptSetRef, RewardSpec
from swarm.protocol.prompts import (
    MAX_PROMPT_CHARS,
    VISITS_PER_CALL,
    Cursor,
    Prompt,
    decode_prompt_set,
    encode_prompt_set,
    epoch_order,
    next_prompts,
    order_key,
    prompt_set_ref,
    prompt_tokens_sha256,
    read_jsonl,
)

SWARM = bytes(range(32))
PROMPTS = [
    Prompt("1+1=", None, "2"),
    Prompt("ü\u2028\n\x01", None, "x", "name", ("a", "b")),
    Prompt(None, ({"role": "system", "content": ""}, {"role": "user", "content": "hi"}), "yes"),
]


def reference(data: bytes, **change: object) -> PromptSetRef:
    count = data.count(b"\n")
    ref = prompt_set_ref(data, [bytes(32)] * count) if count else prompt_set_ref(b"x", [b""])
    fields = {"sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data), **change}
    return ref.model_copy(update=fields)


def read(tmp_path: Path, text: str | bytes) -> list[Prompt]:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_jsonl(path)


# -- the user's file -----------------------------------------------------------------------------


def test_reads_all_fields(tmp_path: Path) -> None:
    text = (
        '{"prompt": "1+1=", "answer": "2"}\n'
        "\n"
        ' {"answer":"x","id":"name","tags":["a","b"],"prompt":"\\u00fc\\u2028\\n\\u0001"}\r\n'
        '{"messages":[{"role":"system","content":""},{"content":"hi","role":"user"}],"answer":"yes"}'
    )
    assert read(tmp_path, text) == PROMPTS
    assert read(tmp_path, b"\xef\xbb\xbf" + text.encode()) == PROMPTS


@pytest.mark.parametrize("number", ["42", "-0", "1.50", "1E5", "1" + "0" * 5000])
def test_a_number_becomes_the_text_that_was_written(tmp_path: Path, number: str) -> None:
    (prompt,) = read(tmp_path, f'{{"prompt":"a","answer":{number}}}')
    assert prompt.answer == number
    assert type(prompt.answer) is str


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "malformed JSON: Expecting property name"),
        ('{"prompt":"a","answer":"b"} x', "malformed JSON: Extra data at column 29"),
        ("[" * 100_000, "nested too deep"),
        ('{"prompt":"a","answer":NaN}', "NaN is no number"),
        ('{"prompt":"a","answer":-Infinity}', "-Infinity is no number"),
        ('{"prompt":"a","answer":"b","answer":"c"}', "a field is given twice"),
        (b"\xff", "not UTF-8"),
        ('{"prompt":"a","answer":"b","reward":"No"}', "'reward.name'"),
        ('{"prompt":"a","answer":"b","reward":{}}', "'reward.name': Field required"),
        ('{"prompt":"a","answer":"b","reward":5}', "'reward'"),
        ('{"prompt":"a","answer":"b","reward":{"name":"exact","x":1}}', "'reward.x'"),
        ('{"prompt":"a","answer":"b","reward":{"name":"a","params":{"x":[1]}}}', "'reward.params."),
        ("[]", "must be an object"),
        ("5", "must be an object"),
        ("{}", "exactly one of 'prompt' and 'messages'"),
        ('{"prompt":"a","messages":[],"answer":"b"}', "exactly one of"),
        ('{"prompt":"a"}', "'answer' is missing"),
        ('{"prompt":"a","answer":"b","anwser":1}', 'unknown field "anwser"; known: prompt,'),
        ('{"prompt":"a","answer":""}', "'answer' is empty"),
        ('{"prompt":"a","answer":" \\n"}', "'answer' is empty"),
        ('{"prompt":"a","answer":true}', "'answer' must be text, not true"),
        ('{"prompt":"a","answer":null}', "'answer' must be text, not null"),
        ('{"prompt":"a","answer":["b"]}', "'answer' must be text"),
        ('{"prompt":5,"answer":"b"}', "'prompt' must be text, not 5"),
        ('{"prompt":" ","answer":"b"}', "'prompt' is empty"),
        ('{"prompt":null,"answer":"b"}', "'prompt' must be text"),
        ('{"prompt":"\\ud800","answer":"b"}', "surrogate"),
        (f'{{"prompt":"{"a" * 65_537}","answer":"b"}}', "65537 characters, above 65536"),
        (f'{{"prompt":"a","answer":"{"b" * 65_537}"}}', "65537 characters, above 65536"),
        ('{"messages":"hi","answer":"b"}', "'messages' must be a list"),
        ('{"messages":[],"answer":"b"}', "1 to 64"),
        ('{"messages":["hi"],"answer":"b"}', "'messages[0]' must have 'role' and 'content'"),
        ('{"messages":[{"role":"user"}],"answer":"b"}', "must have"),
        ('{"messages":[{"role":"user","content":"a","x":1}],"answer":"b"}', "must have"),
        ('{"messages":[{"role":"User","content":"a"}],"answer":"b"}', "'messages[0].role'"),
        ('{"messages":[{"role":1,"content":"a"}],"answer":"b"}', "'messages[0].role'"),
        ('{"messages":[{"role":"user","content":1}],"answer":"b"}', "'messages[0].content'"),
        ('{"messages":[{"role":"user","content":""}],"answer":"b"}', "hold 0 characters"),
        ('{"prompt":"a","answer":"b","id":5}', "'id' must be text"),
        ('{"prompt":"a","answer":"b","id":"' + "i" * 257 + '"}', "257 characters"),
        ('{"prompt":"a","answer":"b","tags":"t"}', "'tags' must be a list"),
        ('{"prompt":"a","answer":"b","tags":["t",1]}', "'tags[1]' must be text, not 1"),
        ('{"prompt":"a","answer":"b","tags":[' + '"t",' * 32 + '"t"]}', "at most 32"),
        ('{"answer":"other","prompt":"first"}', "the same prompt as in line 1"),
    ],
)
def test_a_wrong_line_is_named_with_its_reason(
    tmp_path: Path, line: str | bytes, reason: str
) -> None:
    data = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(DataError) as caught:
        read(tmp_path, b'{"prompt":"first","answer":"b"}\n\n' + data)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'prompts.jsonl'}:3: ")
    assert reason in message
    assert len(message) < len(str(tmp_path)) + 250


def test_the_same_messages_are_the_same_prompt(tmp_path: Path) -> None:
    line = '{"messages":[{"role":"user","content":"hi"}],"answer":"b"}\n'
    turned = '{"answer":"c","messages":[{"content":"hi","role":"user"}]}\n'
    with pytest.raises(DataError, match=r":2: the same prompt as in line 1"):
        read(tmp_path, line + turned)
    assert len(read(tmp_path, line + '{"prompt":"hi","answer":"b"}')) == 2


@pytest.mark.parametrize("text", ["", "\n", " \r\n\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match=r"prompts\.jsonl: holds no prompts"):
        read(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(DataError, match=str(path)):
            read_jsonl(path)


def test_an_endless_line_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^/dev/zero:1: a line of 4 MiB or more; one JSON object"):
        read_jsonl(Path("/dev/zero"))
    longest = '{"prompt":"' + "\\ud83d\\ude00" * MAX_PROMPT_CHARS + '","answer":"b"}'
    assert read(tmp_path, longest)[0].prompt == "\U0001f600" * MAX_PROMPT_CHARS


# -- the set -------------------------------------------------------------------------------------


def test_the_canonical_form_leaves_absent_fields_out() -> None:
    lines = encode_prompt_set(PROMPTS).split(b"\n")
    assert lines == [
        b'{"answer":"2","prompt":"1+1="}',
        '{"answer":"x","id":"name","prompt":"ü\u2028\\n\\u0001","tags":["a","b"]}'.encode(),
        b'{"answer":"yes","messages":[{"content":"","role":"system"},'
        b'{"content":"hi","role":"user"}]}',
        b"",
    ]


def test_a_prompt_may_name_its_own_reward(tmp_path: Path) -> None:
    lines = (
        '{"answer":"2","prompt":"a","reward":{"name":"exact","params":{"x":0.5,"y":7,"z":true},'
        '"version":2}}\n'
        '{"answer":"2","prompt":"b","reward":{"name":"number","params":{},"version":1}}\n'
    )
    prompts = read(tmp_path, lines)
    assert prompts[0].reward == RewardSpec(
        name="exact", version=2, params={"x": 0.5, "y": 7, "z": True}
    )
    assert encode_prompt_set(prompts) == lines.encode()
    assert decode_prompt_set(lines.encode(), reference(lines.encode())) == prompts
    (short,) = read(tmp_path, '{"answer":"2","prompt":"b","reward":"number"}')
    assert short == prompts[1]


def test_a_set_survives_its_bytes() -> None:
    data = encode_prompt_set(PROMPTS)
    assert decode_prompt_set(data, reference(data)) == PROMPTS


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"size_bytes": 1}, "bytes, not 1"),
        ({"sha256": "00" * 32}, "sha256"),
        ({"count": 2}, "3 lines, not 2"),
    ],
)
def test_a_set_that_is_not_the_one_named_is_refused(change: dict[str, object], detail: str) -> None:
    data = encode_prompt_set(PROMPTS)
    with pytest.raises(RemoteProtocolError, match=detail) as caught:
        decode_prompt_set(data, reference(data, **change))
    assert caught.value.reason == "prompt_set"


@pytest.mark.parametrize(
    "data",
    [
        b'{"answer":"b","prompt":"a"}',
        b'{"answer":"b","prompt":"a"}\n\n',
        b'{"answer":"b", "prompt":"a"}\n',
        b'{"prompt":"a","answer":"b"}\n',
        b'{"answer":5,"prompt":"a"}\n',
        b'{"answer":"b","prompt":"a","tags":[]}\n',
        b'{"answer":"b","prompt":"a","reward":"exact"}\n',
        b'{"answer":"b","prompt":"a","reward":{"name":"exact"}}\n',
        b'{"answer":"b","prompt":"\\u0061"}\n',
        b'\xef\xbb\xbf{"answer":"b","prompt":"a"}\n',
        b'{"answer":"b","prompt":"a"}\n{"answer":"c","prompt":"a"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_set_that_is_not_canonical_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_prompt_set(data, reference(data))
    assert caught.value.reason == "prompt_set"


def test_the_reference_of_a_set() -> None:
    data = encode_prompt_set(PROMPTS)
    hashes = [prompt_tokens_sha256(ids) for ids in ([1], [2, 3], [])]
    assert hashes[1] == hashlib.sha256(b"\x02\0\0\0\x03\0\0\0").digest()
    assert prompt_set_ref(data, hashes) == PromptSetRef(
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        count=3,
        tokens_sha256=hashlib.sha256(b"".join(hashes)).hexdigest(),
    )


# -- order ---------------------------------------------------------------------------------------


def test_the_order_is_by_hash() -> None:
    def key(prompt_id: int) -> int:
        message = b"swarm-node order 1\x00" + SWARM
        message += (5).to_bytes(8, "little") + prompt_id.to_bytes(4, "little")
        return int(hashlib.sha256(message).hexdigest()[:16], 16)

    order = epoch_order(SWARM, 5, 100)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(100), key=key)
    assert order_key(SWARM, 5, 7) == key(7)


def test_another_epoch_and_another_swarm_have_another_order() -> None:
    order = epoch_order(SWARM, 0, 50).tolist()
    assert epoch_order(SWARM, 1, 50).tolist() != order
    assert epoch_order(bytes(32), 0, 50).tolist() != order


def test_a_shared_order_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(SWARM, 0, 5)[0] = 1


def test_a_publisher_walks_over_the_end_of_an_epoch() -> None:
    visits = [(epoch, int(i)) for epoch in (0, 1, 2) for i in epoch_order(SWARM, epoch, 5)]
    taken, cursor = next_prompts(SWARM, Cursor(), 5, lambda *_: True, 7)
    assert taken == visits[:7]
    assert cursor == Cursor(1, order_key(SWARM, *visits[6]))
    assert next_prompts(SWARM, cursor, 5, lambda *_: True, 8)[0] == visits[7:]


def test_only_own_prompts_are_taken() -> None:
    taken, _ = next_prompts(SWARM, Cursor(), 100, lambda epoch, i: i % 3 == epoch, 60)
    first = [(0, int(i)) for i in epoch_order(SWARM, 0, 100) if i % 3 == 0]
    second = [(1, int(i)) for i in epoch_order(SWARM, 1, 100) if i % 3 == 1]
    assert taken == [*first, *second][:60]


def test_a_node_that_owns_nothing_comes_back() -> None:
    visited = 0

    def owns(epoch: int, prompt_id: int) -> bool:
        nonlocal visited
        visited += 1
        return False

    taken, cursor = next_prompts(SWARM, Cursor(), 100, owns, 4)
    assert taken == []
    assert visited == VISITS_PER_CALL
    assert cursor.epoch == (VISITS_PER_CALL - 1) // 100
    visited = 0
    next_prompts(SWARM, cursor, 2 * VISITS_PER_CALL, owns, 4)
    assert visited == 2 * VISITS_PER_CALL


def test_a_small_set_shared_by_many_still_yields() -> None:
    taken, _ = next_prompts(SWARM, Cursor(), 3, lambda epoch, i: (epoch, i) == (500, 1), 1)
    assert taken == [(500, 1)]


def test_nothing_is_taken_where_nothing_is_wanted_or_there() -> None:
    cursor = Cursor(3, 99)
    assert next_prompts(SWARM, cursor, 0, lambda *_: True, 4) == ([], cursor)
    assert next_prompts(SWARM, cursor, 10, lambda *_: True, 0) == ([], cursor)
