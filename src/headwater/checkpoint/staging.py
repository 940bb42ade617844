"""The first state of a save, overlapped with training: live tensors into the image of the file to write.

    call:        note each tensor's version ──> clone what a forward pass changes ──> return
    background:  digest every live tensor ──> copy all ──> compare versions ──> seal ──> hand over to the writer

On a GPU the digests are launched by the call, in the stream of training, so that they are those of that moment, and
fetched ahead of the copies. On a host they are computed first of all in the background. A tensor that changes before
its copy is taken, which the fence prevents, has another version, or other bytes than were digested; either way the
save is refused.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.copy_stream import copy_stream
from headwater.checkpoint.digest import device_sums, digests, finish
from headwater.checkpoint.host_buffer import Lease
from headwater.checkpoint.host_copies import HostCopies, HostImage
from headwater.checkpoint.plan import ComponentPlan
from headwater.checkpoint.watch import Watch
from headwater.checkpoint.write_request import listed
from headwater.errors import HeadwaterError

_log = logging.getLogger(__name__)
_Copy = tuple[torch.Tensor, torch.Tensor]


class Staging:
    """One save's staging. digests: live digest of each chunk, by component, in the order given; set when done.

    copies: where in host memory the values are then. seconds: from the call until all bytes were staged. copy_seconds:
    of the copies from a device alone, without what they had to wait for. error: why staging failed, if it did.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._done = threading.Event()
        self._started = time.perf_counter()
        self.digests: dict[str, list[int]] = {}
        self.copies: HostCopies | None = None
        self.seconds = self.copy_seconds = 0.0
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

    def _finish(self) -> None:
        self.seconds = time.perf_counter() - self._started
        self._done.set()


class Stager:
    """Copies in a thread of its own, and on CUDA in a stream of its own. Close it when no save follows."""

    def __init__(self) -> None:
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
        watch: Watch | None = None,
    ) -> Staging:
        """Begin, go on in the background, and call `then` from there, whether staging failed or not.

        plans: of the very chunks given, by component; `lease` has a buffer for each. watch: made of their tensors
        earlier, where this is not the moment whose values are to be saved.
        """
        staging = Staging(label)
        sources = {name: [_source(chunk) for chunk in parts] for name, parts in chunks.items()}
        seen = watch or Watch(c.tensor for parts in chunks.values() for c in parts if not c.changes_in_forward)
        live = _LiveDigests(
            [_digested(*pair) for name in chunks for pair in zip(chunks[name], sources[name], strict=True)]
        )
        behind = _current_events(source for parts in sources.values() for source in parts)

        copies: HostCopies | None = None

        def while_copying() -> None:
            """What nobody has to wait for once the copies are done."""
            nonlocal copies
            values = live.values()
            for name, plan in plans.items():
                staging.digests[name], values = values[: len(plan.keys)], values[len(plan.keys) :]
            if watch is None:
                copies = HostCopies(lease, plans, chunks, seen)

        def stage_in_background() -> None:
            nonlocal chunks
            try:
                live.compute_on_host()
                staging.copy_seconds = self._copy(sources, plans, lease, behind, live, while_copying)
                _require_unchanged(seen, chunks, label)
                lease.seal()
                staging.copies = copies
            except Exception as problem:
                staging.error = problem.with_traceback(None)  # whose frames hold tensors
            chunks = {}
            for held in (sources, seen, live):  # memory that is given up behind the fence must really be free
                held.clear()
            staging._finish()
            then(staging)

        self._jobs.put(stage_in_background)
        return staging

    def then(self, job: Callable[[], None]) -> None:
        """Have something done in the background, after what was begun before."""
        self._jobs.put(job)

    def _copy(
        self,
        sources: Mapping[str, Sequence[torch.Tensor]],
        plans: Mapping[str, ComponentPlan],
        lease: Lease,
        behind: Mapping[torch.device, Any],
        live: _LiveDigests,
        meanwhile: Callable[[], None],
    ) -> float:
        """Returns when all is copied: the longest that a device took. behind: of each, what its copies come after.

        live: fetched ahead of the copies. meanwhile: called while devices copy.
        """
        for name, plan in plans.items():
            header = plan.layout.header
            lease.writable(name, plan.layout.size)[: len(header)] = np.frombuffer(header, np.uint8)
        spans = []
        try:
            for device, event in behind.items():
                stream = copy_stream(device)
                stream.wait_event(event)
                live.fetch(device)
                begin = stream.record_event(torch.cuda.Event(enable_timing=True))
                spans.append((begin, end := torch.cuda.Event(enable_timing=True), stream))
                with torch.cuda.stream(stream):
                    for target, source in _copies(sources, plans, lease, device):
                        target.copy_(source, non_blocking=True)
                stream.record_event(end)
            meanwhile()
            for target, source in _copies(sources, plans, lease, torch.device("cpu")):
                target.copy_(source)
        finally:
            for _, _, stream in spans:  # whatever happens: nothing is read or written any more
                stream.synchronize()
        return max((begin.elapsed_time(end) / 1000 for begin, end, _ in spans), default=0.0)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # of whoever was told; the saves to come must not wait for ever
                _log.exception("what follows the staging of a save failed")


def _source(chunk: Chunk) -> torch.Tensor:
    """What is copied in the background: the live tensor, or its copy where a forward pass would change that."""
    tensor = chunk.tensor.detach()  # keeps the memory, should someone move the tensor who does not ask the fence
    return tensor.clone() if chunk.changes_in_forward else tensor


def _current_events(tensors: Iterable[torch.Tensor]) -> dict[torch.device, Any]:
    """By CUDA device: the end of what its current stream has been given so far, the digests included."""
    return {
        device: torch.cuda.current_stream(device).record_event()
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}
    }


def _copies(
    sources: Mapping[str, Sequence[torch.Tensor]],
    plans: Mapping[str, ComponentPlan],
    lease: Lease,
    device: torch.device,
) -> Iterator[_Copy]:
    """Where each tensor of a device goes, worked out as it is asked for: a GPU copies the first ones by then."""
    for name, parts in sources.items():
        layout = plans[name].layout
        image = HostImage(lease.writable(name, layout.size))
        for source, (begin, end) in zip(parts, layout.ranges, strict=True):
            if begin < end and source.device == device:
                yield image.tensor(begin, source.dtype, source.shape), source


def _require_unchanged(watch: Watch, chunks: Mapping[str, Sequence[Chunk]], label: str) -> None:
    changed = {id(tensor) for tensor in watch.changed()}
    names = [f"{name} {chunk.name}" for name, parts in chunks.items() for chunk in parts if id(chunk.tensor) in changed]
    if changed:
        raise HeadwaterError(
            f"{listed(names)} changed while {label} was still being copied: "
            "whoever writes, frees or moves a tensor has to wait at the fence (wait_staged) first"
        )


def _digested(chunk: Chunk, source: torch.Tensor) -> torch.Tensor:
    """The live tensor, as of now: its clone where a forward pass may change it before it is digested."""
    return source if chunk.changes_in_forward and not source.is_cuda else chunk.tensor


class _LiveDigests:
    """Digests of live tensors: on a GPU in its current stream, without waiting for them; on a host when asked for."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._nbytes = [tensor.nbytes for tensor in tensors]
        self._on_host: list[tuple[int, torch.Tensor]] = []
        self._known: dict[int, int] = {}
        self._sums: list[tuple[list[int], torch.Tensor]] = []
        self._fetched: dict[torch.device, tuple[torch.Tensor, Any]] = {}
        on_device: dict[torch.device, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            if tensor.is_cuda:
                on_device[tensor.device].append(index)
            else:
                self._on_host.append((index, tensor))
        for there in on_device.values():
            self._sums.append((there, device_sums([tensors[index] for index in there])))

    def compute_on_host(self) -> None:
        values = digests([tensor for _, tensor in self._on_host])
        self._known |= {index: value for (index, _), value in zip(self._on_host, values, strict=True)}

    def fetch(self, device: torch.device) -> None:
        """Have those of a GPU copied to the host by its copy stream, which runs behind them."""
        stream = copy_stream(device)
        for _, sums in self._sums:
            if sums.device == device:
                totals = torch.empty(sums.shape, dtype=sums.dtype, device="cpu", pin_memory=True)
                with torch.cuda.stream(stream):
                    totals.copy_(sums, non_blocking=True)
                self._fetched[device] = totals, stream.record_event()

    def values(self) -> list[int]:
        """Waits for what was fetched, which has to be all."""
        for indices, sums in self._sums:
            totals, fetched = self._fetched[sums.device]
            fetched.synchronize()
            for index, total in zip(indices, totals.tolist(), strict=True):
                self._known[index] = finish(total, self._nbytes[index])
        return [self._known[index] for index in range(len(self._nbytes))]

    def clear(self) -> None:
        """Let go of the tensors."""
        self._on_host, self._sums, self._fetched = [], [], {}
