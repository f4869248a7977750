"""The screens of `swarm-node status`."""

import io
from typing import Any

from rich.console import Console
from sample_status import NOW_S, volunteer

from swarm.status import node_view


def shown(status: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(node_view(status, NOW_S))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_a_node_that_trains() -> None:
    text = shown(volunteer())
    assert "training for 3 s" in text
    assert "18.0M of 1.5B parameters trained, bfloat16 on cuda:0" in text
    assert "0.310 (start 0.200)" in text


def test_before_the_model_is_loaded_nothing_is_claimed() -> None:
    status = volunteer(
        model={"path": "/models/qwen", "mode": "lora"},
        activity={"doing": "loading the model", "since_s": NOW_S - 3, "waiting_for": ""},
    )
    status["training"].update(step=0, accuracy=None, accuracies=[])
    text = shown(status)
    assert "/models/qwen, lora, not loaded" in text
    assert "?" not in text
    assert "trained on" not in text


def test_what_is_waited_for_and_why_it_ended() -> None:
    waits = {"doing": "learner down", "since_s": NOW_S - 3, "waiting_for": "restart in 2 s"}
    assert "learner down for 3 s, waiting for restart in 2 s" in shown(volunteer(activity=waits))
    ended = {"doing": "finished", "since_s": NOW_S - 3, "waiting_for": "the swarm is closed"}
    assert "finished for 3 s: the swarm is closed" in shown(volunteer(activity=ended))


def test_fewer_completions_at_a_time_are_told_with_their_cause() -> None:
    engine = {"kind": "transformers", "syncs": 0, "max_completions": None}
    assert "at a time" not in shown(volunteer(engine=engine))
    told = shown(volunteer(engine={**engine, "max_completions": 8}))
    assert "8 completions at a time; memory ran out with more" in told
