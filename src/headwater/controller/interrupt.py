"""Ctrl-C and SIGTERM: the first asks the run to save and end, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"  # a live display hides it and has no time left to show it again


class StopRequest:
    """Context in which the first signal is noted, for the loop to see, and a second exits with 128 + its number."""

    def __init__(self) -> None:
        self.signum: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, 0 without a signal."""
        return 128 + self.signum if self.signum is not None else 0

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self.requested:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            os._exit(128 + signum)
        self.signum = signum
        os.write(sys.stderr.fileno(), b"\nstopping: this step is finished and saved first; once more to quit at once\n")
