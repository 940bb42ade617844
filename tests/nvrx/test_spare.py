"""Another process of NVRx stands by, as it does where a device makes the start of one slow."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from nvrx_saves import MakeManager, add_one, restarts, save_and_go_on, wait_gone
from process_tree import wait_until
from tensor_saves import Tensors, same, save, stored

from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.strategies.nvrx_writer import Writer

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture
def manager(make: MakeManager, tensors: Tensors) -> CheckpointManager:
    """With a spare process and a save behind it."""
    made = make()
    saver_of(made)._keeps_spare = True
    made.prepare({"policy": 1}, False, None)
    save(made, 1, tensors)
    made.wait_committed(60)
    return made


def saver_of(manager: CheckpointManager) -> Any:
    return manager._saver


def spare_pid(manager: CheckpointManager) -> int:
    wait_until(lambda: saver_of(manager)._spare is not None, "another process stands by")
    pid = saver_of(manager)._spare.pid
    assert pid is not None
    return pid


def test_it_takes_the_place_of_one_that_is_lost_and_another_one_stands_by(
    manager: CheckpointManager, root: Path, tensors: Tensors
):
    spare, lost = spare_pid(manager), manager.writer_pid
    assert lost is not None
    assert lost != spare
    os.kill(lost, signal.SIGKILL)
    tensors["a"].add_(1)
    live = save_and_go_on(manager, 2, tensors)
    manager.wait_committed(60)
    assert manager.writer_pid == spare
    assert same(stored(root, 2), live)
    assert restarts(manager) == 1
    assert spare_pid(manager) not in (spare, lost)


def test_one_that_has_ended_is_not_taken(manager: CheckpointManager, root: Path, tensors: Tensors):
    spare, lost = spare_pid(manager), manager.writer_pid
    assert lost is not None
    os.kill(spare, signal.SIGKILL)
    wait_until(lambda: not saver_of(manager)._spare.is_alive, "the spare one has ended")
    os.kill(lost, signal.SIGKILL)
    live = save_and_go_on(manager, 2, tensors)
    manager.wait_committed(60)
    assert manager.writer_pid not in (spare, lost)
    assert same(stored(root, 2), live)
    assert restarts(manager) == 1


@pytest.mark.parametrize("told", [True, False])
def test_it_has_none_of_the_copies_that_the_lost_one_had(
    told: bool, make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """NVRx's trainer side sends an identifier in place of copies that it thinks are there, unless it is told."""
    if cached() is None:
        pytest.skip("NVRx before 0.6 has no cache")
    manager = make(async_ckpt_use_cpu_shm=True)
    saver = saver_of(manager)
    save(manager, 1, tensors)
    manager.wait_committed(60)
    saver._keeps_spare = True
    saver._start_spare()
    save(manager, 2, tensors)  # where one starts, the trainer's side forgets
    manager.wait_committed(60)
    if not cached():
        pytest.skip("this NVRx keeps no copies of what is on the host")
    if not told:
        monkeypatch.setattr(saver._library, "forget", lambda: None)
    saver._replace()
    monkeypatch.undo()
    add_one(tensors)
    save(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors)
    assert restarts(manager) == (1 if told else 2)


def test_copies_that_are_forgotten_where_it_starts_are_forgotten_by_the_one_that_writes_too(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """Or a save would need room in shared memory for them twice."""
    if cached() is None:
        pytest.skip("NVRx before 0.6 has no cache")
    manager = make(async_ckpt_use_cpu_shm=True)
    saver = saver_of(manager)
    asked: list[int] = []
    real = Writer.let_go
    monkeypatch.setattr(Writer, "let_go", lambda self: (asked.append(self.pid), real(self)))
    saver._keeps_spare = True
    for step in (1, 2):
        save_and_go_on(manager, step, tensors)
        manager.wait_committed(60)
    assert asked == [manager.writer_pid]
    live = save_and_go_on(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), live)
    assert restarts(manager) == 0
    monkeypatch.undo()


def cached() -> dict[object, object] | None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

    return getattr(FileSystemWriterAsync, "_cached_identifiers", None)


def test_it_ends_with_the_manager(manager: CheckpointManager):
    assert manager.writer_pid is not None
    pids = [spare_pid(manager), manager.writer_pid]
    manager.close()
    wait_gone(pids)
