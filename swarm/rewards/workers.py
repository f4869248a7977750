"""The node's side of the worker processes that read what strangers wrote.

Owns: starting, feeding, timing and killing them. Does not know: what a reward or a template does
(swarm.rewards.registry, swarm.text.template), nor what becomes of a group without rewards.

A plain child process with a pipe each, rather than a pool of multiprocessing: its environment is
empty from the start, it imports nothing of the parent's, what comes back from it is msgpack and
not a pickle, one that is killed takes no lock with it, and an idle one costs nothing.
"""

import asyncio
import logging
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import swarm
from swarm.protocol.prompts import Prompt
from swarm.rewards import combined, registry
from swarm.rewards.child import EXIT_MEMORY, HEADER, MAX_FRAME_BYTES, pack, unpack
from swarm.rewards.reward import Params, RewardError, Spec
from swarm.terminal import safe
from swarm.text.template import MAX_RENDERED_CHARS, TemplateError

__all__ = ["MEMORY_BYTES", "RewardError", "TemplateError", "WorkerPool"]

T = TypeVar("T", float, str, dict[str, Any])

log = logging.getLogger(__name__)

MEMORY_BYTES = 512 * 2**20
"""Address space of one worker; it starts with about 30 MB."""

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 240.0
"""What a start may take beyond that where it imports a reward's libraries (sympy: seconds)."""

MAX_DETAIL_CHARS = 500
RENDER_BATCH_PROMPTS = 256
RENDER_BATCH_CHARS = 2_000_000
ANSWERS_A_CALL = 512

# Where the interpreter finds its own libraries; nothing else is handed on.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
# Libraries that start a thread a core cannot, in a process that may have no other.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class WorkerPool:
    """Scores groups and renders prompts in killable processes.

    Processes are started when they are needed and kept; one that exceeded the time limit, died or
    was left in the middle of a call is killed, and its successor starts with the next call. The
    workers die with the thread that started them, so use the pool from the main one.

    Args:
        workers: processes at most.
        timeout_s: for one group, or one batch of up to RENDER_BATCH_PROMPTS prompts.
        memory_bytes: address space of one process (Linux).

    Attributes:
        counts: groups and prompts done, processes started, and faults by reason.
    """

    def __init__(self, workers: int, timeout_s: float, memory_bytes: int = MEMORY_BYTES) -> None:
        self.counts: Counter[str] = Counter()
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._workers = workers
        self._processes: list[Process] = []
        # Rewards whose code a worker imports before its limits fall, as calls have asked for them.
        self._loaded: dict[Process, frozenset[str]] = {}
        self._needed: frozenset[str] = frozenset()
        self._closed = False
        # A place holds a waiting process, or None where one must be started first. The last one
        # used is taken first, so that a calm node keeps one process and not all of them.
        self._places: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        for _ in range(workers):
            self._places.put_nowait(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(
        self,
        spec: Spec,
        completions: Sequence[str],
        finished: Sequence[bool],
        answer: str,
        prompt: str = "",
    ) -> list[float]:
        """Score all completions of one prompt.

        Args:
            spec: the manifest's or the prompt's reward.
            completions: decoded texts, without special tokens.
            finished: for each, whether it ended by itself and not at the length limit.
            answer: the prompt's reference answer.
            prompt: the prompt's text.

        Raises:
            RewardError: with a `RewardFault` as its reason.
        """
        if len(completions) != len(finished):
            raise ValueError(f"{len(completions)} completions, {len(finished)} finish flags")
        request = {
            **_named("score", spec),
            "completions": list(completions),
            "finished": list(finished),
            "answer": answer,
            "prompt": prompt,
        }
        scores = await self._call(request, RewardError, float, len(completions), _code_of(spec))
        self.counts["groups"] += 1
        return scores

    async def complete(self, spec: Spec) -> Params:
        """All parameters of a reward, those that it leaves out at their defaults, tried out.

        Raises:
            RewardError: no such reward here (with what to install), wrong parameters, or
                parameters that make it hang.
        """
        request = _named("complete", spec)
        (params,) = await self._call(request, RewardError, dict, 1, _code_of(spec))
        return params

    async def check_answers(self, spec: Spec, answers: Sequence[str]) -> list[str]:
        """For each answer why no completion can match it; empty: one can.

        Raises:
            RewardError: as `complete`.
        """
        checked: list[str] = []
        for start in range(0, len(answers), ANSWERS_A_CALL):
            some = list(answers[start : start + ANSWERS_A_CALL])
            request = {**_named("answers", spec), "answers": some}
            checked += await self._call(request, RewardError, str, len(some), _code_of(spec))
        return checked

    async def render(
        self,
        text: str,
        system: str,
        prompts: Sequence[Prompt],
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> list[str]:
        """Render prompts with a template, in order.

        Args:
            text: the template (see swarm.text.template).
            system: the system text; empty: none.
            prompts: any number.
            max_chars: largest result per prompt.

        Raises:
            TemplateError: the template does not compile or render, or exceeds a limit.
        """
        rendered: list[str] = []
        for batch in _batches(prompts):
            request = {
                "op": "render",
                "template": text,
                "system": system,
                "prompts": batch,
                "first": len(rendered),
                "max_chars": max_chars,
            }
            rendered += await self._call(request, TemplateError, str, len(batch))
            self.counts["prompts"] += len(batch)
        return rendered

    async def close(self) -> None:
        """Kill every process and wait for its end; calls under way fail with "crashed"."""
        self._closed = True
        for process in self._processes:
            _kill(process)
        places = [await self._places.get() for _ in range(self._workers)]  # no call is under way
        for process in self._processes:
            _kill(process)
            await process.wait()
        self._processes.clear()
        for _ in places:
            self._places.put_nowait(None)

    async def _call(
        self,
        request: dict[str, Any],
        error: type[RewardError] | type[TemplateError],
        kind: type[T],
        count: int,
        code: frozenset[str] = frozenset(),
    ) -> list[T]:
        """Have one worker answer with `count` values of one kind, or say why not.

        Args:
            code: rewards whose code it must have imported.
        """
        body = pack({**request, "cpu_s": math.ceil(self._timeout_s)})
        if len(body) > MAX_FRAME_BYTES:
            raise self._fault(error, "size", f"{len(body)} bytes; at most {MAX_FRAME_BYTES}")
        process = await self._places.get()
        keep = False
        try:
            if self._closed:
                raise self._fault(error, "closed", "the node is stopping")
            if process is not None and not code <= self._loaded[process]:
                _kill(process)
                process = None
            if process is None or process.returncode is not None:
                process = await self._start(error, code)
            try:
                async with asyncio.timeout(self._timeout_s):
                    reply = await _ask(process, body)
                if "fault" not in reply:
                    values = _checked(reply.get("values"), kind, count)
                keep = True
            except TimeoutError:
                raise self._fault(error, "timeout", f"killed after {self._timeout_s:g} s") from None
            except (EOFError, ConnectionError, ValueError) as fault:
                _kill(process)
                raise self._fault(error, *_cause(await process.wait(), fault)) from None
        finally:
            if not keep and process is not None:
                _kill(process)
            self._places.put_nowait(process if keep else None)
        if "fault" in reply:
            detail = safe(str(reply.get("detail")), MAX_DETAIL_CHARS)
            raise self._fault(error, str(reply["fault"]), detail)
        return values

    async def _start(
        self, error: type[RewardError] | type[TemplateError], code: frozenset[str]
    ) -> Process:
        self._processes = [p for p in self._processes if p.returncode is None]
        self._loaded = {p: self._loaded[p] for p in self._processes}
        self._needed |= code
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment["PYTHONPATH"] = str(Path(swarm.__file__).parents[1])
        limit_s = START_TIMEOUT_S
        if self._needed:
            environment |= _ONE_THREAD
            limit_s += LOAD_TIMEOUT_S
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "swarm.rewards.child"),
                *(str(os.getpid()), str(self._memory_bytes), *sorted(self._needed)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as fault:
            raise self._fault(error, "crashed", f"no worker process: {fault}") from None
        self._processes.append(process)
        self._loaded[process] = self._needed
        self.counts["started"] += 1
        try:
            if self._closed:
                raise self._fault(error, "closed", "the node is stopping")
            async with asyncio.timeout(limit_s):
                await _read(process)
        except TimeoutError:
            _kill(process)
            raise self._fault(error, "timeout", f"no worker process within {limit_s:g} s") from None
        except (EOFError, ConnectionError, ValueError):
            _kill(process)
            said = await process.stderr.read(4096) if process.stderr else b""
            raise self._fault(
                error,
                "crashed",
                f"no worker process: {safe(said.decode(errors='replace'), MAX_DETAIL_CHARS)}",
            ) from None
        except BaseException:
            _kill(process)
            raise
        return process

    def _fault(
        self, error: type[RewardError] | type[TemplateError], reason: str, detail: str
    ) -> RewardError | TemplateError:
        fault = error(reason, detail)
        self.counts[f"fault_{fault.reason}"] += 1
        if error is RewardError:  # a template's fault ends the verb that renders, with its words
            log.warning("worker: %s", fault)
        return fault


def _named(op: str, spec: Spec) -> dict[str, Any]:
    return {"op": op, "name": spec.name, "version": spec.version, "params": dict(spec.params)}


def _code_of(spec: Spec) -> frozenset[str]:
    """Rewards in this one whose code is imported only where it is used."""
    return frozenset(filter(registry.needs_loading, combined.names([spec])))


async def _ask(process: Process, body: bytes) -> dict[str, Any]:
    stdin = process.stdin
    if stdin is None:
        raise EOFError("no pipe")
    stdin.write(HEADER.pack(len(body)) + body)
    await stdin.drain()
    return await _read(process)


async def _read(process: Process) -> dict[str, Any]:
    stdout = process.stdout
    if stdout is None:
        raise EOFError("no pipe")
    (size,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a reply of {size} bytes")
    reply = unpack(await stdout.readexactly(size))
    if not isinstance(reply, dict):
        raise ValueError("a reply that is no map")
    return reply


def _kill(process: Process) -> None:
    if process.returncode is None:
        try:
            os.kill(process.pid, signal.SIGKILL)  # process.kill() would reap it, and lose its code
        except ProcessLookupError:
            log.debug("worker %d was gone already", process.pid)


def _cause(code: int, fault: Exception) -> tuple[str, str]:
    """Reason and detail for a worker that ended in the middle of a call."""
    if code == EXIT_MEMORY:
        return "memory", "the worker ran out of its memory"
    if code == -signal.SIGXCPU:
        return "timeout", "the worker used up its CPU time"
    if code < 0:
        return "crashed", f"the worker died of {signal.Signals(-code).name}: {fault}"
    return "crashed", f"the worker ended with {code}: {fault}"


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[Any]]:
    """Prompts as the worker takes them, in pieces of bounded count and size."""
    batch: list[Any] = []
    size = 0
    for prompt in prompts:
        if prompt.messages is not None:
            batch.append([dict(message) for message in prompt.messages])
            size += sum(len(value) for message in prompt.messages for value in message.values())
        else:
            batch.append(prompt.prompt)
            size += len(prompt.prompt or "")
        if len(batch) >= RENDER_BATCH_PROMPTS or size >= RENDER_BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _checked(values: Any, kind: type[T], count: int) -> list[T]:
    """The worker's list, if it is one of `count` finite numbers, texts or maps."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"a reply without {count} values")
    for value in values:
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"a reply with something else than {kind.__name__} in it")
    return values
