"""The process side of a worker group: a Ray actor that holds one worker and answers for it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray

from headwater.errors import HeadwaterError

HEALTH = "health"
"""The concurrency group, in Ray's sense, of what is answered while a call runs."""
_MAX_RECORDS = 100


@dataclass(frozen=True)
class Description:
    """Where a worker lives. stderr: the file that its standard error goes to, on its own node."""

    pid: int
    node: str
    stderr: str


@dataclass(frozen=True)
class Raised:
    """What a worker's code raised. time: of the worker's clock, in seconds. exit_code: of our own errors, else None."""

    time: float
    kind: str
    message: str
    traceback: str
    exit_code: int | None


@dataclass(frozen=True)
class Answer:
    """What came of a call. records: (logger, level, message) of warnings meanwhile."""

    value: Any
    raised: Raised | None
    records: tuple[tuple[str, int, str], ...]


class WorkerHost:
    """An actor's body. Calls run in one thread in their order; `ping` and `stack` answer from another meanwhile."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._thread: int | None = None
        self._store: Any = None
        self._records = _Records()
        logging.getLogger().addHandler(self._records)

    def describe(self, module_path: list[str]) -> Answer:
        """Where this is. module_path: the run's, for modules of the user that are found here as well."""
        sys.path += [path for path in module_path if path not in sys.path]
        return self._answer(_describe)

    def open_store(self, node: str, world: int, timeout_s: float) -> Answer:
        """Of rank 0: serve the addresses of all ranks to them. node: its own. Returns the port."""
        return self._answer(lambda: self._open_store(node, world, timeout_s))

    def join(
        self, rank: int, world: int, address: tuple[str, int], timeout_s: float, on_gpu: bool, threads: int
    ) -> Answer:
        """Make the default process group. address: of rank 0's store. timeout_s: of one collective."""
        return self._answer(lambda: self._join(rank, world, address, timeout_s, on_gpu, threads))

    def create(self, made: tuple[Callable[..., Any], tuple[Any, ...]], rank: int, world: int) -> Answer:
        """Make the worker by a factory with its arguments."""
        factory, args = made

        def create() -> None:
            self._worker = factory(*args, rank=rank, world=world)

        return self._answer(create)

    def call(self, method: str, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Answer:
        """Call a method of the worker."""
        args, kwargs = arguments
        return self._answer(lambda: getattr(self._worker, method)(*args, **kwargs))

    @ray.method(concurrency_group=HEALTH)
    def ping(self) -> None:
        """Answered as long as the process runs and its interpreter is not held by one thread."""

    @ray.method(concurrency_group=HEALTH)
    def stack(self) -> str:
        """Where the present call is, as a traceback; empty without one."""
        frame = sys._current_frames().get(self._thread) if self._thread is not None else None
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _open_store(self, node: str, world: int, timeout_s: float) -> int:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        timeout = timedelta(seconds=timeout_s)
        self._store = TCPStore(node, 0, world, is_master=True, timeout=timeout, wait_for_workers=False)
        return self._store.port

    def _join(
        self, rank: int, world: int, address: tuple[str, int], timeout_s: float, on_gpu: bool, threads: int
    ) -> None:
        import torch
        from torch import distributed
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        torch.set_num_threads(threads)
        if on_gpu:
            torch.cuda.set_device(0)  # Ray shows each worker its own device alone
        timeout = timedelta(seconds=timeout_s)
        store = self._store if rank == 0 else TCPStore(*address, world, is_master=False, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        distributed.barrier()  # a rank that cannot be reached is found here and not in the first step

    def _answer(self, work: Callable[[], Any]) -> Answer:
        self._thread = threading.get_ident()
        value, raised = None, None
        try:
            value = work()
        except (Exception, SystemExit) as error:
            raised = Raised(
                time=time.time(),
                kind=type(error).__qualname__,
                message=str(error),
                traceback=_without_this_file(error),
                exit_code=error.exit_code if isinstance(error, HeadwaterError) else None,
            )
        finally:
            self._thread = None
        return Answer(value, raised, self._records.take())


def _describe() -> Description:
    return Description(os.getpid(), ray.util.get_node_ip_address(), os.readlink("/proc/self/fd/2"))


class _Records(logging.Handler):
    """Keeps warnings for the next answer: nobody reads a worker's own output."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._kept) < _MAX_RECORDS:
            self._kept.append((record.name, record.levelno, record.getMessage()))

    def take(self) -> tuple[tuple[str, int, str], ...]:
        self.acquire()
        try:
            kept, self._kept = tuple(self._kept), []
        finally:
            self.release()
        return kept


def _without_this_file(error: BaseException) -> str:
    """The traceback from the worker's own code on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))
