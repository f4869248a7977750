"""`swarm-node eval` on a swarm's folder, with answers that the model is known to give or not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.cli.main import main
from swarm.config import ModelSection
from swarm.intervals import wilson
from swarm.paths import DataDir
from swarm.protocol.charter import Charter
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import Manifest
from swarm.protocol.prompts import Prompt, encode_prompt_set, prompt_set_ref, prompt_tokens_sha256
from swarm.rl.engine import SamplingParams, TransformersEngine
from swarm.rl.policy import Policy
from swarm.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "swarm" / "models" / "arith-small"
QUESTIONS = ("12+34=", "45+12=", "71-25=", "88-11=", "23+34=")
LIMIT = 32


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    """A swarm with five held-out prompts, of which the model answers the first three rightly."""
    tokenizer = Tokenizer.from_folder(MODEL)
    stop = tokenizer.eos_token_id
    assert stop is not None
    policy = Policy.load(ModelSection(path=str(MODEL)), seed=0, vocab_size=tokenizer.vocab_size)
    encoded = [tokenizer.encode(text) for text in QUESTIONS]
    sampling = SamplingParams(1.0, LIMIT, (stop,), greedy=True)
    groups = TransformersEngine(policy).generate(encoded, 1, sampling, [0] * len(encoded))
    given = [tokenizer.decode(group[0].token_ids.tolist()) for group in groups]
    prompts = [
        Prompt(text, None, answer if i < 3 else f"not {answer}")
        for i, (text, answer) in enumerate(zip(QUESTIONS, given, strict=True))
    ]
    data = encode_prompt_set(prompts)
    hashes = [prompt_tokens_sha256(np.array(ids, np.int32)) for ids in encoded]
    ref = prompt_set_ref(data, hashes).model_dump()
    manifest = Manifest.model_validate(
        {
            "name": "Sums",
            "created_s": 1_700_000_000.0,
            "organizers": (Identity(bytes(32)).peer_id,),
            "prompts": ref,
            "held_out": ref,
            "template": {"text": "{{ prompt }}"},
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint(),
                "vocab_size": tokenizer.vocab_size,
                "name": "arith",
            },
            "sampling": {
                "temperature": 1.0,
                "group_size": 2,
                "max_prompt_tokens": 8,
                "max_completion_tokens": LIMIT,
                "stop_token_ids": (stop,),
            },
            "reward": {"name": "exact"},
        }
    )
    made = DataDir(tmp_path / "data")
    made.create()
    swarm = made.swarm(manifest.swarm_id)
    swarm.prompts_dir.mkdir(parents=True)
    swarm.charter_path.write_bytes(Charter(manifest, ()).to_bytes())
    (swarm.prompts_dir / f"{ref['sha256']}.jsonl").write_bytes(data)
    made.current = manifest.swarm_id
    return made


def _cli(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def test_model_is_evaluated_on_the_swarms_held_out_prompts(
    data_dir: DataDir, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--data-dir", data_dir.root, "--set", "model.threads=1")
    assert _cli("eval", MODEL, "--json", *where) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["schema"], result["checkpoint"]) == ("swarm-node/eval/1", None)
    held_out = result["sets"]["held_out"]
    assert (held_out["accuracy"], held_out["prompts"]) == (0.6, 5)
    assert (held_out["low"], held_out["high"]) == pytest.approx(wilson(0.6, 5), abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no run in"),
        ((MODEL, "--step", "3"), "a model has none"),
        ((MODEL, "--max-prompts", "0"), "at least 1"),
        (("/nowhere/at/all",), "does not exist"),
    ],
)
def test_what_cannot_be_evaluated(
    data_dir: DataDir, arguments: tuple[Any, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _cli("eval", *arguments, "--data-dir", data_dir.root) in (2, 78)
    assert says in capsys.readouterr().err
