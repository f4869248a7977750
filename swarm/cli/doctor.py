"""What works here and what does not: `swarm-node doctor`."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.cli.arguments import (
    Arguments,
    Joining,
    Verbs,
    add_data_dir,
    add_set,
    add_verb,
    joining,
    seconds,
)
from swarm.cli.output import out, out_json, run_async

if TYPE_CHECKING:
    from swarm.doctor.findings import Finding


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    doctor = add_verb(
        verbs,
        "doctor",
        _doctor,
        "check this machine, and the way to a swarm: verdict, figure, fix",
        "  swarm-node doctor                               the machine and the swarm joined last\n"
        "  swarm-node doctor swarm1... --model ~/models/Qwen2.5-1.5B   before joining\n"
        "  swarm-node doctor --offline --json\n",
    )
    doctor.add_argument("invite", nargs="?", metavar="INVITE", help="of a swarm to be joined")
    doctor.add_argument("--config", type=Path, metavar="FILE", help="node.toml")
    doctor.add_argument("--model", metavar="DIR|ID", help="model folder or Hub id")
    doctor.add_argument("--mode", choices=("full", "lora"), help="train all weights or an adapter")
    doctor.add_argument("--offline", action="store_true", help="this machine only")
    doctor.add_argument("--timeout", type=seconds, default=20.0, metavar="S", help="for members")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    add_data_dir(doctor)
    add_set(doctor)


def _doctor(arguments: Arguments) -> int:
    from swarm.doctor import findings as form

    logging.basicConfig(level=logging.ERROR)
    found = []
    for finding in _findings(arguments):
        found.append(finding)
        if not arguments.json:
            out(_line(finding))
    if arguments.json:
        out_json(form.report(found))
    return form.exit_code(found)


def _findings(arguments: Arguments) -> Iterator["Finding"]:
    """The checks, one after the other, each given out when it is done."""
    from swarm.doctor import machine
    from swarm.doctor.findings import failed, ok
    from swarm.errors import ConfigError, DataError

    yield machine.python()
    try:
        chosen = joining(arguments)
    except (ConfigError, DataError) as error:
        yield failed("configuration", str(error), "mend it", error.exit_code)
        return
    config, data_dir = chosen.config, chosen.data_dir
    yield ok("configuration", str(arguments.config or "as joined last, or the defaults"))
    yield machine.packages()
    device, probed = machine.device(config)
    yield device
    yield machine.disk(config, data_dir)
    yield machine.identity(data_dir)
    node, status = machine.running(data_dir)
    yield node
    yield machine.ports(config, node_runs=status is not None)
    yield run_async(machine.data_path())
    if not arguments.offline:
        yield from _network(chosen, status, probed, arguments.timeout)


def _network(
    chosen: Joining, status: dict[str, Any] | None, probed: dict[str, Any], timeout_s: float
) -> Iterator["Finding"]:
    from swarm.doctor import network
    from swarm.doctor.findings import skipped
    from swarm.doctor.memory import memory

    config, swarm_id = chosen.config, chosen.swarm_id
    if swarm_id is None:
        yield skipped("swarm", "none was joined here; give an invite: doctor swarm1...")
        return
    known = chosen.data_dir.swarm(swarm_id).load_peers
    addresses = list(chosen.addresses) or [*config.network.bootstrap, *known()]
    if not addresses:
        yield skipped("swarm", "no member has been seen yet")
        return
    examination = run_async(network.examine(swarm_id, addresses, timeout_s))
    yield from network.bootstrap(examination)
    yield network.clock(examination.skew_s)
    yield network.terms(examination)
    yield network.tokenizer(examination.charter, config)
    yield memory(config, examination.charter, probed)
    yield network.reachability(status, config)


_MARKS = {"ok": "ok", "skipped": "-", "warning": "warn", "failed": "FAIL"}


def _line(finding: "Finding") -> str:
    from swarm.terminal import safe

    line = f"{_MARKS[finding.verdict]:<5} {finding.check}: {safe(finding.figure, 1000)}"
    return line + (f"\n      fix: {safe(finding.fix, 500)}" if finding.fix else "")
