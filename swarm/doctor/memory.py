"""Whether the model fits: memory needed by the estimate, against memory that is there.

Owns: the question to swarm.model_memory and what its answer means. Does not know: torch; what the
device has is what swarm.rl.probe said.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from swarm import model_files, model_memory
from swarm.config import NodeConfig
from swarm.doctor.findings import Finding, failed, ok, skipped, warning
from swarm.errors import ConfigError, DataError
from swarm.protocol.charter import Charter

CROWDED = 0.9
"""Above this share of the device nothing else may run beside it."""


def memory(config: NodeConfig, charter: Charter | None, probed: Mapping[str, Any]) -> Finding:
    """Weights, optimizer, activations and sampling against the device's memory.

    Args:
        config: what would be joined with.
        charter: the swarm's terms, which say how long and how many completions are.
        probed: of swarm.rl.probe.
    """
    if not config.model.path or charter is None:
        return skipped("memory", "known for a model and a swarm: doctor swarm1... --model DIR")
    if "device" not in probed:
        return skipped("memory", "the device is not known")
    device = probed["device"]
    total = int(probed.get("memory_total_bytes", psutil.virtual_memory().total))
    sampling = charter.manifest.sampling
    try:
        model = model_files.settle(config.model)
        if model.precision == "auto":
            # As the learner does: what the device computes in.
            precision = "bf16" if probed.get("bfloat16") else "fp32"
            model = model.model_copy(update={"precision": precision})
        facts = model_memory.ModelFacts.read(Path(model.path))
        plan = model_memory.plan(
            facts,
            config.model_copy(update={"model": model}),
            model_memory.Workload(
                sampling.group_size, sampling.max_prompt_tokens, sampling.max_completion_tokens
            ),
            device=device,
            total=total,
            eight_bit=find_spec("bitsandbytes") is not None,
        )
    except (ConfigError, DataError) as error:
        return failed("memory", str(error), "take those settings, or a smaller model")
    if not plan.fits:
        return failed("memory", plan.advice(), "take one of these settings, or a smaller model")
    if plan.estimate.peak > CROWDED * total:
        return warning("memory", plan.advice(), "close what else uses the device")
    return ok("memory", plan.advice())
