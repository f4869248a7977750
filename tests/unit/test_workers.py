"""Worker processes: what they return, what they are denied, and how they end."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgpack
import psutil
import pytest
import uvloop

from swarm.protocol.manifest import RewardSpec
from swarm.protocol.prompts import Prompt
from swarm.rewards import workers
from swarm.rewards.workers import RewardError, TemplateError, WorkerPool
from tests.unit.test_template import ESCAPES

NUMBER = RewardSpec(name="number", version=1, params={})
ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(prompt=text, messages=None, answer="1") for text in texts]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    before = children()
    async with WorkerPool(1, 20.0) as opened:
        yield opened
    assert children() == before


async def one_worker(pool: WorkerPool) -> int:
    """The process id of the pool's only worker, started if need be."""
    before = children()
    await pool.score(NUMBER, ["5"], [True], "5")
    (pid,) = children() - before or before
    return pid


async def test_scores_and_texts_come_back_in_order(pool: WorkerPool) -> None:
    assert await pool.score(NUMBER, ["5", "6", "5"], [True, True, False], "5") == [1.0, 0.0, 0.0]
    spec = NUMBER.model_copy(update={"params": {"truncated": "score"}})
    assert await pool.score(spec, ["5"], [False], "5", "2 + 3 =") == [1.0]
    assert await pool.score(NUMBER, [], [], "5") == []
    many = [f"prompt {i} \u00e9\ud800" for i in range(3 * workers.RENDER_BATCH_PROMPTS + 1)]
    assert await pool.render("<{{ prompt }}>", "", prompts(*many)) == [f"<{m}>" for m in many]
    chat = Prompt(prompt=None, messages=({"role": "user", "content": "hi"},), answer="1")
    assert await pool.render("{{ messages[0].content }}", "", [chat]) == ["hi"]
    assert pool.counts["started"] == 1
    assert pool.counts["groups"] == 3
    assert pool.counts["prompts"] == len(many) + 1


async def test_errors_name_the_prompt_across_batches(pool: WorkerPool) -> None:
    many = ["x"] * (workers.RENDER_BATCH_PROMPTS + 2)
    many[-1] = ""
    with pytest.raises(TemplateError, match=f"prompt {len(many) - 1} renders to nothing"):
        await pool.render("{{ prompt }}", "", prompts(*many))


async def test_several_workers_share_the_work() -> None:
    before = children()
    async with WorkerPool(3, 20.0) as pool:
        scores = await asyncio.gather(
            *(pool.score(NUMBER, [str(i)], [True], "5") for i in range(12))
        )
        assert scores == [[float(i == 5)] for i in range(12)]
        assert len(children() - before) == 3


async def test_a_call_that_takes_too_long_is_killed_and_the_next_one_works() -> None:
    async with WorkerPool(1, 20.0) as pool:
        first = await one_worker(pool)
        pool._timeout_s = 0.3
        start = time.monotonic()
        with pytest.raises(TemplateError, match=r"killed after 0\.3 s") as caught:
            await pool.render(ENDLESS, "", prompts("x"))
        assert time.monotonic() - start < 5.0
        assert caught.value.reason == "timeout"
        await until(lambda: not psutil.pid_exists(first))
        pool._timeout_s = 20.0
        assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]
        assert pool.counts["started"] == 2
        assert pool.counts["fault_timeout"] == 1


async def test_a_frozen_worker_is_killed(pool: WorkerPool) -> None:
    pid = await one_worker(pool)
    os.kill(pid, signal.SIGSTOP)
    pool._timeout_s = 0.3
    with pytest.raises(RewardError) as caught:
        await pool.score(NUMBER, ["5"], [True], "5")
    assert caught.value.reason == "timeout"
    await until(lambda: not psutil.pid_exists(pid))
    pool._timeout_s = 20.0
    assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]


@LINUX
@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**9 }}",
        "{{ '%999999999d' % 1 }}",
        "{% set x = namespace(t='a' * 1000) %}"
        "{% for i in range(40) %}{% set x.t = x.t ~ x.t %}{% endfor %}",
    ],
)
async def test_a_memory_bomb_ends_the_worker_and_not_the_node(pool: WorkerPool, bomb: str) -> None:
    with pytest.raises(TemplateError) as caught:
        await pool.render(bomb, "", prompts("x"))
    assert caught.value.reason == "memory"
    assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]


async def test_a_worker_that_dies_in_the_middle_is_reported(pool: WorkerPool) -> None:
    pid = await one_worker(pool)
    call = asyncio.create_task(pool.render(ENDLESS, "", prompts("x")))
    await until(lambda: psutil.Process(pid).cpu_times().user > 0.2)
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(TemplateError, match="died of SIGSEGV") as caught:
        await call
    assert caught.value.reason == "crashed"
    assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]


async def test_a_worker_that_dies_idle_costs_nobody_a_group(pool: WorkerPool) -> None:
    pid = await one_worker(pool)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pool._processes[0].returncode is not None)
    assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]
    assert pool.counts["fault_crashed"] == 0


async def test_a_cancelled_call_frees_its_place(pool: WorkerPool) -> None:
    pid = await one_worker(pool)
    call = asyncio.create_task(pool.render(ENDLESS, "", prompts("x")))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: not psutil.pid_exists(pid))
    assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]


async def test_close_ends_calls_under_way_and_those_that_wait() -> None:
    before = children()
    pool = WorkerPool(1, 20.0)
    await one_worker(pool)
    running = asyncio.create_task(pool.render(ENDLESS, "", prompts("x")))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(pool.score(NUMBER, ["5"], [True], "5"))
    await asyncio.sleep(0)
    await pool.close()
    assert children() == before
    outcomes = await asyncio.gather(running, waiting, return_exceptions=True)
    assert [getattr(o, "reason", o) for o in outcomes] == ["crashed", "closed"]
    with pytest.raises(RewardError, match="closed"):
        await pool.score(NUMBER, ["5"], [True], "5")
    await pool.close()
    assert children() == before


async def test_close_while_a_worker_starts_leaves_none() -> None:
    before = children()
    for delay_s in (0.0, 0.001, 0.02):
        pool = WorkerPool(1, 20.0)
        call = asyncio.create_task(pool.score(NUMBER, ["5"], [True], "5"))
        await asyncio.sleep(delay_s)
        await pool.close()
        with pytest.raises(RewardError):
            await call
        assert children() == before


async def test_unknown_rewards_and_flags_that_are_missing_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(RewardError, match="no reward 'nothing' version 1"):
        await pool.score(RewardSpec(name="nothing", version=1, params={}), ["5"], [True], "5")
    with pytest.raises(ValueError, match="1 completions, 2 finish flags"):
        await pool.score(NUMBER, ["5"], [True, True], "5")
    assert pool.counts["groups"] == 0


async def test_a_request_beyond_the_limit_is_refused(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(RewardError, match="at most 1000") as caught:
        await pool.score(NUMBER, ["5" * 1000], [True], "5")
    assert caught.value.reason == "size"


async def test_a_template_s_own_error_comes_back(pool: WorkerPool) -> None:
    with pytest.raises(TemplateError, match="prompt 0: ZeroDivisionError: division by zero"):
        await pool.render("{{ 1 / 0 }}", "", prompts("x"))


async def test_templates_that_try_to_escape_get_nowhere_in_a_worker(pool: WorkerPool) -> None:
    plain = prompts("x")
    for text in (*ESCAPES, "{{ prompt }}"):
        try:
            (result,) = await pool.render(text, "", plain, 10_000)
        except TemplateError as error:
            assert error.reason in ("failed", "empty", "syntax")  # noqa: PT017 - one good outcome
        else:
            assert "0x" not in result
            assert "<class" not in result
    assert result == "x"
    assert pool.counts["started"] == 1


# -- what a worker is denied ----------------------------------------------------------------------


@LINUX
async def test_a_worker_has_no_secrets_descriptors_or_rights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    inheritable = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    try:
        async with WorkerPool(1, 20.0) as pool:
            folder = Path(f"/proc/{await one_worker(pool)}")
            environment = (folder / "environ").read_bytes()
            assert b"HF_TOKEN" not in environment
            names = {entry.split(b"=")[0] for entry in environment.split(b"\0") if entry}
            assert names <= {b"PYTHONPATH", b"LD_LIBRARY_PATH", b"LC_CTYPE"}
            assert {fd.name for fd in (folder / "fd").iterdir()} == {"0", "1", "2", "3"}
            limits = (folder / "limits").read_text()
            for line in (
                "Max open files 4 4",
                "Max file size 0 0",
                "Max core file size 0 0",
                "Max processes 0 0",
                f"Max address space {workers.MEMORY_BYTES} {workers.MEMORY_BYTES}",
            ):
                assert line in " ".join(limits.split()), line
            assert "NoNewPrivs:\t1" in (folder / "status").read_text()
    finally:
        os.close(inheritable)


@LINUX
@pytest.mark.parametrize(
    "attempt",
    [
        "open('/etc/passwd')",
        "open('/tmp/swarm-worker-test', 'w')",
        "socket.socket()",
        "os.pipe()",
        "b'x' * 10**10",
    ],
)
def test_code_that_ran_there_could_open_nothing(attempt: str) -> None:
    script = textwrap.dedent(
        f"""
        import os, socket
        from swarm.rewards import child
        os.dup(1)
        child._limit(512 * 2**20)
        try:
            {attempt}
        except (OSError, MemoryError) as error:
            print("denied", error)
        """
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.startswith("denied"), result


def test_cpu_time_is_bounded_without_the_node() -> None:
    script = "from swarm.rewards import child\nchild._limit_cpu(0)\nwhile True: pass"
    result = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert result.returncode == -signal.SIGXCPU


def test_a_worker_imports_little() -> None:
    script = (
        "import sys, swarm.rewards.child\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'tokenizers', 'cryptography', 'asyncio',"
        " 'swarm.protocol') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@LINUX
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_kill_9_of_the_node_leaves_no_worker(loop: str) -> None:
    """The worker is in an endless loop, so that no end of a pipe would stop it."""
    script = textwrap.dedent(
        f"""
        import asyncio, sys, uvloop
        from swarm.protocol.prompts import Prompt
        from swarm.rewards.workers import WorkerPool

        async def main():
            pool = WorkerPool(1, 60.0)
            call = asyncio.create_task(
                pool.render({ENDLESS!r}, "", [Prompt(prompt="x", messages=None, answer="1")])
            )
            while not pool._processes:
                await asyncio.sleep(0.01)
            print(pool._processes[0].pid, flush=True)
            await call

        {loop}.run(main())
        """
    )
    node = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    with node, contextlib.ExitStack() as cleanup:
        cleanup.callback(node.kill)
        worker = psutil.Process(int(node.stdout.readline()))
        cleanup.callback(lambda: worker.kill() if worker.is_running() else None)
        deadline = time.monotonic() + 20
        while worker.cpu_times().user < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        node.kill()
        node.wait()
        _, alive = psutil.wait_procs([worker], timeout=5)
        assert alive == []


def test_a_worker_without_its_node_does_not_start() -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-m", "swarm.rewards.child", "1", str(2**29)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 1
    assert "the node is gone" in result.stderr


# -- what a broken worker can say -----------------------------------------------------------------


def fake_worker(folder: Path, *frames: bytes, before: str = "") -> str:
    """An executable in place of Python that says these frames, one a request, then waits."""
    path = folder / "worker"
    path.write_text(
        f"#!{sys.executable}\nimport sys\n{before}\n"
        f"for frame in {list(frames)!r}:\n"
        "    sys.stdout.buffer.write(frame)\n    sys.stdout.flush()\n    sys.stdin.buffer.read1()\n"
        "sys.stdin.read()\n"
    )
    path.chmod(0o700)
    return str(path)


def frame(message: object) -> bytes:
    body = msgpack.packb(message)
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"\xff\xff\xff\xff", "crashed"),
        (b"\x01\x00\x00\x00\xc1", "crashed"),
        (b"\x05\x00\x00\x00\xdd\xff\xff\xff\xff", "crashed"),
        (frame([1.0]), "crashed"),
        (frame({}), "crashed"),
        (frame({"values": None}), "crashed"),
        (frame({"values": [1.0, 1.0]}), "crashed"),
        (frame({"values": [1]}), "crashed"),
        (frame({"values": ["1"]}), "crashed"),
        (frame({"values": [float("nan")]}), "crashed"),
        (frame({"fault": "\x1b[2J", "detail": "\x1b[31mred"}), "failed"),
        (frame({"fault": ["timeout"]}), "failed"),
    ],
    ids=range(12),
)
async def test_a_reply_out_of_form_is_a_fault(
    reply: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_worker(tmp_path, frame({"ready": True}), reply)
    monkeypatch.setattr(sys, "executable", fake)
    before = children()
    async with WorkerPool(1, 20.0) as pool:
        with pytest.raises(RewardError) as caught:
            await pool.score(NUMBER, ["5"], [True], "5")
        assert caught.value.reason == reason
        assert "\x1b" not in str(caught.value)
        if reason == "crashed":
            await until(lambda: children() == before)


async def test_a_worker_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WorkerPool(1, 20.0) as pool:
        monkeypatch.setattr(
            sys, "executable", fake_worker(tmp_path, before="sys.exit('no such library')")
        )
        with pytest.raises(RewardError, match="no worker process: no such library") as caught:
            await pool.score(NUMBER, ["5"], [True], "5")
        assert caught.value.reason == "crashed"
        monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
        with pytest.raises(RewardError, match=r"no worker process: .*No such file"):
            await pool.score(NUMBER, ["5"], [True], "5")
        monkeypatch.undo()
        assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]


async def test_a_worker_that_never_gets_ready_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", fake_worker(tmp_path))
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.2)
    before = children()
    async with WorkerPool(1, 20.0) as pool:
        with pytest.raises(RewardError, match=r"no worker process within 0\.2 s"):
            await pool.score(NUMBER, ["5"], [True], "5")
        await until(lambda: children() == before)


def test_the_pool_works_under_uvloop() -> None:
    """uvloop starts processes in its own way: it leaves inheritable descriptors open."""

    async def main() -> None:
        before = children()
        async with WorkerPool(1, 20.0) as pool:
            pid = await one_worker(pool)
            if sys.platform == "linux":
                assert set(os.listdir(f"/proc/{pid}/fd")) == {"0", "1", "2", "3"}
            pool._timeout_s = 0.2
            with pytest.raises(TemplateError):
                await pool.render(ENDLESS, "", prompts("x"))
            pool._timeout_s = 20.0
            os.kill(await one_worker(pool), signal.SIGKILL)
            with contextlib.suppress(RewardError):  # "crashed", or a new worker: a race by nature
                await pool.score(NUMBER, ["5"], [True], "5")
            assert await pool.score(NUMBER, ["5"], [True], "5") == [1.0]
        assert children() == before

    inheritable = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    try:
        uvloop.run(main())
    finally:
        os.close(inheritable)
