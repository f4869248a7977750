"""A run of a real node, killed and resumed with other settings, trained again from its log."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Node, Swarm, cli, settings, sums, wait_until, write_prompts
from safetensors.numpy import load_file

from swarm.paths import RunDir
from swarm.replay.logged_run import LoggedRun
from swarm.replay.what_if import answer


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Killed after step 2, without a checkpoint; then with another seed to step 5, then with
    another learning rate to step 7."""
    folder = tmp_path_factory.mktemp("replay")
    prompts = write_prompts(folder / "prompts.jsonl", sums(range(11, 20), range(21, 31)))
    with Swarm(folder) as swarm:
        swarm.seed(prompts)
        node = swarm.join("lone", checkpoint__every_steps="1000", checkpoint__keep="9")
        wait_until(lambda: len(node.steps()) >= 2, "two steps", [node])
        node.kill()
        node = go_on(swarm, node, 5, {"checkpoint.every_steps": "3", "node.seed": "7"})
        yield go_on(swarm, node, 7, {"train.learning_rate": "3e-4"})


def go_on(swarm: Swarm, node: Node, steps: int, changes: dict[str, str]) -> Node:
    """Resume a node with other settings, up to a step, and stop it."""
    node = swarm.restart(node, "join", "--max-steps", str(steps), *settings(changes))
    wait_until(
        lambda: node.status().get("activity", {}).get("doing") == "finished", "the end", [node]
    )
    assert node.stop() == 0
    return node


def replay(node: Node, *arguments: str) -> dict[str, Any]:
    result = cli("replay", "--json", "--data-dir", str(node.data_dir), *arguments)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def weights(checkpoint: Path) -> dict[str, bytes]:
    files = ("model.safetensors", "trainer.safetensors")
    return {
        f"{file}/{name}": array.tobytes()
        for file in files
        for name, array in load_file(checkpoint / file).items()
    }


def test_the_same_method_gives_the_same_weights(node: Node) -> None:
    before = digests(node.run_dir.root)
    logged = [record["step"] for record in node.steps()]
    assert logged[-7:] == [1, 2, 3, 4, 5, 6, 7]
    assert len(logged) >= 9  # the killed attempt is in the log too
    kept = node.run_dir.checkpoints()
    assert list(kept) == [3, 5, 6, 7]

    # From the model's own weights, on the later attempts.
    result = replay(node, "--from", "0", "--steps", "3")
    assert (result["from_step"], result["to_step"]) == (0, 3)
    assert weights(Path(result["checkpoint"])) == weights(kept[3])
    assert result["same_weights_as_run"] is True
    live = {r["step"]: r for r in node.metrics()}  # of equal steps, the last
    assert [row["loss"] for row in result["steps"]] == [live[n]["loss"] for n in (1, 2, 3)]

    # From the first checkpoint, over the change of the learning rate.
    result = replay(node)
    assert (result["from_step"], result["to_step"]) == (3, 7)
    assert weights(Path(result["checkpoint"])) == weights(kept[7])
    assert result["same_weights_as_run"] is True
    assert [row["step"] for row in result["steps"]] == [4, 5, 6, 7]
    assert digests(node.run_dir.root) == before


def test_another_method_gives_other_weights(node: Node, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = replay(node, "--method", "nois", "--steps", "2", "--out", str(out))
    assert result["schema"] == "swarm-node/replay/1"
    assert result["same_weights_as_run"] is False
    ours, theirs = weights(Path(result["checkpoint"])), weights(node.run_dir.checkpoints()[5])
    assert {n for n in ours if n.startswith("model") and ours[n] != theirs[n]}
    assert all(row["kept_share"] == 1.0 for row in result["steps"])
    assert result == json.loads((out / "result.json").read_text())
    live = {r["step"]: r for r in node.metrics()}
    assert live[4]["kept"] < live[4]["samples"]

    # What the live run left out went through the model here: its log answers what the live one
    # cannot.
    _, found = answer(LoggedRun(RunDir(out)), ["filter=and,g=1e-30"])["answers"]
    assert found["all"]["unknown"] == 0
    assert found["all"]["dropped_kl"] > 0


def test_what_if_without_training(node: Node) -> None:
    steps = ("--from", "3", "--steps", "2")
    result = replay(node, *steps, "--what-if", "g=1e-30", "--what-if", "filter=and,g=1e-30")
    assert result["schema"] == "swarm-node/what-if/1"
    trained, strict, both = (found["peers"]["own"] for found in result["answers"])
    live = {r["step"]: r for r in node.metrics()}
    for name in ("samples", "trained", "dropped_advantage", "dropped_kl", "no_signal"):
        assert trained[name] == live[4][name] + live[5][name]
    assert trained["trained"] == strict["trained"] + strict["dropped_kl"]
    assert strict["dropped_kl"] > 0
    assert both["unknown"] > 0  # dropped for their advantage, before the forward pass
