"""What vLLM is told and when, its death and its start; vLLM is fake_vllm, without a model.

That samples come from the right weights is test_engine_contract's.
"""

import contextlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tiny_model import VOCAB_SIZE, write_qwen2

from swarm import paths
from swarm.config import EngineSection, ModelSection
from swarm.errors import ConfigError, LearnerError
from swarm.paths import RunDir
from swarm.protocol.rollout import Finish
from swarm.rl import vllm_engine as module
from swarm.rl import vllm_process
from swarm.rl.engine import SamplingParams
from swarm.rl.policy import Policy
from swarm.rl.vllm_engine import VllmEngine
from swarm.rl.vllm_process import VllmFailedError
from swarm.rl.weight_export import export_model
from tests.fake_vllm import write_interpreter

SAMPLING = SamplingParams(0.9, 5, (3,))
WEIGHTS = "model.safetensors"


class Run:
    """A run's folder with a fake interpreter, and what the fake was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = write_interpreter(folder)

    def engine(self, policy: Policy, **section: Any) -> VllmEngine:
        chosen = EngineSection(kind="vllm", **{"python": str(self.python), **section})
        return VllmEngine(policy, chosen, run_dir=RunDir(self.folder), max_tokens=100, seed=7)

    def told(self) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        # Without a last line that is being written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def calls(self) -> list[str]:
        return [line["call"] for line in self.told()]

    def fault(self, text: str) -> None:
        (self.folder / "fault").write_text(text)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path / "shm")
    return Run(tmp_path)


@pytest.fixture(scope="module", params=["full", "lora"])
def policy(request: pytest.FixtureRequest, tiny_folder: Path) -> Policy:
    section = ModelSection(path=str(tiny_folder), mode=request.param, lora_rank=12)
    return Policy.load(section, seed=3)


@pytest.fixture
def full(tiny_folder: Path) -> Policy:
    return Policy.load(ModelSection(path=str(tiny_folder)), seed=3)


@pytest.fixture
def engine(run: Run, full: Policy) -> Iterator[VllmEngine]:
    started = run.engine(full)
    yield started
    started.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def test_how_vllm_is_started_and_asked(run: Run, policy: Policy) -> None:
    engine = run.engine(policy)
    try:
        groups = engine.generate([[1, 2], [3]], 3, SAMPLING, [5, 6])
    finally:
        engine.close()
    assert [len(group) for group in groups] == [3, 3]
    assert len({tuple(r.token_ids.tolist()) for group in groups for r in group}) == 6
    for rollout in (r for group in groups for r in group):
        assert rollout.finish is Finish.LENGTH
        assert rollout.logprobs.tolist() == [-1.25] * 5
    load, *rest = run.told()
    arguments = load["arguments"]
    assert WEIGHTS in load["files"]
    assert arguments["trust_remote_code"] is False
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["generation_config"] == "vllm"
    assert (arguments["max_model_len"], arguments["dtype"]) == (100, "float32")
    if policy.mode == "lora":
        assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 16)
        assert [line["call"] for line in rest] == ["add_lora", "reset_prefix_cache", "generate"]
        assert rest[-1]["adapter"] == rest[0]["number"] == 1
    else:
        assert "enable_lora" not in arguments
        assert [line["call"] for line in rest] == ["generate"]


def test_new_weights_are_handed_over_once_and_the_cache_is_dropped(
    run: Run, policy: Policy
) -> None:
    engine = run.engine(policy)
    try:
        engine.generate([[1]], 1, SAMPLING, [5])
        before = len(run.told())
        engine.sync()
        engine.sync()
        syncs = engine.syncs
        engine.generate([[1]], 1, SAMPLING, [5])
        engine.generate([[1]], 1, SAMPLING, [5])
        told = run.told()[before:]
        names = [line["call"] for line in told]
        if policy.mode == "lora":
            assert names == [
                "add_lora", "remove_lora", "reset_prefix_cache", "generate", "generate",
            ]  # fmt: skip
            assert (told[0]["number"], told[1]["number"], told[3]["adapter"]) == (2, 1, 2)
            assert "adapter_model.safetensors" in told[0]["files"]
        else:
            assert names == ["reload_weights", "reset_prefix_cache", "generate", "generate"]
            assert WEIGHTS in told[0]["files"]
        assert engine.syncs == syncs + 1
        assert not list(run.folder.glob("shm/*/**/*.safetensors"))  # memory is given back
    finally:
        engine.close()
    assert not list((run.folder / "shm").iterdir())


def test_sleep_on_a_shared_gpu(run: Run, engine: VllmEngine) -> None:
    """Weights first, then new ones, then the cache; a second sleep is none."""
    engine.generate([[1]], 1, SAMPLING, [5])
    engine.sleep()  # not shared
    assert "sleep" not in run.calls()
    for level, expected in (
        (1, ["sleep", "wake_up", "wake_up", "generate"]),
        (2, ["sleep", "wake_up", "reload_weights", "reset_prefix_cache", "wake_up", "generate"]),
    ):
        engine._sleep_level = level
        before = len(run.told())
        engine.sleep()
        engine.sleep()
        engine.generate([[1]], 1, SAMPLING, [5])
        told = run.told()[before:]
        assert [line["call"] for line in told] == expected
        assert told[0]["level"] == level
        assert [line["tags"] for line in told if line["call"] == "wake_up"] == [
            ["weights"], ["kv_cache"],
        ]  # fmt: skip


@pytest.mark.parametrize("fault", ["", "generate: kill", "generate: error"])
def test_death_and_failure_are_mended_by_a_new_start(
    run: Run, engine: VllmEngine, fault: str
) -> None:
    expected = engine.generate([[1]], 2, SAMPLING, [5])
    first = engine.pid
    assert first is not None
    if fault:
        run.fault(fault)
        with pytest.raises(VllmFailedError, match=r"SIGKILL|told to fail"):
            engine.generate([[1]], 2, SAMPLING, [5])  # the new one fails too
        (run.folder / "fault").unlink()
    else:
        os.kill(first, signal.SIGKILL)
    found = engine.generate([[1]], 2, SAMPLING, [5])
    assert found[0][0].token_ids.tolist() == expected[0][0].token_ids.tolist()
    assert not psutil.pid_exists(first)
    assert engine.restarts == (1 if not fault else 2)
    assert run.calls().count("load") == 1 + engine.restarts
    assert engine.describe()["restarts"] == engine.restarts


def test_no_vllm_no_interpreter_no_start(run: Run, full: Policy, tmp_path: Path) -> None:
    says = r"vLLM cannot be imported; .*swarm-node\[vllm\]"
    with pytest.raises(ConfigError, match=says) as caught:
        run.engine(full, python="")
    assert "Traceback" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"engine\.python = .*No such file"):
        run.engine(full, python=str(tmp_path / "missing"))
    run.fault("load: error")
    with pytest.raises(LearnerError, match="load: vLLM failed with RuntimeError: the fake was"):
        run.engine(full)
    run.fault("load: kill")
    with pytest.raises(LearnerError, match=r"load: vLLM .* was killed by SIGKILL"):
        run.engine(full)
    assert not list((run.folder / "shm").iterdir())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (b"#!/bin/sh\nexit 3\n", r"it ended with exit status 3 in place of running vllm_child\.py"),
        (b"#!/bin/sh\nexec sleep 60\n", r"it did not begin within 1 s"),
        (b"no program\n", r"Exec format error"),
        (b"#!/bin/sh\nkill -9 $$\n", None),
    ],
)
def test_an_interpreter_that_is_no_python(
    run: Run,
    full: Policy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: bytes,
    says: str | None,
) -> None:
    """An error of the settings, since to start it again would never help; a killed one may."""
    monkeypatch.setattr(vllm_process, "GREETING_S", 1.0)
    path = tmp_path / "python"
    path.write_bytes(program)
    path.chmod(0o700)
    if says is None:
        with pytest.raises(VllmFailedError, match="was killed by SIGKILL before it began"):
            run.engine(full, python=str(path))
    else:
        with pytest.raises(ConfigError, match=rf"engine\.python = .*: {says}"):
            run.engine(full, python=str(path))


@pytest.mark.parametrize(
    "fault",
    [
        "hang",
        pytest.param("stop", marks=pytest.mark.skipif(sys.platform != "linux", reason="by prctl")),
    ],
)
def test_it_ends_in_the_middle_of_work_when_the_learner_is_killed(
    run: Run, tiny_folder: Path, fault: str
) -> None:
    run.fault(f"generate: {fault}")
    learner = os.fork()
    if not learner:
        # Not a new interpreter: torch is loaded here, and nothing of it is used by threads.
        policy = Policy.load(ModelSection(path=str(tiny_folder)), seed=3)
        run.engine(policy).generate([[1]], 1, SAMPLING, [5])
        os._exit(1)
    until(lambda: "generate" in run.calls())
    child = psutil.Process(int(run.told()[0]["pid"]))
    os.kill(learner, signal.SIGKILL)
    os.waitpid(learner, 0)
    until(lambda: not runs(child))


def test_temperature_that_vllm_has_not(run: Run, engine: VllmEngine) -> None:
    with pytest.raises(ConfigError, match=r"temperature 2\.5, vLLM at 2 at most"):
        engine.generate([[1]], 1, SamplingParams(2.5, 5, ()), [1])
    assert run.calls() == ["load"]


@pytest.mark.parametrize(
    ("visible", "index", "own", "expected"),
    [
        (None, 0, "", None),  # the first, as vLLM takes by itself
        (None, 1, "", "1"),
        ("4,GPU-5", 1, "", "GPU-5"),
        ("4,5", 0, "7", "7"),
    ],
)
def test_gpu_that_vllm_sees(
    engine: VllmEngine,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    index: int,
    own: str,
    expected: str | None,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(engine._policy, "device", torch.device("cuda", index))
    engine._section = EngineSection(kind="vllm", device=own)
    assert engine._environment().get("CUDA_VISIBLE_DEVICES") == expected


def test_rank_that_vllm_has_not(run: Run, tiny_folder: Path) -> None:
    section = ModelSection(path=str(tiny_folder), mode="lora", lora_rank=600)
    with pytest.raises(ConfigError, match=r"lora_rank = 600: vLLM takes at most 512"):
        run.engine(Policy.load(section, seed=0))


def test_files_of_an_earlier_start_are_removed_and_private(
    run: Run, full: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.engine(full)
    (place,) = (run.folder / "shm").iterdir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    (place / "left").write_text("by a kill -9")
    second = run.engine(full)
    assert not (place / "left").exists()
    second.close()
    first.close()
    monkeypatch.setattr(module, "ROOM", 1e12)
    third = run.engine(full)
    assert (run.folder / "engine" / "model" / "config.json").is_file()
    third.close()
    assert not (run.folder / "engine").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["full", "lora"])
def test_exported_model_has_its_own_head_and_the_swarms_ids(
    tmp_path: Path, tied: bool, mode: str
) -> None:
    from transformers import AutoModelForCausalLM

    source = write_qwen2(tmp_path / "source", vocab_size=VOCAB_SIZE + 4, tie_word_embeddings=tied)
    section = ModelSection(path=str(source), mode=mode, lora_rank=4)
    policy = Policy.load(section, seed=0, vocab_size=VOCAB_SIZE)
    export_model(policy, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (False, VOCAB_SIZE)
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert len(tensors["lm_head.weight"]) == VOCAB_SIZE
    assert len(tensors["model.embed_tokens.weight"]) == VOCAB_SIZE
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    found, _ = Policy(
        loaded.eval(), mode="full", source=tmp_path, vocab_size=None
    ).completion_logprobs([[1, 2]], [[3, 4, 5]], 1.0)
    expected, _ = policy.completion_logprobs([[1, 2]], [[3, 4, 5]], 1.0)
    assert found[0].tolist() == pytest.approx(expected[0].tolist(), abs=1e-5)
