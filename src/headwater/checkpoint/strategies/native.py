"""The `native` strategy: training pays for staging alone; a supervised process writes and commits.

save() ──> lease a buffer ──> stage ──> (background) request ──> supervisor ──> writer process ──> commit ──> done()
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from headwater.checkpoint.byte_digest import warm_up
from headwater.checkpoint.collector import collector_running
from headwater.checkpoint.copy_stream import copy_stream
from headwater.checkpoint.digest import warm_up_device
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.host_buffer import BufferPool, Lease, shared_file
from headwater.checkpoint.plan import ComponentPlan, Planner
from headwater.checkpoint.ranks import Ranks
from headwater.checkpoint.save_order import SaveOrder, SaveResult
from headwater.checkpoint.staging import Stager, Staging
from headwater.checkpoint.strategies.pending import PendingSaves
from headwater.checkpoint.supervisor import Job, Supervisor
from headwater.checkpoint.write_request import WriteRequest
from headwater.errors import HeadwaterError

_log = logging.getLogger(__name__)
_BUSY_TIMEOUT_S = 3600.0


class NativeSaver:
    """Saves into `root` through a writer process.

    lock_fd: the lock on `root`, held by the writer too, so that no other run begins while one still writes.
    silence_s: see `Supervisor`. done: called with each save's result, in a background thread. ranks: who saves together
    with this process; vote_timeout_s: how long rank 0's writer then waits for the others.
    """

    def __init__(
        self,
        root: Path,
        lock_fd: int | None,
        silence_s: float,
        done: Callable[[SaveResult], None],
        ranks: Ranks,
        vote_timeout_s: float,
    ) -> None:
        self._root = root
        self._done = done
        self._ranks = ranks
        self._vote_timeout_s = vote_timeout_s
        self._pending = PendingSaves(ranks)
        self._planner = Planner(ranks.rank)
        self._pool = BufferPool(root)
        self._stager = Stager()
        self._supervisor = Supervisor(silence_s, extra_fd=lock_fd)
        threading.Thread(target=warm_up, name="headwater-warm-up", daemon=True).start()
        self._staging: list[Staging] = []
        self._busy_s = 0.0

    @property
    def pending(self) -> int:
        """Saves that are neither committed nor failed."""
        return len(self._pending)

    @property
    def writer_restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def writer_pid(self) -> int | None:
        return self._supervisor.writer_pid

    @property
    def has_room(self) -> bool:
        """Whether a save would find a buffer now."""
        return self._pool.has_free

    def take_busy_s(self) -> float:
        """Seconds that saves waited for a buffer since the last call of this."""
        busy, self._busy_s = self._busy_s, 0.0
        return busy

    def prepare(self, sizes: Mapping[str, int], pin: bool) -> None:
        """Make buffers and digests ready in the background.

        sizes: bytes of each component. pin: whether CUDA copies into the buffers.
        """
        self._pool.prepare({name: nbytes + nbytes // 100 + (4 << 20) for name, nbytes in sizes.items()}, pin)
        if pin:
            device = torch.device("cuda", torch.cuda.current_device())
            threading.Thread(target=_warm_up, args=(device,), name="headwater-warm-up", daemon=True).start()

    def new_save(self, step: int) -> str:
        """See `Saver`."""
        return self._pending.new_token(step)

    def save(self, save: str, order: SaveOrder, fences: Iterable[Fence], skip_when_busy: bool) -> bool:
        """Stage the save of that token; False where no buffer was free and that means to skip.

        Raises as `snapshot` does, UserError where there is no memory, HeadwaterError where no buffer gets free.
        """
        plans = {name: self._planner.plan(name, parts) for name, parts in order.chunks.items()}
        sizes = {name: plan.size_bound for name, plan in plans.items()}
        pin = any(chunk.tensor.is_cuda for parts in order.chunks.values() for chunk in parts)
        lease = self._acquire(sizes, pin, order.step, skip_when_busy)
        if lease is None:
            return False
        rest = replace(order, chunks={}, watch=None)  # what outlives staging holds no tensor
        self._pending.begin(save, order.step)
        try:
            staging = self._stager.stage(
                f"step {order.step}",
                order.chunks,
                plans,
                lease,
                lambda staging: self._staged(save, rest, plans, lease, staging),
                order.watch,
            )
        except BaseException:
            lease.release()
            self._pending.end(save)
            raise
        self._staging = [other for other in self._staging if not other.done] + [staging]
        for fence in fences:
            fence.register(staging)
        return True

    def _acquire(self, sizes: Mapping[str, int], pin: bool, step: int, skip_when_busy: bool) -> Lease | None:
        started = time.perf_counter()
        with collector_running():
            lease = self._pool.acquire(sizes, pin, 0.0 if skip_when_busy else _BUSY_TIMEOUT_S)
        self._busy_s += time.perf_counter() - started
        if lease is None and not skip_when_busy:
            raise HeadwaterError(
                f"saving step {step}: no staging buffer got free in {_BUSY_TIMEOUT_S:g} s, "
                f"{self.pending} saves are still being written"
            )
        return lease

    def _staged(
        self, save: str, order: SaveOrder, plans: Mapping[str, ComponentPlan], lease: Lease, staging: Staging
    ) -> None:
        """In the staging thread: hand the save over to the writer."""
        result = SaveResult(order.step, order.saved_at_ns, measured={"stage_s": staging.seconds})
        if staging.copy_seconds:
            result.measured["copy_s"] = staging.copy_seconds
        fd = -1
        try:
            if staging.error is not None:
                raise staging.error
            ordered: list[int] = []
            for name, plan in plans.items():
                digests = staging.digests[name]
                result.digests |= zip(plan.keys, digests, strict=True)
                ordered += [digests[index] for index in plan.layout.order]
            request = WriteRequest(
                save=save,
                rank=self._ranks.rank,
                step=order.step,
                run_id=order.run_id,
                weight_version=order.weight_version,
                model_identity=order.model_identity,
                saved_at_ns=order.saved_at_ns,
                readback=order.readback,
                structure=tuple(plan.structure for plan in plans.values()),
                digests=tuple(ordered),
                images=tuple((plan.path, plan.layout.size) for plan in plans.values()),
                small=order.small_files,
                world=self._ranks.world,
                vote_timeout_s=self._vote_timeout_s,
            )
            fd = shared_file(self._root)
            json_bytes = request.to_memfd(fd)
        except Exception as error:
            if fd >= 0:
                os.close(fd)
            lease.release()
            result.error = HeadwaterError(f"staging of step {order.step} failed: {error}")
            try:
                self._done(result)
            finally:
                self._refuse(save, order.step, str(result.error))
            return

        def written(job: Job, measured: dict[str, float], error: HeadwaterError | None) -> None:
            result.folder = job.folder if error is None else None
            result.measured |= measured
            result.error = error
            self._end(save, result)

        self._supervisor.submit(Job(self._root, request, fd, json_bytes, lease, tuple(plans), written))

    def refuse(self, save: str, step: int, text: str) -> None:
        """Let the other ranks know that this one does not save; their writers meet in the order of the saves."""
        if self._ranks.world > 1:
            self._pending.begin(save, step)
            self._stager.then(lambda: self._refuse(save, step, text))

    def _refuse(self, save: str, step: int, text: str) -> None:
        """In the staging thread. What the writer says of it is of no interest: the trainer knows."""
        if self._ranks.world == 1:
            self._pending.end(save)
            return
        ranks, timeout = self._ranks, self._vote_timeout_s
        request = WriteRequest(
            save,
            ranks.rank,
            step,
            "",
            0,
            "",
            0,
            False,
            (),
            (),
            (),
            world=ranks.world,
            vote_timeout_s=timeout,
            refusal=text,
        )
        try:
            fd = shared_file(self._root)
            job = Job(self._root, request, fd, request.to_memfd(fd), None, (), lambda *_: self._pending.end(save))
        except OSError as error:
            _log.warning("the other ranks cannot be told that this one does not save step %d: %s", step, error)
            self._pending.end(save)
            return
        self._supervisor.submit(job)

    def _end(self, save: str, result: SaveResult) -> None:
        try:
            self._done(result)
        except Exception:  # in a thread that other saves need
            _log.exception("what follows the save of step %s failed", result.step)
        finally:
            self._pending.end(save)

    def wait_staged(self, timeout: float) -> None:
        """Return when no live tensor is read any more. Raises HeadwaterError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        for staging in self._staging:
            staging.wait(max(0.0, deadline - time.monotonic()))
        self._staging = []

    def wait_committed(self, timeout: float) -> None:
        """Return when every save so far has ended. Raises HeadwaterError after `timeout` seconds."""
        self._pending.wait(timeout)

    def close(self) -> None:
        """End the threads and the writer; saves that have not ended are lost."""
        self._stager.close()
        self._supervisor.close()
        self._pool.close()


def _warm_up(device: torch.device) -> None:
    """What a first save from there would wait for, and what saves keep there."""
    copy_stream(device)
    warm_up_device(device)
