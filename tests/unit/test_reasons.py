"""Every reason that the source gives is listed, and only proven ones are strikes."""

import ast
from pathlib import Path

import swarm
from swarm.protocol.reasons import PROVABLE_REASONS, Reason


def reasons_in_source() -> list[str]:
    """First arguments of RemoteProtocolError(...) in the pure part of the program, as written."""
    found = []
    for path in (Path(swarm.__file__).parent / "protocol").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "RemoteProtocolError"
            ):
                found.append(ast.unparse(node.args[0]))
    return found


def test_no_reason_of_the_protocol_is_written_out_that_is_not_listed() -> None:
    written = reasons_in_source()
    assert "Reason.PUBLISHER" in written  # the search finds something
    literals = {ast.literal_eval(text) for text in written if text[0] in "'\""}
    assert literals <= {str(reason) for reason in Reason}


def test_what_honest_peers_differ_in_is_no_strike() -> None:
    neutral = {"ownership", "age", "incompatible", "duplicate", "prompt_unknown", "no_room", "hash"}
    assert not any(Reason(reason).provable for reason in neutral)


def test_what_a_signature_proves_is_a_strike() -> None:
    proven = {"malformed", "signature", "publisher", "token", "logprob", "length", "size"}
    assert all(Reason(reason).provable for reason in proven)
    assert proven <= PROVABLE_REASONS


def test_a_record_that_anyone_can_store_is_no_strike_for_the_one_it_names() -> None:
    assert not any(reason.provable for reason in Reason if reason.startswith("record_"))
