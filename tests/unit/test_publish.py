"""What a published result says, and what stays here."""

import json
from typing import Any

from swarm.config import NodeConfig
from swarm.publish import card, public_record

RUN: dict[str, Any] = {
    "schema": "swarm-node/run/1",
    "swarm": "ab" * 32,
    "peer_id": "12D3KooWMe",
    "trained": {"model": "Qwen/Qwen2.5-1.5B", "mode": "lora"},
    "config": "d1",
    "configs": {"d1": NodeConfig().model_dump(mode="json")},
    "seed": 0,
    "versions": {"swarm-node": "0.1.0"},
    "revision": None,
    "started_s": 1.0,
}
POINTS = [
    {"evaluation": True, "step": step, "time_s": 1.0, "held_out": accuracy}
    for step, accuracy in ((0, 0.1), (25, 0.2), (50, 0.3), (75, 0.9))
]


def test_the_card_tells_what_was_reached_at_the_published_step() -> None:
    ledger = {"got": {"update_share": 0.25}}
    text = card(RUN, 50, POINTS, ledger, swarm_name="gsm8k", merged=False)
    assert text.startswith("---\nbase_model: Qwen/Qwen2.5-1.5B\n")
    assert "library_name: peft" in text
    assert "| 0 | 0.100 |" in text
    assert "| 50 | 0.300 |" in text
    assert "0.900" not in text
    assert "25% of those trained on" in text
    assert "g = 50, C = 2" in text


def test_the_card_of_a_merged_adapter_calls_it_a_model() -> None:
    text = card(RUN, 50, POINTS, None, swarm_name="gsm8k", merged=True)
    assert "peft" not in text
    assert "Qwen/Qwen2.5-1.5B with a LoRA adapter merged into it, trained for 50 steps" in text


def test_a_model_from_a_folder_does_not_tell_where_it_lies() -> None:
    run = {**RUN, "trained": {"model": "/home/ada/models/mine", "mode": "full"}}
    text = card(run, 50, [], None, swarm_name="gsm8k", merged=False)
    assert "base_model" not in text
    assert "# mine, trained in the swarm gsm8k" in text
    for shown in (text, json.dumps(public_record(run))):
        assert "/home/ada" not in shown
        assert "12D3KooWMe" not in shown
    assert public_record(run)["config"]["ftis"]["clip_max"] == 2.0
    assert "network" not in public_record(run)["config"]
