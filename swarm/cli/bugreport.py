"""What one sends when something is wrong: `swarm-node bugreport`."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swarm.cli.arguments import Arguments, Verbs, add_data_dir, add_verb, data_dir_of
from swarm.cli.output import out
from swarm.errors import ConfigError, ExitCode
from swarm.paths import parse_json

SHOWN_VARIABLES = ("SWARM_", "CUDA_", "OMP_", "HF_H", "TORCH", "NCCL_", "XDG_", "LANG", "TERM")


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    bugreport = add_verb(
        verbs,
        "bugreport",
        _bugreport,
        "write an archive for whoever is to help, without keys, addresses, names or texts",
        "  swarm-node bugreport\n  swarm-node bugreport --out report.tar.gz\n"
        "  tar -xOzf report.tar.gz | less    see for yourself what is in it\n",
    )
    bugreport.add_argument("--out", type=Path, metavar="FILE", help="default: in this folder")
    bugreport.add_argument("--no-doctor", action="store_true", help="leave the checks out")
    add_data_dir(bugreport)


def _bugreport(arguments: Arguments) -> int:
    from swarm.bugreport import Redactor, names_here, tail, write
    from swarm.control import control_request
    from swarm.paths import DataDir, user_path

    data_dir: DataDir = data_dir_of(arguments)
    name = arguments.out or time.strftime("swarm-node-bugreport-%Y%m%d-%H%M%S.tar.gz")
    path = user_path(name)
    if path.exists():
        raise ConfigError(f"{path} exists already; name another file with --out")
    parts: dict[str, Callable[[], Any]] = {
        "versions.txt": _versions,
        "environment.json": _environment,
        "status.json": lambda: control_request(data_dir.control_socket, "status", 10.0),
    }
    if not arguments.no_doctor:
        parts["doctor.json"] = lambda: _doctor(data_dir.root)
    logs = {"node.log": data_dir.log_path}
    if data_dir.current is not None:
        swarm_dir = data_dir.swarm(data_dir.current)
        parts["node.json"] = swarm_dir.saved_config
        run = data_dir.newest_run
        if run is not None:
            parts["run.json"] = run.record
            logs["learner.log"] = run.learner_log_path
            logs["metrics.jsonl"] = run.metrics_path
    for name, log_path in logs.items():
        parts[name] = lambda log_path=log_path: tail(log_path)  # type: ignore[misc]
    held = write(path, parts, Redactor(names_here()))
    for name, size_bytes in held:
        out(f"{size_bytes:>9}  {name}")
    out(f"{path}: look into it before you send it")
    return ExitCode.OK


def _versions() -> str:
    import platform
    from importlib.metadata import distributions

    installed = sorted(f"{d.metadata['Name']}=={d.version}" for d in distributions())
    return "\n".join([sys.version, platform.platform(), "", *installed]) + "\n"


def _environment() -> dict[str, str]:
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith(SHOWN_VARIABLES)}


def _doctor(root: Path) -> Any:
    """The doctor's findings on this machine; in a process of its own, as it may hang."""
    import subprocess

    done = subprocess.run(
        [sys.executable, "-P", "-m", "swarm.cli", "doctor", "--offline", "--json",
         "--data-dir", str(root)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    return parse_json(done.stdout)
