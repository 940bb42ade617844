"""Wall-clock time of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Adds up seconds by tag; a tag timed twice in a step counts both."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, tag: str) -> Iterator[None]:
        """Add the block's duration to `tag`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[tag] = self.seconds.get(tag, 0.0) + time.perf_counter() - start
