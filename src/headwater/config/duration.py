"""Durations as people write them for schedulers."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(?:(\d{1,5}):)?(\d{1,5}):([0-5]?\d):([0-5]?\d)")


def duration_s(text: str) -> int:
    """Seconds of `DD:HH:MM:SS` or `HH:MM:SS`. Raises ValueError for anything else, and for no time at all."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no duration: write DD:HH:MM:SS or HH:MM:SS, such as 00:03:45:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise ValueError(f"{text!r} is no time at all: write a longer one, or null for none")
    return total
