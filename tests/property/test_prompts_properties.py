"""Prompt sets and orders for any content: round trips, stable order, each prompt once an epoch."""

import hashlib
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import DataError, RemoteProtocolError
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.prompts import (
    FIELDS,
    Cursor,
    Prompt,
    decode_prompt_set,
    encode_prompt_set,
    epoch_order,
    next_prompts,
    prompt_set_ref,
    read_jsonl,
)

swarm_ids = st.binary(min_size=32, max_size=32)
epochs = st.integers(0, 2**32)
texts = st.text(min_size=1, max_size=30).filter(lambda text: text.strip(" \t\r\n"))
roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1,
                    max_size=4).map(tuple)  # fmt: skip
tags = st.lists(texts, max_size=3).map(tuple)
prompts = st.one_of(
    st.builds(Prompt, texts, st.none(), texts, st.just("") | texts, tags),
    st.builds(Prompt, st.none(), messages, texts, st.just("") | texts, tags),
)
prompt_sets = st.lists(
    prompts, min_size=1, max_size=6, unique_by=lambda p: json.dumps([p.prompt, p.messages])
)


def reference(data: bytes) -> PromptSetRef:
    count = max(1, data.count(b"\n"))
    return PromptSetRef(
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        count=count,
        tokens_sha256="00" * 32,
    )


@given(prompt_sets)
def test_a_set_survives_its_bytes_and_a_users_file(tmp_path_factory, prompt_set) -> None:
    data = encode_prompt_set(prompt_set)
    ref = prompt_set_ref(data, [bytes(32)] * len(prompt_set))
    assert decode_prompt_set(data, ref) == prompt_set
    path = tmp_path_factory.getbasetemp() / "prompts.jsonl"
    path.write_bytes(data)
    assert read_jsonl(path) == prompt_set


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip
near_prompts = st.dictionaries(st.sampled_from([*FIELDS, "x"]), json_values | messages, max_size=4)
lines = st.one_of(
    st.binary(min_size=1, max_size=60),
    near_prompts.map(lambda value: json.dumps(value, sort_keys=True).encode() + b"\n"),
    near_prompts.map(
        lambda value: (
            json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            )
            + b"\n"
        )
    ),
)


@given(lines)
@settings(max_examples=300)
def test_any_bytes_are_a_set_or_the_one_error(tmp_path_factory, data) -> None:
    """INVARIANT: prompts that encode to the same bytes, or RemoteProtocolError / DataError."""
    try:
        assert encode_prompt_set(decode_prompt_set(data, reference(data))) == data
    except RemoteProtocolError as error:
        assert error.reason == "prompt_set"  # noqa: PT017 - both outcomes are right
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    try:
        assert read_jsonl(path)
    except DataError as error:
        assert str(error).startswith(str(path))  # noqa: PT017 - both outcomes are right


@given(swarm_ids, epochs, st.integers(0, 200), st.integers(0, 100))
def test_appended_prompts_never_move_the_others(swarm_id, epoch, count, appended) -> None:
    before = epoch_order(swarm_id, epoch, count).tolist()
    after = epoch_order(swarm_id, epoch, count + appended).tolist()
    assert sorted(after) == list(range(count + appended))
    assert [prompt_id for prompt_id in after if prompt_id < count] == before


@given(swarm_ids, epochs, st.integers(1, 40), st.data())
def test_every_own_prompt_comes_exactly_once_an_epoch(swarm_id, epoch, count, data) -> None:
    own = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    cursor, taken = Cursor(epoch), []
    while cursor.epoch < epoch + 3:
        chosen, cursor = next_prompts(
            swarm_id, cursor, count, lambda _, i: i in own, data.draw(st.integers(1, 2 * count))
        )
        taken += chosen
    for offset in range(3):
        order = [int(i) for i in epoch_order(swarm_id, epoch + offset, count) if i in own]
        assert [i for e, i in taken if e == epoch + offset] == order


@given(swarm_ids, st.integers(1, 30), st.integers(1, 30), st.data())
def test_prompts_appended_on_the_way_come_at_most_once_and_disturb_nothing(
    swarm_id, count, appended, data
) -> None:
    first = data.draw(st.integers(0, count))
    taken, cursor = next_prompts(swarm_id, Cursor(), count, lambda *_: True, first)
    total = count + appended
    more, _ = next_prompts(swarm_id, cursor, total, lambda *_: True, 2 * total)
    visited = [i for epoch, i in [*taken, *more] if epoch == 0]
    old = [i for i in visited if i < count]
    assert old == epoch_order(swarm_id, 0, count).tolist()
    assert len(set(visited)) == len(visited)
    following = [i for epoch, i in more if epoch == 1]
    assert len(following) >= total - first
    assert following == epoch_order(swarm_id, 1, total).tolist()[: len(following)]
