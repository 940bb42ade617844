"""TensorBoard event files to plain numbers, and those numbers in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import UserError
from headwater.metrics.numbers import from_json, to_json
from headwater.metrics.sinks import read_jsonl


class _Point(NamedTuple):
    tag: str
    step: int
    wall_time: float
    value: float


class _Restart(NamedTuple):
    """A run that resumed: what was written before it for `step` and later is superseded."""

    step: int
    wall_time: float


def dump_tensorboard(folder: str | Path) -> dict[str, dict[str, float]]:
    """All scalars of all event files below `folder`: tag to step (as text) to value, nothing sampled.

    Tags are sorted by name and steps by number. Of two values of one tag and step the one with the later wall time
    wins; values that a resumed run superseded (in its own folder) are left out, as TensorBoard does. A file is read
    up to the first record that a crash cut short. Raises UserError if there is no event file or one cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give the folder of a run's TensorBoard files")
    files = sorted(path for path in folder.rglob("*tfevents*") if path.is_file())
    if not files:
        raise UserError(f"no TensorBoard event files (*tfevents*) below {folder}")
    newest: dict[str, dict[int, _Point]] = {}
    for directory in sorted({path.parent for path in files}):
        for point in _points(path for path in files if path.parent == directory):
            points = newest.setdefault(point.tag, {})
            if point.step not in points or point.wall_time >= points[point.step].wall_time:
                points[point.step] = point
    return {tag: {str(step): points[step].value for step in sorted(points)} for tag, points in sorted(newest.items())}


def encode_dump(data: Mapping[str, Mapping[str, float]]) -> str:
    """`data` as JSON text; NaN and infinities as the strings "NaN", "Infinity", "-Infinity"."""
    plain = {tag: {step: to_json(value) for step, value in points.items()} for tag, points in data.items()}
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def read_dump(path: str | Path) -> dict[str, dict[str, float]]:
    """Read `{tag: {step: value}}` from a JSON file. Raises UserError if it cannot be read or is something else."""
    remedy = "give a file of `headwater metrics dump`, or a metrics.jsonl"
    try:
        content = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {remedy}") from error
    if not isinstance(content, dict) or not all(isinstance(points, dict) for points in content.values()):
        raise UserError(f"{path} does not hold {{tag: {{step: value}}}}: {remedy}")
    data: dict[str, dict[str, float]] = {}
    for tag, points in content.items():
        try:
            data[tag] = {step: from_json(raw) for step, raw in points.items()}
        except ValueError as error:
            raise UserError(f"{path}, tag {tag}: {error}") from error
    return data


def read_series(path: str | Path) -> dict[str, dict[str, float]]:
    """A metrics.jsonl in the form of a dump: tag to step (as text) to value. Raises UserError if it cannot be read."""
    return {tag: {str(step): value for step, value in points.items()} for tag, points in read_jsonl(path).items()}


def _points(files: Iterator[Path]) -> list[_Point]:
    """The points of one folder that no later restart superseded."""
    records = [record for path in files for record in _read(path)]
    restarts = [record for record in records if isinstance(record, _Restart)]
    return [
        point
        for point in records
        if isinstance(point, _Point)
        and not any(point.wall_time < restart.wall_time and point.step >= restart.step for restart in restarts)
    ]


def _read(path: Path) -> Iterator[_Point | _Restart]:
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    scalars: set[str] = set()
    events = 0
    try:
        for event in EventFileLoader(str(path)).Load():
            events += 1
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                yield _Restart(event.step, event.wall_time)
            for value in event.summary.value:
                # Only the first value of a tag says what it is.
                if value.metadata.plugin_data.plugin_name == "scalars":
                    scalars.add(value.tag)
                number = _scalar(value) if value.tag in scalars else None
                if number is not None:
                    yield _Point(value.tag, event.step, event.wall_time, number)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except DecodeError as error:
        raise UserError(f"{path} is not a TensorBoard event file: {error}") from error
    if not events and path.stat().st_size:
        raise UserError(f"{path} is not a TensorBoard event file")


def _scalar(value: Any) -> float | None:
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else None
