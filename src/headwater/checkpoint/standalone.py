"""Checkpoints for any torch program, without the rest of Headwater."""

from __future__ import annotations

import atexit
import logging
import operator
import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch

from headwater.checkpoint.background import Background, Job
from headwater.checkpoint.catalog import scan
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.collector import collector_paused
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint
from headwater.checkpoint.tree import flatten, freeze, unflatten
from headwater.checkpoint.watch import Watch
from headwater.config.schema import CheckpointingConfig
from headwater.errors import UserError

_log = logging.getLogger(__name__)
_COMPONENT = "state"
_IDENTITY = "state_dict"


class _Saving:
    """A save that the manager may not have yet. Waits until its tensors are read, whether that failed or not."""

    def __init__(self, job: Job, staged: Fence) -> None:
        self._job = job
        self._staged = staged

    def wait(self, timeout: float) -> None:
        self._job.wait(timeout)
        self._staged.wait()


class AsyncCheckpointer:
    """Saves state dicts in the background, each with a proof that the file holds what the tensors held at the call.

        checkpointer = AsyncCheckpointer("checkpoints")
        for step in range(1, 1001):
            loss(model, batch).backward()     # overlaps with the save
            checkpointer.wait_staged()        # before anything writes or moves the tensors
            optimizer.step()
            checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        checkpointer.wait_committed()

    A forward pass that writes tensors, as BatchNorm's writes running statistics, has to wait as well.

    folder: of one run's checkpoints, made if need be; no other live process may use it. keep_latest_k: newest
    committed checkpoints to keep, None for all. when_busy: what `save` does while two saves are still being written.
    The end of the program waits for what is being written. Raises UserError when the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_latest_k: int | None = 2,
        when_busy: Literal["wait", "skip"] = "wait",
        writer_silence_s: float = 120.0,
    ) -> None:
        config = CheckpointingConfig(
            checkpoint_dir=str(folder),
            strategy="native",
            keep_latest_k=keep_latest_k,
            when_busy=when_busy,
            writer_silence_s=writer_silence_s,
        )
        self._closed = False
        self._process = os.getpid()
        self._fence = Fence()
        self._manager = CheckpointManager(config, uuid.uuid4().hex, _IDENTITY)
        self._background = Background("headwater-save")
        self._job: Job | None = None
        self._structure: list[object] | None = None
        atexit.register(self.close)

    @property
    def folder(self) -> Path:
        return self._manager.root

    @property
    def pending(self) -> int:
        """Saves that are neither committed nor failed."""
        self._finish_job()
        return self._manager.pending

    @collector_paused()
    def save(self, step: int, state_dict: Mapping[str, Any]) -> None:
        """Stage a checkpoint and return; a background process writes and commits it.

        step: 0 or more. state_dict: nested dicts, lists and tuples of tensors on CPU or CUDA, numbers, strings and
        None. Until `wait_staged` returns the tensors must not be written, freed or moved. Where torch does it, the save
        is refused. What is done to host memory past torch, as by numpy or through `.data`, may be saved instead of what
        was there at the call, and a storage resized to nothing may crash the process.
        Raises UserError for what cannot be saved, and the error of an earlier save that failed.
        """
        if self._closed:
            raise UserError(f"{self.folder}: this checkpointer is closed: make another one to save")
        step = _step(step)
        self._raise_error()
        frozen = freeze(state_dict)
        # A first save shows what cannot be saved; where it is of a GPU, each one is asked for in the caller's stream.
        if frozen is None or frozen.structure != self._structure or not self._manager.has_room:
            self._save(step, state_dict, self._fence, None)
            on_host = frozen is not None and not any(tensor.is_cuda for tensor in frozen.tensors)
            self._structure = frozen.structure if frozen is not None and on_host else None
            return
        watch, staged = Watch(frozen.tensors), Fence()
        self._job = Job(f"preparing the save of step {step}", lambda: self._save(step, frozen.state, staged, watch))
        self._fence.register(_Saving(self._job, staged))
        self._background.submit(self._job)

    def _save(self, step: int, state: Any, fence: Fence, watch: Watch | None) -> None:
        tensors, tree = flatten(state)
        if watch is not None:
            for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
                torch.cuda.synchronize(device)  # moved there since the last save: behind what the caller asked for
        chunks = [Chunk.whole(name, tensor) for name, tensor in tensors.items()]
        trainer = {"step": step, "tree": tree}
        self._manager.save(step, {_COMPONENT: chunks}, trainer, "", None, step, [fence], watch=watch)

    def _finish_job(self, timeout: float = 3600.0) -> None:
        """Return when the manager has all saves; it may have to wait for a buffer."""
        if self._job is not None:
            self._job.wait(timeout)

    def _raise_error(self) -> None:
        self._finish_job()
        job, self._job = self._job, None
        if job is not None and job.error is not None:
            raise job.error

    def wait_staged(self) -> None:
        """Return when the tensors may change again; waits for memory only, never for the disk."""
        self._fence.wait()

    def wait_committed(self, timeout: float = 3600.0) -> None:
        """Return when all saves are checkpoints on disk. Raises the error of one that is not."""
        self._raise_error()
        self._manager.wait_committed(timeout)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return sorted({found.step for found in scan(self.folder) if found.committed})

    def load(self, state_dict: Mapping[str, Any] | None = None, step: int | None = None) -> Any:
        """The newest checkpoint's state dict, or that of a step; every byte is checked against its digest.

        state_dict: its tensors are filled in place, whatever their device, and are those of the result; they must be
            the ones stored. Without it the result has new tensors on the CPU.
        Raises UserError where there is no such checkpoint or the tensors are others, CorruptCheckpointError for one
        that does not hold.
        """
        self._finish_job()
        checkpoint = self._checkpoint(step)
        reader = checkpoint.component(_COMPONENT) if _COMPONENT in checkpoint.components() else None
        tree = checkpoint.trainer_state()["tree"]
        names = set(reader.names()) if reader is not None else set()
        if state_dict is None:
            return unflatten(tree, lambda name: reader.read(name))  # pyright: ignore[reportOptionalMemberAccess]
        self._fence.wait()
        tensors, _ = flatten(state_dict)
        if names != tensors.keys():
            odd = ", ".join(sorted(names ^ tensors.keys())[:5])
            raise UserError(f"{checkpoint.folder} holds other tensors than the state dict given: {odd}")
        for name, tensor in tensors.items():
            reader.read_into(Chunk.whole(name, tensor))  # pyright: ignore[reportOptionalMemberAccess]
        return unflatten(tree, tensors.__getitem__)

    def _checkpoint(self, step: int | None) -> Checkpoint:
        if step is None:
            newest = self._manager.latest()
        else:
            found = [found for found in scan(self.folder) if found.committed and found.step == step]
            newest = Checkpoint.open_to_load(found[-1].folder) if found else None
        if newest is None:
            asked = "committed checkpoint" if step is None else f"committed checkpoint of step {step}"
            raise UserError(f"{self.folder}: no {asked}")
        return newest

    def close(self) -> None:
        """Wait for what is being written and end the background process; safe to call twice."""
        self._closed = True
        atexit.unregister(self.close)
        if os.getpid() != self._process:  # the threads that it would wait for were not forked
            return
        self._background.close()
        if self._job is not None and self._job.error is not None:
            _log.error("%s", self._job.error)
            self._job = None
        self._manager.close()

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step(value: Any) -> int:
    with suppress(TypeError):  # of what is no integer
        if not isinstance(value, bool) and operator.index(value) >= 0:
            return operator.index(value)
    raise UserError(f"step={value!r} cannot name a checkpoint: give an integer, 0 or more")
