"""Metrics that merge over microbatches and ranks without depending on how a batch was cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from headwater.metrics import names

_ADDED = {
    names.CHECKPOINT_BYTES,
    names.CHECKPOINT_CHUNKS_ADVANCED,
    names.CHECKPOINT_CHUNKS_REPEATED,
    names.CHECKPOINT_WRITER_RESTARTS,
}


class Stat(NamedTuple):
    """A metric of a part of a batch.

    A mean keeps its total and its count, so that parts of unequal size merge into the mean of the whole.
    NaN in any part is NaN in the whole, for min and max too.
    """

    value: float
    """The total of a mean, or the extreme itself."""
    weight: float
    """The count that the total of a mean is divided by; 1 for an extreme."""
    kind: Literal["mean", "min", "max"]

    @classmethod
    def mean(cls, total: float, count: float) -> Stat:
        """The mean total / count, such as a summed loss and its tokens. A count of zero is a part without data."""
        if not count >= 0:
            raise ValueError(f"the count of a mean must be 0 or more, not {count}")
        return cls(float(total), float(count), "mean")

    @classmethod
    def min(cls, v: float) -> Stat:
        """The smallest value seen."""
        return cls(float(v), 1.0, "min")

    @classmethod
    def max(cls, v: float) -> Stat:
        """The largest value seen."""
        return cls(float(v), 1.0, "max")


def merge(stats: Iterable[Mapping[str, Stat]]) -> dict[str, Stat]:
    """One Stat a tag from those of all parts; a part may lack a tag. Raises ValueError if kinds differ."""
    merged: dict[str, Stat] = {}
    for part in stats:
        for tag, stat in part.items():
            merged[tag] = _merge_two(tag, merged[tag], stat) if tag in merged else stat
    return merged


def reduce(stats: Mapping[str, Stat]) -> dict[str, float]:
    """The numbers to log. A mean of zero weight has no value and is left out."""
    return {
        tag: stat.value / stat.weight if stat.kind == "mean" else stat.value
        for tag, stat in stats.items()
        if stat.weight > 0
    }


def all_ranks(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number a tag from those of each rank: what each counts for itself is added, else the largest is taken."""
    tags = dict.fromkeys(tag for of_rank in metrics for tag in of_rank)
    return {tag: (sum if tag in _ADDED else max)(of_rank[tag] for of_rank in metrics if tag in of_rank) for tag in tags}


def _merge_two(tag: str, a: Stat, b: Stat) -> Stat:
    if a.kind != b.kind:
        raise ValueError(f"{tag} is a {a.kind} in one part and a {b.kind} in another")
    if a.kind == "mean":
        return Stat(a.value + b.value, a.weight + b.weight, "mean")
    # The builtins answer by argument order when one of the two is NaN.
    if math.isnan(a.value) or math.isnan(b.value):
        return Stat(math.nan, 1.0, a.kind)
    return a if (a.value <= b.value) == (a.kind == "min") else b
