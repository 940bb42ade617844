"""NVRx as training stacks use it, without Headwater's lifecycle: the control arm, which is to show the faults.

A persistent writer, structure assumed to be constant, finalized before the next save; nothing is released where the
trainer moves its tensors, since nobody told NVRx that it would.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from headwater.checkpoint.chunk import Chunk


class PlainNvrx:
    """One rank's. Each save is a torch DCP folder, which `headwater ckpt freshness` reads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        on_device = torch.cuda.is_available()
        self._queue = core.AsyncCallsQueue(persistent=True, **({} if on_device else {"cpu_shm_mode": True}))
        self._on_device = on_device

    @property
    def pid(self) -> int | None:
        """Of its process."""
        caller = self._queue.persistent_caller
        return caller.process.pid if caller is not None and caller.process is not None else None

    def save(self, step: int, components: dict[str, Iterable[Chunk]]) -> float:
        """Returns the seconds until training may go on. The names in the folder are those of a Headwater checkpoint."""
        self.finalize()
        started = time.perf_counter()
        state = {
            f"{component}.{chunk.name}" + (f"@{chunk.offset}" if any(chunk.offset) else ""): chunk.tensor.detach()
            for component, chunks in components.items()
            for chunk in chunks
        }
        folder = self._root / f"step_{step:06d}"
        writer = filesystem_async.FileSystemWriterAsync(folder, thread_count=2, use_cached_data_structure=True)
        _, metadata, _ = save_state_dict_async_plan(state, writer, planner=DefaultSavePlanner())
        write, stage, arguments = writer.get_save_function_and_args()
        if not self._on_device:
            stage = partial(stage.func, stage.args[0], False)
        request = core.AsyncRequest(write, tuple(arguments), [partial(_finish, writer, metadata)], {}, stage)
        self._queue.schedule_async_request(request)
        return time.perf_counter() - started

    def finalize(self) -> None:
        """Wait until the last save is on the disk, with its metadata."""
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def folder(self, step: int) -> Path:
        return self._root / f"step_{step:06d}"

    def close(self) -> None:
        self.finalize()
        if self._queue.persistent_caller is not None:
            self._queue.persistent_caller.close()
            self._queue.persistent_caller = None


def _finish(writer: Any, metadata: Any) -> None:
    results = writer.retrieve_write_results()
    if not isinstance(results, list):
        raise results[0]
    writer.finish(metadata, [results])
