"""The whole path, from one node's sampler over the wire into another's trainer, changes nothing."""

from pathlib import Path

from nodes import Node, Swarm, wait_until, write_prompts

# Six lengths, so that sampling three of them together pads on the left.
PROMPTS = {
    "3+4=": "7",
    "13+4=": "17",
    "13+24=": "37",
    "4+3+12=": "19",
    "14+3+12=": "29",
    "2+2+3+12=": "19",
    "5+2=": "7",
    "12+7=": "19",
    "21+34=": "55",
    "47-5=": "42",
    "59-26=": "33",
    "1+2+3=": "6",
}
ENOUGH = 12


def foreign_log_ratios(node: Node, other: str) -> list[float]:
    """Of each step with samples of `other`: the largest |log-ratio| of their tokens."""
    theirs = [report["per_peer"].get(other) for report in node.metrics()]
    return [t["log_ratio_max"] for t in theirs if t and t["log_ratio_max"] is not None]


def test_equal_models_see_no_difference_in_each_others_samples(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
        swarm.seed(prompts, "--held-out-fraction", "0", "--temperature", "0.8")
        nodes = [
            swarm.join(name, train__learning_rate="0", ftis__filter="none") for name in ("a", "b")
        ]
        wait_until(lambda: all(node.step > 0 for node in nodes), "both train", swarm.nodes)
        a, b = nodes
        for node, other in ((a, b.peer_id), (b, a.peer_id)):
            wait_until(
                lambda node=node, other=other: len(foreign_log_ratios(node, other)) >= ENOUGH,
                f"{node.name} trains on the other's samples",
                swarm.nodes,
            )
            ratios = foreign_log_ratios(node, other)
            assert max(ratios) < 1e-4
            assert any(ratios)  # computed twice, in different batches
            own = [report["per_peer"]["own"]["log_ratio_max"] for report in node.metrics()]
            assert max(value for value in own if value is not None) < 1e-4
            used = {
                len(list(PROMPTS)[group["prompt_id"]])
                for step in node.steps()
                for group in step["groups"]
                if group["publisher"] == other
            }
            assert len(used) >= 3
