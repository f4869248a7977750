"""A vLLM without a model: it writes down what it is told, and draws tokens of one log-prob.

Each call is a line of JSON in the file that FAKE_VLLM_CALLS names. FAKE_VLLM_FAULT names a file:
while it is there, the call that it names fails ("generate: error"), kills ("load: kill"), never
ends ("generate: hang") or does so without a thread that runs ("generate: stop").
"""

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__version__ = "0.fake"

LOGPROB = -1.25


def note(call: str, **arguments: Any) -> None:
    with open(os.environ["FAKE_VLLM_CALLS"], "a") as file:
        file.write(json.dumps({"call": call, **arguments}) + "\n")
    fault = Path(os.environ.get("FAKE_VLLM_FAULT", "none"))
    if not fault.is_file():
        return
    name, _, what = fault.read_text().partition(": ")
    if name != call:
        return
    if what == "error":
        raise RuntimeError("the fake was told to fail")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def files(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


class SamplingParams:
    def __init__(self, **arguments: Any) -> None:
        self.__dict__.update(arguments)


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str = "length"


@dataclass
class Output:
    outputs: list[Completion] = field(default_factory=list)


class LLMEngine:
    def add_lora(self, request: Any) -> None:
        note("add_lora", number=request.lora_int_id, files=files(request.lora_path))

    def remove_lora(self, number: int) -> None:
        note("remove_lora", number=number)


class LLM:
    def __init__(self, **arguments: Any) -> None:
        note("load", arguments=arguments, files=files(arguments["model"]), pid=os.getpid())
        self.llm_engine = LLMEngine()

    def collective_rpc(self, name: str, kwargs: dict[str, str]) -> None:
        note(name, files=files(kwargs["weights_path"]))

    def reset_prefix_cache(self) -> bool:
        note("reset_prefix_cache")
        return True

    def sleep(self, level: int) -> None:
        note("sleep", level=level)

    def wake_up(self, tags: list[str]) -> None:
        note("wake_up", tags=tags)

    def generate(
        self, requests: list[Any], parameters: list[Any], use_tqdm: bool, lora_request: Any
    ) -> list[Output]:
        adapter = None if lora_request is None else lora_request.lora_int_id
        note("generate", requests=len(requests), adapter=adapter)
        outputs = []
        for item in parameters:
            draw = random.Random(item.seed)
            ids = [draw.randrange(8) for _ in range(item.max_tokens)]
            outputs.append(Output([Completion(ids, [{i: Logprob(LOGPROB)} for i in ids])]))
        return outputs
