"""The screens of `swarm-node status`: what they answer, on narrow and wide terminals."""

import io
from typing import Any

import pytest
from rich.console import Console
from sample_status import NOW_S, PEER, member, organizer, volunteer

from swarm.status import bar, members_table, node_view, swarm_view


def screen(view: Any, width: int = 160, *, terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, highlight=False).print(view)
    return file.getvalue()


def node_screen(status: dict[str, Any], width: int = 160) -> str:
    return screen(node_view(status, NOW_S, width), width)


def activity(doing: str, **changes: Any) -> dict[str, Any]:
    return {"doing": doing, "since_s": NOW_S - 3, "waiting_for": "", "expected_s": None, **changes}


def test_what_peers_gave_and_got_and_which_matter() -> None:
    text = node_screen(volunteer())
    assert "77 groups accepted by 1 peers as they say" in text
    assert "25% of the samples trained on" in text
    (row,) = [line for line in text.splitlines() if "25.0%" in line]
    assert row.split()[:2] == ["ada", f"..{PEER[-6:]}"]
    assert "0.889" in row


def test_how_well_sampling_and_training_agree() -> None:
    status = volunteer()
    assert "own KL" not in node_screen(status)
    status["ledger"]["own"] = {"kl_p50": 1.25e-13, "kl_p99": 0.0012}
    text = node_screen(status)
    assert "1.2e-13 nats a completion in the median, 0.0012 in the worst of a hundred" in text


def test_a_peer_that_is_gone_is_shown_as_such() -> None:
    assert f"gone ..{PEER[-6:]}" in node_screen(volunteer(members=[]))


def test_the_progress_of_a_long_step() -> None:
    assert f"{bar(0.25)} of about 12 s" in node_screen(volunteer())
    overdue = activity("training", since_s=NOW_S - 60, expected_s=12.0)
    assert f"{bar(1.0)} of about 12 s" in node_screen(volunteer(activity=overdue))
    quick = activity("training", expected_s=0.5)
    assert "█" not in node_screen(volunteer(activity=quick)).split("swarm")[0]


def test_how_far_the_next_batch_is() -> None:
    text = node_screen(volunteer(activity=activity("sampling")))
    assert "4 of 8 groups for the next step" in text


@pytest.mark.parametrize(
    ("doing", "stage"),
    [
        ("looking for members", 1),
        ("fetching prompts", 2),
        ("loading the model", 3),
        ("training", 5),
    ],
)
def test_how_far_the_first_step_is(doing: str, stage: int) -> None:
    status = volunteer(activity=activity(doing))
    status["training"]["last_step"] = {}
    assert f"{stage} of 5 to the first step" in node_screen(status)
    if stage < 3:
        for section in ("training", "exchange", "model", "alone"):
            del status[section]
        assert f"{stage} of 5 to the first step" in node_screen(status)


def test_an_organizer_has_no_first_step() -> None:
    text = node_screen(organizer(activity=activity("serving")))
    assert "first step" not in text
    assert "serving for 3 s" in text


def test_columns_go_before_text_is_squeezed() -> None:
    members = [member(), member("12D3KooWB", name="bob", role="organizer")]
    for width in (40, 80, 120, 160):
        lines = screen(members_table(members, NOW_S, width), width).splitlines()
        assert len(lines) == 3
        assert all(len(line.rstrip()) <= width for line in lines)
        assert "…" not in "".join(lines)
        assert {"member", "step"} <= set(lines[0].split())
    narrow = screen(members_table(members, NOW_S, 80), 80)
    wide = screen(members_table(members, NOW_S, 160), 160)
    assert "version" in wide
    assert "version" not in narrow
    assert "accuracy" in narrow


def test_a_whole_swarm_and_its_totals() -> None:
    members = [
        member(groups_accepted_by_others=50),
        member("12D3KooWB", name="bob", tokens_per_s=188.0, groups_accepted_by_others=7),
    ]
    snapshot = {
        "swarm": {"id": "ab" * 32, "name": "sums", "prompts": 500, "closes_at_s": None},
        "totals": {"members": 2, "sampling": 2, "tokens_per_s": 1000.0, "groups_made": 240},
        "members": members,
    }
    lines = screen(swarm_view(snapshot, NOW_S)).splitlines()
    assert "useful" in lines[2]
    last = lines[-1].split()
    assert last == ["2", "in", "all", "1.0k", "240", "120", "57"]


def test_colour_only_on_a_terminal_and_no_strangers_codes() -> None:
    status = volunteer(
        problems=["the network daemon is down"], members=[member(name="\x1b[31mred[bold]")]
    )
    assert "\x1b" not in screen(node_view(status, NOW_S))
    shown = screen(node_view(status, NOW_S), terminal=True)
    assert "\x1b[31mthe network daemon" in shown
    assert "\x1b[31mred" not in shown
