"""Checks of this machine: packages, devices, disk, identity, ports, the path of data.

Owns: checks that need no peer. Does not know: torch; a child process asks it.
"""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import numpy as np
from packaging.requirements import Requirement

from swarm import model_files
from swarm.config import NodeConfig
from swarm.control import control_request
from swarm.doctor.findings import Finding, failed, ok, skipped, warning
from swarm.errors import ConfigError, ExitCode, IdentityError, NotRunningError
from swarm.node.store import BlobStore
from swarm.paths import DataDir
from swarm.protocol.codec import CodecLimits, blob_hash, decode_group, encode_group
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import RewardSpec
from swarm.protocol.prompts import Prompt
from swarm.protocol.rollout import Finish, Rollout, RolloutGroup
from swarm.rewards.grading import Grader
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import Tokenizer

PROBE_TIMEOUT_S = 600.0
"""For importing torch on a slow disk and waking a GPU."""

IMPORTED = ("swarm.node.volunteer", "uvloop", "transformers", "peft")
"""What a node and its learner import, tried in a child process one after the other."""

_IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    print(name, flush=True)
    importlib.import_module(name)
"""

SELF_TEST_S = 1.0

_GB = 1e9


def python() -> Finding:
    """The interpreter and the system."""
    figure = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        return failed("python", figure, "use Linux, macOS, or WSL2 on Windows", ExitCode.CONFIG)
    return ok("python", figure)


def packages() -> Finding:
    """What pyproject.toml asks for is installed in these versions and can be imported."""
    wrong = []
    for text in requires("swarm-node") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, needed is {requirement.specifier}")
    fix = "install again, in a checkout: pip install --constraint constraints.txt ."
    if wrong:
        return failed("packages", "; ".join(wrong), fix, ExitCode.CONFIG)
    code, out, err = _child("-c", _IMPORT_ALL, *IMPORTED)
    if code != 0:
        name = (out.split() or ["python"])[-1]
        why = (err.strip().splitlines() or [f"exit status {code}"])[-1]
        return failed("packages", f"import {name}: {why[:200]}", fix, ExitCode.CONFIG)
    shown = ", ".join(f"{name} {version(name)}" for name in ("hivemind", "torch", "transformers"))
    return ok("packages", shown)


def device(config: NodeConfig) -> tuple[Finding, dict[str, Any]]:
    """What the learner would compute on, and that it does compute.

    Returns:
        The finding, and what swarm.rl.probe said.
    """
    code, out, err = _child("-m", "swarm.rl.probe", config.model.device)
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError:
        why = (err.strip().splitlines() or [f"exit status {code}"])[-1]
        return (
            failed("device", f"torch: {why[:200]}", "reinstall torch for this machine"),
            {},
        )
    return _device_finding(found, config), found


def _device_finding(found: dict[str, Any], config: NodeConfig) -> Finding:
    build = f"torch {found['torch']}"
    if found.get("device") == "cuda" and "architecture" in found:
        figure = (
            f"{found['name']} ({found['architecture']}), {found['memory_free_bytes'] / _GB:.1f} of "
            f"{found['memory_total_bytes'] / _GB:.1f} GB free, {build}"
        )
        if "error" in found:
            return failed(
                "device",
                f"{figure}: {found['error']}",
                f"install a torch build for {found['architecture']}; this one is for "
                f"{', '.join(found['built_for'])}",
            )
        return ok("device", figure)
    if "error" in found:
        return failed(
            "device",
            f"model.device = {config.model.device!r}: {found['error']} ({build})",
            "set model.device to auto, or install the torch build for the device",
        )
    if found["device"] == "cpu":
        return warning(
            "device",
            f"no GPU: the CPU, {os.cpu_count()} cores, {build}",
            "fine for models of some million parameters; larger ones need a GPU",
        )
    return ok("device", f"{found['device']}, {build}")


def disk(config: NodeConfig, data_dir: DataDir) -> Finding:
    """Room for rollouts and checkpoints where the data directory is."""
    place = next(p for p in (data_dir.root, *data_dir.root.parents) if p.exists())
    if not os.access(place, os.W_OK):
        return failed(
            "disk", f"{place} cannot be written", "choose another --data-dir", ExitCode.CONFIG
        )
    free_bytes = shutil.disk_usage(place).free
    rollouts_bytes = config.limits.blob_store_mb * 1_000_000
    checkpoint_bytes = _checkpoint_bytes(config)
    kept = config.checkpoint.keep + 2  # the best one, and the one being written
    wanted = rollouts_bytes + kept * checkpoint_bytes
    figure = (
        f"{free_bytes / _GB:.1f} GB free at {place}; {rollouts_bytes / _GB:.1f} GB for rollouts"
        + (f", {kept} checkpoints of {checkpoint_bytes / _GB:.1f} GB" if checkpoint_bytes else "")
    )
    if free_bytes < wanted:
        return warning(
            "disk",
            figure,
            f"free {(wanted - free_bytes) / _GB:.1f} GB, or lower limits.blob_store_mb or "
            "checkpoint.keep",
        )
    return ok("disk", figure)


def _checkpoint_bytes(config: NodeConfig) -> int:
    """About the size of a full checkpoint: weights and AdamW's two moments; 0: unknown or small."""
    try:
        folder = model_files.resolve(config.model) if config.model.path else None
    except ConfigError:
        return 0
    if folder is None or config.model.mode == "lora":
        return 0
    return 3 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def identity(data_dir: DataDir) -> Finding:
    """The key, and who may read it."""
    path = data_dir.identity_path
    if not path.exists():
        return skipped("identity", f"{path} does not exist yet; `join` and `seed` make it")
    try:
        peer_id = Identity.load_or_create(path).peer_id
    except IdentityError as error:
        return failed(
            "identity",
            str(error),
            "mend the file's owner and mode (chmod 400), or put a backup back with "
            "`swarm-node identity import`",
            error.exit_code,
        )
    return ok("identity", peer_id)


def running(data_dir: DataDir) -> tuple[Finding, dict[str, Any] | None]:
    """Whether a node runs on the data directory, and how it is.

    Returns:
        The finding, and its status.
    """
    try:
        status = control_request(data_dir.control_socket, "status", timeout_s=10.0)
    except NotRunningError:
        return skipped("node", f"none is running on {data_dir.root}"), None
    doing = f"pid {status['node']['pid']}, {status['activity']['doing']}"
    if status["problems"]:
        return (
            warning("node", f"{doing}: {'; '.join(status['problems'])}", "see `swarm-node status`"),
            status,
        )
    return ok("node", doing), status


def ports(config: NodeConfig, *, node_runs: bool) -> Finding:
    """Whether the ports that node.toml names are free."""
    wanted = [("network.port", config.network.host, config.network.port)]
    if config.metrics.enabled:
        wanted.append(("metrics.port", config.metrics.host, config.metrics.port))
    named = [(field, host, port) for field, host, port in wanted if port]
    if node_runs:
        return skipped("ports", "held by the node that runs")
    for field, host, port in named:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                return failed(
                    "ports",
                    f"{field} {port} on {host}: {error.strerror or error}",
                    f"end what holds it (`ss -tlnp`), or set {field} to another port or to 0",
                    ExitCode.TRY_AGAIN,
                )
    figure = ", ".join(f"{field} {port}" for field, _, port in named)
    return ok("ports", f"{figure} free" if figure else "any free one is taken")


async def data_path() -> Finding:
    """Encode, store, read, decode and reward groups for a second, as a node does."""
    tokenizer = Tokenizer.from_folder(Path(__file__).parents[1] / "models" / "arith-small")
    signer = Identity(os.urandom(32))
    answer = Prompt(prompt="1+1=", messages=None, answer="2")
    groups = done_bytes = 0
    with tempfile.TemporaryDirectory(prefix="swarm-node-") as folder:
        store = BlobStore(Path(folder), quota_bytes=64 << 20, min_free_bytes=0)
        async with WorkerPool(1, 30.0) as workers:
            grader = Grader(workers, tokenizer, RewardSpec(name="number", params={}))
            started = time.perf_counter()
            while groups < 2 or time.perf_counter() - started < SELF_TEST_S:
                group = _group(tokenizer, signer, groups)
                blob = encode_group(group, signer)
                store.put(blob_hash(blob), blob)
                back = decode_group(
                    store.get(blob_hash(blob)) or b"", CodecLimits(len(group.rollouts), 64)
                )
                rewards = await grader.rewards(
                    answer, [(rollout.token_ids, True) for rollout in back.rollouts]
                )
                if rewards is None:
                    return failed(
                        "data path",
                        f"rewards: {grader.trouble}",
                        "see that child processes may start (ulimit -u, ulimit -v)",
                    )
                if rewards.tolist() != [1.0, 0.0]:
                    return failed(
                        "data path",
                        f"rewards of 2 and 3 for 1+1 are {rewards.tolist()}",
                        "this is a fault of the program: send `swarm-node bugreport`",
                    )
                if not groups:  # the first one started the worker
                    started = time.perf_counter()
                else:
                    done_bytes += len(blob)
                groups += 1
            seconds = time.perf_counter() - started
    return ok(
        "data path",
        f"{(groups - 1) / seconds:.0f} groups/s signed, stored, read, checked and rewarded "
        f"({done_bytes / seconds / 1000:.0f} kB/s)",
    )


def _group(tokenizer: Tokenizer, signer: Identity, number: int) -> RolloutGroup:
    rollouts = []
    for text in ("2", "3"):
        ids = np.asarray(tokenizer.encode(text), dtype=np.int32)
        rollouts.append(Rollout(ids, np.full(len(ids), -0.5, np.float32), Finish.STOP))
    return RolloutGroup(
        swarm_id=bytes(32),
        publisher=signer.peer_id,
        epoch=0,
        prompt_id=number,
        prompt_sha256=bytes(32),
        policy_step=0,
        created_ms=0,
        temperature=1.0,
        rollouts=tuple(rollouts),
        claimed_rewards=np.zeros(2, np.float32),
    )


def _child(*arguments: str) -> tuple[int, str, str]:
    """Run this interpreter; exit status, stdout, stderr."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    return done.returncode, done.stdout, done.stderr
