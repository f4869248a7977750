"""Faults of real nodes: whatever dies, hangs or fills up, the node is back to training by itself,
as itself, the others go on, and `status` names the condition while it lasts."""

import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from examined import faulty_files
from nodes import (
    LOOPBACK,
    Node,
    Swarm,
    cli,
    command_line,
    settings,
    sums,
    wait_until,
    write_prompts,
)

from swarm.paths import DataDir

PROMPTS = sums(range(3, 20), range(2, 12))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """An organizer; the tests that need them add volunteers."""
    folder = tmp_path_factory.mktemp("faults")
    with Swarm(folder) as swarm:
        swarm.seed(write_prompts(folder / "prompts.jsonl", PROMPTS))
        yield swarm


def trains_on(node: Node, steps: int = 2) -> None:
    step = node.step
    wait_until(lambda: node.step >= step + steps, f"{node.name} trains on", [node])


def replaced(node: Node, word: str, pid: int) -> bool:
    """Whether a node has a child of this kind again, after that one."""
    found = [child.pid for child in node.children() if word in command_line(child)]
    return bool(found) and pid not in found


def running(swarm: Swarm) -> set[str]:
    return {node.name for node in swarm.nodes if node.running}


def named(swarm: Swarm, name: str) -> Node:
    """The running node of that name."""
    return next(node for node in swarm.nodes if node.name == name and node.running)


def fill_up(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(65_536))


def volunteer(swarm: Swarm, name: str, **changes: str) -> Node:
    node = named(swarm, name) if name in running(swarm) else swarm.join(name, **changes)
    wait_until(lambda: node.step >= 2, f"{name} trains", [node])
    return node


# -- without a model: quick ----------------------------------------------------------------------


def test_an_organizer_whose_network_daemon_is_killed_stays_who_it_is(swarm: Swarm) -> None:
    organizer = named(swarm, "organizer")
    before, daemon = organizer.status(), organizer.child("p2pd")
    daemon.kill()
    wait_until(
        lambda: organizer.status()["network"]["p2pd_restarts"] == 1,
        "the daemon is started again",
        [organizer],
    )
    after = organizer.status()
    assert after["node"]["peer_id"] == before["node"]["peer_id"]
    assert after["network"]["addresses"] == before["network"]["addresses"]
    assert after["problems"] == []
    shown = cli("status", swarm.invite, "--timeout", "60")
    assert shown.returncode == 0, shown.stderr


def test_an_organizer_says_that_its_prompts_are_lost(swarm: Swarm) -> None:
    organizer = named(swarm, "organizer")
    (prompts, *_) = organizer.swarm_dir.prompts_dir.glob("*.jsonl")
    whole = prompts.read_bytes()
    prompts.write_bytes(whole[:-1])
    wait_until(lambda: bool(organizer.status()["problems"]), "status says so", [organizer])
    (problem,) = organizer.status()["problems"]
    assert "missing or damaged" in problem
    assert str(prompts) in problem
    shown = cli("doctor", "--offline", "--data-dir", str(organizer.data_dir))
    assert "missing or damaged" in " ".join(shown.stdout.split())
    prompts.write_bytes(whole)
    wait_until(lambda: not organizer.status()["problems"], "all is well again", [organizer])


def test_a_port_that_is_taken_is_named(swarm: Swarm, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = cli(
            "join",
            swarm.invite,
            *("--model", "/nowhere", "--data-dir", str(tmp_path / "node"), "--port", port),
            *settings(LOOPBACK),
        )
    assert result.returncode == 75, result.stderr
    assert port in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_restart_storm_leaves_nothing_behind(swarm: Swarm) -> None:
    organizer = named(swarm, "organizer")
    peer_id = organizer.peer_id
    for _ in range(20):
        organizer.kill()
        assert organizer.leftovers() == []
        organizer = swarm.restart(organizer, "seed", *settings(LOOPBACK))
        wait_until(lambda node=organizer: bool(node.status()), "it answers", [organizer])
    assert organizer.peer_id == peer_id
    shown = cli("status", swarm.invite, "--timeout", "60")
    assert shown.returncode == 0, shown.stderr
    assert faulty_files(DataDir(organizer.data_dir)) == []


# -- with models: slow ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_volunteer_killed_again_and_again_loses_no_checkpoint(swarm: Swarm) -> None:
    """While it starts, loads, steps, writes: whenever it comes."""
    node = volunteer(swarm, "finn", checkpoint__every_steps="1")
    wait_until(lambda: bool(node.run_dir.checkpoints()), "a checkpoint", [node])
    peer_id, run_dir, moments, newest = node.peer_id, node.run_dir, random.Random(0), 0
    for _ in range(20):
        time.sleep(moments.uniform(0.0, 12.0))
        node.kill()
        assert node.leftovers() == []
        assert newest <= max(run_dir.checkpoints())
        newest = max(run_dir.checkpoints())
        node = swarm.restart(node, "join")
    wait_until(lambda: node.step > newest, "it trains on", [node])
    assert f"resumed at step {newest}" in node.log()
    assert (node.peer_id, node.run_dir) == (peer_id, run_dir)
    assert node.stop() == 0
    assert not DataDir(node.data_dir).runtime_dir.exists()
    assert faulty_files(DataDir(node.data_dir)) == []


@pytest.mark.slow
@pytest.mark.parametrize("child", ["swarm.rl.learner", "p2pd", "swarm.rewards.child"])
def test_a_process_of_a_node_is_killed(swarm: Swarm, child: str) -> None:
    node, other = volunteer(swarm, "ada"), volunteer(swarm, "bob")
    peer_id, victim = node.peer_id, node.child(child)
    victim.kill()
    if child == "swarm.rl.learner":
        wait_until(lambda: bool(node.status()["problems"]), "status says so", [node])
    trains_on(node)
    wait_until(lambda: replaced(node, child, victim.pid), "there is another one", [node])
    assert node.peer_id == peer_id
    trains_on(other)
    seen = len([s for s in node.steps() for g in s["groups"] if g["publisher"] == other.peer_id])
    wait_until(
        lambda: (
            len([s for s in node.steps() for g in s["groups"] if g["publisher"] == other.peer_id])
            > seen
        ),
        "it trains on the other's groups again",
        [node, other],
    )
    wait_until(lambda: not node.status()["problems"], "all is well", [node])
    for table in (node.status()["peers"], other.status()["peers"]):
        assert [peer for peer in table if peer["strikes"] > 0] == []


@pytest.mark.slow
def test_an_organizer_gets_lost_prompts_back_from_members(swarm: Swarm) -> None:
    organizer, node = named(swarm, "organizer"), volunteer(swarm, "ada")
    kept = {path: path.read_bytes() for path in organizer.swarm_dir.prompts_dir.glob("*.jsonl")}
    assert kept
    for path in kept:
        path.unlink()
    wait_until(lambda: all(path.exists() for path in kept), "they are back", [organizer, node])
    assert {path: path.read_bytes() for path in kept} == kept
    wait_until(lambda: not organizer.status()["problems"], "all is well again", [organizer])


@pytest.mark.slow
def test_a_frozen_node_stops_nobody_and_comes_back(swarm: Swarm) -> None:
    node, other = volunteer(swarm, "ada"), volunteer(swarm, "bob")
    frozen = [psutil.Process(other.process.pid), *other.children()]
    for process in frozen:
        process.suspend()
    try:
        trains_on(node, 5)
    finally:
        for process in frozen:
            process.resume()
    trains_on(other)
    assert [peer for peer in node.status()["peers"] if peer["strikes"] > 0] == []


@pytest.mark.slow
def test_a_learner_that_gets_no_memory_is_started_until_it_does(swarm: Swarm) -> None:
    node = volunteer(swarm, "ada")
    peer_id, process = node.peer_id, psutil.Process(node.process.pid)
    failed = node.log().count("learner failed")
    # Children inherit it: torch does not fit in, what the node needs besides does.
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + 400_000_000, -1))
    node.child("swarm.rl.learner").kill()
    wait_until(
        lambda: node.log().count("learner failed") >= failed + 3,
        "it fails before its first step",
        [node],
    )
    assert "the learner failed" in " ".join(node.status()["problems"])
    process.rlimit(psutil.RLIMIT_AS, (-1, -1))
    trains_on(node)
    assert node.status()["problems"] == []
    assert node.peer_id == peer_id


@pytest.mark.slow
def test_a_learner_that_the_kernel_ends_for_its_memory(swarm: Swarm) -> None:
    node = volunteer(swarm, "gina")
    peer_id, restarts = node.peer_id, node.log().count("learner started")
    with memory_limit(node, 250_000_000) as lift:
        if lift is None:
            pytest.skip("this user cannot limit the memory of a group of processes")
        node.child("swarm.rl.learner").kill()
        wait_until(
            lambda: node.log().count("learner started") >= restarts + 2, "another one ends", [node]
        )
        assert "the learner failed" in " ".join(node.status()["problems"])
        lift()
        trains_on(node)
        assert node.peer_id == peer_id


@contextmanager
def memory_limit(node: Node, limit_bytes: int) -> Iterator[Callable[[], object] | None]:
    """Limit what a node and its new children take, until what is given is called.

    None where that is not allowed. The node is killed at the end, as its group goes only then.
    """
    for root, file, none in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "-1"),
        (Path("/sys/fs/cgroup"), "memory.max", "max"),
    ):
        group = root / f"swarm-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / file).write_text(str(limit_bytes))
            (group / "cgroup.procs").write_text(str(node.process.pid))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        try:
            yield partial((group / file).write_text, none)
        finally:
            node.kill()
            assert node.leftovers() == []
            group.rmdir()
        return
    yield None


@pytest.mark.slow
def test_a_learner_that_hangs_is_started_again(swarm: Swarm) -> None:
    node = volunteer(swarm, "carl", limits__call_timeout_s="60")
    learner = node.child("swarm.rl.learner")
    learner.suspend()
    wait_until(lambda: "no answer within 60 s" in node.log(), "the watchdog bites", [node])
    trains_on(node)
    assert node.child("swarm.rl.learner").pid != learner.pid
    assert node.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    swarm: Swarm, damage: str
) -> None:
    node = volunteer(swarm, "dora", checkpoint__keep="3")
    wait_until(lambda: len(node.run_dir.checkpoints()) >= 2, "two checkpoints", [node])
    peer_id = node.peer_id
    node.kill()
    assert node.leftovers() == []  # its learner may be writing another one
    *_, (older, _), (newest, path) = node.run_dir.checkpoints().items()
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-100])
    else:
        (path / "checkpoint.json").unlink()
    lines_before = node.log().count("\n")
    node = swarm.restart(node, "join")
    wait_until(lambda: node.step > older, "it resumes", [node])
    log = node.log().split("\n")[lines_before:]
    assert [line for line in log if line.endswith(f"resumed at step {older}")]
    assert not [line for line in log if line.endswith(f"resumed at step {newest}")]
    assert node.peer_id == peer_id
    trains_on(node)
    node.kill()


@pytest.mark.slow
def test_a_full_disk_stops_no_training(swarm: Swarm) -> None:
    place = swarm.folder / "eva"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this user cannot mount a small file system")
    try:
        # The node's own log is in the way of nothing: it is on that disk too.
        node = volunteer(swarm, "eva", limits__min_free_mb="1")
        ballast = place / "ballast"
        fill_up(ballast)
        wait_until(lambda: len(node.status()["problems"]) >= 2, "status says so", [node])
        problems = " ".join(node.status()["problems"])
        assert "rollouts are not stored" in problems
        assert "no checkpoint written" in problems
        trains_on(node, 4)
        ballast.unlink()
        wait_until(lambda: node.status()["problems"] == [], "all is well again", [node])
        step = node.step
        wait_until(
            lambda: max(node.run_dir.checkpoints(), default=0) >= step, "a checkpoint", [node]
        )
        assert node.stop() == 0
        assert not list(place.rglob("*.draft"))
        assert not list(node.run_dir.checkpoints_dir.glob(".writing-*"))
    finally:
        for node in swarm.nodes:
            if node.name == "eva" and node.running:
                node.kill()
        subprocess.run(["umount", "-l", str(place)], check=False)
