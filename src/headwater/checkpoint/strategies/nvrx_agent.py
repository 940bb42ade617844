"""What of Headwater runs in the writer process of NVRx: a thread that answers the trainer, a proof after each write.

The process belongs to NVRx and does one thing after the other. The thread lets go of device memory while it writes,
tells that it lives, and ends it with its trainer.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.checkpoint.byte_digest import digest_many, warm_up
from headwater.checkpoint.foreign.archive import storage_range
from headwater.checkpoint.strategies.nvrx_sent import SentMemory

PACKAGE = "nvidia_resiliency_ext.checkpointing.async_ckpt"
REPORT_NAME = "report.json"
_PROBE_BYTES = 1 << 16
_LOOK_EVERY_S = 0.5
ItemKey = tuple[str, tuple[int, ...]]
"""Name and offset of an item, as NVRx is told them."""


def _warm_up() -> None:
    """What a first save would wait for: with torch's part of it, seconds."""
    importlib.import_module(f"{PACKAGE}.filesystem_async")
    warm_up()


_adopted = False  # as the process that serves all saves is
_warming = threading.Thread(target=_warm_up, name="headwater-warm-up", daemon=True)


class Adopt:
    """Called in a new writer process, first of all. channel: the process's end of a pipe to its trainer."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel

    def __call__(self) -> None:
        global _adopted
        _adopted = True
        os.setpgid(0, 0)  # the processes that it forks to write end with it
        threading.Thread(target=_answer, args=(self._channel,), name="headwater-agent", daemon=True).start()
        _warming.start()


@dataclass(frozen=True)
class OpenDevice:
    """Called in the process's main thread before it is sent device tensors: a CUDA context on the trainer's device."""

    index: int

    def __call__(self) -> None:
        torch.cuda.set_device(self.index)  # NVRx waits for the copies of the device that is current
        torch.empty(1, device="cuda")


def _answer(channel: Connection) -> None:
    """Answer each question, until the trainer's end of the pipe is closed, however that happens.

    Where NVRx forks to write, it waits for ever for one that was killed; the process ends then as well.
    """
    forked: set[process.BaseProcess] = set()
    try:
        channel.send("adopted")
        while not any(child.exitcode for child in forked):
            forked = {child for child in forked if child.exitcode is None}
            forked |= getattr(process, "_children")  # noqa: B009 - active_children() forgets those that have ended
            if not channel.poll(_LOOK_EVERY_S):
                continue
            question = channel.recv()
            if question == "let go":
                _let_go()
            channel.send(question)
    except (EOFError, OSError):
        pass
    finally:  # a process that answers nobody any more would outlive its trainer
        os.killpg(0, signal.SIGKILL)


def _end_with_trainer() -> None:
    """Of a process that was forked for one save."""
    trainer = process.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)


def _let_go() -> None:
    """Close every handle to the trainer's device memory that is kept between saves."""
    caller = importlib.import_module(f"{PACKAGE}.core").PersistentAsyncCaller
    clean_up = getattr(caller, "cleanup_worker_data_cache", None)  # of versions that have a cache
    if clean_up is not None:
        clean_up()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class StageOnce:
    """NVRx's staging, which is forgotten with the device tensors that it holds once it has run.

    NVRx keeps what it was sent until the write has ended, and in some versions until the next save is sent. sent: notes
    what is pickled for its process.
    """

    def __init__(self, stage: Callable[[], Any], sent: SentMemory | None = None) -> None:
        self._stage: Callable[[], Any] | None = stage
        self._sent = sent

    def __reduce__(self) -> Any:
        assert self._sent is not None, "it is sent once"
        return _received, (self._sent.pickled(self._stage),)

    def __call__(self) -> Any:
        stage, self._stage = self._stage, None
        assert stage is not None, "a save is staged once"
        return stage()


def _received(data: bytes) -> StageOnce:
    return StageOnce(pickle.loads(data))


@dataclass(frozen=True)
class WriteAndProve:
    """NVRx's write function, and then what its files hold, told in a file that belongs to this save alone.

    parts: of each item, the range of each chunk in its bytes.
    """

    write: Callable[..., None]
    folder: str
    parts: Mapping[ItemKey, Sequence[tuple[int, int]]]

    def __call__(self, rank: int, staged: Any, _results: Any) -> None:
        if not _adopted:
            threading.Thread(target=_end_with_trainer, daemon=True).start()
        if _warming.is_alive():
            _warming.join()  # NVRx may fork to write, and a fork keeps the locks that another thread holds
        results = _Results()
        self.write(rank, staged, results)
        try:
            report = self._prove(results.taken)
        except Exception as error:
            refused = error if isinstance(error, OSError) else _refused(Path(self.folder))
            number = refused.errno if refused is not None else None
            text = os.strerror(number) if number is not None else str(error)
            report = {"error": text or type(error).__name__, "errno": number}
            for path in Path(self.folder).iterdir():
                path.unlink()  # or a full disk has no room to say so
        target = Path(self.folder) / REPORT_NAME
        temporary = target.with_suffix(".tmp")
        temporary.write_text(json.dumps(report))
        os.rename(temporary, target)

    def _prove(self, written: Any) -> dict[str, Any]:
        """Digests of the bytes that lie where NVRx says that it wrote each item."""
        if isinstance(written, Exception):
            raise written
        by_file: dict[str, list[tuple[ItemKey, int, int]]] = {}
        for result in (result for of_thread in written.values() for result in of_thread):
            key = (result.index.fqn, tuple(result.index.offset))
            place = result.storage_data
            by_file.setdefault(place.relative_path, []).append((key, place.offset, place.offset + place.length))
        told = sorted(key for places in by_file.values() for key, _, _ in places)
        if told != sorted(self.parts):
            raise ValueError(f"NVRx tells of {len(told)} tensors written, it was given {len(self.parts)}")
        report: dict[str, Any] = {"files": [], "items": []}
        for path, places in by_file.items():
            size, checksum, items = _prove_file(Path(self.folder) / path, places, self.parts)
            report["files"].append([path, size, checksum])
            report["items"] += [[*key, path, begin, digests] for key, begin, digests in items]
        return report


class _Results:
    """Stands in for the queue on which NVRx tells what it wrote: results of one save cannot be taken for another's."""

    taken: Any = None

    def put(self, results: Any) -> None:
        """As a queue's."""
        self.taken = results


def _refused(folder: Path) -> OSError | None:
    """What the file system says to more bytes in these files: torch tells of a write that failed, but not why."""
    try:
        for path in folder.iterdir():
            with open(path, "ab", buffering=0) as file:
                file.write(bytes(_PROBE_BYTES))
                os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _prove_file(
    path: Path, places: Sequence[tuple[ItemKey, int, int]], parts: Mapping[ItemKey, Sequence[tuple[int, int]]]
) -> tuple[int, int, list[tuple[ItemKey, int, list[int]]]]:
    """Size and digest of a file; of each item where its bytes begin, and the digest of each of its parts."""
    with open(path, "rb", buffering=0) as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        begins, ranges = [], []
        for key, begin, end in places:
            first, last = storage_range(file.fileno(), begin, end)
            if last - first < max((to for _, to in parts[key]), default=0):
                raise ValueError(f"{key[0]} has {last - first} bytes in {path.name}, which is too few")
            begins.append(first)
            ranges += [data[first + start : first + stop] for start, stop in parts[key]]
    checksum, *digests = digest_many([data, *ranges])
    remaining = iter(digests)
    items = [
        (key, first, [next(remaining) for _ in parts[key]]) for (key, _, _), first in zip(places, begins, strict=True)
    ]
    return len(data), int(checksum), items
