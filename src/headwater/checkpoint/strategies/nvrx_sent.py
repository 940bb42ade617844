"""What another process has open of this one's device memory, to have it back where that process was killed.

Device memory that was sent to a process is kept until the process takes one off a counter in shared memory, which one
that was killed never does: see "Sharing CUDA tensors" in torch's notes on multiprocessing.
"""

from __future__ import annotations

import io
import os
import threading
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions

_SHARED_MEMORY = "/dev/shm"
_COUNTERS_AT = 64  # in a file of torch's RefcountedMapAllocator
_COUNTER_BYTES = 8
_ARGUMENTS = reductions.rebuild_cuda_tensor.__code__.co_varnames[: reductions.rebuild_cuda_tensor.__code__.co_argcount]


class _Counter(NamedTuple):
    """How many have a tensor open that was sent once."""

    file: bytes
    place: int


class SentMemory:
    """Of one process. Methods may be called in any thread."""

    def __init__(self) -> None:
        self._open: list[_Counter] = []
        self._is_gone = False
        self._changing = threading.Lock()

    def pickled(self, value: Any) -> bytes:
        """As a queue of torch.multiprocessing pickles it."""
        with self._changing:
            self._open = _above_zero(self._open)  # the process may have closed what it was sent before
        buffer = io.BytesIO()
        pickler: Any = ForkingPickler(buffer)
        known = pickler.dispatch_table
        known |= {kind: self._reduce for kind, reduce in known.items() if reduce is reductions.reduce_tensor}
        pickler.dump(value)
        return buffer.getvalue()

    def _reduce(self, tensor: torch.Tensor) -> Any:
        rebuild, arguments = reductions.reduce_tensor(tensor)
        named: dict[str, Any] = dict(zip(_ARGUMENTS, arguments, strict=False))
        if rebuild is reductions.rebuild_cuda_tensor and {"ref_counter_handle", "ref_counter_offset"} <= named.keys():
            counter = _Counter(named["ref_counter_handle"], named["ref_counter_offset"])
            if _read(counter.file, [counter.place]) == [1]:  # or this torch counts elsewhere, and keeps the memory
                self._note(counter)
        return rebuild, arguments

    def _note(self, counter: _Counter) -> None:
        with self._changing:
            if self._is_gone:  # while a queue's thread still pickles for it
                _take_one_off(counter)
            else:
                self._open.append(counter)

    def take_back(self) -> None:
        """Call when the process is no more."""
        with self._changing:
            self._is_gone = True
            for counter in _above_zero(self._open):
                _take_one_off(counter)


def _above_zero(counters: list[_Counter]) -> list[_Counter]:
    """Below zero is the largest number there is, and torch would keep the memory for good."""
    places: dict[bytes, list[int]] = {}
    for counter in counters:
        places.setdefault(counter.file, []).append(counter.place)
    found = {file: dict(zip(some, _read(file, some), strict=True)) for file, some in places.items()}
    return [counter for counter in counters if found[counter.file][counter.place]]


def _read(file: bytes, places: list[int]) -> list[int]:
    """Zeros where there is no such file any more: torch removes it with its last counter."""
    first, content = min(places), b""
    with suppress(OSError), open(_SHARED_MEMORY + os.fsdecode(file), "rb") as opened:
        opened.seek(_COUNTERS_AT + _COUNTER_BYTES * first)
        content = opened.read(_COUNTER_BYTES * (max(places) + 1 - first))
    found = [content[_COUNTER_BYTES * (place - first) :][:_COUNTER_BYTES] for place in places]
    return [int.from_bytes(number, "little") for number in found]


def _take_one_off(counter: _Counter) -> None:
    torch.UntypedStorage._release_ipc_counter(counter.file, counter.place)
