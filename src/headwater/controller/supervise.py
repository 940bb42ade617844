"""Failures that a run tolerates: of environments, which are the user's code and may call the world outside."""

from __future__ import annotations

import logging

from headwater.errors import HeadwaterError

_log = logging.getLogger(__name__)


class FailureBudget:
    """Counts failures over a run, shows each, and ends the run at the first above `max_failures`.

    what: of what, such as "environment errors".
    """

    def __init__(self, what: str, max_failures: int) -> None:
        self.count = 0
        self._what = what
        self._max_failures = max_failures

    def spend(self, error: Exception) -> None:
        """Take note of a failure. Raises HeadwaterError, from `error`, where there is nothing left to spend."""
        self.count += 1
        said = f"{type(error).__name__}: {error}"
        if self.count > self._max_failures:
            raise HeadwaterError(
                f"{self.count} {self._what}, and {self._max_failures} are tolerated: {said}"
            ) from error
        _log.warning("%d of %d tolerated %s: %s", self.count, self._max_failures, self._what, said)
