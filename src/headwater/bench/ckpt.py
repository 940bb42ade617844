"""Saving a checkpoint in Headwater and in its peers, in turns in one run, while a real model trains.

Each round visits every side, in an order that rotates:

    steps without saves | steps with a save each | one save alone: call, fence, synced commit
    (and every other round the steps with saves come first)

A peer that breaks is left out from then on; the run goes on.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from headwater.bench.ckpt_ceilings import CeilingMeter, Ceilings
from headwater.bench.ckpt_guards import (
    limited,
    one_line,
    quiet_warnings,
    single_process_group,
    terminated_as_interrupted,
)
from headwater.bench.ckpt_peers import OWN, PEERS, Way
from headwater.bench.ckpt_result import Comparison, SideResult
from headwater.bench.ckpt_sides import Setup, Side
from headwater.bench.ckpt_state import Training, fingerprints, synchronize
from headwater.checkpoint.host_memory import available_bytes
from headwater.checkpoint.preflight import size_text
from headwater.errors import BlockedError, UserError

_STEP_PER_WRITE = 1.5  # a step takes this many times as long as a synced write, or the disk alone would be measured


@dataclass(frozen=True)
class Options:
    """size: bytes of the state. folder: to write into, which must exist. peers: keys of `PEERS`."""

    size: float
    rounds: int
    steps: int
    peers: Sequence[str]
    folder: Path
    device: str

    def check(self) -> None:
        """Raise UserError for what cannot be run, BlockedError for a missing device."""
        if not (math.isfinite(self.size) and self.size > 0):
            raise UserError("--size-gb must be above 0")
        if self.rounds < 1 or self.steps < 1:
            raise UserError("--rounds and --steps must be 1 or more")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise BlockedError("--device cuda: torch sees no CUDA device here")
        if not self.folder.is_dir():
            raise UserError(f"--folder {self.folder}: no such folder")
        # Two checkpoints of each side, one that is being removed, and the file that the disk is measured with.
        disk = self.size * (2 * (len(self.peers) + 1) + 2)
        free = shutil.disk_usage(self.folder).free
        if free < disk:
            raise UserError(
                f"--folder {self.folder}: this run may write {size_text(disk)}, {size_text(free)} is free: "
                "free space, lower --size-gb, or name fewer sides with --peer"
            )
        # The state and its gradients, the memory it is copied to, two staging buffers here and one in each peer.
        memory = self.size * (2.5 + 2 + len(self.peers))
        available = available_bytes()
        if available is not None and available < memory:
            raise UserError(
                f"this run may take {size_text(memory)} of memory, {size_text(available)} is free: "
                "lower --size-gb, or name fewer sides with --peer"
            )


def compare(options: Options, console: Console) -> Comparison:
    """Measure Headwater and the peers named, and remove all that was written. Raises as `Options.check` does."""
    options.check()
    with ExitStack() as stack:
        try:
            root = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-bench-", dir=options.folder))
            ).resolve()
        except OSError as error:
            raise UserError(f"--folder {options.folder}: {error.strerror}") from error
        stack.enter_context(terminated_as_interrupted())
        stack.enter_context(quiet_warnings())
        device = torch.device(options.device)
        training = Training(options.size, device)
        meter = CeilingMeter(training.state, root, device)
        meter.measure()
        meter.measure()
        step = training.calibrate(_STEP_PER_WRITE * min(meter.found.best_write))
        meter.found = Ceilings(meter.found.nbytes)  # those were for the calibration
        console.print(
            f"{size_text(training.nbytes)} of weights and moments; a step (micro-batches: {training.microbatches}) "
            f"takes {step:.2f} s, more than a synced write",
            highlight=False,
        )
        bench = _Bench(options, training, meter, root, console, stack)
        bench.run()
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
        return Comparison(
            machine=f"torch {torch.__version__}, {where}",
            nbytes=training.nbytes,
            microbatches=training.microbatches,
            step_s=step,
            ceilings=meter.found,
            sides=bench.results,
        )


class _Bench:
    def __init__(
        self,
        options: Options,
        training: Training,
        meter: CeilingMeter,
        root: Path,
        console: Console,
        stack: ExitStack,
    ) -> None:
        self._options = options
        self._training = training
        self._meter = meter
        self._console = console
        self._saves = 0
        self._open: dict[str, Side] = {}
        ways = {"headwater": OWN} | {key: PEERS[key] for key in options.peers}
        self.results = [SideResult(key, way.label) for key, way in ways.items()]
        stack.callback(self._close_all)
        distributed = self._process_group(ways, root, stack)
        for result, way in zip(self.results, ways.values(), strict=True):
            result.problem = way.missing() or (distributed if way.distributed else "")
            if not result.problem:
                result.title = way.title()
                self._start(result, way, root / result.key)

    @staticmethod
    def _process_group(ways: dict[str, Way], root: Path, stack: ExitStack) -> str:
        """Make one where a side needs it; returns why there is none."""
        if not any(way.distributed and not way.missing() for way in ways.values()):
            return ""
        try:
            stack.enter_context(single_process_group(root))
        except Exception as error:
            return f"does not run here: no gloo process group ({one_line(error)})"
        return ""

    def _start(self, result: SideResult, way: Way, root: Path) -> None:
        """Open a side and let it make what it makes once: memory, processes, plans."""
        root.mkdir()

        def begin() -> None:
            side = limited(lambda: way.make(Setup(root, self._training.state, self._training.device)))
            self._open[result.key] = side
            result.note = side.note
            for _ in range(2):
                self._call_save(side)
                limited(side.wait_safe_to_change)
                limited(side.wait_committed_and_synced)

        self._guarded(result, begin, "does not run here")

    def run(self) -> None:
        """All rounds, then the check of what the last checkpoints hold."""
        for number in range(self._options.rounds):
            self._meter.measure()
            turn = number % len(self.results)
            for result in self.results[turn:] + self.results[:turn]:
                if result.key in self._open:
                    self._guarded(result, lambda r=result, n=number: self._round(r, n), "broke")
        for result in self.results:
            if result.key in self._open:
                self._guarded(result, lambda r=result: self._check(r), "broke")

    def _guarded(self, result: SideResult, action: Callable[[], None], how: str) -> None:
        try:
            action()
        except Exception as error:
            result.problem = f"{how}: {one_line(error)}"
            self._console.print(f"{result.title} {result.problem}", highlight=False, markup=False)
            self._close(result.key)

    def _round(self, result: SideResult, number: int) -> None:
        side = self._open[result.key]
        blocks = [self._steps_without, self._steps_with]
        for block in blocks if number % 2 == 0 else reversed(blocks):
            block(result, side)
        self._save_alone(result, side)
        self._console.print(
            f"round {number + 1}/{self._options.rounds} {result.title}: stall {result.stall_s[-1] * 1e3:.0f} ms, "
            f"synced after {result.commit_s[-1]:.2f} s, step {100 * result.interference:+.1f} %",
            highlight=False,
            markup=False,
        )

    def _steps_without(self, result: SideResult, side: Side) -> None:
        for _ in range(self._options.steps):
            started = self._now()
            self._training.accumulate()
            self._training.update()
            result.step_s.append(self._now() - started)

    def _steps_with(self, result: SideResult, side: Side) -> None:
        """Each step overlaps with the save of the step before, the first with one that is not timed."""
        self._call_save(side)
        for _ in range(self._options.steps):
            started = self._now()
            self._training.accumulate()
            computed = self._now()
            limited(side.wait_safe_to_change)
            safe = self._now()
            self._training.update()
            stall = self._call_save(side)
            result.saving_step_s.append(self._now() - started)
            result.loop_fence_s.append(safe - computed)
            result.loop_stall_s.append(stall)
        limited(side.wait_safe_to_change)
        limited(side.wait_committed_and_synced)

    def _save_alone(self, result: SideResult, side: Side) -> None:
        self._training.accumulate()
        self._training.update()
        started = self._now()
        result.stall_s.append(self._call_save(side))
        called = time.perf_counter()
        limited(side.wait_safe_to_change)
        result.fence_s.append(time.perf_counter() - called)
        folder = limited(side.wait_committed_and_synced)
        result.commit_s.append(time.perf_counter() - started)
        result.nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def _check(self, result: SideResult) -> None:
        """Save, change every tensor as soon as that is said to be safe, load, and compare with what was live."""
        side = self._open[result.key]
        self._training.accumulate()
        live = fingerprints(self._training.state)
        self._call_save(side)
        limited(side.wait_safe_to_change)
        self._training.update()
        limited(side.wait_committed_and_synced)
        loaded = fingerprints(side.load(self._training.state))
        result.wrong = sorted(path for path in live.keys() | loaded.keys() if live.get(path) != loaded.get(path))
        result.right = not result.wrong
        self._close(result.key)

    def _call_save(self, side: Side) -> float:
        """Seconds that the caller of `save` waits."""
        self._saves += 1
        started = self._now()
        limited(lambda: side.save(self._saves, self._training.state))
        return time.perf_counter() - started

    def _now(self) -> float:
        synchronize(self._training.device)
        return time.perf_counter()

    def _close(self, key: str) -> None:
        side = self._open.pop(key, None)
        if side is not None:
            with suppress(Exception):  # what went wrong before is what counts
                limited(side.close, 60.0)

    def _close_all(self) -> None:
        for key in list(self._open):
            self._close(key)
