"""`make soak`: real nodes under random kills, freezes and a lying peer, and a report at the end.

Faults come one after the other to nodes that have got over their last one. The first volunteer is
only frozen and loses reward workers, the organizer is killed once: their processes live long
enough to show whether memory and descriptors grow.
"""

import argparse
import asyncio
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import psutil
from examined import Growth, faulty_files
from liar import DEEP, STREAM, liar
from nodes import LARGE, LOOPBACK, PATIENCE_S, SMALL, Node, Swarm, read_jsonl, settings, wait_until

from swarm.demo.task import arithmetic
from swarm.errors import SwarmError
from swarm.evil.attacks import Attack
from swarm.paths import DataDir, write_atomic, write_json
from swarm.protocol.invite import Invite

FAULTS = {"node": 4, "learner": 3, "p2pd": 2, "reward worker": 2, "freeze": 3}
"""How often each happens, compared with the others."""

WORDS = {"learner": "swarm.rl.learner", "p2pd": "p2pd", "reward worker": "swarm.rewards.child"}
GENTLE = ("freeze", "reward worker")
"""What the first volunteer gets."""

PERIOD_S = 15.0
DOWN_S = (2.0, 15.0)
FROZEN_S = (5.0, 40.0)
MEASURE_S = 10.0
LIAR_S = 60.0
"""Between two names of the liar."""

ATTACKS = (Attack.GARBAGE, Attack.FLOOD)
"""Of the volunteers that attack, beside the liar."""

KINDS = ((SMALL, "full"), (LARGE, "full"), (LARGE, "lora"))
SETTINGS = {
    "train.learning_rate": "1e-4",  # of the demo's, thousands of steps would make nothing better
    "eval.every_steps": "25",
    "eval.max_prompts": "200",
    "checkpoint.every_steps": "25",
}
LORA_SETTINGS = {"model.lora_rank": "8", "train.learning_rate": "4e-4"}


@dataclass(slots=True)
class Fault:
    """What happened to a node, and from when on it can be back."""

    kind: str
    since_s: float
    """Unix time."""
    victim: psutil.Process | None = None
    """The child that was killed."""


class Evil:
    """Members that lie, one after the other under new names, in a thread of their own."""

    def __init__(self, invite: str) -> None:
        self._invite = Invite.decode(invite)
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.names: list[str] = []
        self.messages = 0
        self.refused = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    async def _run(self) -> None:
        while not self._over.is_set():
            # The organizer may be down just now.
            with suppress(TimeoutError, SwarmError, OSError, IndexError):
                await self._lie(time.monotonic() + LIAR_S)
            await asyncio.sleep(1.0)

    async def _lie(self, until_s: float) -> None:
        async with liar(self._invite) as (evil, exchange):
            self.names.append(evil.overlay.peer_id)
            number, idle = 0, []
            while time.monotonic() < until_s and not self._over.is_set():
                await evil.say(evil.heartbeat() if number % 4 else b"\xc1")
                for victim in evil.overlay.connected():
                    number += 1
                    bodies = [evil.announcement(number % 256), b"\xc1", DEEP, msgpack.packb({})]
                    self.messages += 1
                    try:
                        async with asyncio.timeout(10):
                            if number % 5 == 0:  # a stream on which nothing is ever said
                                idle.append(await evil.overlay.open_stream(victim, [STREAM], 5.0))
                            else:
                                await exchange.notify(victim, bodies[number % 4])
                    except Exception:  # noqa: BLE001 - refused, busy, gone: all is right
                        self.refused += 1
                await asyncio.sleep(0.5)
            for _, _, writer in idle:
                writer.close()


class Soak:
    """A swarm of `count` volunteers and what is done to it.

    Args:
        folder: for the nodes' data directories.
        seed: of the faults.
    """

    def __init__(self, swarm: Swarm, folder: Path, count: int, seed: int) -> None:
        self._swarm = swarm
        self._random = random.Random(seed)
        self._started_s = time.monotonic()
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._hurt: dict[str, Fault] = {}
        self._frozen: dict[str, list[psutil.Process]] = {}
        self._down: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.back_s: dict[str, list[float]] = {}
        self.crashes: list[str] = []
        self.orphans: list[str] = []
        self.growth = Growth()
        task = arithmetic(folder, 0)
        flags = [part for pair in task.swarm_flags.items() for part in pair]
        swarm.seed(Path(task.prompts[0]), *task.prompts[1:], *flags)
        common = {**task.settings, **LOOPBACK, **SETTINGS}
        for number in range(count):
            model, mode = KINDS[number % len(KINDS)]
            changes = common | (LORA_SETTINGS if mode == "lora" else {})
            swarm.start(
                f"n{number}",
                *("join", swarm.invite, "--model", str(model), "--mode", mode),
                *settings(changes),
            )

    @property
    def nodes(self) -> dict[str, Node]:
        """The newest process of each honest member."""
        return {n.name: n for n in self._swarm.nodes if n.name not in ATTACKS}

    @property
    def volunteers(self) -> list[Node]:
        return [node for name, node in self.nodes.items() if name != "organizer"]

    def run(self, seconds: float, say: Callable[[str], None]) -> None:
        """Hurt the nodes for so long, then let each get over it."""
        for node in self.volunteers:
            wait_until(lambda node=node: bool(_steps(node)), f"{node.name} trains", [node])
        for attack in ATTACKS[: len(self.volunteers) // 3]:
            self._swarm.attack(attack)
        start_s = time.monotonic()
        next_fault_s, next_measure_s = start_s + PERIOD_S, start_s
        self._at(start_s + seconds / 3, lambda: self._kill_node(self.nodes["organizer"]))
        while (now_s := time.monotonic()) < start_s + seconds:
            self._go_on(now_s)
            if now_s >= next_fault_s:
                next_fault_s = now_s + PERIOD_S
                say(f"{now_s - start_s:5.0f} s  {self._hurt_one()}")
            if now_s >= next_measure_s:
                next_measure_s = now_s + MEASURE_S
                for name in self.nodes.keys() - self._down - self._frozen.keys():
                    with suppress(psutil.Error):
                        self.growth.measure(self.nodes[name], now_s)
            time.sleep(0.5)
        say("no more faults; waiting for all to be back")
        deadline_s = time.monotonic() + PATIENCE_S
        while self._hurt or self._later:
            self._go_on(time.monotonic())
            if time.monotonic() > deadline_s:
                self.crashes += [f"{n}: not back after {f.kind}" for n, f in self._hurt.items()]
                break
            time.sleep(0.5)

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        self._later.append((when_s, what))

    def _go_on(self, now_s: float) -> None:
        """What is due: restarts, thaws; who is back, and who ended without being told to."""
        due = [what for when_s, what in self._later if when_s <= now_s]
        self._later = [(when_s, what) for when_s, what in self._later if when_s > now_s]
        for what in due:
            what()
        for node in self.nodes.values():
            if node.name not in self._down and not node.running:
                self.crashes.append(f"{node.name} ended with {node.process.returncode}")
                self._restart(node)
        for name, fault in list(self._hurt.items()):
            busy = name in self._down or name in self._frozen
            if not busy and _back(self.nodes[name], fault):
                del self._hurt[name]
                self.back_s.setdefault(fault.kind, []).append(time.time() - fault.since_s)

    def _hurt_one(self) -> str:
        well = [n for n in self.volunteers if n.name not in self._hurt]
        if len(well) <= len(self.volunteers) // 2:
            return "enough are down"
        node = self._random.choice(well)
        first = node is self.volunteers[0]
        kinds = [kind for kind in FAULTS if not first or kind in GENTLE]
        (kind,) = self._random.choices(kinds, [FAULTS[kind] for kind in kinds])
        if kind == "node":
            self._kill_node(node)
        elif kind == "freeze":
            self._freeze(node)
        else:
            victims = [c for c in node.children() if WORDS[kind] in " ".join(_words(c))]
            if not victims:
                return f"{node.name} has no {kind} now"
            self._hurt[node.name] = Fault(kind, time.time(), victims[0])
            victims[0].kill()
        self.faults[kind] += 1
        return f"{node.name}: {kind}"

    def _kill_node(self, node: Node) -> None:
        node.kill()
        self._down.add(node.name)
        self.faults["organizer"] += node.name == "organizer"
        after_s = self._random.uniform(*DOWN_S)
        self._at(time.monotonic() + after_s, lambda: self._restart(node))
        kind = "organizer" if node.name == "organizer" else "node"
        self._hurt[node.name] = Fault(kind, time.time() + after_s)

    def _restart(self, node: Node) -> None:
        self.orphans += [f"{node.name}: {left}" for left in node.leftovers()]
        self._swarm.restart(node, "seed" if node.name == "organizer" else "join")
        if node.name == "organizer":
            self.nodes["organizer"].arguments = ["seed"]
        self._down.discard(node.name)
        self._hurt.setdefault(node.name, Fault("crash", time.time())).since_s = time.time()

    def _freeze(self, node: Node) -> None:
        processes = [psutil.Process(node.process.pid), *node.children()]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        self._frozen[node.name] = processes
        after_s = self._random.uniform(*FROZEN_S)
        self._hurt[node.name] = Fault("freeze", time.time() + after_s)
        self._at(time.monotonic() + after_s, lambda: self._thaw(node.name))

    def _thaw(self, name: str) -> None:
        for process in self._frozen.pop(name):
            with suppress(psutil.NoSuchProcess):
                process.resume()
        self._hurt[name].since_s = time.time()


def _words(process: psutil.Process) -> Sequence[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _steps(node: Node) -> list[dict[str, Any]]:
    return [line for line in read_jsonl(node.run_dir.metrics_path) if "loss" in line]


def _back(node: Node, fault: Fault) -> bool:
    """Whether a node is over it: a volunteer made a step, others are connected or answer."""
    if fault.kind in ("organizer", "p2pd"):
        replaced = fault.victim is None or not fault.victim.is_running()
        return replaced and bool(node.status().get("network", {}).get("connected"))
    return any(line["time_s"] > fault.since_s for line in _steps(node)[-1:])


def ended_in_order(soak: Soak) -> list[str]:
    """Stop every node; what is wrong with how it ended."""
    wrong = []
    nodes = list(soak.nodes.values())
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        try:
            code = node.process.wait(PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - said in the report
            wrong.append(f"{node.name} does not end: {error}")
            continue
        if code != 0:
            wrong.append(f"{node.name} ended with {code}")
        if DataDir(node.data_dir).runtime_dir.exists():
            wrong.append(f"{node.name} left {DataDir(node.data_dir).runtime_dir}")
    return wrong


def tracebacks(nodes: Sequence[Node]) -> list[str]:
    """Faults of the program that stand in the nodes' logs."""
    found = []
    for node in nodes:
        for path in [node.data_dir / "console.log", *node.data_dir.rglob("learner.log*")]:
            text = path.read_text(errors="replace")
            found += [f"{path}: {match}" for match in re.findall(r"Traceback.*(?:\n.*){12}", text)]
    return found


def soak(folder: Path, minutes: float, count: int, seed: int, say: Callable[[str], None]) -> Any:
    """Run it; the report, a JSON object."""
    with Swarm(folder) as swarm:
        run = Soak(swarm, folder, count, seed)
        evil = Evil(swarm.invite)
        evil.start()
        try:
            run.run(minutes * 60, say)
        finally:
            evil.stop()
        attacks = [node.name for node in swarm.nodes if node.name in ATTACKS]
        statuses = {name: node.status() for name, node in run.nodes.items()}
        wrong = run.crashes + ended_in_order(run)
        nodes = list(run.nodes.values())
        run.orphans += [f"{n.name}: {left}" for n in swarm.nodes for left in n.leftovers()]
    run.growth.write(folder / "growth.jsonl")
    ids = {status["node"]["peer_id"] for status in statuses.values() if status}
    evaluations = {
        node.name: [
            line["held_out"]
            for line in read_jsonl(node.run_dir.metrics_path)
            if line.get("evaluation")
        ]
        for node in run.volunteers
    }
    accuracy = {name: [values[0], values[-1]] for name, values in evaluations.items()}
    report = {
        "schema": "swarm-node/soak/1",
        "minutes": minutes,
        "nodes": count,
        "seed": seed,
        "faults": dict(run.faults),
        "attacks": attacks,
        "evil": {"names": len(evil.names), "messages": evil.messages, "refused": evil.refused},
        "crashes": wrong + tracebacks(nodes),
        "orphans": run.orphans,
        "corrupt_files": [f for node in nodes for f in faulty_files(DataDir(node.data_dir))],
        "strikes_of_honest": [
            f"{name}: {row['peer_id']} {row['rejected']}"
            for name, status in statuses.items()
            for row in status.get("peers", [])
            if row["strikes"] > 0 and row["peer_id"] in ids
        ],
        "problems_at_the_end": {n: s["problems"] for n, s in statuses.items() if s.get("problems")},
        "steps": {node.name: _steps(node)[-1]["step"] for node in run.volunteers},
        "accuracy": accuracy,
        "accuracy_rises": statistics.mean(last - first for first, last in accuracy.values()) > 0,
        "back_s": {
            kind: {
                "times": len(seconds),
                "median": round(statistics.median(seconds), 1),
                "worst": round(max(seconds), 1),
            }
            for kind, seconds in run.back_s.items()
        },
        "growth": run.growth.report(long_s=min(300.0, minutes * 20)),
    }
    report["passed"] = report["accuracy_rises"] and not any(
        report[key] for key in ("crashes", "orphans", "corrupt_files", "strikes_of_honest")
    )
    return report


def as_text(report: Any) -> str:
    """The report for people."""
    lines = [
        f"{report['nodes']} nodes, {report['minutes']:g} minutes, seed {report['seed']}: "
        + ("passed" if report["passed"] else "FAILED"),
        "faults: " + ", ".join(f"{kind} {n}" for kind, n in sorted(report["faults"].items())),
        f"attacks: {', '.join(report['attacks'])}",
        "lies: {messages} messages under {names} names, {refused} refused".format(**report["evil"]),
    ]
    for key in ("crashes", "orphans", "corrupt_files", "strikes_of_honest"):
        lines += [f"{key.replace('_', ' ')}: {len(report[key])}"]
        lines += [f"  {item}" for item in report[key]]
    for name, problems in report["problems_at_the_end"].items():
        lines.append(f"{name} says at the end: {'; '.join(problems)}")
    for kind, row in report["back_s"].items():
        lines.append(
            "back to work after {}: median {median} s, worst {worst} s".format(kind, **row)
        )
    for name, (first, last) in report["accuracy"].items():
        lines.append(f"{name}: {report['steps'][name]} steps, accuracy {first:.2f} to {last:.2f}")
    lines.append(f"{'process':14} lives  long  most MB  most fds  MB/h median, worst  fds/h worst")
    for role, row in report["growth"].items():
        lines.append(
            f"{role:14} {row['lives']:5} {row['long_lives']:5} {row['most_mb']:8.0f} "
            f"{row['most_descriptors']:9.0f} {row['median_mb_per_hour']:12.1f}, "
            f"{row['worst_mb_per_hour']:.1f} {row['worst_descriptors_per_hour']:12.1f}"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 where the report does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, prog="soak")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--nodes", type=int, default=6, help="volunteers (default 6)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    chosen = parser.parse_args(arguments)
    out = chosen.out.absolute() / time.strftime("%Y%m%d-%H%M%S")
    out.mkdir(parents=True)
    report = soak(out, chosen.minutes, chosen.nodes, chosen.seed, lambda t: print(t, flush=True))
    write_json(out / "report.json", report)
    write_atomic(out / "report.txt", as_text(report).encode())
    print(as_text(report) + f"report and the nodes' data: {out}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
