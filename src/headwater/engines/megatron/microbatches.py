"""Which sequences a data-parallel rank runs, and in how many passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from headwater.data.types import TrainSequence
from headwater.engines.torch.parallel import share


@dataclass(frozen=True)
class Microbatch:
    """Sequences of one pass. is_own: false where they stand in, since other ranks have one pass more."""

    sequences: Sequence[TrainSequence]
    is_own: bool


def cut(sequences: Sequence[TrainSequence], size: int, rank: int, ranks: int, multiple_of: int = 1) -> list[Microbatch]:
    """A rank's contiguous share, at most `size` sequences a pass; all ranks have as many passes."""
    own = share(sequences, rank, ranks)
    passes = ceil(ceil(ceil(len(sequences) / ranks) / size) / multiple_of) * multiple_of
    found = [Microbatch(own[start : start + size], True) for start in range(0, len(own), size)]
    return found + [Microbatch(sequences[:1], False)] * (passes - len(found))
