"""What a strategy that saves in the background offers the manager."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from headwater.checkpoint.fence import Fence
from headwater.checkpoint.ranks import Ranks
from headwater.checkpoint.save_order import SaveOrder, SaveResult
from headwater.checkpoint.strategies.native import NativeSaver
from headwater.config.schema import CheckpointingConfig


class Saver(Protocol):
    """Makes one save after the other, each called by its token, and tells of each how it ended."""

    @property
    def pending(self) -> int:
        """Saves that are neither committed nor failed."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a save would not wait for one before it."""
        ...

    @property
    def writer_pid(self) -> int | None:
        """Of the process that writes."""
        ...

    @property
    def writer_restarts(self) -> int:
        """How often it was replaced."""
        ...

    def take_busy_s(self) -> float:
        """Seconds that saves waited for one before them since the last call of this."""
        ...

    def prepare(self, sizes: Mapping[str, int], pin: bool) -> None:
        """Make ready in the background for components of so many bytes. pin: whether they are on a CUDA device."""
        ...

    def new_save(self, step: int) -> str:
        """The token of a save that begins. Several ranks have the same one, so each has to call this at each save."""
        ...

    def save(self, save: str, order: SaveOrder, fences: Iterable[Fence], skip_when_busy: bool) -> bool:
        """Begin it; False where one before it is in the way and that means to skip."""
        ...

    def refuse(self, save: str, step: int, text: str) -> None:
        """Let the other ranks know that this one does not save."""
        ...

    def wait_staged(self, timeout: float) -> None:
        """Return when no live tensor is read any more. Raises HeadwaterError after `timeout` seconds."""
        ...

    def wait_committed(self, timeout: float) -> None:
        """Return when every save so far has ended. Raises HeadwaterError after `timeout` seconds."""
        ...

    def close(self) -> None:
        """End its threads and processes; saves that have not ended are lost."""
        ...


def make_saver(
    config: CheckpointingConfig, root: Path, lock_fd: int | None, done: Callable[[SaveResult], None], ranks: Ranks
) -> Saver | None:
    """None for `sync`, which saves at once. The arguments are those of `NativeSaver`.

    Raises BlockedError or UserError where NVRx is not there, or is not what the configuration asks for.
    """
    if config.strategy == "sync":
        return None
    if config.strategy == "native":
        return NativeSaver(root, lock_fd, config.writer_silence_s, done, ranks, config.vote_timeout_s)
    from headwater.checkpoint.strategies.nvrx import NvrxSaver  # what it imports takes seconds
    from headwater.checkpoint.strategies.nvrx_writer import Library

    library = Library(
        constant_structure=config.ckpt_assume_constant_structure,
        cpu_shm=config.async_ckpt_use_cpu_shm,
        persistent=config.use_persistent_ckpt_worker,
    )
    return NvrxSaver(root, library, config.writer_silence_s, done, ranks, config.vote_timeout_s)
