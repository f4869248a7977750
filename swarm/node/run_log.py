"""A run's logs: what each step trained on, and what it and the evaluations came to.

Owns: `steps.jsonl`, `metrics.jsonl`, TensorBoard's curves, and what happens when they cannot be
written. Does not know: what the records say.
"""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.metrics.curves import TensorBoardCurves
from swarm.paths import RunDir, append_json, replacing

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 << 20
"""One step's log line, with thousands of groups in the batch."""


class RunLog:
    """Appends to a run's logs; a line that cannot be written is lost, and nothing else.

    Args:
        run_dir: of the run.
        limit_bytes: of each log, at most, after `shorten`.

    Attributes:
        trouble: why the last line was lost; empty when it was not.
    """

    def __init__(self, run_dir: RunDir, limit_bytes: int) -> None:
        self._run_dir = run_dir
        self._limit_bytes = limit_bytes
        self._curves: TensorBoardCurves | None = None
        self.trouble = ""

    def open(self) -> None:
        """Cut off what a crash left of the last lines."""
        for path in (self._run_dir.steps_path, self._run_dir.metrics_path):
            drop_cut_line(path)

    def shorten(self) -> None:
        """Drop the older half of a log that has become too long, but no evaluation."""
        for path in (self._run_dir.steps_path, self._run_dir.metrics_path):
            try:
                if path.exists() and path.stat().st_size > self._limit_bytes:
                    drop_older_lines(path, self._limit_bytes // 2)
                    log.info("%s: its older half is dropped (limits.run_log_mb)", path)
            except OSError as error:
                log.error("%s is not shortened: %s", path, error.strerror or error)

    def draw_curves(self, first_step: int) -> None:
        """Keep TensorBoard's event files too, from now on."""
        if self._curves is None:
            self._curves = TensorBoardCurves(self._run_dir.tensorboard_dir, first_step)

    def step(self, record: Mapping[str, Any]) -> None:
        """What one step trained on."""
        self._append(self._run_dir.steps_path, record)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """What a step or an evaluation came to."""
        self._append(self._run_dir.metrics_path, record)
        if self._curves is not None:
            self._curves.add(record)

    def close(self) -> None:
        """Finish TensorBoard's files."""
        if self._curves is not None:
            self._curves.close()

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        try:
            append_json(path, record)
        except OSError as error:
            problem = f"{path} is not written: {error.strerror or error}"
            if problem != self.trouble:
                log.error("%s; training goes on", problem)
            self.trouble = problem
        else:
            self.trouble = ""


def drop_cut_line(path: Path) -> None:
    """Remove what a crash left of a log's last line, so that the next one starts on its own."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - MAX_LINE_BYTES)
        file.seek(start)
        tail = file.read()
        file.truncate(start + tail.rfind(b"\n") + 1)


_EVALUATION = b'{"evaluation":true'
"""How `RunLog.metrics` writes one."""


def drop_older_lines(path: Path, kept_bytes: int) -> None:
    """Leave of a log the lines that begin in its last bytes, and its evaluations.

    Raises:
        OSError: there is no room for the shorter one beside it; the log is as before.
    """
    start = path.stat().st_size - kept_bytes
    with path.open("rb") as old, replacing(path) as new:
        position = 0
        for line in old:
            position += len(line)
            if position > start:
                break
            if line.startswith(_EVALUATION):
                new.write(line)
        shutil.copyfileobj(old, new, 1 << 20)
