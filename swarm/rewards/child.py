"""The worker process: scores groups and renders prompts, one request at a time.

Owns: what such a process is denied. Runs as `python -P -m swarm.rewards.child PARENT_PID
MEMORY_BYTES [REWARD ...]`, the names being rewards whose code must be imported first; requests
come on standard input, replies go to standard output, each a frame of 4 bytes little-endian length
and a msgpack map. Does not know: which peer a text is from.

The first defence is that nothing here evaluates a text, and that nothing could while one is
judged (swarm.rewards.wall). The limits are the second: no secrets in the environment, no new
descriptor (so no file and no connection can be opened), no written byte, no core file, no child of
an ordinary user's, a ceiling on memory and CPU time, and on Linux death together with the node.
They bound a mistake; they are not a jail against code that runs here.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
import traceback
from typing import Any, BinaryIO, NoReturn

import msgpack

from swarm.rewards import registry, wall
from swarm.rewards.reward import PlainSpec, RewardError
from swarm.text import template

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 64 * 2**20
EXIT_MEMORY = 70

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def pack(message: dict[str, Any]) -> bytes:
    """A message without its length; texts may hold lone surrogates."""
    packed: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return packed


def unpack(body: bytes) -> Any:
    """The inverse of `pack`."""
    return msgpack.unpackb(body, unicode_errors="surrogatepass")


def main() -> None:
    """Give up what is not needed, say so, and serve until the node closes the pipe."""
    parent, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    os.closerange(3, 2**20)  # whatever the node left open
    _warm_up()
    small = _mapped_bytes()
    for name in sys.argv[3:]:
        registry.load(name)
    memory_bytes += _mapped_bytes() - small  # libraries are not the text's doing
    requests = os.fdopen(0, "rb", closefd=False)
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    _limit(memory_bytes)
    try:
        _send(replies, pack({"ready": True}))
        while body := _receive(requests):
            reply = pack(_answer(unpack(body)))
            if len(reply) > MAX_FRAME_BYTES:
                reply = pack({"fault": "size", "detail": f"{len(reply)} bytes of results"})
            _send(replies, reply)
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BrokenPipeError:
        os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    _limit_cpu(request["cpu_s"])
    try:
        if request["op"] == "render":
            with wall.standing(executing=True):
                texts = template.render(
                    request["template"],
                    request["system"],
                    request["prompts"],
                    request["max_chars"],
                    request["first"],
                )
            return {"values": texts}
        spec = PlainSpec(request["name"], request["version"], request["params"])
        with wall.standing():
            return {"values": _judge(request, spec)}
    except (RewardError, template.TemplateError) as error:
        return {"fault": str(error.reason), "detail": error.detail}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - outermost: the node logs it, the worker goes on
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {
            "fault": "failed",
            "detail": f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})",
        }


def _judge(request: dict[str, Any], spec: PlainSpec) -> list[Any]:
    """Scores; or complete parameters; or for each answer why it can never be matched."""
    if request["op"] == "complete":
        scorer = registry.resolve(spec)
        scorer.check()
        return [dict(scorer.params)]
    if request["op"] == "answers":
        scorer = registry.resolve(spec)
        return [scorer.check_answer(answer) or "" for answer in request["answers"]]
    return registry.score_group(
        spec,
        request["completions"],
        request["finished"],
        request["answer"],
        request["prompt"],
    )


def _receive(stream: BinaryIO) -> bytes:
    """The next frame's body; empty at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return b""
    return stream.read(HEADER.unpack(header)[0])


def _send(stream: BinaryIO, body: bytes) -> None:
    stream.write(HEADER.pack(len(body)) + body)
    stream.flush()


def _die_with(parent: int) -> None:
    """End at once when the node does; elsewhere than on Linux the closed pipe ends the worker."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_NO_NEW_PRIVS, 1)):
            if libc.prctl(option, int(value), 0, 0, 0) != 0:
                _exit(f"prctl({option}): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        _exit("the node is gone")


def _warm_up() -> None:
    """Go once through what Python and jinja2 import only where they need it."""
    template.render("{{ messages | pprint | striptags }}{{ 'é\\n' | tojson }}", "", ["text"])
    try:
        template.render("{{ raise_exception('') }}", "", ["text"])
    except template.TemplateError:
        return


def _limit(memory_bytes: int) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    _lower(resource.RLIMIT_NPROC, 0)
    if sys.platform == "linux":  # macOS refuses a limit on address space
        _lower(resource.RLIMIT_AS, memory_bytes)
    # Descriptors 0 to 3 are in use, so none can be opened any more.
    _lower(resource.RLIMIT_NOFILE, 4)


def _mapped_bytes() -> int:
    """Address space in use; 0 where it is not limited anyway."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(limit, (value, value))


def _limit_cpu(seconds: int) -> None:
    """End by SIGXCPU after so much more CPU time: for a node that cannot watch the clock."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _exit(reason: str) -> NoReturn:
    sys.stderr.write(f"worker: {reason}\n")
    sys.exit(1)


if __name__ == "__main__":
    main()
