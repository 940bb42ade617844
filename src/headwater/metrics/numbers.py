"""Numbers in JSON: NaN and the infinities, which JSON lacks, are written as strings."""

from __future__ import annotations

import math

_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: float) -> float | str:
    """A value that strict JSON can hold: itself, or "NaN", "Infinity", "-Infinity"."""
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(raw: object) -> float:
    """The float that `to_json` wrote. Raises ValueError for anything else: other text, booleans, null, lists."""
    if isinstance(raw, str) and raw in _NAMES:
        return _NAMES[raw]
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise ValueError(f"{raw!r} is not a number")
    try:
        return float(raw)
    except OverflowError:
        raise ValueError("a whole number that large does not fit a float") from None
