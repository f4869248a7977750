"""Fuzz the readers of other people's bytes with atheris: `python -m fuzz [TARGET ...]`.

Owns: time and memory limits of a run, the report. Does not know: the readers (fuzz.targets).

Each target runs in a process of its own, which libFuzzer ends by itself, at once where it finds an
input that breaks a promise; that input is then in build/fuzz/TARGET and belongs into fuzz/corpus,
where `make test` tries it ever after.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

OUT = Path("build") / "fuzz"
MAX_INPUT_BYTES = 4096
MEMORY_MB = 700
"""Of a whole run: interpreter and libraries take about 250."""


def main() -> None:
    """Run every target that was asked for; exit with 1 where one found something."""
    from fuzz.targets import CORPUS, TARGETS, first_inputs

    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default: 60)")
    parser.add_argument("--runs", type=int, help="executions of each, in place of seconds")
    parser.add_argument("--keep", action="store_true", help="add to fuzz/corpus what covers more")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")

    report = {}
    for name in options.targets or TARGETS:
        found = OUT / name
        for folder in (found, CORPUS / name):
            folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(first_inputs(name)):
            (found / f"first-{number}").write_bytes(data)
        limit = f"-runs={options.runs}" if options.runs else f"-max_total_time={options.seconds}"
        started = time.monotonic()
        run = _child(name, limit, f"-artifact_prefix={found}/found-", found, CORPUS / name)
        executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", run.stderr)
        covered = re.findall(r"cov: (\d+)", run.stderr)
        report[name] = {
            "executions": int(executed[1]) if executed else 0,
            "edges": int(covered[-1]) if covered else 0,
            "seconds": round(time.monotonic() - started, 1),
            "clean": run.returncode == 0,
        }
        print(f"{name}: {report[name]}", flush=True)
        if run.returncode:
            print(run.stderr[-4000:], file=sys.stderr)
        elif options.keep:
            _child(name, "-merge=1", CORPUS / name, found).check_returncode()
    (OUT / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    raise SystemExit(0 if all(result["clean"] for result in report.values()) else 1)


def _child(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """libFuzzer on one target; its log is in stderr."""
    limits = (f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={MEMORY_MB}", "-print_final_stats=1")
    command = [sys.executable, "-m", "fuzz.child", name, *limits, *map(str, arguments)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
