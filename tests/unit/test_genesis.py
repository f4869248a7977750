"""From prompts and options to a swarm: what is refused or left out, and what the manifest says."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from swarm.errors import DataError, TryAgainError, UsageError
from swarm.node.amending import amend
from swarm.node.genesis import Genesis, SeedOptions, append_set, make_genesis, store_genesis
from swarm.node.prompt_table import render, render_set
from swarm.paths import DataDir, SwarmDir
from swarm.protocol.charter import Charter
from swarm.protocol.identity import Identity
from swarm.protocol.manifest import RewardSpec
from swarm.protocol.prompts import Prompt, decode_prompt_set, encode_prompt_set, prompt_set_ref
from swarm.rewards.reward import RewardError
from swarm.rewards.workers import WorkerPool
from swarm.text.tokenizer import Tokenizer

ORGANIZER = Identity.generate()
NUMBER = {"truncated": "zero", "inside": "text"}


def write(path: Path, *lines: dict[str, Any] | str) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return str(path)


def sums(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in numbers]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return folder


async def seed(tokenizer: Path, *prompts: str, **options: Any) -> Genesis:
    fields = {"held_out_fraction": 0.0, "max_prompt_tokens": 20, **options}
    return await make_genesis(
        SeedOptions(prompts=prompts, tokenizer=tokenizer, **fields), ORGANIZER.peer_id, 1.0
    )


def training(genesis: Genesis) -> list[Prompt]:
    ref = genesis.manifest.prompts
    return decode_prompt_set(genesis.sets[ref.sha256], ref)


@pytest.fixture
def bad(tmp_path: Path) -> str:
    return write(
        tmp_path / "bad.jsonl",
        *sums(1),
        '{"prompt": "2+2="}',
        {"prompt": "1+1=", "answer": "3"},
        {"prompt": "x" * 21, "answer": "4"},
        {"prompt": "5+5=", "answer": "ten"},
        {"prompt": "6+6=", "answer": " "},
        *sums(7),
    )


async def test_all_that_cannot_be_used_is_named_at_once(tokenizer: Path, bad: str) -> None:
    with pytest.raises(DataError) as caught:
        await seed(tokenizer, bad)
    message = str(caught.value)
    assert message.startswith("5 prompts cannot be used (--drop-bad leaves them out):")
    for line, why in (
        (2, "'answer' is missing"),
        (3, f"the same prompt as in {bad}:1"),
        (4, "has 21 tokens; allowed are 1 to 20 (--max-prompt-tokens)"),
        (5, "answer 'ten': it holds no number (reward number)"),
        (6, "'answer' is empty"),
    ):
        (found,) = [row for row in message.splitlines() if f"{bad}:{line}: " in row]
        assert why in found


async def test_they_are_left_out_when_asked(
    tokenizer: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        genesis = await seed(tokenizer, bad, drop_bad=True)
    assert [prompt.prompt for prompt in training(genesis)] == ["1+1=", "7+7="]
    assert genesis.left_out == 5
    assert f"5 prompts left out: {bad}:2: 'answer' is missing; " in caplog.text
    assert genesis.rendered["prompts"].token_ids[0].tolist() != []


async def test_only_the_first_of_many_faults_are_shown(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *(["{}"] * 200))
    with pytest.raises(DataError, match="200 prompts cannot be used") as caught:
        await seed(tokenizer, path)
    assert len(str(caught.value).splitlines()) == 12
    assert str(caught.value).endswith("and 190 more")
    with pytest.raises(DataError, match="holds no prompts to train on"):
        await seed(tokenizer, path, drop_bad=True)


async def test_what_is_evaluated_is_not_trained_on(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *sums(1, 2, 3))
    held_out = write(tmp_path / "b.jsonl", *sums(2, 4))
    ood = write(tmp_path / "c.jsonl", *sums(3, 4))
    with pytest.raises(DataError, match=f"stands in the held-out set, {held_out}:1, too"):
        await seed(tokenizer, path, held_out=held_out)
    genesis = await seed(tokenizer, path, held_out=held_out, out_of_distribution=ood, drop_bad=True)
    assert [prompt.prompt for prompt in training(genesis)] == ["1+1="]
    assert genesis.manifest.held_out is not None
    assert genesis.manifest.held_out.count == 2
    assert genesis.manifest.out_of_distribution is not None
    assert genesis.left_out == 2


async def test_a_share_is_held_out(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *sums(*range(100, 300)))
    genesis = await seed(tokenizer, path, held_out_fraction=0.25)
    assert genesis.manifest.held_out is not None
    assert 30 <= genesis.manifest.held_out.count <= 70
    assert genesis.manifest.held_out.count + genesis.manifest.prompts.count == 200
    with pytest.raises(UsageError, match=r"--held-out-fraction 1\.0: from 0 to below 1"):
        await seed(tokenizer, path, held_out_fraction=1.0)
    with pytest.raises(DataError, match="nothing is left to train on"):
        await seed(tokenizer, f"{path}?limit=1", held_out_fraction=0.9999)


# -- rewards -------------------------------------------------------------------------------------


async def test_prompts_keep_their_own_reward_and_sets_theirs(
    tokenizer: Path, tmp_path: Path
) -> None:
    own = {"prompt": "a", "answer": "b", "reward": "exact"}
    same = {"prompt": "c", "answer": "5", "reward": {"name": "number"}}
    first = write(tmp_path / "a.jsonl", *sums(1), own, same)
    second = write(tmp_path / "b.jsonl", {"prompt": "d", "answer": "e"})
    genesis = await seed(tokenizer, first, f"{second}?reward=exact&tag=words")
    assert genesis.manifest.reward == RewardSpec(name="number", params=NUMBER)
    exact = RewardSpec(name="exact", params={**NUMBER, "ignore_case": False})
    prompts = training(genesis)
    assert [prompt.reward for prompt in prompts] == [None, exact, None, exact]
    assert [prompt.tags for prompt in prompts] == [("a",), ("a",), ("a",), ("words",)]


async def test_the_sources_reward_is_the_swarm_s_where_all_agree(
    tokenizer: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "d", "answer": "e"})
    genesis = await seed(tokenizer, f"{path}?reward=exact", reward_params={"ignore_case": True})
    assert genesis.manifest.reward.name == "exact"
    assert genesis.manifest.reward.params["ignore_case"] is True
    assert [prompt.reward for prompt in training(genesis)] == [None]


async def test_reasoning_gym_brings_its_reward(tokenizer: Path) -> None:
    genesis = await seed(
        tokenizer, "reasoning-gym:chain_sum", source_options={"size": "5"}, max_prompt_tokens=400
    )
    assert genesis.manifest.reward.name == "reasoning-gym"
    assert genesis.manifest.reward.params["task"] == "chain_sum"
    assert genesis.manifest.name == "chain_sum"
    assert {prompt.reward for prompt in training(genesis)} == {None}


async def test_sums_are_written_out_in_the_manifest(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *sums(1))
    genesis = await seed(tokenizer, path, reward="number:0.9+format:0.1")
    assert genesis.manifest.reward.params["a_weight"] == 0.9
    assert genesis.manifest.reward.params["b_tags"] == "answer"
    charter = Charter.from_genesis(genesis.manifest)
    assert Charter.from_bytes(charter.to_bytes(), charter.swarm_id) == charter


@pytest.mark.parametrize(
    ("reward", "params", "error", "says"),
    [
        ("vibes", {}, RewardError, "no reward 'vibes' version 1; exact 1, format 1"),
        ("number", {"colour": "red"}, RewardError, "no parameter 'colour'"),
        ("regex", {"pattern": "("}, RewardError, "regex 1: pattern"),
        ("reasoning-gym", {"task": "countdown"}, RewardError, "task 'countdown' is none of ab"),
    ],
)
async def test_a_reward_that_cannot_be_is_refused(
    tokenizer: Path,
    tmp_path: Path,
    reward: str,
    params: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    path = write(tmp_path / "a.jsonl", *sums(1))
    with pytest.raises(error, match=says):
        await seed(tokenizer, path, reward=reward, reward_params=params)


async def test_prompts_whose_own_reward_cannot_be_are_named(
    tokenizer: Path, tmp_path: Path
) -> None:
    own: list[tuple[Any, str]] = [
        ({"name": "nope"}, "its reward: .*'nope'"),
        ({"name": "regex", "params": {"pattern": "("}}, "its reward: .*"),
    ]
    for reward, says in own:
        path = write(tmp_path / "a.jsonl", *sums(1), {**sums(2)[0], "reward": reward})
        with pytest.raises(DataError, match=f"{path}:2: {says}"):
            await seed(tokenizer, path)
        assert (await seed(tokenizer, path, drop_bad=True)).left_out == 1


async def test_an_own_reward_that_hangs_on_an_answer_is_named(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_answers = WorkerPool.check_answers

    async def hangs(self: WorkerPool, reward: Any, answers: Any) -> list[str]:
        if reward.name == "exact":
            raise RewardError("timeout", "killed after 10 s")
        return await check_answers(self, reward, answers)

    monkeypatch.setattr(WorkerPool, "check_answers", hangs)
    path = write(tmp_path / "a.jsonl", *sums(1), {**sums(2)[0], "reward": {"name": "exact"}})
    with pytest.raises(DataError, match=rf"{path}:2: .*killed after 10 s \(reward exact\)"):
        await seed(tokenizer, path)


async def test_a_member_without_a_reward_is_told_what_to_install(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Before it trains: when it renders the set, for the swarm's reward and for a prompt's own."""
    missing = {"name": "length", "version": 1, "params": {"package": "swarm-reward-length==1.0"}}
    path = write(tmp_path / "a.jsonl", *sums(1))
    manifest = (await seed(tokenizer, path)).manifest
    prompts = [Prompt("1+1=", None, "2"), Prompt("a", None, "b", reward=RewardSpec(**missing))]
    async with WorkerPool(1, 60.0) as workers:
        tokens = Tokenizer.from_folder(tokenizer)
        other = manifest.model_copy(update={"reward": RewardSpec(**missing)})
        for count, terms in ((2, manifest), (1, other)):
            rendered = await render(prompts[:count], "{{ prompt }}", "", tokens, workers)
            data = encode_prompt_set(prompts[:count])
            ref = prompt_set_ref(data, rendered.hashes)
            with pytest.raises(RewardError, match="pip install 'swarm-reward-length==1") as caught:
                await render_set(data, ref, terms, tokens, "a model", workers)
            assert caught.value.reason == "missing"
        data = encode_prompt_set(prompts[:1])
        ref = prompt_set_ref(data, rendered.hashes)
        assert len((await render_set(data, ref, manifest, tokens, "m", workers)).prompts) == 1


# -- more prompts --------------------------------------------------------------------------------


@pytest.fixture
async def swarm(tokenizer: Path, tmp_path: Path) -> tuple[Charter, SwarmDir]:
    path = write(tmp_path / "a.jsonl", *sums(1, 2))
    held_out = write(tmp_path / "b.jsonl", *sums(3))
    genesis = await seed(tokenizer, path, held_out=held_out)
    data_dir = DataDir(tmp_path / "data")
    options = SeedOptions(prompts=(path,), tokenizer=tokenizer)
    return Charter.from_genesis(genesis.manifest), store_genesis(genesis, options, data_dir)


async def test_appended_prompts_repeat_none_of_the_swarm_s(
    swarm: tuple[Charter, SwarmDir], tmp_path: Path
) -> None:
    charter, swarm_dir = swarm
    more = write(tmp_path / "more.jsonl", *sums(2, 3, 4))
    with pytest.raises(DataError) as caught:
        await append_set(charter, swarm_dir, [more])
    assert f"{more}:1: '2+2=' stands in the swarm's training set 0 too" in str(caught.value)
    assert f"{more}:2: '3+3=' stands in the swarm's held-out set too" in str(caught.value)
    ref = await append_set(charter, swarm_dir, [more], drop_bad=True)
    assert ref.count == 1
    request = {"append": ref.model_dump(mode="json"), "sets": 1}
    extended = amend(charter, swarm_dir, ORGANIZER, request)
    assert extended.prompt_sets == (*charter.prompt_sets, ref)
    with pytest.raises(TryAgainError, match="other prompts were added"):  # and unchecked by these
        amend(extended, swarm_dir, ORGANIZER, request)
    with pytest.raises(DataError, match="training set 1 too"):
        await append_set(extended, swarm_dir, [write(tmp_path / "x.jsonl", *sums(4))])
    with pytest.raises(DataError, match="no prompt is left"):
        await append_set(extended, swarm_dir, [more], drop_bad=True)


async def test_appended_prompts_are_held_to_the_swarm_s_terms(
    swarm: tuple[Charter, SwarmDir], tmp_path: Path
) -> None:
    charter, swarm_dir = swarm
    path = write(tmp_path / "x.jsonl", {"prompt": "y" * 30, "answer": "1"})
    with pytest.raises(DataError, match=f"{path}:1: .* has 30 tokens"):
        await append_set(charter, swarm_dir, [path])
    with pytest.raises(UsageError, match="no option colour"):
        await append_set(charter, swarm_dir, [f"{path}?colour=red"])
