"""What the doctor makes of what it finds."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.config import NodeConfig, load_config
from swarm.doctor import machine, network
from swarm.doctor.findings import Verdict, exit_code, failed, ok, report, skipped, warning
from swarm.doctor.memory import memory
from swarm.errors import ExitCode
from swarm.paths import DataDir
from swarm.protocol.identity import Identity

ADDRESS = "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWAda"
CUDA = {
    "torch": "2.9.0+cu128",
    "device": "cuda",
    "name": "NVIDIA H200",
    "architecture": "sm_90",
    "built_for": ["sm_80", "sm_90"],
    "memory_free_bytes": 130e9,
    "memory_total_bytes": 140e9,
}


def config(**changes: str) -> NodeConfig:
    return load_config(None, {k.replace("__", "."): v for k, v in changes.items()}, environ={})


def status(*addresses: str) -> dict[str, Any]:
    return {"network": {"addresses": list(addresses)}}


def test_the_exit_code_says_the_worst() -> None:
    fine, hint = ok("a", ""), warning("b", "", "do")
    bad, worse = failed("c", "", "do", ExitCode.UNREACHABLE), failed("d", "", "do")
    assert exit_code([fine, skipped("e", "")]) == ExitCode.OK
    assert exit_code([fine, hint]) == ExitCode.DEGRADED
    assert exit_code([hint, bad, worse]) == ExitCode.UNREACHABLE
    result = report([fine, hint, bad])
    assert result["counts"] == {"ok": 1, "skipped": 0, "warning": 1, "failed": 1}
    assert result["exit_code"] == 69
    assert [f.get("exit_code") for f in result["findings"]] == [None, None, 69]
    assert json.loads(json.dumps(result)) == result


def test_packages_are_as_pyproject_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "IMPORTED", ("json",))
    assert machine.packages().verdict is Verdict.OK
    monkeypatch.setattr(machine, "IMPORTED", ("json", "no_such_module", "json"))
    found = machine.packages()
    assert found.verdict is Verdict.FAILED
    assert "import no_such_module" in found.figure
    monkeypatch.setattr(machine, "requires", lambda _: ["numpy>=99", "nothing-of-this-name"])
    found = machine.packages()
    assert "numpy is" in found.figure
    assert "nothing-of-this-name is missing" in found.figure


def test_a_gpu_that_the_installed_torch_is_not_built_for() -> None:
    found = machine._device_finding(
        {**CUDA, "architecture": "sm_120", "error": "no kernel image is available"},
        config(),
    )
    assert found.verdict is Verdict.FAILED
    assert "no kernel image" in found.figure
    assert "sm_120" in found.fix
    assert "sm_90" in found.fix
    assert machine._device_finding(CUDA, config()).verdict is Verdict.OK


def test_a_gpu_that_torch_cannot_use() -> None:
    found = machine._device_finding(
        {"torch": "2.9.0+cpu", "error": "NVIDIA X is here, but torch cannot use it"}, config()
    )
    assert found.verdict is Verdict.FAILED
    assert "NVIDIA X" in found.figure


def test_the_probe_computes_on_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarm.rl.probe", "cpu"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["device"] == "cpu"
    assert found["result"] == pytest.approx(1.0)


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = DataDir(tmp_path / "not" / "yet")
    assert machine.disk(config(limits__blob_store_mb="1"), data_dir).verdict is Verdict.OK
    found = machine.disk(config(limits__blob_store_mb="1000000000"), data_dir)
    assert found.verdict is Verdict.WARNING
    assert "blob_store_mb" in found.fix
    monkeypatch.setattr(machine.os, "access", lambda _path, _mode: False)
    assert machine.disk(config(), data_dir).verdict is Verdict.FAILED


def test_identity(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    assert machine.identity(data_dir).verdict is Verdict.SKIPPED
    assert not data_dir.identity_path.exists()
    made = Identity.load_or_create(data_dir.identity_path)
    assert machine.identity(data_dir) == ok("identity", made.peer_id)
    data_dir.identity_path.chmod(0o644)
    found = machine.identity(data_dir)
    assert (found.verdict, found.exit_code) == (Verdict.FAILED, ExitCode.PERMISSION)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = config(network__host="127.0.0.1", network__port=str(port))
        found = machine.ports(wanted, node_runs=False)
        assert found.verdict is Verdict.FAILED
        assert str(port) in found.figure
        assert machine.ports(wanted, node_runs=True).verdict is Verdict.SKIPPED
    assert machine.ports(wanted, node_runs=False).verdict is Verdict.OK


async def test_the_path_of_data() -> None:
    found = await machine.data_path()
    assert found.verdict is Verdict.OK, found.figure
    assert "groups/s" in found.figure


def examination(results: dict[str, str], **changes: Any) -> network.Examination:
    known = {"skew_s": None, "charter": None, "trouble": "", "seconds": 0.0}
    return network.Examination(results=results, **{**known, **changes})


def test_one_address_that_answers_is_enough() -> None:
    results = {ADDRESS: "TCP refused: nothing listens", "/ip4/192.0.2.2/tcp/1/p2p/x": "connected"}
    gone, there = network.bootstrap(examination(results))
    assert (gone.verdict, there.verdict) == (Verdict.WARNING, Verdict.OK)
    (alone,) = network.bootstrap(examination({ADDRESS: "TCP timed out"}))
    assert (alone.verdict, alone.exit_code) == (Verdict.FAILED, ExitCode.UNREACHABLE)
    assert "TCP timed out" in alone.figure


def test_clocks() -> None:
    assert network.clock(0.2).verdict is Verdict.OK
    assert network.clock(-2.0).verdict is Verdict.WARNING
    found = network.clock(7.0)
    assert found.verdict is Verdict.FAILED
    assert found.figure.startswith("-7.00 s")  # this machine's clock is behind
    assert network.clock(None).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(
    ("addresses", "verdict", "word"),
    [
        (("/ip4/127.0.0.1/tcp/1/p2p/x", "/ip4/8.8.8.8/tcp/1/p2p/x"), Verdict.OK, "directly"),
        (("/dns4/node.example/tcp/1/p2p/x",), Verdict.OK, "directly"),
        (("/ip4/8.8.8.8/tcp/1/p2p/r/p2p-circuit/p2p/x",), Verdict.OK, "relays"),
        (("/ip4/192.168.1.5/tcp/1/p2p/x",), Verdict.WARNING, "local network"),
        (("/ip4/127.0.0.1/tcp/1/p2p/x",), Verdict.WARNING, "this machine"),
    ],
)
def test_how_others_reach_this_node(
    addresses: tuple[str, ...], verdict: Verdict, word: str
) -> None:
    found = network.reachability(status(*addresses), config())
    assert found.verdict is verdict
    assert word in found.figure


@pytest.mark.parametrize(
    ("host", "fix"), [("127.0.0.1", "network.host to 0.0.0.0"), ("0.0.0.0", "to a network")]
)
def test_what_to_do_where_only_this_machine_reaches_it(host: str, fix: str) -> None:
    found = network.reachability(status("/ip4/127.0.0.1/tcp/1/p2p/x"), config(network__host=host))
    assert fix in found.fix


def charter() -> Any:
    sampling = SimpleNamespace(group_size=4, max_prompt_tokens=16, max_completion_tokens=10)
    return SimpleNamespace(manifest=SimpleNamespace(sampling=sampling))


def test_memory_against_what_the_device_has() -> None:
    model = config(model__path=str(Path(machine.__file__).parents[1] / "models" / "arith-large"))
    found = memory(model, charter(), CUDA)
    assert found.verdict is Verdict.OK, found
    assert "peak" in found.figure
    small = {**CUDA, "memory_total_bytes": 1e6}
    assert memory(model, charter(), small).verdict is Verdict.FAILED
    assert memory(config(), charter(), CUDA).verdict is Verdict.SKIPPED
    assert memory(model, None, CUDA).verdict is Verdict.SKIPPED
    assert memory(model, charter(), {}).verdict is Verdict.SKIPPED
