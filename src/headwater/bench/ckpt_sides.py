"""One protocol for every way to save a checkpoint, Headwater's own way, and `torch.save`.

save ──> wait_safe_to_change ──> (training changes the tensors) ──> wait_committed_and_synced ──> load
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from headwater.bench.ckpt_state import State
from headwater.checkpoint.catalog import newest
from headwater.checkpoint.standalone import AsyncCheckpointer
from headwater.errors import HeadwaterError


@dataclass(frozen=True)
class Setup:
    """root: a folder for this side alone. state: what will be saved. device: where it lives."""

    root: Path
    state: State
    device: torch.device

    @property
    def write_threads(self) -> int:
        return max(1, min(4, os.cpu_count() or 1))


class Side(Protocol):
    """One way to save. Its files lie in the folder of its setup; it keeps the last checkpoint and the one before.

    note: what is special about its setup here, for the table; empty for none.
    """

    note: str

    def save(self, step: int, state: State) -> None:
        """Begin to save; waits for an earlier save where this way needs that."""
        ...

    def wait_safe_to_change(self) -> None:
        """Return when, by this way's own rules, training may write to the tensors again."""
        ...

    def wait_committed_and_synced(self) -> Path:
        """Return the last checkpoint's folder when this way calls it done and all of it is synced to the disk."""
        ...

    def load(self, like: State) -> State:
        """The last checkpoint's state, on the CPU, with the structure of `like`."""
        ...

    def close(self) -> None: ...


class Headwater:
    """`headwater.AsyncCheckpointer`, as in docs/checkpoints.md."""

    note = ""

    def __init__(self, setup: Setup) -> None:
        self._checkpointer = AsyncCheckpointer(setup.root, keep_latest_k=1)

    def save(self, step: int, state: State) -> None:
        self._checkpointer.save(step, state)

    def wait_safe_to_change(self) -> None:
        self._checkpointer.wait_staged()

    def wait_committed_and_synced(self) -> Path:
        self._checkpointer.wait_committed()
        found = newest(self._checkpointer.folder)
        if found is None:
            raise HeadwaterError("no checkpoint was committed")
        return found.folder

    def load(self, like: State) -> State:
        return self._checkpointer.load()

    def close(self) -> None:
        self._checkpointer.close()


class Folders:
    """A folder for each save; those before the last two are removed in the background, as trainers do."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kept: list[Path] = []
        self._remover = ThreadPoolExecutor(1, "bench-remove")

    def new(self, step: int) -> Path:
        self._kept.append(self._root / f"step_{step:06d}")
        while len(self._kept) > 2:
            self._remover.submit(shutil.rmtree, self._kept.pop(0), ignore_errors=True)
        return self._kept[-1]

    @property
    def last(self) -> Path:
        return self._kept[-1]

    def synced(self, folder: Path | None = None) -> Path:
        """Sync every file of a save, by default the last one's, and the folders that name them."""
        folder = folder or self.last
        for path in [*folder.rglob("*"), folder, self._root]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return folder

    def close(self) -> None:
        self._remover.shutdown()


class TorchSave:
    """`torch.save` and fsync, in the training thread."""

    note = ""

    def __init__(self, setup: Setup) -> None:
        self._folders = Folders(setup.root)

    def save(self, step: int, state: State) -> None:
        folder = self._folders.new(step)
        folder.mkdir()
        torch.save(state, folder / "state.pt")
        self._folders.synced()

    def wait_safe_to_change(self) -> None:
        """Nothing reads the tensors after `save`."""

    def wait_committed_and_synced(self) -> Path:
        return self._folders.last

    def load(self, like: State) -> State:
        return torch.load(self._folders.last / "state.pt", map_location="cpu", weights_only=True)

    def close(self) -> None:
        self._folders.close()
