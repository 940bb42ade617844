"""What the manager asks of a strategy, and what it hears back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.watch import Watch
from headwater.errors import HeadwaterError


@dataclass(frozen=True)
class SaveOrder:
    """What to save. chunks: of each component. small_files: path in the folder and content.

    readback: whether to read it from the disk again before the commit. watch: made when the tensors held what is to
    be saved, where that was earlier.
    """

    step: int
    chunks: Mapping[str, Sequence[Chunk]]
    small_files: dict[str, bytes]
    run_id: str
    weight_version: int
    model_identity: str
    saved_at_ns: int
    readback: bool
    watch: Watch | None = None


@dataclass
class SaveResult:
    """How a save ended.

    saved_at_ns: of the order. digests: live ones, by component, name and offset of the chunk. measured: seconds and
    bytes, by metric name without its group. error: None if committed.
    """

    step: int
    saved_at_ns: int
    folder: Path | None = None
    digests: dict[tuple[str, str, tuple[int, ...]], int] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    error: HeadwaterError | None = None
