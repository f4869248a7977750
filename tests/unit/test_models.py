import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import make_models
from scripts.make_models import METADATA, MODELS, RECIPES, VOCABULARY, Recipe
from swarm.config import ModelSection
from swarm.rewards.number import score
from swarm.rl.engine import SamplingParams, TransformersEngine
from swarm.rl.policy import Policy
from swarm.tasks import IN_DISTRIBUTION, Problem, draw
from swarm.text.tokenizer import Tokenizer

NAMES = [recipe.name for recipe in RECIPES]
MAX_BYTES = 3_000_000


def test_the_folders_are_those_of_the_recipes_and_small() -> None:
    files = [path for path in MODELS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(NAMES)
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_all_have_the_same_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(MODELS / name / file).read_bytes() for name in NAMES}) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_the_metadata_are_those_of_the_files_and_of_the_recipe(recipe: Recipe) -> None:
    folder = MODELS / recipe.name
    metadata = json.loads((folder / METADATA).read_text())
    weights = (folder / "model.safetensors").read_bytes()
    assert metadata["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert metadata["recipe"] == json.loads(json.dumps(asdict(recipe)))


@pytest.mark.parametrize("name", NAMES)
def test_plain_transformers_loads_a_folder(name: str) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(MODELS / name, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    metadata = json.loads((MODELS / name / METADATA).read_text())
    assert sum(p.numel() for p in model.parameters()) == metadata["parameters"]

    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    assert tokenizer.is_fast
    assert tokenizer("12+34=").input_ids == [VOCABULARY[character] for character in "12+34="]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 1
    assert model.config.vocab_size == len(tokenizer) == len(VOCABULARY)


def test_the_tokenizer_takes_one_token_a_character_and_gives_the_text_back() -> None:
    tokenizer = Tokenizer.from_folder(MODELS / NAMES[0])
    text = "0123456789+-=;"
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode("64;46"), 1]) == "64;46"
    # What is outside of the alphabet is one unknown token a character, the line break too.
    assert tokenizer.encode("a\n") == [VOCABULARY["<unk>"]] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_model_solves_a_part_of_the_held_out_problems(name: str) -> None:
    """Enough for a signal in most groups, little enough to leave something to learn."""
    greedy = SamplingParams(1.0, make_models.MAX_COMPLETION_TOKENS, (1,), greedy=True)
    sampled = SamplingParams(1.0, make_models.MAX_COMPLETION_TOKENS, (1,))
    assert 0.45 < _accuracy(name, greedy, 1) < 0.75
    assert 0.25 < _accuracy(name, sampled, 4) < 0.50


def _accuracy(name: str, sampling: SamplingParams, n: int) -> float:
    problems = draw(IN_DISTRIBUTION, "held_out", 200, seed=11)
    tokenizer = Tokenizer.from_folder(MODELS / name)
    section = ModelSection(path=str(MODELS / name), device="cpu", precision="fp32")
    engine = TransformersEngine(Policy.load(section, seed=0))
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    groups = engine.generate(prompts, n, sampling, list(range(len(prompts))))
    scores = [
        score(tokenizer.decode(rollout.token_ids), str(problem.value), problem.prompt, {})
        for problem, group in zip(problems, groups, strict=True)
        for rollout in group
        if int(rollout.token_ids[-1]) == 1  # in time; else it counts as wrong
    ]
    return sum(scores) / (n * len(problems))


def test_the_script_refuses_a_recipe_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_models.py", "arith-huge", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        make_models.main()
    assert ended.value.code == 2
    assert "no recipe arith-huge; known: arith-small" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_worked_answer_leads_to_the_answer_and_fits_the_length() -> None:
    problem = Problem("add", (99, 99))
    assert make_models.worked_answer(problem, reverse_first=True) == "891;198"
    assert make_models.worked_answer(problem, reverse_first=False) == "198"
    assert len("891;198") + 1 == make_models.MAX_COMPLETION_TOKENS
