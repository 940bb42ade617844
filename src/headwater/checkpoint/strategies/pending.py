"""The book of saves that have begun: their tokens, and whether all have ended."""

from __future__ import annotations

import secrets
import threading
from collections import Counter

from headwater.checkpoint.ranks import Ranks
from headwater.errors import HeadwaterError


class PendingSaves:
    """Of one rank. May be used in several threads, but for `new_token`, which belongs to the one that saves."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._saves_of_step: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._steps: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def new_token(self, step: int) -> str:
        """Of a save that begins. Several ranks have the same one, so each has to call this at each save."""
        if self._ranks.world == 1:
            return secrets.token_hex(16)
        time_of_step = self._saves_of_step[step]
        self._saves_of_step[step] += 1
        return self._ranks.save_token(step, time_of_step)

    def begin(self, token: str, step: int) -> None:
        """It is neither committed nor failed."""
        with self._changed:
            self._steps[token] = step

    def end(self, token: str) -> None:
        """It is; safe to call twice, and for one that never began."""
        with self._changed:
            self._steps.pop(token, None)
            self._changed.notify_all()

    def wait(self, timeout: float) -> None:
        """Return when all have ended. Raises HeadwaterError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._steps, timeout):
                steps = ", ".join(map(str, sorted(self._steps.values())))
                raise HeadwaterError(f"the checkpoint of step {steps} is not committed after {timeout:g} s")
