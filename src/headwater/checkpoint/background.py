"""A thread for what a caller need not wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from headwater.errors import HeadwaterError

_CLOSE_S = 3600.0


class Job:
    """label: what to call it in errors. error: why it failed; there once it is done."""

    def __init__(self, label: str, work: Callable[[], None]) -> None:
        self._label = label
        self._work: Callable[[], None] | None = work
        self._done = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it; whatever it raises is kept in `error`."""
        work, self._work = self._work, None  # what it holds on to is let go before anybody is told
        assert work is not None
        try:
            work()
        except BaseException as error:
            self.error = error.with_traceback(None)
        del work
        self._done.set()

    def wait(self, timeout: float) -> None:
        """Return when it is done, also where it failed. Raises HeadwaterError after `timeout` seconds."""
        if not self._done.wait(timeout):
            raise HeadwaterError(f"{self._label} is not done after {timeout:g} s")


class Background:
    """Runs jobs one after the other. Close it when no job follows."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Return when all jobs are done, or after an hour; safe to call twice."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
