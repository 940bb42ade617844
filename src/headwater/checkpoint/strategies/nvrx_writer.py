"""NVRx's own writer process, seen from its trainer, with a limit on every wait.

NVRx waits for its process by joining queues, for ever where the process is dead or stopped. Here a wait ends as soon as
the process has, or when it does not answer any more. It is then killed, with whatever it had forked, and its queues are
dropped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from headwater.checkpoint.strategies.nvrx_agent import PACKAGE, Adopt, OpenDevice, StageOnce, WriteAndProve
from headwater.checkpoint.strategies.nvrx_items import Items
from headwater.checkpoint.strategies.nvrx_sent import SentMemory
from headwater.errors import HeadwaterError, UserError, require_extra

_log = logging.getLogger(__name__)
_START_S = 120.0
_SAVE_S = 3600.0
_LET_GO_S = 5.0
_CLOSE_S = 10.0
_DEATH_S = 5.0
_POLL_S = 0.02
_QUESTION_EVERY_S = 0.5
_THREADS = 2


class WriterLostError(HeadwaterError):
    """The process died, or does not answer any more; it is gone when this is raised."""


class Library:
    """What there is of NVRx. Raises BlockedError where it is not installed, UserError for what it cannot do.

    constant_structure: whether its process may keep handles to device tensors from save to save. cpu_shm: whether the
    trainer copies tensors into shared memory, so that the process needs no device. persistent: whether one process
    serves all saves, or each save forks one.
    """

    def __init__(self, *, constant_structure: bool, cpu_shm: bool, persistent: bool) -> None:
        try:
            core, files = (importlib.import_module(f"{PACKAGE}.{name}") for name in ("core", "filesystem_async"))
        except ImportError as error:
            if (error.name or "").startswith("nvidia_resiliency_ext"):
                raise require_extra("nvrx", "nvidia-resiliency-ext") from None
            raise
        self.version = importlib.metadata.version("nvidia-resiliency-ext")
        self._core: Any = core
        self._files: Any = files
        self.cpu_shm, self.persistent = cpu_shm, persistent
        writer = inspect.signature(self._files.FileSystemWriterAsync.__init__).parameters
        if cpu_shm and "use_cpu_shm_for_gpu_tensors" not in writer:
            raise UserError(
                f"checkpointing.async_ckpt_use_cpu_shm: nvidia-resiliency-ext {self.version} cannot; install 0.6 or "
                "later, or set it to false"
            )
        if not persistent and not torch.cuda.is_available():
            raise UserError(
                "checkpointing.use_persistent_ckpt_worker=false: NVRx asks for a CUDA device where it forks for each "
                "save, and torch sees none; set it to true"
            )
        wanted = {
            "thread_count": _THREADS,
            "use_cached_data_structure": constant_structure and persistent,
            "use_cpu_shm_for_gpu_tensors": cpu_shm,
            "is_multiproc_io": False,
        }
        self._writer_options = {key: value for key, value in wanted.items() if key in writer or key == "thread_count"}

    def new_caller(self) -> Any:
        """Of its objects the one that has a process."""
        if not self.persistent:
            return self._core.TemporalAsyncCaller()
        known = inspect.signature(self._core.PersistentAsyncCaller.__init__).parameters
        # So that its process begins without a CUDA context; see OpenDevice.
        wanted = {"is_daemon": True, "cpu_shm_mode": True}
        return _starts_once(self._core.PersistentAsyncCaller)(
            **{key: value for key, value in wanted.items() if key in known}
        )

    def request(self, call: int, folder: Path, items: Items, sent: SentMemory) -> Any:
        """What its process is to do: stage the items, write them into the folder, and prove what it wrote.

        sent: notes what the process is sent.
        """
        writer = self._files.FileSystemWriterAsync(folder, **self._writer_options)
        plan = writer.prepare_decentralized_global_plan(writer.prepare_local_plan(items.plan()))
        with self._without_results_queue():
            writer.prepare_write_data(plan, items)
        write, stage, arguments = writer.get_save_function_and_args()
        # Its host tensors need no device to wait for, and there may be none.
        stage = StageOnce(partial(stage.func, stage.args[0], torch.cuda.is_available()), sent)
        return self._core.AsyncRequest(
            async_fn=WriteAndProve(write, str(folder), items.parts()),
            async_fn_args=(arguments[0], None, None),
            finalize_fns=[],
            async_fn_kwargs={},
            preload_fn=stage,
            call_idx=call,
        )

    @contextmanager
    def _without_results_queue(self) -> Iterator[None]:
        """NVRx would make one, by a process that outlives its trainer."""
        missing = object()
        before = getattr(self._files, "_results_queue", missing)
        self._files._results_queue = missing
        try:
            yield
        finally:
            if before is missing:
                del self._files._results_queue
            else:
                self._files._results_queue = before

    def adoption(self, channel: Connection) -> Any:
        """The first request that its process gets."""
        return self._core.AsyncRequest(Adopt(channel), (), [], {}, None, call_idx=-1)

    def device_opening(self, device: int) -> Any:
        """The request behind which it may be sent tensors of that CUDA device."""
        return self._core.AsyncRequest(OpenDevice(device), (), [], {}, None, call_idx=-2)

    def kept_on_host(self) -> int:
        """Bytes of shared memory that the trainer's side has from saves before, for copies of what is on a device."""
        copies = getattr(self._files.FileSystemWriterAsync, "_shm_tensor_cache", {})
        return sum(tensor.nbytes for _, tensors in list(copies.values()) for tensor in tensors)

    def forget(self) -> None:
        """Drop what the trainer's side remembers of tensors that were sent."""
        clean_up = getattr(self._files.FileSystemWriterAsync, "cleanup_tensor_caches", None)
        if clean_up is not None:
            clean_up()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


class Writer:
    """One process of NVRx. rank: of the trainer. silence_s: how long it may leave a question unanswered.

    The process starts at once; `stage` waits until it is there, and until then it has no CUDA context. Methods may be
    called from several threads.
    """

    def __init__(self, library: Library, rank: int, silence_s: float) -> None:
        self._library = library
        self._silence_s = silence_s
        self._caller = library.new_caller()
        self._caller.rank = rank
        self._unsent: Exception | None = None
        if library.persistent:  # or what cannot be sent is dropped, and nobody answers
            self._caller.queue._on_queue_feeder_error = self._not_sent
        self._channel: Connection | None = None
        self._asking = threading.Lock()
        self._asked = time.monotonic()
        self._adopted = self._opened = self._killed = False
        self.is_starting = library.persistent
        self.holds_device_memory = False
        self.sent = SentMemory()
        self._deadline = float("inf")
        self._process: Any = None
        if library.persistent:
            try:
                self._start()
            except BaseException as error:
                self._process = self._caller.process
                self.kill()
                if isinstance(error, OSError):
                    raise HeadwaterError(f"NVRx's writer process cannot be started: {error}") from None
                raise

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._process.pid if self._process is not None else None

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._channel = ours
        self._caller.schedule_async_call(self._library.adoption(theirs))
        self._process = self._caller.process
        self._theirs = theirs  # until the process has it

    @property
    def is_alive(self) -> bool:
        """Whether the process is there, as far as is known."""
        return self._process is not None and self._process.is_alive()

    def _not_sent(self, error: Exception, _request: object) -> None:
        self._unsent = error

    def wait_ready(self, device: int | None) -> None:
        """Return when it can be given a save. device: CUDA device of its tensors. Raises WriterLostError."""
        with self._asking:
            if self._channel is None:
                return
            opens = None if self._opened or self._library.cpu_shm else device
            self.is_starting = opens is not None or not self._adopted
            if not self._adopted:
                self._expect("adopted", _START_S)
                self._theirs.close()
                self._wait_for_call()
                self._adopted = True
            if opens is not None:
                self._caller.schedule_async_call(self._library.device_opening(opens))
                self._wait_for_call()
                self._opened = True
            self.is_starting = False

    def _wait_for_call(self) -> None:
        """Until a call that stages nothing is done."""
        deadline = time.monotonic() + _START_S
        while not self._caller.is_current_async_call_done(no_dist=True):
            self._require_alive()
            if time.monotonic() > deadline:
                raise self._lost(f"did not start within {_START_S:g} s")
            time.sleep(_POLL_S)
        self._require_alive()  # of one that was ended meanwhile NVRx says that its calls are done

    def disown(self) -> None:
        """In a fork of the trainer, at whose end multiprocessing would end the trainer's process."""
        children: set[Any] = getattr(multiprocessing.process, "_children", set())
        children.discard(self._process)

    def stage(self, request: Any, device: int | None) -> None:
        """Hand a save over, and return when its tensors may change. device: as for `wait_ready`.

        Raises WriterLostError, and HeadwaterError for what cannot be sent to it.
        """
        self.wait_ready(device)
        if self._library.persistent:
            self._require_alive()  # NVRx would start one of its own where it was closed behind our back
        self.holds_device_memory = not self._library.cpu_shm
        self._deadline = time.monotonic() + _SAVE_S
        call = _Call(lambda: self._schedule(request, device))
        while not call.done.wait(_POLL_S):
            self._check()
            if self._unsent is not None:
                error = self._unsent
                self.kill()
                raise HeadwaterError(f"NVRx's writer process cannot be sent the tensors ({error})")
        if self._library.persistent:
            self._require_alive()  # also of one whose queues were given up, which ends the call
        else:
            self._process = self._caller.process
        if call.error is not None:
            raise call.error

    def _schedule(self, request: Any, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins on the first one
        self._caller.schedule_async_call(request)

    def is_done(self) -> bool:
        """Whether what was staged last is written. Raises WriterLostError."""
        if self._library.persistent:
            done = self._caller.is_current_async_call_done(no_dist=True)
            if not done:
                self._check()
            return done
        done = self._caller.is_current_async_call_done(no_dist=True)
        if done:
            self._process = None  # that it has ended is no loss
        else:
            self._require_in_time()
        return done

    def let_go(self) -> None:
        """Have it forget every tensor it was sent, whose memory may be freed or moved then. Raises WriterLostError."""
        if self._channel is not None:
            self._ask("let go", max(_LET_GO_S, self._silence_s))
        self.holds_device_memory = False
        self._library.forget()

    def _check(self) -> None:
        """See that it lives; now and then also that it answers."""
        self._require_alive()
        self._require_in_time()
        if self._channel is not None and time.monotonic() - self._asked > _QUESTION_EVERY_S:
            self._ask("alive", self._silence_s)

    def _require_alive(self) -> None:
        process = self._process
        if self._killed:
            raise WriterLostError("NVRx's writer process was ended")
        if process is not None and not process.is_alive():
            unready = " before it was ready" if self._channel is not None and not self._adopted else ""
            guard = '; it imports the main script, which may train only under if __name__ == "__main__"'
            raise self._lost(f"ended with exit code {process.exitcode}{unready and unready + guard}")

    def _require_in_time(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._lost(f"has not written a save for {_SAVE_S:g} s")

    def _ask(self, question: str, timeout: float) -> None:
        with self._asking:
            assert self._channel is not None
            with suppress(OSError):
                self._channel.send(question)
            self._expect(question, timeout)
            self._asked = time.monotonic()

    def _expect(self, answer: str, timeout: float) -> None:
        assert self._channel is not None
        deadline = time.monotonic() + timeout
        while True:
            try:
                if self._channel.poll(_POLL_S) and self._channel.recv() == answer:
                    return
            except (OSError, EOFError):
                time.sleep(_POLL_S)  # it is about to end
            self._require_alive()
            if time.monotonic() > deadline:
                raise self._lost(f"has not answered for {timeout:g} s (checkpointing.writer_silence_s)")

    def _lost(self, what: str) -> WriterLostError:
        pid = self.pid
        self.kill()
        return WriterLostError(f"NVRx's writer process {pid} {what}")

    def close(self) -> None:
        """End it in an orderly way, or else by force."""
        call = _Call(self._end)
        call.done.wait(_CLOSE_S)
        self.kill()

    def _end(self) -> None:
        self.let_go()
        self._caller.close()

    def kill(self) -> None:
        """End it, whatever it does, with what it forked; safe to call twice."""
        self._killed = True
        process, self._process = self._process, None
        self._caller.process = None
        if process is not None and process.pid is not None:
            with suppress(OSError):
                # Its own group, unless it did not live to make one; what it forked is in there when it is gone itself.
                if self._adopted or os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join(_DEATH_S)
            if not process.is_alive():
                self.sent.take_back()
        for name in ("queue", "preload_q", "comp_q"):
            queue = getattr(self._caller, name, None)
            if queue is not None:
                _give_up(queue)
        if self._channel is not None:
            self._channel.close()
        self.holds_device_memory = False
        self._library.forget()


def _starts_once(caller: type[Any]) -> type[Any]:
    """That class of NVRx, which would start another process wherever it was closed, and nobody would end that."""

    class StartsOnce(caller):
        _only: Any = None

        @property
        def process(self) -> Any:
            return self._only

        @process.setter
        def process(self, process: Any) -> None:
            self._only = _Ended() if process is None and self._only is not None else process

    return StartsOnce


class _Ended:
    """In place of NVRx's process: it waits for none and starts none, not even where it was about to."""

    def __bool__(self) -> bool:
        return False

    def is_alive(self) -> bool:
        return False

    def join(self, timeout: float | None = None) -> None:
        pass

    terminate = kill = join


def _give_up(queue: Any) -> None:
    """Have nobody wait for what is still in a queue, now or at the end of the program."""
    with suppress(Exception):
        queue.cancel_join_thread()
        queue.close()
    if hasattr(queue, "task_done"):
        with suppress(RuntimeError):  # at the end of a program there is no thread any more, nor one that joins
            _Call(queue.task_done)  # frees a thread that joins it; it could itself wait for a lock of the dead


class _Call:
    """A call that may never return, in a thread of its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None
        self._work = work
        threading.Thread(target=self._run, name="headwater-nvrx-call", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = error
        self.done.set()
