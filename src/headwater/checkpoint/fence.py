"""The one place that whoever changes or moves a tensor's storage passes."""

from __future__ import annotations

import time
from typing import Protocol


class Staged(Protocol):
    """Something that reads live tensors until `wait` returns."""

    def wait(self, timeout: float) -> None:
        """Raises HeadwaterError, naming itself, when it is not done after `timeout` seconds."""
        ...


class Fence:
    """Keeps an engine's storage as it is until all that was registered has read it. It never waits for a disk.

    timeout_s: the longest that one wait may take.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self._readers: list[Staged] = []
        self._waited_s = 0.0
        self._removed = False

    def register(self, reader: Staged) -> None:
        """From now on `wait` waits for this one too."""
        self._readers.append(reader)

    def wait(self) -> list[Staged]:
        """Call before any storage is written, freed or moved. Raises HeadwaterError on a timeout.

        Returns what read the storage since the last call: it holds what the tensors hold still.
        """
        if self._removed:
            return []
        started = time.perf_counter()
        passed: list[Staged] = []
        while self._readers:
            self._readers[0].wait(self._timeout_s)
            passed.append(self._readers.pop(0))
        self._waited_s += time.perf_counter() - started
        return passed

    def take_waited_s(self) -> float:
        """Seconds spent in `wait` since the last call of this."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def remove_for_test(self) -> None:
        """Wait for nothing any more, to show that the proof of a commit sees what then goes wrong."""
        self._removed = True
