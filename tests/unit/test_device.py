"""Choosing the device, on machines that are made up."""

from pathlib import Path

import pytest
import torch

from swarm.errors import ConfigError
from swarm.rl.device import choose_device, choose_dtype, has_kernels, nvidia_gpus


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], count: int = 1) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "compute_90"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")


def test_auto_without_gpu_is_the_cpu() -> None:
    assert choose_device("auto", list).type == "cpu"
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize("wanted", ["auto", "cuda", "cuda:1"])
@pytest.mark.parametrize(
    ("cuda", "says"),
    [(None, "build without CUDA: install"), ("12.8", r"CUDA 12\.8\).*update the driver")],
)
def test_gpu_that_torch_cannot_use_is_an_error_with_the_fix(
    wanted: str, cuda: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=rf"RTX 4090.*{says}.*model\.device = 'cpu'"):
        choose_device(wanted, lambda: ["RTX 4090"])
    assert choose_device("cpu", lambda: ["RTX 4090"]).type == "cpu"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpu_hidden_on_purpose_is_none(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert choose_device("auto", lambda: ["RTX 4090"]).type == "cpu"


def test_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _gpu(monkeypatch, (7, 5))
    with pytest.raises(ConfigError, match=r"Some GPU is sm_75.*built for sm_80, sm_90"):
        choose_device("auto", list)


def test_one_gpu_of_several(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _gpu(monkeypatch, (8, 9), count=2)
    with caplog.at_level("INFO"):
        assert choose_device("auto", list) == torch.device("cuda", 0)
    assert "a node trains on one" in caplog.text
    assert choose_device("cuda:1", list) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        choose_device("cuda:2", list)


@pytest.mark.parametrize(
    ("capability", "runs"),
    [((8, 0), True), ((8, 9), True), ((9, 0), True), ((10, 0), True), ((7, 5), False)],
)
def test_kernels_run_on_their_generation_and_compiled_ones_on_later(
    capability: tuple[int, int], runs: bool
) -> None:
    assert has_kernels(capability, ["sm_80", "sm_90a", "compute_90"]) == runs


def test_driver_names_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t 1\n")
    assert nvidia_gpus(tmp_path) == ["NVIDIA H200"]
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA L4 (UUID: GPU-1)'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia_gpus(tmp_path / "nowhere") == ["NVIDIA L4"]
    command.write_text("#!/bin/sh\nexit 9\n")
    assert nvidia_gpus(tmp_path / "nowhere") == []
