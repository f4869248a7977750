"""How the node calls its learner: answers, refusals, deaths, and nobody left behind.

The child is tests/unit/fake_learner.py: the real serving loop, without torch.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from swarm.errors import ConfigError, LearnerError
from swarm.learner.process import LearnerProcess

PATIENCE_S = 30.0
"""For what takes well under a second on an idle machine."""


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "learner.log"


@pytest.fixture
async def learner(log_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LearnerProcess]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    process = LearnerProcess(log_path, module="fake_learner")
    await process.start()
    pid = process.pid
    yield process
    await process.close()
    assert pid is not None
    assert not psutil.pid_exists(pid)  # nor a zombie


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (processes set no events)
            await asyncio.sleep(0.02)


def _text(path: Path) -> str:
    return path.read_text()


def _gone(pid: int) -> bool:
    """Not running: what an orphan leaves behind is for the system to reap."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_answer_to_each_call(learner: LearnerProcess) -> None:
    big = os.urandom(3_000_000)
    answer = await learner.call("echo", timeout_s=PATIENCE_S, data=big, id=[1, -2.5, None, "é"])
    assert answer["echo"] == {"data": big, "id": [1, -2.5, None, "é"]}
    assert answer["pid"] == learner.pid != os.getpid()
    answers = await asyncio.gather(
        *(learner.call("echo", timeout_s=PATIENCE_S, number=i) for i in range(20))
    )
    assert [answer["echo"]["number"] for answer in answers] == list(range(20))


async def test_start_of_a_running_learner_does_nothing(learner: LearnerProcess) -> None:
    pid = learner.pid
    await learner.start()
    assert (learner.pid, learner.starts) == (pid, 1)


async def test_what_it_is_busy_with(learner: LearnerProcess) -> None:
    assert learner.busy_with == ""
    call = asyncio.create_task(learner.call("sleep", timeout_s=PATIENCE_S, seconds=0.2))
    await _until(lambda: learner.busy_with == "sleep")
    await call
    assert learner.busy_with == ""


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        ("refuse", {"kind": "config"}, ConfigError, "^refused: config$"),
        ("refuse", {"kind": "learner"}, LearnerError, "^refuse: refused: learner$"),
        ("dance", {}, LearnerError, "no operation 'dance'; known: echo"),
    ],
)
async def test_refusal_leaves_the_learner_running(
    learner: LearnerProcess, op: str, arguments: dict[str, str], error: type, message: str
) -> None:
    pid = learner.pid
    with pytest.raises(error, match=message):
        await learner.call(op, timeout_s=PATIENCE_S, **arguments)
    assert (await learner.call("echo", timeout_s=PATIENCE_S))["pid"] == pid


async def test_fault_of_its_own_ends_the_learner_with_a_traceback_in_the_log(
    learner: LearnerProcess, log_path: Path
) -> None:
    pid = learner.pid
    with pytest.raises(LearnerError, match="fail failed with ZeroDivisionError: a bug"):
        await learner.call("fail", timeout_s=PATIENCE_S)
    assert not learner.alive
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert "Traceback" in _text(log_path)
    await learner.start()
    assert (await learner.call("echo", timeout_s=PATIENCE_S))["pid"] != pid
    assert learner.starts == 2


@pytest.mark.parametrize(
    ("op", "arguments", "fate"),
    [("kill", {}, "was killed by SIGKILL"), ("leave", {"status": 3}, "ended with exit status 3")],
)
async def test_death_in_a_call_is_told_with_the_last_words(
    learner: LearnerProcess, log_path: Path, op: str, arguments: dict[str, int], fate: str
) -> None:
    await learner.call("say", timeout_s=PATIENCE_S, text="CUDA error: too hot")
    with pytest.raises(LearnerError) as caught:
        await learner.call(op, timeout_s=PATIENCE_S, **arguments)
    assert fate in str(caught.value)
    assert str(log_path) in str(caught.value)
    assert "CUDA error: too hot" in str(caught.value)
    assert not learner.alive
    assert learner.pid is None


async def test_death_between_calls(learner: LearnerProcess) -> None:
    pid = learner.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await _until(lambda: not learner.alive)
    assert not psutil.pid_exists(pid)  # reaped without a call
    with pytest.raises(LearnerError, match="echo: no learner is running"):
        await learner.call("echo", timeout_s=PATIENCE_S)
    await learner.start()
    await learner.call("echo", timeout_s=PATIENCE_S)


async def test_death_unnoticed_before_the_call(learner: LearnerProcess) -> None:
    pid = learner.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)  # and no turn of the event loop to see it
    with pytest.raises(LearnerError, match=r"SIGKILL|no learner"):
        await learner.call("echo", timeout_s=PATIENCE_S, data=bytes(3_000_000))


async def test_hung_learner_says_where_and_is_killed(
    learner: LearnerProcess, log_path: Path
) -> None:
    pid = learner.pid
    await learner.call("echo", timeout_s=PATIENCE_S)
    with pytest.raises(LearnerError, match="spin: no answer within 1 s"):
        await learner.call("spin", timeout_s=1.0)  # a busy machine takes a while to begin
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert not learner.alive
    assert "in spin" in log_path.read_text()  # noqa: ASYNC240 - a few lines


async def test_stream_out_of_step_ends_the_learner(learner: LearnerProcess) -> None:
    pid = learner.pid
    with pytest.raises(LearnerError, match="the learner"):
        await learner.call("garble", timeout_s=PATIENCE_S)
    assert pid is not None
    await _until(lambda: not psutil.pid_exists(pid))


async def test_cancelled_call_keeps_the_next_one_in_step(learner: LearnerProcess) -> None:
    pid = learner.pid
    call = asyncio.create_task(learner.call("sleep", timeout_s=PATIENCE_S, seconds=0.3))
    await _until(lambda: learner.busy_with == "sleep")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for number in range(3):
        answer = await learner.call("echo", timeout_s=PATIENCE_S, number=number)
        assert (answer["echo"], answer["pid"]) == ({"number": number}, pid)


async def test_call_cancelled_while_it_waits_for_its_turn(learner: LearnerProcess) -> None:
    first = asyncio.create_task(learner.call("sleep", timeout_s=PATIENCE_S, seconds=0.3))
    second = asyncio.create_task(learner.call("kill", timeout_s=PATIENCE_S))
    await _until(lambda: learner.busy_with == "sleep")
    second.cancel()
    assert (await first)["slept"] == 0.3
    assert (await learner.call("echo", timeout_s=PATIENCE_S))["pid"] == learner.pid


async def test_close_ends_it_in_the_middle_of_work(learner: LearnerProcess) -> None:
    pid = learner.pid
    await learner.call("echo", timeout_s=PATIENCE_S)
    call = asyncio.create_task(learner.call("spin", timeout_s=PATIENCE_S))
    await _until(lambda: learner.busy_with == "spin")
    started = time.monotonic()
    await learner.close()
    assert time.monotonic() - started < 5.0  # it ended by itself
    assert pid is not None
    assert not psutil.pid_exists(pid)
    with pytest.raises(LearnerError, match="exit status 0"):
        await call
    await learner.close()  # twice does no harm


async def test_close_waits_for_a_child_that_a_cancelled_call_was_ending(
    learner: LearnerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.learner.process.STACKS_S", 0.0)
    pid = learner.pid
    assert pid is not None
    call = asyncio.create_task(learner.call("sleep", timeout_s=0.2, seconds=60.0))
    await _until(lambda: not learner.alive)  # killed, and not reaped yet
    call.cancel()
    await learner.close()
    assert not psutil.pid_exists(pid)


async def test_stop_is_answered(learner: LearnerProcess) -> None:
    assert (await learner.call("stop", timeout_s=PATIENCE_S))["ok"]
    await _until(lambda: not learner.alive)


async def test_ctrl_c_in_the_terminal_does_not_reach_it(learner: LearnerProcess) -> None:
    assert learner.pid is not None
    assert os.getsid(learner.pid) != os.getsid(0)


async def test_sigusr1_writes_what_it_is_doing_to_the_log(
    learner: LearnerProcess, log_path: Path
) -> None:
    await learner.call("echo", timeout_s=PATIENCE_S)
    call = asyncio.create_task(learner.call("spin", timeout_s=2 * PATIENCE_S))
    pid = learner.pid
    assert pid is not None

    def told() -> bool:
        os.kill(pid, signal.SIGUSR1)  # the first may come before it has read what to do
        return "in spin" in _text(log_path)

    await _until(told)
    await learner.close()
    with pytest.raises(LearnerError):
        await call


def test_long_log_is_put_aside(log_path: Path) -> None:
    log_path.parent.mkdir()
    log_path.write_bytes(b"x" * (9 << 20))
    learner = LearnerProcess(log_path, module="json")  # ends at once

    async def run() -> None:
        await learner.start()
        await learner.close()

    asyncio.run(run())
    assert 0 < log_path.stat().st_size < 10_000
    assert log_path.with_name("learner.log.1").stat().st_size == 9 << 20


async def test_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LearnerError, match="cannot be started"):
        await LearnerProcess(tmp_path / "file" / "learner.log").start()


async def test_threads_of_numerical_libraries(
    log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    process = LearnerProcess(log_path, threads=3, module="fake_learner")
    await process.start()
    try:
        assert process.pid is not None
        await process.call("echo", timeout_s=PATIENCE_S)  # its program has been loaded by then
        assert psutil.Process(process.pid).environ()["OMP_NUM_THREADS"] == "3"
    finally:
        await process.close()


# -- a node that dies ------------------------------------------------------------------------------

NODE = """
import asyncio, os, sys, time
from pathlib import Path
from swarm.learner.process import LearnerProcess

async def main():
    learner = LearnerProcess(Path(sys.argv[1]), module="fake_learner")
    await learner.start()
    await learner.call("echo", timeout_s=60)
    sleeper = 0
    if sys.argv[3] == "fork":
        sleeper = os.fork()
        if not sleeper:
            time.sleep(120)
            os._exit(0)
    call = asyncio.create_task(learner.call(sys.argv[2], timeout_s=60))
    await asyncio.sleep(0.2)
    print(learner.pid, sleeper, flush=True)
    await call

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("op", "fork"),
    [
        ("spin", ""),
        ("echo", ""),
        ("spin", "fork"),  # a process of the node's that holds the socket open
    ],
)
def test_no_orphan_after_the_node_is_killed(log_path: Path, op: str, fork: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", NODE, str(log_path), op, fork],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as node:
        assert node.stdout is not None
        child, sleeper = map(int, node.stdout.readline().split())
        try:
            if op == "spin":
                assert not _gone(child)
                node.kill()
            deadline = time.monotonic() + PATIENCE_S
            while not _gone(child):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            if sleeper:
                assert not _gone(sleeper)
        finally:
            node.kill()
            if sleeper:
                os.kill(sleeper, signal.SIGKILL)
