"""Saves through NVRx's real writer process, held still at a place in them, and what is left of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from process_tree import below, is_alive, wait_until
from tensor_saves import Tensors, copy_of, save

from headwater.checkpoint.manager import CheckpointManager
from headwater.errors import HeadwaterError

MakeManager = Callable[..., CheckpointManager]

# Each process that NVRx starts from now on waits, its file written but not synced, while there is a file `hold`.
_HOLD = """
import os, time
from pathlib import Path
here = Path(__file__).parent
def fsync(fd, real=os.fsync):
    if "/.nvrx/" in os.readlink(f"/proc/self/fd/{fd}"):
        (here / f"writing-{os.getpid()}").touch()
        while (here / "hold").exists():
            time.sleep(0.01)
    real(fd)
os.fsync = fsync
"""


class Hold:
    """Holds the writes of processes that are started while it is in place."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        (folder / "sitecustomize.py").write_text(_HOLD)
        self.python_path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))

    def on(self) -> None:
        for mark in self.folder.glob("writing-*"):
            mark.unlink()
        (self.folder / "hold").touch()

    def off(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def wait_writing(self) -> int:
        """The process that writes, which before 0.5 is one that NVRx's forked."""
        wait_until(lambda: any(self.folder.glob("writing-*")), "NVRx writes")
        return int(next(self.folder.glob("writing-*")).name.removeprefix("writing-"))


def add_one(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.add_(1)


def save_and_go_on(manager: CheckpointManager, step: int, tensors: Tensors) -> Tensors:
    """What was live at the call, which the tensors do not hold any more."""
    live = copy_of(tensors)
    save(manager, step, tensors)
    add_one(tensors)
    return live


def writer_of(manager: CheckpointManager) -> int:
    """Once it has answered."""
    saver: Any = manager._saver
    manager.prepare({}, False, None)
    wait_until(lambda: saver._writer is not None and saver._writer._adopted, "NVRx's process has started")
    assert manager.writer_pid is not None
    return manager.writer_pid


def restarts(manager: CheckpointManager) -> float:
    return manager.take_news().metrics["checkpoint/writer_restarts"]


def failure(manager: CheckpointManager) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as caught:
        manager.wait_committed(100)
    assert "\n" not in str(caught.value)
    return caught.value


def tree(pid: int) -> list[int]:
    """A process and all that descends from it."""
    return [pid, *below(pid)]


def wait_gone(pids: Iterable[int], timeout_s: float = 10.0) -> None:
    pids = list(pids)
    wait_until(lambda: not any(map(is_alive, pids)), f"{pids} end", timeout_s)


def entries(root: Path) -> list[str]:
    """What is in the folder of the checkpoints but the lock, of a checkpoint without its save id."""
    return sorted(path.name[:11] if path.name.startswith("step_") else path.name for path in root.iterdir())


def python_words(script: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "ignore", script, *map(str, arguments)]
