"""vLLM in a process of its own: `PYTHON swarm/rl/vllm_child.py FD`, run by swarm.rl.vllm_process.

Owns: vLLM's engine, and which message leads to which call of it. Does not know: anything of swarm.
It imports none of it, because the interpreter may be another one, with vLLM and without swarm-node.

Messages are as in swarm.learner.ipc: a u32 little-endian length, then one msgpack map. A request is
{"op", "arguments"}, its reply {"ok": True, ...} or {"ok": False, "kind", "error"}. Token ids and
log-probs are the bytes of little-endian int32 and float32 arrays. The first message is an empty map
from this side: an interpreter that runs this file sends it before it looks for vLLM.
"""

import contextlib
import ctypes
import faulthandler
import hashlib
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

LENGTH = struct.Struct("<I")

PARENT_CHECK_S = 5.0
"""How often the process looks whether the learner still is its parent."""

GREETING = LENGTH.pack(1) + b"\x80"

NO_VLLM = 69
"""Exit status where vLLM cannot be imported."""

PR_SET_PDEATHSIG = 1

FINISHES = {"stop": 0, "length": 1}
"""vLLM's reasons, as the numbers of swarm.protocol.rollout.Finish."""


class VllmChild:
    """Does what the learner asks for. Every public method is an operation."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._adapter: Any = None

    def load(self, *, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Start vLLM with these arguments of `vllm.LLM`."""
        import vllm

        self._llm = vllm.LLM(**arguments)
        return {"version": vllm.__version__}

    def reload(self, *, path: str) -> dict[str, Any]:
        """Take over all weights of a folder of the same model."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        return {}

    def adapt(self, *, path: str, number: int) -> dict[str, Any]:
        """Sample with this adapter; a number that was used before means the old one to vLLM."""
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest(lora_name=f"adapter-{number}", lora_int_id=number, lora_path=path)
        self._llm.llm_engine.add_lora(adapter)
        if self._adapter is not None and self._adapter.lora_int_id != number:
            self._llm.llm_engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = adapter
        return {}

    def forget(self) -> dict[str, Any]:
        """Drop the keys and values of prompts that other weights computed."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        return {}

    def sleep(self, *, level: int) -> dict[str, Any]:
        """1: drop the KV cache and move the weights to main memory; 2: drop both."""
        self._llm.sleep(level=level)
        return {}

    def wake(self, *, what: str) -> dict[str, Any]:
        """Take memory again for "weights" or "kv_cache"."""
        self._llm.wake_up(tags=[what])
        return {}

    def generate(
        self,
        *,
        prompts: list[bytes],
        n: int,
        seeds: list[int],
        temperature: float,
        max_tokens: int,
        stop_token_ids: list[int],
        greedy: bool,
    ) -> dict[str, Any]:
        """n completions a prompt: for each prompt a list of [ids, log-probs, finish]."""
        import numpy as np
        from vllm import SamplingParams

        requests, parameters = [], []
        for prompt, seed in zip(prompts, seeds, strict=True):
            token_ids = np.frombuffer(prompt, "<i4").tolist()
            for number in range(n):
                requests.append({"prompt_token_ids": token_ids})
                parameters.append(
                    SamplingParams(
                        temperature=0.0 if greedy else temperature,
                        max_tokens=max_tokens,
                        stop_token_ids=stop_token_ids,
                        seed=_seed(seed, number),
                        logprobs=0,  # the drawn token's alone
                        # Nothing but the temperature may change the distribution, and nothing but
                        # the swarm's stop tokens end a completion.
                        top_p=1.0,
                        top_k=0,
                        min_p=0.0,
                        ignore_eos=True,
                        detokenize=False,
                    )
                )
        outputs = self._llm.generate(
            requests, parameters, use_tqdm=False, lora_request=self._adapter
        )
        rows = []
        for output in outputs:
            (completion,) = output.outputs
            ids = list(completion.token_ids)
            found = zip(ids, completion.logprobs, strict=True)
            logprobs = [entry[token].logprob for token, entry in found]
            rows.append(
                [
                    np.asarray(ids, "<i4").tobytes(),
                    np.asarray(logprobs, "<f4").tobytes(),
                    FINISHES[completion.finish_reason],
                ]
            )
        return {"groups": [rows[start : start + n] for start in range(0, len(rows), n)]}


def _seed(seed: int, number: int) -> int:
    """A stream of random numbers of its own for each completion of a prompt."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def serve(connection: socket.socket, msgpack: Any) -> None:
    """Answer requests until the connection ends; then end the process, in the middle of work too.

    Args:
        msgpack: encodes and decodes.
    """
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(
        target=_receive_all, args=(connection, requests.put), name="learner", daemon=True
    ).start()
    child = VllmChild()
    while True:
        request = msgpack.decode(requests.get())
        try:
            reply = {"ok": True, **getattr(child, request["op"])(**request["arguments"])}
        except Exception as error:  # noqa: BLE001 - outermost: the learner decides what becomes of it
            traceback.print_exc()
            text = str(error) or repr(error)
            reply = {"ok": False, "kind": type(error).__name__, "error": text}
        body = msgpack.encode(reply)
        connection.sendall(LENGTH.pack(len(body)) + body)


def _receive_all(connection: socket.socket, put: Callable[[bytes], None]) -> None:
    """Thread: read requests ahead of the work, so that the end of the learner is seen during it."""
    parent = os.getppid()
    while True:
        # A process that the learner forked may hold the other end open after it has died.
        while not select.select([connection], [], [], PARENT_CHECK_S)[0]:
            if os.getppid() != parent:
                os._exit(0)
        body = _receive(connection)
        if body is None:
            os._exit(0)
        put(body)


def _receive(connection: socket.socket) -> bytes | None:
    with contextlib.suppress(ConnectionError), connection.makefile("rb", buffering=0) as stream:
        header = _read(stream, LENGTH.size)
        return None if header is None else _read(stream, LENGTH.unpack(header)[0])
    return None


def _read(stream: Any, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = stream.read(count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def _die_with(parent: int) -> None:
    """End at once when the learner does; elsewhere than on Linux the closed socket ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(f"the learner, process {parent}, is gone or did not start this interpreter itself")


def main(arguments: list[str]) -> None:
    """Run as a child of the learner; arguments: number of the inherited socket, learner's pid."""
    faulthandler.enable()
    number, parent = map(int, arguments)
    _die_with(parent)
    with socket.socket(fileno=os.dup(number)) as connection:
        connection.sendall(GREETING)
    try:
        import vllm  # noqa: F401 (takes seconds, in which the learner writes the weights)
        from msgspec import msgpack  # which vLLM needs too
    except ImportError as error:
        sys.stderr.writelines(traceback.format_exception_only(error))
        sys.exit(NO_VLLM)
    with socket.socket(fileno=number) as connection:
        serve(connection, msgpack)


if __name__ == "__main__":
    main(sys.argv[1:])
