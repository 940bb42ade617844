"""What ends a run early: Ctrl-C and SIGTERM, the first to save and end, the second at once; and a time set before."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"  # a live display hides it and has no time left to show it again


def process_age_s() -> float:
    """Seconds since this process began, whatever it did before it came here. Linux only.

    Field 22 of /proc/self/stat; the second field, the name in parentheses, may hold spaces.
    """
    began_ticks = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(began_ticks) / os.sysconf("SC_CLK_TCK")


class StopRequest:
    """Context in which the first signal is noted, for the loop to see, and a second exits with 128 + its number.

    must_save_by_s: age of the process from which on a stop is requested too, once a step has ended; None for none.
    """

    def __init__(self, must_save_by_s: float | None = None) -> None:
        self.signum: int | None = None
        self._must_save_by_s = must_save_by_s
        self._step_ended = False

    @property
    def requested(self) -> bool:
        """Whether a signal has come, or the time to save by."""
        return self.signum is not None or self.time_is_up

    @property
    def time_is_up(self) -> bool:
        """Whether the time to save by has come. Not before this process has trained a step: resuming must get on."""
        return self._must_save_by_s is not None and self._step_ended and process_age_s() >= self._must_save_by_s

    def step_ended(self) -> None:
        """A step of this process was trained."""
        self._step_ended = True

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
        if self.signum is not None:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), _SHOW_CURSOR)
            os._exit(128 + signum)
        self.signum = signum
        os.write(sys.stderr.fileno(), b"\nstopping: this step is finished and saved first; once more to quit at once\n")
