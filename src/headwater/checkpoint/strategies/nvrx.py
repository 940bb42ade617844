"""The `nvrx` strategy: NVIDIA's resiliency extension writes, under a lifecycle and a proof of Headwater's.

save() ──> live digests ──> NVRx stages ──> (background) NVRx writes ──> digests of its bytes ──> commit ──> done()

NVRx's process keeps handles to the device tensors that it was sent, and reads them again at the next save. They are
closed when the fence says that memory is about to be freed or moved, and when a save finds that it was: never because
of what a configuration says. Where nothing has moved, the process and its handles stay.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headwater.checkpoint.background import Background, Job
from headwater.checkpoint.collector import collector_running
from headwater.checkpoint.digest import warm_up_device
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.ranks import NVRX_FOLDER, SAVE_ID_DIGITS, Ranks
from headwater.checkpoint.save_order import SaveOrder, SaveResult
from headwater.checkpoint.strategies.joint_commit import JointCommit, Written
from headwater.checkpoint.strategies.nvrx_agent import ItemKey
from headwater.checkpoint.strategies.nvrx_items import Identity, Items, make_items
from headwater.checkpoint.strategies.nvrx_save import Reading, Save, parts_of, proven, read_report
from headwater.checkpoint.strategies.nvrx_writer import Library, Writer, WriterLostError
from headwater.checkpoint.strategies.pending import PendingSaves
from headwater.checkpoint.votes import error_of, refusal_of
from headwater.errors import HeadwaterError

FOLDER_NAME = ".nvrx"
_MAX_ATTEMPTS = 3
_BUSY_TIMEOUT_S = 3600.0
_LONGEST_POLL_S = 0.1
_EXIT_S = 2.0
_log = logging.getLogger(__name__)


class NvrxSaver:
    """Saves into `root` through NVRx. library: of which version, used how. The rest as for `NativeSaver`."""

    def __init__(
        self,
        root: Path,
        library: Library,
        silence_s: float,
        done: Callable[[SaveResult], None],
        ranks: Ranks,
        vote_timeout_s: float,
    ) -> None:
        self._root = root
        self._library = library
        self._silence_s = silence_s
        self._done = done
        self._ranks = ranks
        self._vote_timeout_s = vote_timeout_s
        self._pending = PendingSaves(ranks)
        self._writer: Writer | None = None
        self._spare: Writer | None = None
        self._device: int | None = None
        # With CUDA's libraries a process takes many seconds to start.
        self._keeps_spare = library.persistent and torch.cuda.is_available()
        self._using = threading.RLock()
        self._sent: Identity = ()
        self._structure: set[tuple[ItemKey, torch.Size, torch.dtype]] = set()
        self._calls = 0
        self._changed = threading.Condition()
        self._writing: Save | None = None
        self._busy_s = 0.0
        self._background = Background("headwater-nvrx")
        self._removed = self._closed = False
        self._trainer_pid = os.getpid()
        self.writer_restarts = 0
        atexit.register(self._exit)
        _clear(root, ranks)

    @property
    def pending(self) -> int:
        """Saves that are neither committed nor failed."""
        return len(self._pending)

    @property
    def writer_pid(self) -> int | None:
        """Of NVRx's process."""
        return self._writer.pid if self._writer is not None else None

    @property
    def has_room(self) -> bool:
        """Whether a save would not wait for one before it."""
        return self._writing is None

    def take_busy_s(self) -> float:
        """Seconds that saves waited for one before them since the last call of this."""
        busy, self._busy_s = self._busy_s, 0.0
        return busy

    def prepare(self, sizes: Mapping[str, int], pin: bool) -> None:
        """Start NVRx's process in the background, and have digests ready."""
        if pin:
            self._device = torch.cuda.current_device()
            device = torch.device("cuda", self._device)
            threading.Thread(target=warm_up_device, args=(device,), name="headwater-warm-up", daemon=True).start()
        self._background.submit(Job("starting NVRx's writer", self._start))

    def _start(self) -> None:
        with self._using:
            try:
                self._running().wait_ready(self._device)
            except WriterLostError as error:  # a save tries again, and reports it
                if not self._closed:
                    _log.warning("%s", error)
                self._replace()
        self._start_spare()

    def new_save(self, step: int) -> str:
        """See `Saver`."""
        return self._pending.new_token(step)

    def save(self, save: str, order: SaveOrder, fences: Iterable[Fence], skip_when_busy: bool) -> bool:
        """Have it staged; False where one is still being written and that means to skip.

        Raises as `snapshot` does, UserError where shared memory is short, HeadwaterError where NVRx's process is lost
        time after time.
        """
        if not self._wait_for_room(order.step, skip_when_busy):
            return False
        parts = parts_of(order.chunks)
        kept = self._library.kept_on_host()
        items = make_items(order.chunks, device_through_host=self._library.cpu_shm, kept_on_host=kept)
        _wait_for_devices(items)
        made = Save(save, replace(order, chunks={}, watch=None), parts, items, Reading(items))
        self._pending.begin(save, order.step)
        with self._changed:
            self._writing = made
        try:
            self._stage(made)
            for fence in fences:
                fence.register(made.reading)
                fence.keep_handles(self)
            self._background.submit(Job(f"the save of step {order.step}", lambda: self._finish(made)))
        except Exception as error:
            self._end(made, None)
            raise self._told(error, order.step) from None
        except BaseException:
            self._end(made, None)
            raise
        return True

    def _wait_for_room(self, step: int, skip: bool) -> bool:
        started = time.perf_counter()
        with collector_running(), self._changed:
            free = self._changed.wait_for(lambda: self._writing is None, 0.0 if skip else _BUSY_TIMEOUT_S)
        self._busy_s += time.perf_counter() - started
        if not free and not skip:
            raise HeadwaterError(
                f"saving step {step}: NVRx still writes the save before it after {_BUSY_TIMEOUT_S:g} s"
            )
        return free

    def _stage(self, save: Save) -> None:
        """Hand it to NVRx's process, to another one where that is lost."""
        while True:
            save.attempts += 1
            save.folder = self._root / FOLDER_NAME / f"{save.token[:SAVE_ID_DIGITS]}-{self._ranks.rank}-{save.attempts}"
            save.folder.mkdir(parents=True)
            try:
                with self._using, collector_running():
                    writer = self._running()
                    writer.wait_ready(save.items.device)
                    self._forget_other_tensors(writer, save.items)
                    self._calls += 1
                    request = self._library.request(self._calls, save.folder, save.items, writer.sent)
                    writer.stage(request, save.items.device)
                save.staged_at = time.perf_counter()
                return
            except WriterLostError as error:
                self._lost(save, error)
            except BaseException:  # NVRx may have been given it, and would tell of it as of the next save
                shutil.rmtree(save.folder, ignore_errors=True)
                self._replace()
                raise

    def _forget_other_tensors(self, writer: Writer, items: Items) -> None:
        """Handles to memory that is not that of these tensors any more, and copies in another structure."""
        moved = writer.holds_device_memory and self._sent != items.identity
        structure = {(key, tensor.shape, tensor.dtype) for key, tensor in items.tensors.items()}
        if (moved or self._structure != structure) and self._structure and not self._removed:
            writer.let_go()
        self._sent, self._structure = items.identity, structure

    def _lost(self, save: Save, error: WriterLostError) -> None:
        """Make ready for another try, or raise HeadwaterError."""
        shutil.rmtree(save.folder, ignore_errors=True)
        self._replace()
        if save.attempts >= _MAX_ATTEMPTS:
            raise HeadwaterError(f"saving step {save.order.step} failed {save.attempts} times: {error}")
        _log.warning("%s; step %d is saved again by another one", error, save.order.step)

    def _running(self) -> Writer:
        if self._closed:
            raise HeadwaterError("the checkpoints are closed")
        if self._writer is None:
            spare, self._spare = self._spare, None
            if spare is not None and not spare.is_alive:
                spare.kill()
                spare = None
            self._writer = spare or Writer(self._library, self._ranks.rank, self._silence_s)
            if self._closed:  # meanwhile
                self._writer.kill()
        return self._writer

    def _start_spare(self) -> bool:
        """In the background: have another process ready, without a context on the device, should this one be lost.

        Whether one was started.
        """
        with self._using:
            if not self._keeps_spare or self._spare is not None or self._closed:
                return False
            self._spare = Writer(self._library, self._ranks.rank, self._silence_s)
            if self._closed:  # meanwhile
                self._spare.kill()
            return True

    def _replace(self) -> None:
        """Have the next save begin with another process."""
        with self._using:
            writer, self._writer = self._writer, None
            self._sent, self._structure = (), set()
            if writer is not None:
                writer.kill()
                self.writer_restarts += 1

    def let_go(self) -> None:
        """Close all handles to device memory; the fence asks for it before memory is freed or moved."""
        if self._removed:
            return
        with self._using:
            try:
                if self._writer is not None and self._writer.holds_device_memory:
                    self._writer.let_go()
                    self._structure = set()
            except WriterLostError as error:  # nobody has a handle any more; the next save has another process
                _log.warning("%s", error)
                self._replace()

    def remove_for_test(self) -> None:
        """Never let go of anything, to show that the proof of a commit sees what then goes wrong."""
        self._removed = True

    def _finish(self, save: Save) -> None:
        """In the background: wait for NVRx, prove, commit."""
        result = SaveResult(save.order.step, save.order.saved_at_ns)
        result.measured["stage_s"] = save.staged_at - save.started
        result.digests = {(part.component, part.name, part.offset): part.digest for part in save.parts}
        ends = self._end_of(save.token, save.order)
        try:
            try:
                report = self._written(save)
                result.measured["write_s"] = time.perf_counter() - save.staged_at
                chunks, files = proven(save, report)
            except Exception as error:
                ends.refuse(error)
                raise
            ends.commit(Written(save.folder, files, chunks, NVRX_FOLDER))
            result.folder = ends.folder
            result.measured |= ends.measured
        except Exception as error:
            result.error = self._told(error, save.order.step)
        shutil.rmtree(save.folder, ignore_errors=True)
        self._stand_by()
        self._end(save, result)

    def _stand_by(self) -> None:
        """Between two saves: start another process where there is none but the one that writes."""
        with self._using:
            try:
                if self._start_spare() and self._library.cpu_shm and self._writer is not None:
                    self._writer.let_go()  # of copies that NVRx's trainer side forgets where it starts a process
            except WriterLostError as error:
                _log.warning("%s", error)
                self._replace()
            except Exception as error:  # whoever waits for the save is to be told of that
                _log.warning("no other process of NVRx stands by: %s: %s", type(error).__name__, error)

    def _told(self, error: Exception, step: int) -> HeadwaterError:
        """What the trainer is told of it: of what the file system refuses with the remedy."""
        if isinstance(error, HeadwaterError):
            return error
        if isinstance(error, OSError):
            return error_of(refusal_of(error), step, self._root)
        return HeadwaterError(f"saving step {step} failed: {type(error).__name__}: {error}")

    def _end_of(self, token: str, order: SaveOrder) -> JointCommit:
        return JointCommit(self._root, self._ranks, self._vote_timeout_s, token, order)

    def _written(self, save: Save) -> dict[str, Any]:
        """Wait until NVRx has written it; its report. Where its process is lost, the save is staged again if it can."""
        while True:
            try:
                self._wait_written(save)
                return read_report(save.folder)
            except WriterLostError as error:
                with save.reading.lock:
                    if save.is_live and save.reading.passed:
                        self._replace()
                        raise HeadwaterError(
                            f"the checkpoint of step {save.order.step} is lost: {error} while it wrote, and training "
                            "has gone on since; the next save begins with another one"
                        ) from None
                    self._lost(save, error)
                    self._stage(save)

    def _wait_written(self, save: Save) -> None:
        pause = 0.005
        while True:
            with self._using:
                if self._writer is None:
                    raise WriterLostError("NVRx's writer process was ended")
                if self._writer.is_done():
                    return
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_POLL_S)

    def _end(self, save: Save, result: SaveResult | None) -> None:
        """result: None where whoever called `save` is told."""
        save.items.drop()
        with self._changed:
            self._writing = None
            self._changed.notify_all()
        try:
            if result is not None:
                self._done(result)
        except Exception:  # in a thread that other saves need
            _log.exception("what follows the save of step %s failed", save.order.step)
        finally:
            self._pending.end(save.token)

    def refuse(self, save: str, step: int, text: str) -> None:
        """Let the other ranks know that this one does not save."""
        if self._ranks.world == 1:
            self._pending.end(save)
            return
        self._pending.begin(save, step)
        order = SaveOrder(step, {}, {}, "", 0, "", 0, False)

        def tell() -> None:
            try:
                self._end_of(save, order).refuse(HeadwaterError(text))
            finally:
                self._pending.end(save)

        self._background.submit(Job(f"the refusal of step {step}", tell))

    def wait_staged(self, timeout: float) -> None:
        """Return when no live tensor is read any more, nor will be. Raises HeadwaterError after `timeout` seconds."""
        writing = self._writing
        if writing is not None:
            writing.reading.wait(timeout)

    def wait_committed(self, timeout: float) -> None:
        """Return when every save so far has ended. Raises HeadwaterError after `timeout` seconds."""
        self._pending.wait(timeout)

    def _exit(self) -> None:
        """At the end of a program that did not close: multiprocessing would join a process that may never end."""
        writers = [writer for writer in (self._writer, self._spare) if writer is not None]
        if os.getpid() != self._trainer_pid:  # a fork of the trainer ends
            for writer in writers:
                writer.disown()
            return
        self._closed = True
        for writer in writers:
            with suppress(Exception):  # the other one is to end all the same
                writer.kill()
        if self._using.acquire(timeout=_EXIT_S):  # whoever makes one now ends it
            self._using.release()

    def close(self) -> None:
        """End NVRx's process; a save that has not ended is lost."""
        self._closed = True
        atexit.unregister(self._exit)
        starting = self._writer
        if starting is not None and starting.is_starting:  # whoever waits for it would hold what is taken next
            starting.kill()
        with self._using:
            writer, self._writer = self._writer, None
            spare, self._spare = self._spare, None
            if spare is not None:
                spare.kill()
            if writer is not None:
                writer.close()
        self._background.close()
        _clear(self._root, self._ranks)


def _clear(root: Path, ranks: Ranks) -> None:
    """Remove what this rank's saves that did not end left behind, as rank 0 that of ranks which are no more.

    Other ranks may be saving already, or still.
    """
    for folder in (root / FOLDER_NAME).glob("*-*-*"):
        rank = folder.name.split("-")[1]
        if rank == str(ranks.rank) or (ranks.rank == 0 and rank.isdecimal() and int(rank) >= ranks.world):
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not empty, or not there
        (root / FOLDER_NAME).rmdir()


def _wait_for_devices(items: Items) -> None:
    """What was asked of them so far is what the save holds; another process does not wait for it."""
    for device in {tensor.device for tensor in items.tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
