"""What this machine can do at most: copy the state to host memory, and write as many bytes to the disk."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from headwater.bench.ckpt_state import State, named_tensors, state_bytes, synchronize

_PAGE = 4096
_PIECE = 8 << 20
_THREADS = max(4, min(8, os.cpu_count() or 1))


@dataclass
class Ceilings:
    """Seconds of each measurement for the state's bytes. direct is empty where the file system refuses O_DIRECT."""

    nbytes: int
    memcpy: list[float] = field(default_factory=list)
    buffered: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    direct_threads: int = _THREADS

    @property
    def best_write(self) -> list[float]:
        """Seconds of the faster way to write, by median."""
        return min((way for way in (self.buffered, self.direct) if way), key=lambda way: sorted(way)[len(way) // 2])


class CeilingMeter:
    """Measures again and again into the same memory and one file, which it removes.

    device: the state's. On CUDA the host memory is page-locked.
    """

    def __init__(self, state: State, folder: Path, device: torch.device) -> None:
        self.found = Ceilings(state_bytes(state))
        self._device = device
        self._path = folder / "ceiling"
        size = -(-self.found.nbytes // _PAGE) * _PAGE
        if device.type == "cuda":
            self._buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            self._buffer.zero_()
        self._copies, begin = [], 0
        for _, tensor in sorted(named_tensors(state), key=lambda item: -item[1].element_size()):
            flat = self._buffer[begin : begin + tensor.numel() * tensor.element_size()]
            self._copies.append((flat.view(tensor.dtype).view(tensor.shape), tensor.detach()))
            begin += len(flat)

    def measure(self) -> None:
        """One more sample of each ceiling."""
        synchronize(self._device)
        started = time.perf_counter()
        for target, source in self._copies:
            target.copy_(source, non_blocking=True)
        synchronize(self._device)
        self.found.memcpy.append(time.perf_counter() - started)
        try:
            self.found.buffered.append(self._write(os.O_WRONLY, 1))
            self.found.direct.append(self._write(os.O_WRONLY | os.O_DIRECT, _THREADS))
        except OSError:
            if not self.found.buffered:
                raise
        finally:
            self._path.unlink(missing_ok=True)

    def _write(self, flags: int, threads: int) -> float:
        """Seconds to write the buffer into a new file and sync it."""
        self._path.unlink(missing_ok=True)
        data = self._buffer.numpy().data
        started = time.perf_counter()
        descriptor = os.open(self._path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        try:

            def write(begin: int) -> None:
                end = min(begin + _PIECE, len(data))
                while begin < end:
                    begin += os.pwrite(descriptor, data[begin:end], begin)

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(write, range(0, len(data), _PIECE)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return time.perf_counter() - started
