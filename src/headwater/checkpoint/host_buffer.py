"""Host memory that two processes share without a name, and that is lent to one save at a time.

A buffer is a memfd: its pages are reached through a file descriptor alone, so nothing is left behind however the
processes end, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.checkpoint.host_memory import available_bytes
from headwater.checkpoint.layout import PAGE
from headwater.errors import HeadwaterError, UserError

_log = logging.getLogger(__name__)
_SETS = 2
_USABLE = 0.8  # of the memory that is free: training needs some too


class HostBuffer:
    """Shared memory that grows on demand.

    folder: where an unlinked file stands in if this system offers no memfd.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._registered: int | None = None
        self._refused = False
        self._array = np.empty(0, np.uint8)
        self.fd = -1

    @property
    def pinned(self) -> bool:
        """Whether CUDA copies into it asynchronously."""
        return self._registered is not None

    def reserve(self, nbytes: int, pin: bool) -> None:
        """Hold at least this many bytes, with their pages present. Raises OSError where memory is short.

        pin: page-lock them for CUDA, where that is possible.
        """
        if self.fd < 0:
            self.fd = shared_file(self._folder)
        if nbytes > len(self._array):
            self._grow(nbytes)
        if pin and self._registered is None and not self._refused:
            self._register()

    def _grow(self, nbytes: int) -> None:
        size = -(-nbytes // PAGE) * PAGE
        self._unregister()
        self._array = np.empty(0, np.uint8)
        _require_memory(size - os.fstat(self.fd).st_size)
        os.posix_fallocate(self.fd, 0, size)  # fails where memory is short; touching pages would kill the process
        array = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        array[::PAGE] = 0  # maps the pages now, outside of the interpreter lock, and not in the first save
        self._array = array

    def view(self, nbytes: int) -> np.ndarray:
        """The first `nbytes` bytes, writable."""
        return self._array[:nbytes]

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        self._unregister()
        self._array = np.empty(0, np.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _register(self) -> None:
        runtime: Any = torch.cuda.cudart()
        pointer = self._array.ctypes.data
        result = runtime.cudaHostRegister(pointer, len(self._array), 0)
        if result == runtime.cudaError.success:
            self._registered = pointer
        else:
            self._refused = True
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # CUDA keeps the error for whoever asks next
            _log.warning("staging memory cannot be page-locked (%s): copies from the GPU are slower", result)

    def _unregister(self) -> None:
        if self._registered is not None:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._registered)
            self._registered = None


def _require_memory(nbytes: int) -> None:
    """Refuse what a container's limit does not hold: the kernel would not refuse it, but kill."""
    available = available_bytes()
    if available is not None and nbytes > available * _USABLE:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def shared_file(folder: Path) -> int:
    """The descriptor of an empty file without a name, for a child process too. Raises OSError."""
    try:
        return os.memfd_create("headwater-staging", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        _log.warning("no memfd here (%s): staging through an unnamed file in %s, which is slower", error, folder)
    descriptor, path = tempfile.mkstemp(prefix=".staging-", dir=folder)
    os.unlink(path)
    return descriptor


class Lease:
    """A set of buffers that one save has until it is committed or given up, and longer where someone keeps it."""

    def __init__(self, pool: BufferPool, buffers: dict[str, HostBuffer]) -> None:
        self._pool = pool
        self._buffers = buffers
        self._sealed = False
        self._released = False
        self._keepers = 0

    def writable(self, name: str, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] to stage into. Raises HeadwaterError once the lease is sealed or given back."""
        if self._sealed or self._released:
            raise HeadwaterError(
                f"staging buffer {name} belongs to a save that is not committed yet: it is not written"
            )
        return self._buffers[name].view(nbytes)

    def seal(self) -> None:
        """Staging is done: nothing may be written any more."""
        self._sealed = True

    def fd(self, name: str) -> int:
        """The descriptor of a buffer, for the writer process."""
        return self._buffers[name].fd

    def image(self, name: str, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of what was staged, to read, for whoever keeps it."""
        return self._buffers[name].view(nbytes)

    def keep(self) -> bool:
        """Have the bytes stay as they are until `let_go`, also when the save has ended.

        False where that is too late, or would leave no set for the saves to come.
        """
        with self._pool._changed:
            if not self._keepers:
                if self._released or not self._pool._may_keep():
                    return False
                self._pool._kept += 1
            self._keepers += 1
            return True

    def let_go(self) -> None:
        """Once for each `keep`."""
        with self._pool._changed:
            self._keepers -= 1
            if not self._keepers:
                self._pool._kept -= 1
                if self._released:
                    self._pool._give_back(self._buffers)

    def release(self) -> None:
        """Give the set back; safe to call twice."""
        with self._pool._changed:
            if not self._released:
                self._released = True
                if not self._keepers:
                    self._pool._give_back(self._buffers)


class BufferPool:
    """Two sets of buffers, so that one save is staged while the one before is still being written.

    folder: see `HostBuffer`. Short of memory it goes on with one set, and says so.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = threading.Condition()
        self._free: list[dict[str, HostBuffer]] = [{} for _ in range(_SETS)]
        self._sets = _SETS
        self._kept = 0
        self._closed = False

    def prepare(self, sizes: Mapping[str, int], pin: bool) -> None:
        """Make both sets hold buffers of these names and bytes, in the background; `acquire` waits for it."""
        with self._changed:
            waiting, self._free = self._free, []
        device = torch.cuda.current_device() if pin else None
        threading.Thread(
            target=self._prepare, args=(waiting, dict(sizes), device), name="headwater-staging-prepare", daemon=True
        ).start()

    def _prepare(self, waiting: list[dict[str, HostBuffer]], sizes: dict[str, int], device: int | None) -> None:
        """device: the caller's, to pin for; a thread begins on the first one, and would make a context there."""
        if device is not None:
            torch.cuda.set_device(device)
        for buffers in waiting:
            try:
                self._fit(buffers, sizes, device is not None)
            except (OSError, RuntimeError) as error:  # the save that needs the memory tries again and reports it
                _log.warning("staging memory could not be prepared ahead of the first save: %s", error)
            self._give_back(buffers)

    @property
    def has_free(self) -> bool:
        """Whether `acquire` would find a set now."""
        with self._changed:
            return bool(self._free)

    def acquire(self, sizes: Mapping[str, int], pin: bool, timeout: float) -> Lease | None:
        """Lease a set with at least these bytes in each named buffer; None if none is free within `timeout` seconds.

        Raises UserError where the host has no memory for even one set.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._free, max(0.0, deadline - time.monotonic())):
                    return None
                buffers = self._free.pop(0)
            try:
                self._fit(buffers, sizes, pin)
                return Lease(self, buffers)
            except BaseException as error:
                _close(buffers)
                with self._changed:
                    alone = self._sets - self._kept == 1
                    self._sets -= not alone
                if not isinstance(error, OSError) or alone:
                    self._give_back({})
                    if isinstance(error, OSError):
                        raise UserError(
                            f"no host memory to stage a checkpoint of {sum(sizes.values()):,} bytes "
                            f"({error.strerror}): free memory, raise the limit, or set checkpointing.strategy=sync"
                        ) from error
                    raise
                _log.warning("host memory holds one staged checkpoint only: a save waits until the last is written")

    def _fit(self, buffers: dict[str, HostBuffer], sizes: Mapping[str, int], pin: bool) -> None:
        for name, nbytes in sizes.items():
            buffers.setdefault(name, HostBuffer(self._folder)).reserve(nbytes, pin)

    def _give_back(self, buffers: dict[str, HostBuffer]) -> None:
        with self._changed:
            if self._closed:
                _close(buffers)
            else:
                # The one used last is warm in the caches, and a run that never overlaps saves touches one set only.
                self._free.insert(0, buffers)
            self._changed.notify_all()

    def _may_keep(self) -> bool:
        return self._kept + 1 < self._sets

    def close(self) -> None:
        """Free all sets; one that is leased goes when its lease ends."""
        with self._changed:
            self._closed = True
            free, self._free = self._free, []
        for buffers in free:
            _close(buffers)


def _close(buffers: Mapping[str, HostBuffer]) -> None:
    for buffer in buffers.values():
        buffer.close()
