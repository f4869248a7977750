"""What a check found: verdict, figure, fix; and what all of them together come to.

Owns: the form of a finding. Does not know: any check.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from swarm.errors import ExitCode

SCHEMA = "swarm-node/doctor/1"


class Verdict(StrEnum):
    """From harmless to bad."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result.

    Attributes:
        check: its name.
        verdict: how it is.
        figure: what was measured or found, in words.
        fix: what to do; empty where all is well.
        exit_code: of the program where the check failed.
    """

    check: str
    verdict: Verdict
    figure: str
    fix: str = ""
    exit_code: ExitCode = ExitCode.ERROR


def ok(check: str, figure: str) -> Finding:
    """All is well."""
    return Finding(check, Verdict.OK, figure)


def skipped(check: str, why: str) -> Finding:
    """It could not be asked; says what it would need."""
    return Finding(check, Verdict.SKIPPED, why)


def warning(check: str, figure: str, fix: str) -> Finding:
    """It works, but not as well as it could, or not for long."""
    return Finding(check, Verdict.WARNING, figure, fix)


def failed(check: str, figure: str, fix: str, exit_code: ExitCode = ExitCode.ERROR) -> Finding:
    """It does not work."""
    return Finding(check, Verdict.FAILED, figure, fix, exit_code)


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    """0: nothing to mend; 4: warnings; else that of the first check that failed."""
    for finding in findings:
        if finding.verdict is Verdict.FAILED:
            return finding.exit_code
    warned = any(finding.verdict is Verdict.WARNING for finding in findings)
    return ExitCode.DEGRADED if warned else ExitCode.OK


def report(findings: Sequence[Finding]) -> dict[str, Any]:
    """For `--json`."""
    verdicts = [finding.verdict for finding in findings]
    return {
        "schema": SCHEMA,
        "findings": [
            {**asdict(finding), "exit_code": int(finding.exit_code)}
            if finding.verdict is Verdict.FAILED
            else {k: v for k, v in asdict(finding).items() if k != "exit_code"}
            for finding in findings
        ],
        "counts": {str(verdict): verdicts.count(verdict) for verdict in Verdict},
        "exit_code": int(exit_code(findings)),
    }
