"""A run as its folder tells it: steps, the configuration of each, the swarm's terms.

Owns: reading a run back, without writing. Does not know: what is done with it.
"""

from collections.abc import Mapping
from typing import Any

from swarm.config import NodeConfig, load_config
from swarm.errors import DataError
from swarm.paths import RunDir
from swarm.protocol.charter import Charter
from swarm.replay.step_log import LoggedStep, StepLog
from swarm.stored import load_charter

SCHEMA = "swarm-node/run/1"


class LoggedRun:
    """One run.

    Args:
        run_dir: its folder, in the folder of its swarm.

    Attributes:
        record: run.json.
        log: its steps.

    Raises:
        DataError: no run, or one that made no step.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.dir = run_dir
        record = run_dir.record()
        if record is None or record.get("schema") != SCHEMA:
            raise DataError(
                f"{run_dir.root} is no run: it holds no run.json with the schema {SCHEMA!r}. "
                "Runs are in <data dir>/swarms/<id>/runs/<number>"
            )
        self.record: dict[str, Any] = record
        self.log = StepLog(run_dir.steps_path)

    def charter(self) -> Charter:
        """The swarm's terms.

        Raises:
            DataError: they are not where the run lies.
        """
        return load_charter(self.dir.swarm_dir, bytes.fromhex(self.record["swarm"]))

    def config(self, digest: str, changes: Mapping[str, str]) -> NodeConfig:
        """What a step was made with, and what would be different.

        Args:
            digest: of the step's configuration.
            changes: `section.key` to text, as on the command line.

        Raises:
            ConfigError: a change is wrong.
            DataError: run.json does not know the digest.
        """
        saved = self.record["configs"].get(digest)
        if saved is None:
            raise DataError(
                f"{self.dir.record_path}: the configuration {digest[:16]} of a step is not in it"
            )
        return load_config(None, changes, environ={}, saved=saved)

    def steps_after(self, start: int, count: int | None) -> list[int]:
        """Numbers of the steps that follow a step, at most `count`.

        Raises:
            DataError: there are none, or one is missing in between.
        """
        steps = [step for step in self.log.steps if step > start][:count]
        if not steps:
            last = f"the last one is {self.log.steps[-1]}" if self.log.steps else "there are none"
            raise DataError(f"{self.dir.steps_path}: no steps after step {start}; {last}")
        for expected, step in enumerate(steps, start=start + 1):
            if step != expected:
                raise DataError(
                    f"{self.dir.steps_path}: step {expected} is missing; begin with a later one"
                )
        return steps

    def step(self, number: int) -> LoggedStep:
        """What a step trained on."""
        return self.log.read(number)
