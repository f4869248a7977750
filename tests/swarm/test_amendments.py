"""A swarm's terms change under its id: prompts are appended, the swarm is closed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import LOOPBACK, Node, Swarm, cli, read_invite, settings, sums, wait_until, write_prompts

from swarm.node.observe import visiting
from swarm.protocol.charter import Charter
from swarm.protocol.codec import CodecLimits, decode_group
from swarm.protocol.invite import Invite
from swarm.protocol.prompts import decode_prompt_set

GENESIS, FIRST, SECOND = sums(range(3, 7), range(2, 6)), sums([7], range(2, 6)), sums([8], [2, 3])
THIRD = sums([8], [4, 5])


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as swarm:
        held_out = write_prompts(tmp_path / "held_out.jsonl", sums([9], range(2, 12)))
        swarm.seed(write_prompts(tmp_path / "prompts.jsonl", GENESIS), "--held-out", str(held_out))
        swarm.join("member")
        yield swarm


def prompts_used(node: Node) -> set[int]:
    """Ids of the prompts whose groups it trained on."""
    return {group["prompt_id"] for step in node.steps() for group in step["groups"]}


def append(organizer: Node, name: str, prompts: dict[str, str], *, piped: bool = False) -> str:
    """`swarm-node seed --append`; what it prints."""
    path = write_prompts(organizer.data_dir / name, prompts)
    source, text = ("/dev/stdin", path.read_text()) if piped else (str(path), "")
    result = cli("seed", "--append", source, "--data-dir", str(organizer.data_dir), stdin=text)
    assert result.returncode == 0, result.stderr
    return result.stdout


async def test_prompts_are_appended_and_the_swarm_closes(swarm: Swarm, tmp_path: Path) -> None:
    organizer, member = swarm.nodes
    genesis, organizer_id = Invite.decode(swarm.invite), organizer.peer_id

    both = [organizer, member]
    wait_until(lambda: prompts_used(member) == set(range(len(GENESIS))), "it trains", both)

    # An amendment signed while the organizer is down; then it is the same swarm and the same peer.
    assert organizer.stop() == 0
    assert organizer.leftovers() == []
    assert "amendment 1 signed; the organizer is not running" in append(organizer, "1", FIRST)
    organizer = swarm.restart(organizer, "seed", *settings(LOOPBACK))
    invite = Invite.decode(read_invite(organizer))
    assert (invite.swarm_id, invite.addresses) == (genesis.swarm_id, genesis.addresses)
    assert organizer.peer_id == organizer_id
    count = len(GENESIS) + len(FIRST)
    both = [organizer, member]
    wait_until(lambda: prompts_used(member) == set(range(count)), "all prompts are used", both)

    # Nobody trains on what is evaluated.
    evaluated = str(write_prompts(organizer.data_dir / "evaluated", sums([9], [2])))
    result = cli("seed", "--append", evaluated, "--data-dir", str(organizer.data_dir))
    assert result.returncode == 78, result.stderr
    assert "9+2=" in result.stderr

    # One signed by the running organizer.
    assert "amendment 2 signed; members fetch it" in append(organizer, "2", SECOND, piped=True)
    count += len(SECOND)
    wait_until(lambda: prompts_used(member) == set(range(count)), "the newest prompts too", both)
    assert member.status()["swarm"]["amendments"] == 2
    assert member.status()["swarm"]["prompts"] == count

    # The end, also where prompts that were added before it can be had of nobody.
    assert organizer.stop() == 0
    append(organizer, "3", THIRD)
    sets = {path.name: path for path in organizer.data_dir.glob("swarms/*/prompts/*.jsonl")}
    known = {path.name for path in member.data_dir.glob("swarms/*/prompts/*.jsonl")}
    (lost,) = sets.keys() - known
    sets[lost].rename(tmp_path / lost)
    organizer = swarm.restart(organizer, "seed", *settings(LOOPBACK))
    read_invite(organizer)
    both = [organizer, member]
    wait_until(lambda: member.status()["swarm"]["amendments"] == 3, "it has the terms", both)
    closed = cli("seed", "--close", "--data-dir", str(organizer.data_dir))
    assert closed.returncode == 0, closed.stderr
    wait_until(lambda: bool(member.status()["training"]["finished"]), "the end is seen", both)
    status = member.status()
    assert status["training"]["finished"] == "the swarm is closed"
    assert status["activity"]["doing"] == "finished"
    assert "closed" in cli("status", "--data-dir", str(member.data_dir)).stdout
    last = status["training"]["step"]
    assert status["training"]["accuracies"][-1]["step"] == last
    saved = member.run_dir.checkpoints_dir.glob(f"step-{last:08d}*/checkpoint.json")
    accuracies = [json.loads(path.read_text())["accuracy"] for path in saved]
    assert status["training"]["accuracy"] in accuracies

    # They are fetched once they can be had.
    sets[lost] = (tmp_path / lost).rename(sets[lost])
    there = member.swarm_dir.prompt_set_path(sets[lost].stem)
    wait_until(there.exists, "the lost prompts are here", both)

    # It idles, and serves what it has, also to those who never met the organizer.
    organizer.kill()
    members_invite = cli("invite", "--data-dir", str(member.data_dir)).stdout.strip()
    seen = json.loads(cli("status", members_invite, "--json").stdout)
    assert seen["swarm"]["amendments"] == 4
    assert seen["swarm"]["closes_at_s"] is not None
    (row,) = [row for row in seen["members"] if row["name"] == "member"]
    assert (row["state"], row["sampling"], row["step"]) == ("finished", False, last)
    await assert_serves(member, Invite.decode(members_invite))
    later = member.status()
    assert later["training"]["groups_made"] == status["training"]["groups_made"]
    assert member.step == last
    assert member.stop() == 0


async def assert_serves(member: Node, invite: Invite) -> None:
    """Charter, prompt sets and groups come from the member, to a stranger."""
    peer = member.peer_id
    digest = bytes.fromhex(member.steps()[-1]["groups"][0]["hash"])
    async with visiting(invite.swarm_id, ()) as (overlay, exchange):
        results = await overlay.dial([a for a in invite.addresses if a.endswith(peer)])
        assert "connected" in results.values(), results
        charter = Charter.from_bytes(await exchange.fetch_charter(peer), invite.swarm_id)
        texts = []
        for ref in charter.prompt_sets:
            data = await exchange.fetch_blob(peer, bytes.fromhex(ref.sha256), 1_000_000)
            texts += [prompt.prompt for prompt in decode_prompt_set(data, ref)]
        blob = await exchange.fetch_blob(peer, digest, 1_000_000)
    assert texts == [*GENESIS, *FIRST, *SECOND, *THIRD]
    assert decode_group(blob, CodecLimits(4, 10)).publisher == peer
