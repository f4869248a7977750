"""The learner's operations on a tiny model, in this process, and once in a child."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import STOP_ID, VOCAB_SIZE

from swarm.config import (
    CheckpointSection,
    ModelSection,
    NodeConfig,
    NodeSection,
    TrainSection,
)
from swarm.errors import ConfigError, LearnerError
from swarm.learner.process import LearnerProcess
from swarm.rl import learner as module
from swarm.rl.learner import Learner

PROMPTS = [[1, 2, 3], [4, 5], [6]]
N = 6
TEMPERATURE = 0.9


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """`init` sets what holds for its whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["full", "lora"])
def config(request: pytest.FixtureRequest, tiny_folder: Path) -> NodeConfig:
    return NodeConfig(
        node=NodeSection(seed=3),
        model=ModelSection(path=str(tiny_folder), mode=request.param, lora_rank=4, threads=1),
        train=TrainSection(learning_rate=1e-3),
        checkpoint=CheckpointSection(keep=2),
    )


def _init(config: NodeConfig, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return {
        "config": config.model_dump(mode="json"),
        "run_dir": str(run_dir),
        "vocab_size": VOCAB_SIZE,
        "stop_token_ids": [STOP_ID],
        "temperature": TEMPERATURE,
        **changes,
    }


@pytest.fixture
def learner(config: NodeConfig, tmp_path: Path) -> Learner:
    made = Learner()
    made.init(**_init(config, tmp_path))
    return made


SAMPLE = {
    "prompts": PROMPTS,
    "n": N,
    "temperature": TEMPERATURE,
    "max_new_tokens": 8,
    "stop_token_ids": [STOP_ID],
    "seeds": [1, 2, 3],
}


def _batch(sampled: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups as the node sends them; completions with many small token ids are rewarded."""
    groups = []
    for index, (prompt, rollouts) in enumerate(zip(PROMPTS, sampled["groups"], strict=True)):
        means = np.array([np.frombuffer(r["ids"], "<i4").mean() for r in rollouts])
        groups.append(
            {
                "hash": bytes([index]) * 32,
                "publisher": f"peer{index}",
                "own": index == 0,
                "prompt_ids": prompt,
                "rollouts": rollouts,
                "rewards": (means < np.median(means)).astype("<f4").tobytes(),
            }
        )
    return groups


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in learner._model.policy.trainable_parameters().items()}


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_init_says_what_the_model_is(config: NodeConfig, tmp_path: Path) -> None:
    answer = Learner().init(**_init(config, tmp_path))
    assert answer["model"] == "Qwen2ForCausalLM"
    assert (answer["mode"], answer["dtype"], answer["device"]) == (
        config.model.mode, "float32", "cpu",
    )  # fmt: skip
    assert (answer["trainable"] == answer["parameters"]) == (config.model.mode == "full")
    assert (answer["step"], answer["node_state"], answer["checkpoint"]) == (0, None, None)
    assert answer["memory_bytes"] > 1 << 20
    assert torch.get_num_threads() == 1
    assert torch.are_deterministic_algorithms_enabled()


def test_samples_are_scored_alike_by_the_model_that_is_trained(learner: Learner) -> None:
    """What the importance ratio rests on: it is 1 for one's own fresh samples."""
    answer = learner.sample(**SAMPLE)
    assert [len(group) for group in answer["groups"]] == [N] * 3
    assert answer["policy_step"] == 0
    rollouts = [rollout for group in answer["groups"] for rollout in group]
    assert answer["tokens"] == sum(len(r["ids"]) // 4 for r in rollouts)
    scores = learner.logprobs(
        prompt_ids=[prompt for prompt in PROMPTS for _ in range(N)],
        completions=[rollout["ids"] for rollout in rollouts],
        temperature=TEMPERATURE,
    )["logprobs"]
    for rollout, packed in zip(rollouts, scores, strict=True):
        found, scored = (np.frombuffer(b, "<f4") for b in (rollout["logprobs"], packed))
        assert len(scored) == len(rollout["ids"]) // 4
        np.testing.assert_allclose(found, scored, atol=1e-5, rtol=0.0)
        stopped = np.frombuffer(rollout["ids"], "<i4")[-1] == STOP_ID
        assert rollout["finish"] == (0 if stopped else 1)


def test_training_raises_what_is_rewarded(learner: Learner) -> None:
    def expected_reward_gap() -> float:
        rewarded, others = [], []
        for group in batch:
            scores = learner.logprobs(
                prompt_ids=[group["prompt_ids"]] * N,
                completions=[rollout["ids"] for rollout in group["rollouts"]],
                temperature=TEMPERATURE,
            )["logprobs"]
            for reward, packed in zip(np.frombuffer(group["rewards"], "<f4"), scores, strict=True):
                (rewarded if reward else others).append(np.frombuffer(packed, "<f4").mean())
        return float(np.mean(rewarded) - np.mean(others))

    batch = _batch(learner.sample(**SAMPLE))
    before = expected_reward_gap()
    reports = [learner.train(groups=batch) for _ in range(5)]
    assert expected_reward_gap() > before + 0.01
    first = reports[0]
    assert [report["step"] for report in reports] == [1, 2, 3, 4, 5]
    assert first["stepped"]
    assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert (first["own_samples"], first["foreign_samples"]) == (N, 2 * N)
    assert set(first["per_peer"]) == {"own", "peer1", "peer2"}
    assert learner.sample(**SAMPLE)["policy_step"] == 5


def test_greedy_answers_in_the_order_of_the_prompts(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"max_new_tokens": 6, "stop_token_ids": [STOP_ID]}
    alone = [learner.greedy(prompts=[p], **arguments)["completions"][0] for p in PROMPTS]
    assert len(set(alone)) == 3
    monkeypatch.setattr(module, "GREEDY_PROMPTS", 2)
    assert learner.greedy(prompts=PROMPTS, **arguments)["completions"] == alone


def test_sampling_out_of_memory_goes_on_by_halves_and_remembers(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = learner._model.engine
    expected = learner.sample(**SAMPLE)
    generate = type(engine).generate
    sizes = []

    def tight(self: Any, prompts: list[list[int]], *arguments: Any) -> Any:
        sizes.append(len(prompts))
        if len(prompts) > limit:
            raise torch.OutOfMemoryError("no memory")
        return generate(self, prompts, *arguments)

    monkeypatch.setattr(type(engine), "generate", tight)
    limit = 1
    found = learner.sample(**SAMPLE)
    assert sizes == [3, 1, 1, 1]
    assert found["engine"]["max_completions"] == SAMPLE["n"]
    assert expected["engine"]["max_completions"] is None
    sizes.clear()
    learner.sample(**SAMPLE)
    assert sizes == [1, 1, 1]
    ids = [[[r["ids"] for r in group] for group in a["groups"]] for a in (expected, found)]
    assert ids[0] == ids[1]
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        learner.sample(**SAMPLE)


def test_run_continues_from_its_checkpoint_bit_exactly(
    learner: Learner, config: NodeConfig, tmp_path: Path
) -> None:
    batch = _batch(learner.sample(**SAMPLE))
    for _ in range(2):
        learner.train(groups=batch)
    folder = str(tmp_path / "checkpoints")
    written = learner.checkpoint(path=folder, node_state=b"cursor", accuracy=0.5)
    after = learner.train(groups=batch)
    weights, sampled = _weights(learner), learner.sample(**SAMPLE)["groups"]

    again = Learner()
    answer = again.init(**_init(config, tmp_path))
    assert (answer["step"], answer["node_state"]) == (2, b"cursor")
    assert answer["checkpoint"] == written["path"]
    repeated = again.train(groups=batch)
    assert (repeated["step"], repeated["loss"]) == (3, after["loss"])
    assert _equal(_weights(again), weights)
    assert again.sample(**SAMPLE)["groups"] == sampled


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-bf16"])
def test_bfloat16_run_continues_bit_exactly_with_updates_below_its_spacing(
    tiny_folder: Path, tmp_path: Path, optimizer: Any
) -> None:
    config = NodeConfig(
        model=ModelSection(path=str(tiny_folder), precision="bf16", threads=1),
        train=TrainSection(learning_rate=1e-6, optimizer=optimizer),
    )
    learner, again = Learner(), Learner()
    learner.init(**_init(config, tmp_path))
    batch = _batch(learner.sample(**SAMPLE))
    for _ in range(2):
        learner.train(groups=batch)
    learner.checkpoint(path=str(tmp_path / "checkpoints"), node_state=b"")
    again.init(**_init(config, tmp_path))
    for _ in range(2):
        after, repeated = (each.train(groups=batch) for each in (learner, again))
    assert after["loss"] == repeated["loss"]
    assert _equal(_weights(again), _weights(learner))
    first, second = (each._model.trainer.state_dict()[0] for each in (learner, again))
    assert _equal(first, second)
    low = [tensor for key, tensor in first.items() if key.startswith("low/")]
    assert any(bool(tensor.any()) for tensor in low)  # updates are there, below the weights'


def test_init_anew_goes_back_to_the_checkpoint(
    learner: Learner, config: NodeConfig, tmp_path: Path
) -> None:
    before = _weights(learner)
    learner.train(groups=_batch(learner.sample(**SAMPLE)))
    assert not _equal(_weights(learner), before)
    assert learner.init(**_init(config, tmp_path))["step"] == 0
    assert _equal(_weights(learner), before)


def test_checkpoints_of_another_folder(
    learner: Learner, config: NodeConfig, tmp_path: Path
) -> None:
    learner.train(groups=_batch(learner.sample(**SAMPLE)))
    learner.checkpoint(path=str(tmp_path / "elsewhere"), node_state=b"")
    arguments = _init(config, tmp_path, resume=str(tmp_path / "elsewhere"))
    assert Learner().init(**arguments)["step"] == 1


def test_as_many_checkpoints_as_configured(learner: Learner, tmp_path: Path) -> None:
    batch = _batch(learner.sample(**SAMPLE))
    for _ in range(4):
        learner.train(groups=batch)
        learner.checkpoint(path=str(tmp_path / "checkpoints"), node_state=b"")
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]


def test_checkpoint_that_cannot_be_written_is_an_error_and_no_end(
    learner: Learner, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LearnerError, match="no checkpoint written in"):
        learner.checkpoint(path=str(tmp_path / "file"), node_state=b"")
    learner.sample(**SAMPLE)


def test_run_of_another_mode_is_refused(
    learner: Learner, config: NodeConfig, tmp_path: Path
) -> None:
    learner.checkpoint(path=str(tmp_path / "checkpoints"), node_state=b"")
    changes = {"full": {"mode": "lora"}, "lora": {"lora_rank": 8}}[config.model.mode]
    named = {"full": r"model\.mode: was 'full', is 'lora'", "lora": "lora_rank: was 4, is 8"}
    other = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    with pytest.raises(ConfigError, match=named[config.model.mode]):
        Learner().init(**_init(other, tmp_path))


def test_stop_token_that_is_none(config: NodeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"\[{VOCAB_SIZE}\]"):
        Learner().init(**_init(config, tmp_path, stop_token_ids=[STOP_ID, VOCAB_SIZE]))


def test_nothing_before_init() -> None:
    with pytest.raises(LearnerError, match="init comes first"):
        Learner().sample(**SAMPLE)


async def test_child_killed_in_training_resumes(tiny_folder: Path, tmp_path: Path) -> None:
    """The whole way: process, socket, torch, checkpoint."""
    config = NodeConfig(
        model=ModelSection(path=str(tiny_folder), threads=1),
        train=TrainSection(learning_rate=1e-3),
    )
    child = LearnerProcess(tmp_path / "learner.log", threads=1)
    await child.start()
    try:
        await child.call("init", timeout_s=120, **_init(config, tmp_path))
        batch = _batch(await child.call("sample", timeout_s=60, **SAMPLE))
        report = await child.call("train", timeout_s=60, groups=batch)
        assert report["stepped"]
        folder = str(tmp_path / "checkpoints")
        await child.call("checkpoint", timeout_s=60, path=folder, node_state=b"x", accuracy=None)
        expected = await child.call("sample", timeout_s=60, **SAMPLE)
        await child.call("train", timeout_s=60, groups=batch)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        with contextlib.suppress(LearnerError):
            await child.call("train", timeout_s=60, groups=batch)
        assert not child.alive
        await child.start()
        answer = await child.call("init", timeout_s=120, **_init(config, tmp_path))
        assert (answer["step"], answer["node_state"]) == (1, b"x")
        found = await child.call("sample", timeout_s=60, **SAMPLE)
        assert found["groups"] == expected["groups"]
    finally:
        await child.close()
