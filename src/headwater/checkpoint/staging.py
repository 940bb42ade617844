"""The first state of a save, overlapped with training: live tensors into the image of the file to write.

    call:        digest every live tensor ──> copy what a forward pass changes ──> return
    background:  copy the rest ──> seal ──> hand over to the writer

The digests are those of the moment of the call. A tensor that changes before its copy is taken, which the fence
prevents, makes the writer's digest differ, and the save is refused.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import device_sum, digest, finish
from headwater.checkpoint.dtypes import dtype_name
from headwater.checkpoint.host_buffer import Lease
from headwater.checkpoint.layout import Box, FileLayout, lay_out
from headwater.checkpoint.snapshot import check_chunks
from headwater.errors import HeadwaterError

_Copy = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ComponentPlan:
    """boxes: of the chunks in the order given. layout: of the component's file."""

    boxes: tuple[Box, ...]
    layout: FileLayout


class Planner:
    """Plans of structures seen lately: names, shapes, dtypes and boxes are cached, never a tensor or a pointer."""

    def __init__(self, remembered: int = 8) -> None:
        self._remembered = remembered
        self._layouts: dict[tuple[Box, ...], FileLayout] = {}

    def plan(self, chunks: Sequence[Chunk]) -> ComponentPlan:
        """Raises as `snapshot` does for chunks that cannot be saved."""
        check_chunks(chunks)
        boxes = tuple(
            Box(c.name, dtype_name(c.tensor.dtype), tuple(c.tensor.shape), c.global_shape, c.offset) for c in chunks
        )
        layout = self._layouts.get(boxes)
        if layout is None:
            while len(self._layouts) >= self._remembered:
                del self._layouts[next(iter(self._layouts))]
            layout = self._layouts[boxes] = lay_out(boxes)
        return ComponentPlan(boxes, layout)


class Staging:
    """One save's staging. digests: live digest of each chunk, by component, in the order given; set when done.

    seconds: from the call until all bytes were staged. error: why staging failed, if it did.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._done = threading.Event()
        self._started = time.perf_counter()
        self.digests: dict[str, list[int]] = {}
        self.seconds = 0.0
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float) -> None:
        """Return when no live tensor is read any more, also where staging failed.

        Raises HeadwaterError when that takes longer than `timeout` seconds.
        """
        if not self._done.wait(timeout):
            raise HeadwaterError(f"staging of {self._label} is not done after {timeout:g} s")

    def _finish(self, error: Exception | None) -> None:
        self.error = error
        self.seconds = time.perf_counter() - self._started
        self._done.set()


class Stager:
    """Copies in a thread of its own, and on CUDA in a stream of its own. Close it when no save follows."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headwater-staging", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, after what it has begun."""
        self._jobs.put(None)
        self._thread.join(60.0)

    def stage(
        self,
        label: str,
        chunks: Mapping[str, Sequence[Chunk]],
        plans: Mapping[str, ComponentPlan],
        lease: Lease,
        then: Callable[[Staging], None],
    ) -> Staging:
        """Digest now, copy in the background, then call `then` from there, whether staging failed or not.

        plans: of the very chunks given, by component; `lease` has a buffer for each.
        """
        staging = Staging(label)
        digests = {name: _Digests(parts) for name, parts in chunks.items()}
        later: list[_Copy] = []
        now: list[_Copy] = []
        for name, parts in chunks.items():
            layout = plans[name].layout
            image = lease.writable(name, layout.size)
            image[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
            for chunk, (begin, end) in zip(parts, layout.ranges, strict=True):
                (now if chunk.changes_in_forward else later).append(_copy_of(chunk, image[begin:end]))
        for target, source in now:
            target.copy_(source)
        wait_for_copies = self._enqueue(later, lease.pinned)

        def finish_in_background() -> None:
            error = None
            try:
                wait_for_copies()
                staging.digests = {name: part.values() for name, part in digests.items()}
                lease.seal()
            except Exception as problem:
                error = problem
            staging._finish(error)
            then(staging)

        self._jobs.put(finish_in_background)
        return staging

    def _enqueue(self, copies: list[_Copy], pinned: bool) -> Callable[[], None]:
        """Begin the copies; returns what ends when they are done, to be called in the background."""
        on_device = [copy for copy in copies if copy[1].is_cuda]
        on_host = [copy for copy in copies if not copy[1].is_cuda]
        events = []
        for device in {source.device for _, source in on_device}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            stream.wait_stream(torch.cuda.current_stream(device))  # behind the digests
            parts = [copy for copy in on_device if copy[1].device == device]
            if pinned:
                _copy_on(stream, parts)
                events.append(stream.record_event())
            else:  # a copy into pageable memory blocks its caller
                events.append(_InBackground(stream, parts))

        def run() -> None:
            for target, source in on_host:
                target.copy_(source)
            for event in events:
                event.synchronize()

        return run

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class _InBackground:
    """Copies that are made when they are waited for."""

    def __init__(self, stream: torch.cuda.Stream, copies: list[_Copy]) -> None:
        self._stream = stream
        self._copies = copies

    def synchronize(self) -> None:
        _copy_on(self._stream, self._copies)
        self._stream.synchronize()


def _copy_on(stream: torch.cuda.Stream, copies: list[_Copy]) -> None:
    with torch.cuda.stream(stream):
        for target, source in copies:
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)  # memory freed meanwhile is not handed out again before it was read


def _copy_of(chunk: Chunk, image: np.ndarray) -> _Copy:
    source = chunk.tensor.detach()
    if source.numel() == 0:
        return torch.empty(0), torch.empty(0)
    return torch.from_numpy(image).view(source.dtype).view(source.shape), source


class _Digests:
    """Digests of live tensors: at once on a CPU, on a GPU in its current stream without waiting for them."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._values: list[int | tuple[torch.Tensor, int]] = []
        devices = {chunk.tensor.device for chunk in chunks if chunk.tensor.is_cuda}
        for chunk in chunks:
            tensor = chunk.tensor
            nbytes = tensor.numel() * tensor.element_size()
            self._values.append((device_sum(tensor), nbytes) if tensor.is_cuda else digest(tensor))
        # Whoever reads the sums is in another thread, and so in another stream.
        self._computed = [torch.cuda.current_stream(device).record_event() for device in devices]

    def values(self) -> list[int]:
        """Waits for the device."""
        for event in self._computed:
            event.synchronize()
        sums = [value[0] for value in self._values if isinstance(value, tuple)]
        totals = iter([int(total) for total in torch.stack(sums).tolist()] if sums else [])
        return [finish(next(totals), value[1]) if isinstance(value, tuple) else value for value in self._values]
