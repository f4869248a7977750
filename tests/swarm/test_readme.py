"""README's "A swarm by hand", typed as it stands there, on real nodes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import (
    ENVIRONMENT,
    PATIENCE_S,
    QUICK,
    SMALL,
    Node,
    Swarm,
    read_invite,
    sums,
    wait_until,
    write_prompts,
)

from swarm.protocol.identity import Identity
from tests.documented import ROOT, Command, commands

BY_HAND = [c for c in commands(ROOT / "README.md") if c.where.endswith(": A swarm by hand")]
STRANGER = Identity(bytes(range(32))).peer_id


class Reader:
    """Somebody in a terminal, in a folder with the files that README speaks of.

    Commands are README's own, looked up by how they begin, so one that README no longer shows
    cannot be typed. Settings for small and quick steps come from the environment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.swarm = Swarm(folder)
        self.typed: set[Command] = set()
        self.names = {"~/models/Qwen2.5-1.5B": str(SMALL), "DIR": str(SMALL)}
        (folder / "swarm").symlink_to(ROOT / "swarm")
        write_prompts(folder / "sums.jsonl", sums(range(3, 20), range(2, 12)))
        write_prompts(folder / "more.jsonl", sums([20], range(2, 12)))
        write_prompts(folder / "gsm8k.jsonl", sums(range(3, 9), range(2, 12)))
        (folder / "ids.txt").write_text(f"{STRANGER}\n")
        self.environment = ENVIRONMENT | {
            "XDG_DATA_HOME": str(folder / "share"),
            "SWARM_NODE__NAME": "reader",
        }
        for key, value in QUICK.items():
            self.environment[f"SWARM_{key.replace('.', '__').upper()}"] = value
        self.environment["SWARM_TRAIN__MAX_STEPS"] = "6"

    def words(self, begin: str, *extra: str) -> list[str]:
        """The arguments of the one command that begins like this, with what it stands for."""
        exact = [c for c in BY_HAND if c.text == begin]
        (command,) = exact or [c for c in BY_HAND if c.text.startswith(begin)]
        self.typed.add(command)
        return [*(self.names.get(word, word) for word in command.words[1:]), *extra]

    def run(self, begin: str, *extra: str, code: int = 0) -> str:
        """Type it and read what it prints."""
        result = subprocess.run(
            [sys.executable, "-P", "-m", "swarm.cli", *self.words(begin, *extra)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            cwd=self.folder,
            env=self.environment,
        )
        assert result.returncode == code, f"{begin}: {result.stderr}"
        assert "Traceback" not in result.stderr
        return result.stdout

    def start(self, data_dir: str, begin: str, *extra: str) -> Node:
        """Type one that runs until Ctrl-C."""
        where = self.folder / data_dir
        where.mkdir(parents=True, exist_ok=True)
        words = self.words(begin, *extra)
        with (where / "console.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "swarm.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=self.environment,
            )
        node = Node(data_dir, where, words, process)
        self.swarm.nodes.append(node)
        return node

    def end(self, node: Node) -> None:
        """Ctrl-C."""
        node.signal(signal.SIGINT)
        assert node.process.wait(PATIENCE_S) == 0, node.log()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    with reader.swarm:
        yield reader


def test_a_swarm_by_hand(reader: Reader) -> None:
    ada = ("--data-dir", "ada")

    organizer = reader.start("share/swarm-node", "swarm-node seed sums.jsonl")
    reader.names["swarm1..."] = read_invite(organizer)
    volunteer = reader.start("ada", "swarm-node join swarm1...")
    wait_until(lambda: volunteer.step >= 3, "the volunteer trains", reader.swarm.nodes)

    assert "organizer" in reader.run("swarm-node status")
    assert "step" in reader.run("swarm-node status", *ada)
    assert "arith-large" in reader.run("swarm-node status swarm1...")
    assert reader.run("swarm-node invite").startswith("swarm1")
    assert reader.run("swarm-node invite", *ada).startswith("swarm1")
    watched = reader.start("watched", "swarm-node status --watch")
    assert watched.process.stdout is not None
    assert watched.process.stdout.readline()  # at once, though it is no terminal
    watched.signal(signal.SIGINT)
    assert watched.process.wait(PATIENCE_S) in (0, 130)

    reader.end(organizer)
    organizer = reader.start("share/swarm-node", "swarm-node seed")
    read_invite(organizer)
    assert "amendment 1" in reader.run("swarm-node seed --append")
    wait_until(
        lambda: volunteer.status()["swarm"]["amendments"] == 1,
        "the volunteer has the new prompts",
        [organizer, volunteer],
    )

    reader.names["12D3KooW..."] = STRANGER
    assert STRANGER in reader.run("swarm-node peers ban") + reader.run("swarm-node peers")
    other = reader.start("other", "swarm-node seed gsm8k.jsonl", "--data-dir", "other")
    read_invite(other)
    reader.names["12D3KooW..."] = volunteer.peer_id
    assert "amendment" in reader.run("swarm-node members add", "--data-dir", "other")
    reader.end(other)

    reader.end(volunteer)
    assert "step" in reader.run("swarm-node checkpoint list", *ada)
    reader.names["DIR"] = "exported"
    reader.run("swarm-node checkpoint export", *ada)
    assert (reader.folder / "exported" / "model.safetensors").exists()
    assert "held out" in reader.run("swarm-node eval", *ada)
    assert "held out" in reader.run("swarm-node eval ~/models", *ada)
    assert "step" in reader.run("swarm-node replay", *ada)
    assert "100.0%" in reader.run("swarm-node replay --method nois --from 0", *ada)
    assert "k3" in reader.run("swarm-node replay --what-if", *ada)

    assert "amendment 2" in reader.run("swarm-node seed --min-version")
    assert "amendment 3" in reader.run("swarm-node seed --close")
    reader.end(organizer)
    assert [c.text for c in BY_HAND if c not in reader.typed] == []
