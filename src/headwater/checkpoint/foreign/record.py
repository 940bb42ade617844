"""What a checkpoint folder of any format holds, as far as the question of freshness needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Role = Literal["weight", "param", "exp_avg", "exp_avg_sq", "other"]
"""`param` is an optimizer's own (master) copy of a weight; `other` is no evidence: RNG, counters, integers."""


@dataclass(frozen=True)
class ByteRange:
    """Where a chunk's bytes are.

    archive: the range is a whole `torch.save` archive, and the tensor's bytes are one entry of it; otherwise the
        range is the tensor's bytes.
    """

    path: Path
    begin: int
    end: int
    archive: bool = False


@dataclass(frozen=True)
class StoredChunk:
    """A stored box of a tensor.

    key: the tensor's name in the folder. parameter: what the tensor belongs to, the same for a parameter's weight,
    moments, master copy and step.
    offset, shape: of the box, one number a dimension. dtype: safetensors name. part: tells boxes apart that the
    format does not place in the tensor, empty where it does.
    """

    component: str
    role: Role
    parameter: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: ByteRange
    part: str = ""

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for two chunks, one of each folder, that can be compared."""
        return self.component, self.key, self.offset, self.shape, self.dtype, self.part


@dataclass(frozen=True)
class Contents:
    """One folder.

    kind: the format, in words. steps: optimizer steps by (component, parameter). group_steps: by component, where
    the optimizer stores one step for many parameters, ascending. notes: what could not be read and does not matter
    enough to give up.
    identity: what the weights belong to, empty where the format does not say.
    """

    folder: Path
    kind: str
    chunks: tuple[StoredChunk, ...]
    steps: dict[tuple[str, str], float] = field(default_factory=dict)
    group_steps: dict[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    identity: str = ""
