"""A node that samples with vLLM, in a real swarm, and one whose engine drifts.

The first needs an interpreter with vLLM, named by TEST_VLLM_PYTHON: `make test-vllm` makes one. The
other has a vLLM without a model, whose log-probs are nobody's.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from nodes import LARGE, PATIENCE_S, SMALL, Swarm, cli, sums, wait_until, write_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarm.rl.vllm_engine import DEFAULTS, ENVIRONMENT
from tests.fake_vllm import write_interpreter

HEAD = 32
"""Width of an attention head: the smallest that vLLM has for CPUs."""

PLAIN_VLLM = """
import json, sys, vllm
folder, out, *prompts = sys.argv[1:]
model = vllm.LLM(folder, dtype="float32", enforce_eager=True, max_num_seqs=8)
answers = model.generate(prompts, vllm.SamplingParams(temperature=0.0, max_tokens=8))
with open(out, "w") as file:  # on stdout vLLM logs
    json.dump([answer.outputs[0].text for answer in answers], file)
"""


def wide_heads(source: Path, out: Path) -> Path:
    """The same function of the same tokens, with attention heads of `HEAD` numbers.

    Rotation turns number i with number i + D/2 by an angle that falls with i / D: in a head twice
    as wide, i stands at 2i. Between them are zeros. The product of queries and keys is divided by
    the root of the width, so queries grow by the root of its growth.
    """
    shutil.copytree(source, out)
    config = json.loads((source / "config.json").read_text())
    narrow, growth = config["head_dim"], HEAD // config["head_dim"]
    tensors = load_file(source / "model.safetensors")

    def widened(weight: Tensor, scale: float = 1.0) -> Tensor:
        heads = weight.reshape(-1, narrow, weight.shape[-1])
        wide = heads.new_zeros(len(heads), HEAD, weight.shape[-1])
        wide[:, ::growth] = heads * scale
        return wide.reshape(-1, weight.shape[-1])

    for name, tensor in tensors.items():
        if "q_proj" in name:
            tensors[name] = widened(tensor, growth**0.5)
        elif "k_proj" in name or "v_proj" in name:
            tensors[name] = widened(tensor)
        elif "o_proj" in name:
            tensors[name] = widened(tensor.t()).t().contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"head_dim": HEAD}))
    return out


def said_by_vllm(folder: Path, prompts: list[str]) -> list[str]:
    """Greedy completions of a model folder by vLLM alone, which knows nothing of swarm-node."""
    out = folder.with_suffix(".json")
    done = subprocess.run(
        [os.environ["TEST_VLLM_PYTHON"], "-P", "-c", PLAIN_VLLM, str(folder), str(out), *prompts],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
        env={**os.environ, **DEFAULTS, **ENVIRONMENT, "TORCHDYNAMO_DISABLE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(out.read_text()))


def said_by_transformers(folder: Path, prompts: list[str]) -> list[str]:
    """The same by transformers."""
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    said = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        answer = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
        said.append(tokenizer.decode(answer, skip_special_tokens=True))
    return said


@pytest.mark.vllm
@pytest.mark.skipif(
    "TEST_VLLM_PYTHON" not in os.environ, reason="TEST_VLLM_PYTHON names no interpreter"
)
def test_node_that_samples_with_vllm(tmp_path: Path) -> None:
    """Its samples are right sums, both nodes train on them, and what it exports is a model."""
    with Swarm(tmp_path) as swarm:
        prompts = write_prompts(tmp_path / "prompts.jsonl", sums(range(10, 40), range(10, 14)))
        swarm.seed(prompts, "--held-out-fraction", "0.1")
        vllm = swarm.join(
            "vllm",
            wide_heads(SMALL, tmp_path / "wide"),
            engine__kind="vllm",
            engine__python=os.environ["TEST_VLLM_PYTHON"],
        )
        nodes = swarm.nodes
        # vLLM needs 20 s of both cores to start; nobody else should want them meanwhile.
        wait_until(lambda: vllm.step > 0, "the node with vLLM trains", nodes, 3 * PATIENCE_S)
        other = swarm.join("other", LARGE)
        wait_until(lambda: vllm.peer_id in other.trained_on(), "the other learns from it", nodes)
        wait_until(lambda: vllm.step >= 3, "the node with vLLM trains on", nodes)
        status = vllm.status()
        assert not status["problems"]
        engine = status["engine"]
        assert engine["kind"] == "vllm"
        assert engine["syncs"] >= 3
        assert engine["drift"] < 1e-4
        assert max(status["training"]["rewards"]) > 0.1  # not a random model's
        own = [report["per_peer"].get("own", {}) for report in vllm.metrics()]
        fresh = [r["log_ratio_max"] for r in own if r.get("log_ratio_max") is not None]
        assert min(fresh) < 1e-3  # trained on before the next change of weights
        assert vllm.stop() == 0
        assert other.stop() == 0  # vLLM needs the cores
    out = tmp_path / "exported"
    result = cli("checkpoint", "export", "--out", str(out), "--data-dir", str(vllm.data_dir))
    assert result.returncode == 0, result.stderr
    asked = ["12+13=", "27+11=", "30+13="]
    assert said_by_vllm(out, asked) == said_by_transformers(out, asked)


def test_training_is_paused_when_the_engine_drifts(tmp_path: Path) -> None:
    """The reason stands in the status, no step is made, and nothing is published."""
    with Swarm(tmp_path) as swarm:
        swarm.seed(write_prompts(tmp_path / "prompts.jsonl", sums(range(10), range(3))))
        node = swarm.join(
            "node", engine__kind="vllm", engine__python=str(write_interpreter(tmp_path))
        )
        wait_until(
            lambda: node.status().get("activity", {}).get("doing") == "paused",
            "training is paused",
            swarm.nodes,
        )
        (problem,) = node.status()["problems"]
        assert "the engine's log-probs differ from the trained model's by" in problem
        assert "(limit 0.001)" in problem
        status = node.status()
        assert (status["training"]["step"], status["training"]["groups_made"]) == (0, 0)
        loads = (tmp_path / "calls.jsonl").read_text().count('"load"')
        assert loads == 2  # a new start did not help
        run_dir = node.run_dir
        assert any(folder.exists() for folder in run_dir.handover_dirs)
        assert node.stop() == 0
        assert not any(folder.exists() for folder in run_dir.handover_dirs)
