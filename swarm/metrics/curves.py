"""The run's figures as curves in TensorBoard.

Owns: which records become which curves, written by TensorBoard's own library (an extra).
Does not know: what the figures mean, when they are made. metrics.jsonl has them all the same; this
is a second copy for those who read curves there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swarm.errors import ConfigError

_GROUPS = {
    "kl": ("kl_p50", "kl_p90", "kl_p99", "kl_threshold"),
    "ratio": ("ratio_mean", "ratio_max", "is_weight_mean", "truncated_share"),
    "speed": ("seconds", "tokens", "batch_tokens", "micro_batches", "memory_bytes"),
}
_GROUP_OF = {key: group for group, keys in _GROUPS.items() for key in keys}
_NOT_CURVES = ("step", "time_s", "evaluation")


class TensorBoardCurves:
    """Writes event files.

    Args:
        folder: for them.
        step: where the run goes on; curves of later steps, of an attempt that a crash cut off,
            are hidden by TensorBoard.

    Raises:
        ConfigError: the extra is not installed.
    """

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                f"metrics.tensorboard needs TensorBoard ({error}): "
                "pip install 'swarm-node[tensorboard]'"
            ) from None
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(step=step + 1, session_log=start))

    def add(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        values = [
            self._summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars(record).items()
        ]
        self._writer.add_event(
            self._event(
                wall_time=record["time_s"],
                step=record["step"],
                summary=self._summary(value=values),
            )
        )

    def close(self) -> None:
        """Write what is left and end the writer's thread."""
        self._writer.close()


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The curves' points in one record of metrics.jsonl: name to value."""
    if record.get("evaluation"):
        return {f"accuracy/{k}": v for k, v in record.items() if k not in _NOT_CURVES}
    return {
        f"{_GROUP_OF.get(key, 'train')}/{key}": float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and key not in _NOT_CURVES
    }
