"""Where metrics go: a line of JSON a step, and TensorBoard event files. Both survive a crash and a resume."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from headwater.config.schema import LoggerConfig
from headwater.errors import UserError
from headwater.metrics.numbers import from_json, to_json


class MetricSink(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep `metrics` (tag to value) of `step`. They are in the operating system's hands on return."""
        ...

    def close(self) -> None:
        """Release the file. Nothing is logged after it."""
        ...


class JsonlSink:
    """Appends one line a step: {"step": 3, "time": "2026-01-01T00:00:00+00:00", "metrics": {"train/loss": 0.5}}.

    Each line is handed to the operating system at once. A line that a crash left half-written is removed before
    anything is appended. Raises UserError if the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._mend()
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record = {
            "step": step,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "metrics": {tag: to_json(value) for tag, value in metrics.items()},
        }
        self._write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _mend(self) -> None:
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        tail = content[content.rfind(b"\n") + 1 :]
        if not tail:
            return
        if _parse(tail) is None:
            os.ftruncate(self._fd, len(content) - len(tail))
        else:
            self._write(b"\n")

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise _cannot_write(self.path, error) from error


class TensorBoardSink:
    """Writes one event file of scalars (float32, as TensorBoard keeps them) into `folder`, made if missing.

    With `purge_step`, readers discard what earlier files of the folder hold for that step and later ones.
    Events are written in the caller's thread: an error surfaces where it happened. Raises UserError if the
    folder cannot be written.
    """

    def __init__(self, folder: str | Path, purge_step: int | None = None) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        now = time.time()
        # Readers take files in the order of their names: microseconds keep two runs of one second in order.
        self.path = Path(folder) / f"events.out.tfevents.{int(now):010d}.{int(now % 1 * 1e6):06d}.{os.getpid()}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb")
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in metrics.items()]
        self._write(step=step, summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

        try:
            self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def open_sinks(config: LoggerConfig, first_step: int) -> list[MetricSink]:
    """The sinks that `config` asks for; `first_step` is the first that this run trains (1 unless it resumes).

    Writes `log_dir`/metrics.jsonl and `log_dir`/tensorboard/. What an earlier run logged for `first_step` and later
    is superseded. Raises UserError if the folder cannot be written.
    """
    folder = Path(config.log_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    sinks: list[MetricSink] = [JsonlSink(folder / "metrics.jsonl")]
    if config.tensorboard_enabled:
        # A run from the start supersedes step 0, a validation before training, as well.
        purge_step = first_step if first_step > 1 else 0
        try:
            sinks.append(TensorBoardSink(folder / "tensorboard", purge_step))
        except BaseException:
            sinks[0].close()
            raise
    return sinks


def read_jsonl(path: str | Path) -> dict[str, dict[int, float]]:
    """Read what `JsonlSink` wrote: tag to step to value, steps in ascending order.

    A later line wins over an earlier one of the same step. Where the step goes back, a run was resumed, and what
    was logged before for steps above is superseded. A last line that a crash cut short is left out. Raises
    UserError if the file cannot be read or another line is not a record.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    series: dict[str, dict[int, float]] = {}
    previous = -1
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is None:
            if number == len(lines) or not line.strip():
                continue
            raise UserError(f'{path}, line {number}: not a record such as {{"step": 1, "metrics": {{...}}}}')
        step, metrics = record
        if step < previous:
            series = {tag: {s: v for s, v in points.items() if s <= step} for tag, points in series.items()}
        previous = step
        for tag, value in metrics.items():
            series.setdefault(tag, {})[step] = value
    return {tag: dict(sorted(points.items())) for tag, points in series.items() if points}


def _parse(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Step and metrics of a line, or None if the line is not a record."""
    try:
        record = json.loads(line)
        step, metrics = record["step"], record["metrics"]
        if type(step) is not int or not isinstance(metrics, dict):
            return None
        return step, {tag: from_json(raw) for tag, raw in metrics.items()}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write metrics to {path}: {error.strerror or error}; set logger.log_dir to another folder")
