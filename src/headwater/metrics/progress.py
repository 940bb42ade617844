"""What a run shows while it goes: a live bar on a terminal, one plain line a step elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from headwater.metrics import names

_RECENT_STEPS = 20


def _number(value: float) -> str:
    """Three decimals, or the magnitude where these would show none of it."""
    return f"{value:.2e}" if 0 < abs(value) < 0.001 or 1e6 <= abs(value) < float("inf") else f"{value:.3f}"


def _lost(what: str) -> Callable[[float], str]:
    """Time that training waited for; nothing where nobody would notice it."""
    return lambda seconds: f"{what} {seconds:.1f}s" if seconds >= 0.05 else ""


# What is shown of a step, in this order; what a step lacks, or has nothing to say of, is left out.
_SHOWN: list[tuple[str, Callable[[float], str]]] = [
    (names.TRAIN_REWARD, lambda v: f"reward {v:.2f}"),
    (names.VALIDATION_ACCURACY, lambda v: f"accuracy {v:.2f}"),
    (names.TRAIN_LOSS, lambda v: f"loss {_number(v)}"),
    (names.TRAIN_CRITIC_LOSS, lambda v: f"critic {_number(v)}"),
    (names.TRAIN_CRITIC_EXPLAINED_VAR, lambda v: f"explained {v:.2f}"),
    (names.TRAIN_TOKEN_MULT_PROB_ERROR, lambda v: f"mismatch {_number(v)}"),
    (names.TIMING_GENERATION, lambda v: f"gen {v:.1f}s"),
    (names.TIMING_VALUE_TRAINING, lambda v: f"value {v:.1f}s"),
    (names.TIMING_POLICY_TRAINING, lambda v: f"train {v:.1f}s"),
    (names.CHECKPOINT_STALL_S, _lost("save")),
    (names.CHECKPOINT_BUSY_WAIT_S, _lost("writer busy")),
    (names.CHECKPOINT_FENCE_WAIT_S, _lost("fence")),
    (names.TIMING_TOTAL_STEP_TIME, lambda v: f"{v:.1f} s/step"),
]


class _PatientConsole(Console):
    """A console whose reader may go away: the run goes on, unseen, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit fails


class Progress:
    """Shows a run; use it as a context manager.

    Args:
        total_steps: the step that the run ends with; steps count from 1.
        first_step: the first step that this run trains: 1, or one more than the step it resumed from.
        console: where to write; standard output if left out.
        clock: seconds, for the time that is left.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._first = first_step
        self._console = console or _PatientConsole()
        self._clock = clock
        self._last_time = clock()
        self._step_times: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._accuracy: dict[str, float] = {}
        self._status = Text(no_wrap=True, overflow="ellipsis")
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=total_steps, completed=first_step - 1, phase="")
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._last_time = self._clock()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(Group(self._bar, self._status), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.phase("")
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """What the run does now, such as "generation". Shown live; a plain log has no use for it."""
        self._bar.update(self._task, phase=name)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics (tag to value) of a finished step. Times are in seconds."""
        eta = self._eta(step, metrics)
        if self._live is None:
            self._line("  ".join([f"step {step}/{self._total}", *_describe(metrics), *eta]))
            return
        if names.VALIDATION_ACCURACY in metrics:
            self._accuracy = {names.VALIDATION_ACCURACY: metrics[names.VALIDATION_ACCURACY]}
        self._bar.update(self._task, completed=step)
        self._status.plain = "  ".join([*_describe({**self._accuracy, **metrics}), *eta])

    def note(self, text: str) -> None:
        """Write a line that stays, above the live bar."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _eta(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """The time left, from the mean of the recent steps with all that went on between them."""
        now = self._clock()
        since_last, self._last_time = now - self._last_time, now
        if step >= self._first:
            # Before the first step a run sets up and validates, which does not come again.
            first = not self._step_times and names.TIMING_TOTAL_STEP_TIME in metrics
            self._step_times.append(metrics[names.TIMING_TOTAL_STEP_TIME] if first else since_last)
        if not self._step_times or step >= self._total:
            return []
        mean = sum(self._step_times) / len(self._step_times)
        return [f"eta {_duration(mean * (self._total - step))}"]


def _describe(metrics: Mapping[str, float]) -> list[str]:
    return [text for tag, show in _SHOWN if tag in metrics and (text := show(metrics[tag]))]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
