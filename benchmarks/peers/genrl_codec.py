"""gensyn-genrl's own serializer, with the text payloads that its swarms exchange.

Runs under the interpreter of `.venv-peers`, as a `benchmarks.measure.Worker`.
"""

import sys
from pathlib import Path
from typing import Any

import msgpack

sys.path.insert(0, str(Path(__file__).parents[1]))
from genrl.communication import Payload
from genrl.serialization.msgpack_utils import _msgpack_decode, _msgpack_encode
from genrl.state.game_tree import WorldState
from self_measuring import measured, serve

CHARACTERS_PER_TOKEN = 4
"""Of English text, by the tokenizers of today's models."""

_made: dict[str, Any] = {}


def make(completions: int, tokens: int) -> dict[str, Any]:
    """What `HivemindBackend.put` packs: node -> payloads, each a prompt and its completions."""
    text = ("the sum of two and three is five; " * tokens)[: tokens * CHARACTERS_PER_TOKEN]
    state = WorldState(environment_states=["a prompt"], opponent_states=None, personal_states=None)
    actions = [f"{index} {text}" for index in range(completions)]
    _made["object"] = {"batch": [Payload(state, actions, None)]}
    _made["packer"] = msgpack.Packer(use_bin_type=True, default=_msgpack_encode)
    _made["bytes"] = _made["packer"].pack(_made["object"])
    return {"bytes": len(_made["bytes"])}


def both() -> dict[str, Any]:
    """Pack, and unpack as its `get` does."""

    def work() -> None:
        packed = _made["packer"].pack(_made["object"])
        unpacker = msgpack.Unpacker(object_hook=_msgpack_decode, raw=False, max_buffer_size=2**27)
        unpacker.feed(packed)
        next(unpacker)

    return measured(work)


serve({"make": make, "both": both})
