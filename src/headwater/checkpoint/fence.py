"""The one place that whoever changes or moves a tensor's storage passes."""

from __future__ import annotations

import time
from typing import Protocol


class Staged(Protocol):
    """Something that reads live tensors until `wait` returns."""

    def wait(self, timeout: float) -> None:
        """Raises HeadwaterError, naming itself, when it is not done after `timeout` seconds."""
        ...


class HandleKeeper(Protocol):
    """Something that keeps another process's handles to memory, by which a device does not get it back when freed."""

    def let_go(self) -> None:
        """Close them."""
        ...


class Fence:
    """Keeps an engine's storage as it is until all that was registered has read it. It never waits for a disk.

    Whoever writes it waits; whoever frees or moves it vacates.

    timeout_s: the longest that one wait may take.
    """

    def __init__(self, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self._readers: list[Staged] = []
        self._keepers: list[HandleKeeper] = []
        self._waited_s = 0.0
        self._removed = False

    def register(self, reader: Staged) -> None:
        """From now on `wait` waits for this one too."""
        self._readers.append(reader)

    def keep_handles(self, keeper: HandleKeeper) -> None:
        """The next `vacate` asks it to let go, once."""
        if keeper not in self._keepers:
            self._keepers.append(keeper)

    def vacate(self) -> list[Staged]:
        """Call before any storage is freed or moved: `wait`, and no process has a handle to it any more."""
        passed = self.wait()
        started = time.perf_counter()
        while self._keepers and not self._removed:
            self._keepers[-1].let_go()
            self._keepers.pop()
        self._waited_s += time.perf_counter() - started
        return passed

    def wait(self) -> list[Staged]:
        """Call before any storage is written. Raises HeadwaterError on a timeout.

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
        """Seconds spent in `wait` and `vacate` since the last call of this."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def remove_for_test(self) -> None:
        """Wait for nothing any more, to show that the proof of a commit sees what then goes wrong."""
        self._removed = True
