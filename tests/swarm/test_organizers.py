"""A swarm of several organizers: each amends it, serving it or training in it."""

import json
from pathlib import Path

from nodes import (
    LOOPBACK,
    SMALL,
    Swarm,
    cli,
    read_invite,
    settings,
    sums,
    wait_until,
    write_prompts,
)

from swarm.protocol.identity import Identity


def peer_id_of(data_dir: Path) -> str:
    """Of the node that has or will have this data directory."""
    data_dir.mkdir(exist_ok=True)
    return Identity.load_or_create(data_dir / "identity.key").peer_id


def another_tokenizer(folder: Path) -> Path:
    """The swarm's, but that two tokens have changed places."""
    folder.mkdir()
    tokenizer = json.loads((SMALL / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["8"], words["9"] = words["9"], words["8"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_second_organizer_serves_and_a_third_trains(tmp_path: Path) -> None:
    second, third = (peer_id_of(tmp_path / name) for name in ("second", "third"))
    more = {
        name: str(write_prompts(tmp_path / f"{name}.jsonl", sums([first], [2, 3])))
        for name, first in (("second", 8), ("third", 9), ("again", 7))
    }
    with Swarm(tmp_path) as swarm:
        prompts = write_prompts(tmp_path / "prompts.jsonl", sums(range(3, 7), range(2, 6)))
        flags = ("--co-organizer", second, "--co-organizer", third)
        founder = swarm.seed(prompts, "--held-out-fraction", "0", *flags)
        trainer = swarm.join("third")
        wait_until(lambda: trainer.step >= 1, "it trains", [founder, trainer])

        # Who was not named learns at once who was.
        stranger = swarm.start("stranger", "seed", swarm.invite, *settings(LOOPBACK))
        assert stranger.process.wait(60) == 77
        for peer in (peer_id_of(stranger.data_dir), founder.peer_id, second, third):
            assert peer in stranger.log()

        # The second one has terms and prompts of the others, and goes on when the founder has left.
        other = swarm.start("second", "seed", swarm.invite, *settings(LOOPBACK))
        read_invite(other)
        wait_until(lambda: other.status().get("problems") == [], "all is here", [other])
        assert founder.stop() == 0
        where = ("--data-dir", str(other.data_dir))
        refused = cli("seed", "--append", more["second"], *where)
        assert refused.returncode == 2
        assert "--tokenizer DIR" in refused.stderr
        done = cli("seed", "--append", more["second"], "--tokenizer", str(SMALL), *where)
        assert done.returncode == 0, done.stderr
        both = [other, trainer]
        wait_until(
            lambda: trainer.status()["swarm"]["prompts"] == 18, "prompts of the second", both
        )

        # Another tokenizer is refused, and does not take the place of the one that is kept.
        wrong = ("--tokenizer", str(another_tokenizer(tmp_path / "wrong")))
        refused = cli("seed", "--append", more["again"], *wrong, *where)
        assert refused.returncode == 78
        assert "tokenizer mismatch" in refused.stderr
        done = cli("seed", "--append", more["again"], *where)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: trainer.status()["swarm"]["prompts"] == 20, "two more", both)

        where = ("--data-dir", str(trainer.data_dir))
        done = cli("seed", "--append", more["third"], "--tokenizer", str(SMALL), *where)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: other.status()["swarm"]["prompts"] == 22, "prompts of the third", both)
        wait_until(
            lambda: (
                {g["prompt_id"] for s in trainer.steps() for g in s["groups"]} == set(range(22))
            ),
            "all are trained on",
            both,
        )
        assert cli("seed", "--close", *where).returncode == 0
        wait_until(lambda: bool(trainer.status()["training"]["finished"]), "the end", both)
        assert (other.stop(), trainer.stop()) == (0, 0)
