"""One cell of the F-TIS benchmark: a small swarm in one process, without a network.

Owns: the round (who samples what, who trains on what), evaluation, and the figures that one run
leaves behind. It samples, rewards and trains with the code that a node runs: `Policy`,
`TransformersEngine`, `score_group`, `Trainer`.
Does not know: which cells are worth running (`benchmarks.ftis`), tables and plots
(`benchmarks.ftis_report`).
"""

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from swarm import model_files
from swarm.config import ModelSection, TrainSection
from swarm.errors import ConfigError, DataError
from swarm.protocol.manifest import RewardSpec
from swarm.protocol.prompts import Prompt, encode_prompt_set
from swarm.protocol.rollout import Finish, Rollout
from swarm.rewards.registry import score_group
from swarm.rl.engine import SamplingParams, TransformersEngine
from swarm.rl.loss import FtisConfig
from swarm.rl.policy import Policy
from swarm.rl.step_report import OWN, StepReport
from swarm.rl.trainer import Trainer, TrainGroup
from swarm.text.template import render
from swarm.text.tokenizer import PLAIN_TEMPLATE, Tokenizer

Sharing = Literal["alone-seen", "alone-generated", "vertical", "horizontal"]
"""Who samples and who trains on what, with B prompts a round and K nodes:

`vertical`: each node samples whole groups for B / K prompts; all train on all B groups.
`horizontal`: each samples G / K completions of every prompt; all train on the pooled groups, whose
mean and standard deviation run over all nodes' rewards.
`alone-seen`: each samples all B groups itself: as many samples seen as in a swarm.
`alone-generated`: each samples the B / K groups that it would in a swarm, and trains on no others.
"""

POOL = "pool"
"""Publisher of groups that several nodes sampled together."""


@dataclass(frozen=True, slots=True)
class Member:
    """One node: its name in tables, its model, what of it is trained."""

    name: str
    model: str
    mode: Literal["full", "lora"] = "full"
    lora_rank: int = 8
    learning_rate_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How hard a run trains, and how it samples."""

    name: str
    learning_rate: float
    steps: int
    groups: int = 32
    """Prompts in a round: the groups that a node trains on in one step."""
    group_size: int = 8
    max_completion_tokens: int = 10
    temperature: float = 1.0
    reward: str = "number"
    evaluate_every: int = 50
    rows_per_call: int = 1024
    """Completions decoded together."""
    micro_batch_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Method:
    """What is compared: the loss, who shares what, and how old the samples are."""

    name: str
    ftis: FtisConfig
    sharing: Sharing = "vertical"
    staleness: int = 0
    """Samples are trained on so many steps after the policy that sampled them."""
    study: str = ""
    """The ablation that it belongs to; empty: the main comparison."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run."""

    pair: str
    members: tuple[Member, ...]
    setting: Setting
    method: Method
    seed: int
    device: str = "cpu"
    precision: str = "fp32"

    @property
    def id(self) -> str:
        """Unique within a benchmark; also the path of the result."""
        return f"{self.pair}/{self.setting.name}/{self.method.name}/seed{self.seed}"

    def describe(self, prompts: "Prompts") -> dict[str, Any]:
        """Everything that the result depends on, as JSON-able values."""
        models = [_content_digest(model_files.resolve(_section(self, m))) for m in self.members]
        described = {**asdict(self), "models": models, "prompts": prompts.digest()}
        values: dict[str, Any] = json.loads(json.dumps(described))
        return values


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is trained on, and what is measured in and out of distribution (perhaps nothing)."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    out_of_distribution: Sequence[Prompt] = ()

    def digest(self) -> str:
        """Tells sets of prompts apart."""
        state = hashlib.sha256()
        for part in (self.train, self.held_out, self.out_of_distribution):
            state.update(hashlib.sha256(encode_prompt_set(part)).digest())
        return state.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt as nodes see it."""

    text: str
    token_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What one node sampled for one prompt."""

    place: int
    """Of the prompt in its round."""
    publisher: str
    task: Task
    rollouts: tuple[Rollout, ...]
    rewards: NDArray[np.float32]


@dataclass(slots=True)
class _Clock:
    """CPU seconds of this process by what they were spent on."""

    cpu_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.cpu_s[what] = self.cpu_s.get(what, 0.0) + time.process_time() - started


class Node:
    """One member at work: a policy, what samples from it, what trains it.

    Args:
        train: further settings of [train].
    """

    def __init__(
        self,
        cell: Cell,
        member: Member,
        tokenizer: Tokenizer,
        train: Mapping[str, Any] | None = None,
    ) -> None:
        setting = cell.setting
        self.name = member.name
        self._setting = setting
        self._tokenizer = tokenizer
        self._reward = RewardSpec(name=setting.reward, version=1, params={})
        if tokenizer.eos_token_id is None:
            raise DataError(f"{member.model}: its tokenizer names no end-of-sequence token")
        self._stop_token_ids = (tokenizer.eos_token_id,)
        self.policy = Policy.load(
            _section(cell, member), cell.seed, vocab_size=tokenizer.vocab_size
        )
        self._engine = TransformersEngine(self.policy)
        self._trainer = Trainer(
            self.policy,
            TrainSection(
                groups_per_step=setting.groups,
                learning_rate=setting.learning_rate * member.learning_rate_factor,
                micro_batch_tokens=setting.micro_batch_tokens,
                log_samples=False,
                **(train or {}),
            ),
            cell.method.ftis,
            temperature=setting.temperature,
        )

    def sample(
        self, tasks: Sequence[tuple[int, Task]], n: int, seeds: Sequence[int]
    ) -> list[Sampled]:
        """n rewarded completions for each (place in the round, task)."""
        rollouts = self._decode([task for _, task in tasks], n, seeds, greedy=False)
        return [
            Sampled(place, self.name, task, tuple(group), self.score(task, group))
            for (place, task), group in zip(tasks, rollouts, strict=True)
        ]

    def train(self, groups: Sequence[TrainGroup]) -> StepReport:
        """One step."""
        return self._trainer.step(groups)

    def accuracy(self, tasks: Sequence[Task]) -> float:
        """Mean reward of greedy completions."""
        scores = [
            self.score(task, group) for task, group in zip(tasks, self.greedy(tasks), strict=True)
        ]
        return float(np.concatenate(scores).mean())

    def greedy(self, tasks: Sequence[Task]) -> list[list[Rollout]]:
        """The most probable completion of each task, each alone in its group."""
        return self._decode(tasks, 1, [0] * len(tasks), greedy=True)

    def _decode(
        self, tasks: Sequence[Task], n: int, seeds: Sequence[int], *, greedy: bool
    ) -> list[list[Rollout]]:
        setting = self._setting
        params = SamplingParams(
            setting.temperature, setting.max_completion_tokens, self._stop_token_ids, greedy
        )
        size = max(1, setting.rows_per_call // n)
        done: list[list[Rollout]] = []
        for start in range(0, len(tasks), size):
            at = slice(start, start + size)
            done += self._engine.generate([t.token_ids for t in tasks[at]], n, params, seeds[at])
        return done

    def score(self, task: Task, rollouts: Sequence[Rollout]) -> NDArray[np.float32]:
        """Rewards (G,) of completions."""
        texts = [self._tokenizer.decode(rollout.token_ids.tolist()) for rollout in rollouts]
        finished = [rollout.finish is Finish.STOP for rollout in rollouts]
        rewards = score_group(self._reward, texts, finished, task.answer, task.text)
        return np.array(rewards, dtype=np.float32)


def run_cell(
    cell: Cell, prompts: Prompts, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Train one small swarm from its start to its last step.

    The prompts of a round and the random numbers of sampling depend on the seed alone, so that
    methods are compared on equal terms. On the CPU the same cell gives the same result.

    Args:
        cell: what to run.
        prompts: of a kind that the members' shared tokenizer can write.
        progress: told of every evaluation, in words.

    Returns:
        JSON-able: `cell` (its description), `nodes` (for each: `evaluations` and, by metric,
        `steps`), `cpu_s`, `seconds`.

    Raises:
        ConfigError: the members' tokenizers differ, or the group cannot be split evenly.
        DataError: a model or a prompt cannot be read.
    """
    started, clock, setting = time.monotonic(), _Clock(), cell.setting
    count = len(cell.members)
    if cell.method.sharing == "horizontal" and setting.group_size % count:
        raise ConfigError(f"group size {setting.group_size} is no multiple of {count} nodes")
    description = cell.describe(prompts)
    tokenizer = shared_tokenizer(cell)
    train, held_out, out_of_distribution = (
        tasks_of(part, tokenizer)
        for part in (prompts.train, prompts.held_out, prompts.out_of_distribution)
    )
    with clock.on("loading"):
        nodes = [Node(cell, member, tokenizer) for member in cell.members]
    evaluations: list[list[dict[str, float]]] = [[] for _ in nodes]
    series: list[dict[str, list[float | None]]] = [{} for _ in nodes]
    rounds = rounds_of(train, setting.groups, cell.seed)
    waiting: list[list[list[Sampled]]] = []  # rounds that are sampled and not yet trained on

    def evaluate(step: int) -> None:
        with clock.on("evaluation"):
            for node, done in zip(nodes, evaluations, strict=True):
                done.append({"step": step, "in_distribution": node.accuracy(held_out)})
                if out_of_distribution:
                    done[-1]["out_of_distribution"] = node.accuracy(out_of_distribution)
        accuracies = ", ".join(f"{done[-1]['in_distribution']:.3f}" for done in evaluations)
        progress(f"{cell.id}: step {step}, accuracy {accuracies}")

    evaluate(0)
    for turn in range(setting.steps + cell.method.staleness):
        if turn < setting.steps:
            with clock.on("sampling"):
                waiting.append(_sample_round(cell, nodes, next(rounds), turn))
        if turn < cell.method.staleness:
            continue
        sampled = waiting.pop(0)
        with clock.on("training"):
            reports = [
                node.train(_diet(cell.method.sharing, sampled, index))
                for index, node in enumerate(nodes)
            ]
        for figures, report, own in zip(series, reports, sampled, strict=True):
            for name, value in _figures(report, own).items():
                figures.setdefault(name, []).append(value)
        step = turn + 1 - cell.method.staleness
        if step == setting.steps or step % setting.evaluate_every == 0:
            evaluate(step)
    return {
        "cell": description,
        "nodes": [
            {
                "name": node.name,
                "parameters": node.policy.count_parameters()[0],
                "trained_parameters": node.policy.count_parameters()[1],
                "evaluations": done,
                "steps": figures,
            }
            for node, done, figures in zip(nodes, evaluations, series, strict=True)
        ],
        "cpu_s": {name: round(value, 2) for name, value in clock.cpu_s.items()},
        "seconds": round(time.monotonic() - started, 2),
        "torch": torch.__version__,
    }


def _sample_round(
    cell: Cell, nodes: Sequence[Node], tasks: Sequence[Task], turn: int
) -> list[list[Sampled]]:
    """What each node samples of one round."""
    placed = list(enumerate(tasks))
    sampled = []
    for index, node in enumerate(nodes):
        whole = cell.method.sharing in ("alone-seen", "horizontal")
        share = placed if whole else placed[index :: len(nodes)]
        n = cell.setting.group_size
        if cell.method.sharing == "horizontal":
            n //= len(nodes)
        seeds = [seed_of(cell.seed, turn, place, index) for place, _ in share]
        sampled.append(node.sample(share, n, seeds))
    return sampled


def _diet(sharing: Sharing, sampled: Sequence[Sequence[Sampled]], index: int) -> list[TrainGroup]:
    """The groups that node `index` trains on, in the order of the round's prompts."""
    if sharing == "horizontal":
        # One prompt's parts become one group. Nobody's own: the trainer knows owners by group.
        return [
            train_group(parts[0].task, POOL, False, parts)
            for parts in (list(together) for together in zip(*sampled, strict=True))
        ]
    publishers = [index] if sharing.startswith("alone") else range(len(sampled))
    groups = [(one, publisher == index) for publisher in publishers for one in sampled[publisher]]
    groups.sort(key=lambda item: item[0].place)
    return [train_group(one.task, one.publisher, own, [one]) for one, own in groups]


def train_group(task: Task, publisher: str, own: bool, parts: Sequence[Sampled]) -> TrainGroup:
    return TrainGroup(
        hash=hashlib.sha256(f"{publisher} {task.text}".encode()).digest(),
        publisher=publisher,
        own=own,
        prompt_ids=task.token_ids,
        rollouts=tuple(rollout for part in parts for rollout in part.rollouts),
        rewards=np.concatenate([part.rewards for part in parts]),
    )


def _figures(report: StepReport, own: Sequence[Sampled]) -> dict[str, float | None]:
    """What is kept of one step, by name; None: not known in this step."""
    foreign = [peer for name, peer in report.per_peer.items() if name != OWN]
    logprobs = np.concatenate([r.logprobs for group in own for r in group.rollouts])

    def foreign_mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    values = {
        "reward": float(np.mean([group.rewards.mean() for group in own])),
        "entropy": -float(logprobs.mean(dtype=np.float64)),
        "trained_share": report.trained / report.samples,
        "foreign_trained_share": (
            report.foreign_trained / report.foreign_samples if report.foreign_samples else None
        ),
        "dropped_advantage_share": report.dropped_advantage / report.samples,
        "dropped_kl_share": report.dropped_kl / report.samples,
        "no_signal_share": report.no_signal / report.samples,
        "foreign_kl_p50": foreign_mean([peer.kl_p50 for peer in foreign]),
        "foreign_kl_p90": foreign_mean([peer.kl_p90 for peer in foreign]),
        "foreign_kl_p99": foreign_mean([peer.kl_p99 for peer in foreign]),
        "ratio_mean": report.ratio_mean,
        "ratio_max": report.ratio_max,
        "is_weight_mean": report.is_weight_mean,
        "truncated_token_share": report.truncated_share,
        "cut_share": report.truncated_completions / report.samples,
        "batch_tokens": float(report.batch_tokens),
        "model_token_share": report.tokens / report.batch_tokens,
        "grad_norm": report.grad_norm,
        "moved": float(report.stepped),
    }
    return {name: None if v is None else float(f"{v:.5g}") for name, v in values.items()}


def rounds_of(tasks: Sequence[Task], size: int, seed: int) -> Iterator[list[Task]]:
    """Prompts round by round, in a new order every epoch, without end."""
    if len(tasks) < size:
        raise DataError(f"{len(tasks)} prompts to train on; a round takes {size}")
    rng = random.Random(f"rounds {seed}")
    order: list[Task] = []
    while True:
        if len(order) < size:
            order += rng.sample(list(tasks), len(tasks))
        yield order[:size]
        del order[:size]


def seed_of(*place: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:6], "big")


def _section(cell: Cell, member: Member) -> ModelSection:
    return ModelSection.model_validate(
        {
            "path": member.model,
            "mode": member.mode,
            "lora_rank": member.lora_rank,
            "lora_alpha": 2.0 * member.lora_rank,
            "device": cell.device,
            "precision": cell.precision,
        }
    )


def shared_tokenizer(cell: Cell) -> Tokenizer:
    folders = [model_files.resolve(_section(cell, member)) for member in cell.members]
    tokenizers = [Tokenizer.from_folder(folder) for folder in folders]
    if len({tokenizer.fingerprint() for tokenizer in tokenizers}) != 1:
        raise ConfigError(
            f"{', '.join(map(str, folders))}: their tokenizers differ; nodes of one swarm must "
            "agree on what a token id means"
        )
    return tokenizers[0]


def tasks_of(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Task]:
    template = tokenizer.chat_template or PLAIN_TEMPLATE
    given: list[str | Sequence[Mapping[str, str]]] = [
        prompt.messages or prompt.prompt or "" for prompt in prompts
    ]
    texts = render(template, "", given)
    return [
        Task(text=text, token_ids=tuple(tokenizer.encode(text)), answer=prompt.answer)
        for text, prompt in zip(texts, prompts, strict=True)
    ]


def _content_digest(folder: Path) -> str:
    """Tells models apart, also two of the same shape, without reading gigabytes."""
    state = hashlib.sha256(model_files.digest(folder).encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            state.update(file.read(1 << 20))
    return state.hexdigest()[:16]
