"""Which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A committed, readable checkpoint, as far as retention cares. key: unique among the checkpoints compared."""

    key: str
    step: int
    saved_at_ns: int
    pinned: bool = False


def keys_to_keep(
    saved: Sequence[Saved],
    keep_latest_k: int | None,
    keep_top_k: int | None = None,
    metrics: Mapping[int, float] | None = None,
    higher_is_better: bool = True,
) -> set[str]:
    """Keys of the checkpoints to keep: the newest k, the best k by metric, the pinned, never none of many.

    saved: committed checkpoints alone; whatever else lies in the folder must not be counted.
    keep_latest_k: newest by step; None keeps all steps. keep_top_k: best by `metrics` (value of each step); a step
        without a finite value is never best, and of equals the later step is better.
    Of several checkpoints of one step the last one saved stands for the step; the others go unless pinned.
    The checkpoint saved last is kept whatever its step, since it holds the run's newest state.
    """
    if not saved:
        return set()
    kept = {item.key for item in saved if item.pinned}
    kept.add(max(saved, key=lambda item: item.saved_at_ns).key)
    by_step = {item.step: item for item in sorted(saved, key=lambda item: item.saved_at_ns)}
    steps = sorted(by_step)
    latest = steps if keep_latest_k is None else steps[-max(keep_latest_k, 1) :]
    sign = 1 if higher_is_better else -1
    ranked = [step for step in steps if math.isfinite((metrics or {}).get(step, math.nan))]
    ranked.sort(key=lambda step: (sign * (metrics or {})[step], step))
    best = ranked[-keep_top_k:] if keep_top_k else []
    return kept | {by_step[step].key for step in (*latest, *best)}
