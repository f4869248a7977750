"""A swarm for its members only: a newcomer kept out, let in while the swarm runs, removed again;
and what a node's owner sees of peers, and may do to them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Node, Swarm, cli, sums, wait_until, write_prompts

from swarm.protocol.identity import Identity

STRANGER = Identity(b"\x07" * 32).peer_id


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """An organizer whose roster names a stranger, and nobody else."""
    folder = tmp_path_factory.mktemp("roster")
    roster = folder / "ids.txt"
    roster.write_text(f"# friends\n{STRANGER} somebody\n\n")
    with Swarm(folder) as swarm:
        prompts = write_prompts(folder / "prompts.jsonl", sums(range(3, 20), range(2, 9)))
        swarm.seed(prompts, "--members", str(roster))
        yield swarm


def run(node: Node, *arguments: str) -> str:
    result = cli(*arguments, "--data-dir", str(node.data_dir))
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_newcomer_is_told_its_id_and_gets_in_once_it_is_on_the_roster(swarm: Swarm) -> None:
    (organizer,) = swarm.nodes
    assert organizer.status()["swarm"]["roster"] == 2
    assert STRANGER in run(organizer, "members")

    outsider = cli("status", swarm.invite, "--timeout", "60")
    assert outsider.returncode == 77
    assert "roster" in outsider.stderr

    member = swarm.join("member")
    wait_until(lambda: bool(member.status().get("problems")), "it is told", [member])
    told = cli("status", "--data-dir", str(member.data_dir))
    assert told.returncode == 4
    peer_id = member.peer_id
    (problem,) = member.status()["problems"]
    assert peer_id in problem
    assert "organizer" in problem
    waits_for = member.status()["activity"]["waiting_for"]
    assert waits_for == "the swarm's organizer to let this node in"

    assert "amendment 2 signed" in run(organizer, "members", "add", peer_id)
    wait_until(lambda: member.status()["swarm"].get("roster") == 3, "it is in", swarm.nodes)
    wait_until(lambda: not member.status()["problems"], "all is well", swarm.nodes)
    roster = json.loads(run(member, "members", "--json"))
    assert set(roster["members"]) == {STRANGER, peer_id, organizer.peer_id}
    wait_until(
        lambda: peer_id in [m["peer_id"] for m in organizer.status()["members"]],
        "the organizer reads its heartbeats",
        swarm.nodes,
    )


def test_the_owner_bans_and_unbans(swarm: Swarm) -> None:
    organizer, member = swarm.nodes
    run(member, "peers", "ban", STRANGER, organizer.peer_id)
    shown = json.loads(run(member, "peers", "--json"))
    states = {peer["peer_id"]: peer["state"] for peer in shown["peers"]}
    assert states == {STRANGER: "banned", organizer.peer_id: "banned"}
    assert "roster of 3 members" in run(member, "peers")
    wait_until(lambda: not member.status()["members"], "it is not listened to", swarm.nodes)
    assert json.loads((member.data_dir / "bans.json").read_text())["banned"] == sorted(states)
    run(member, "peers", "unban", STRANGER, organizer.peer_id)
    wait_until(lambda: bool(member.status()["members"]), "it is listened to again", swarm.nodes)
    wrong = cli("peers", "ban", "me", "--data-dir", str(member.data_dir))
    assert wrong.returncode == 2
    assert "12D3Koo" in wrong.stderr


def test_who_is_removed_is_told_so(swarm: Swarm, tmp_path: Path) -> None:
    organizer, member = swarm.nodes
    file = tmp_path / "out.txt"
    file.write_text(member.peer_id)
    run(organizer, "members", "remove", "--file", str(file))
    wait_until(
        lambda: any(member.peer_id in problem for problem in member.status()["problems"]),
        "it is told",
        swarm.nodes,
    )
    wait_until(
        lambda: not organizer.status()["members"],
        "its heartbeats are refused",
        swarm.nodes,
    )
    assert member.stop() == 0
    # Without a running node the list is changed for its next start.
    out = json.loads(run(member, "peers", "ban", STRANGER, "--json"))
    assert out["banned_here"] == [STRANGER]
    file.write_text("12D3KooWwrong")
    wrong = cli("members", "add", "--file", str(file), "--data-dir", str(organizer.data_dir))
    assert wrong.returncode == 78
    assert "out.txt, line 1" in wrong.stderr
