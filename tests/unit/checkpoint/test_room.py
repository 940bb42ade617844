"""A disk with no room for a save while others are written: the save waits, is skipped or fails with the cause."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_saves import save as save_tensors

from headwater import AsyncCheckpointer
from headwater.checkpoint import preflight, pruner
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.ranks import Ranks
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError


def save(manager: CheckpointManager, step: int) -> None:
    save_tensors(manager, step, {"w": torch.full((1000,), float(step))})


def saved(root: Path) -> list[str]:
    return sorted(path.name[:11] for path in root.glob("step_*"))


def full_while_writing(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The disk is, and the writer, which stands still, goes on when it is waited for. The threads that do."""
    free, wait, waited_in = preflight.free_bytes, manager.wait_committed, list[threading.Thread]()
    monkeypatch.setattr(preflight, "free_bytes", lambda root: 0 if manager.pending else free(root))
    writer = manager.writer_pid
    assert writer is not None

    def go_on(timeout: float = 60) -> None:
        waited_in.append(threading.current_thread())
        time.sleep(0.1)
        os.kill(writer, signal.SIGCONT)
        wait(timeout)

    monkeypatch.setattr(manager, "wait_committed", go_on)
    return waited_in


class Held:
    """A manager whose step 1 is committed, whose step 2 is held in its writer, and whose disk is full until then."""

    def __init__(self, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.manager = manager
        save(manager, 1)
        manager.wait_committed(60)
        assert manager.writer_pid is not None
        os.kill(manager.writer_pid, signal.SIGSTOP)
        save(manager, 2)
        self.waited_in = full_while_writing(manager, monkeypatch)


@pytest.fixture
def made(root: Path) -> Iterator[list[CheckpointManager]]:
    """Closed at the end."""
    managers: list[CheckpointManager] = []
    yield managers
    for manager in managers:
        if manager.writer_pid is not None:
            os.kill(manager.writer_pid, signal.SIGCONT)
        manager.close()


def make(made: list[CheckpointManager], root: Path, ranks: Ranks | None = None, **options: Any) -> CheckpointManager:
    config = CheckpointingConfig(checkpoint_dir=str(root), **options)
    made.append(CheckpointManager(config, "run", "model", ranks or Ranks.alone()))
    return made[-1]


def test_a_save_waits_for_the_room_that_retention_gives_once_the_one_before_it_is_committed(
    made: list[CheckpointManager], root: Path, monkeypatch: pytest.MonkeyPatch
):
    held = Held(make(made, root, keep_latest_k=1), monkeypatch)
    manager, remove = held.manager, pruner.remove

    def remove_slowly(folder: Path) -> None:
        time.sleep(0.3)
        remove(folder)

    monkeypatch.setattr(pruner, "remove", remove_slowly)
    monkeypatch.setattr(preflight, "free_bytes", lambda root: 10**6 if saved(root) == ["step_000002"] else 0)
    save(manager, 3)
    assert held.waited_in
    metrics = manager.take_news().metrics
    waited = metrics["checkpoint/busy_wait_s"]
    assert 0.1 <= waited <= metrics["checkpoint/stall_s"]
    manager.wait_committed()
    monkeypatch.setattr(preflight, "free_bytes", lambda root: 10**9)
    save(manager, 4)
    assert manager.take_news().metrics["checkpoint/busy_wait_s"] < waited, "it is counted once"


def test_the_error_of_the_save_before_it_comes_first(
    made: list[CheckpointManager], root: Path, monkeypatch: pytest.MonkeyPatch
):
    held = Held(make(made, root), monkeypatch)
    kept = held.manager.wait_committed

    def fails(timeout: float = 60) -> None:
        held.manager._errors.append(HeadwaterError("step 2 could not be written"))
        kept(timeout)

    monkeypatch.setattr(held.manager, "wait_committed", fails)
    with pytest.raises(HeadwaterError, match="step 2 could not be written"):
        save(held.manager, 3)


def test_a_save_that_may_be_skipped_does_not_wait_for_the_disk(
    made: list[CheckpointManager], root: Path, monkeypatch: pytest.MonkeyPatch
):
    held = Held(make(made, root, when_busy="skip"), monkeypatch)
    save(held.manager, 3)
    assert not held.waited_in
    news = held.manager.take_news()
    assert news.notes[-1] == "skipped the save of step 3: the writer is busy"
    assert news.metrics["checkpoint/skipped"] == 1
    held.manager.wait_committed()
    assert saved(root) == ["step_000001", "step_000002"]
    save(held.manager, 4)
    held.manager.wait_committed()
    assert "step_000004" in saved(root)


def test_nor_for_what_retention_removes(made: list[CheckpointManager], root: Path, monkeypatch: pytest.MonkeyPatch):
    manager = make(made, root, when_busy="skip", keep_latest_k=1)
    removing, go = threading.Event(), threading.Event()
    remove = pruner.remove

    def held(folder: Path) -> None:
        removing.set()
        assert go.wait(60)
        remove(folder)

    monkeypatch.setattr(pruner, "remove", held)
    for step in (1, 2):
        save(manager, step)
        manager.wait_committed(60)
    assert removing.wait(60)
    monkeypatch.setattr(preflight, "free_bytes", lambda root: 0)
    try:
        save(manager, 3)
        assert manager.take_news().metrics["checkpoint/skipped"] == 1
    finally:
        go.set()


def test_a_disk_that_does_not_tell_its_room_is_not_waited_for(
    made: list[CheckpointManager], root: Path, monkeypatch: pytest.MonkeyPatch
):
    held = Held(make(made, root), monkeypatch)

    def unknown(root: Path) -> int:
        raise UserError("free space cannot be known")

    monkeypatch.setattr(preflight, "free_bytes", unknown)
    with pytest.raises(UserError, match="free space cannot be known"):
        save(held.manager, 3)
    assert not held.waited_in


def test_the_rank_that_removes_checkpoints_is_the_one_that_looks(made: list[CheckpointManager], root: Path):
    """Another one would look again while the first is still removing, and refuse what fits."""
    first, second = (make(made, root, Ranks(number, 2, "session")) for number in (0, 1))
    with pytest.raises(UserError, match="is free"):
        first.require_space(10**18)
    second.require_space(10**18)


def test_a_state_dict_is_taken_at_once_or_in_the_call_that_waits_for_the_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    """Never behind the caller's back, which would have `wait_staged` wait for the disk."""
    state = {"w": torch.ones(1000)}
    with AsyncCheckpointer(root) as checkpointer:
        for step in (1, 2):  # the second one is taken behind the call
            checkpointer.save(step, state)
            checkpointer.wait_committed(60)
        manager = checkpointer._manager
        assert manager.writer_pid is not None
        os.kill(manager.writer_pid, signal.SIGSTOP)
        checkpointer.save(3, state)
        checkpointer.wait_staged()
        waited_in = full_while_writing(manager, monkeypatch)
        checkpointer.save(4, state)
        deadline = time.monotonic() + 60
        while not waited_in and time.monotonic() < deadline:
            time.sleep(0.01)
        assert waited_in == [threading.current_thread()]
        checkpointer.wait_committed(60)
        assert checkpointer.steps()[-1] == 4
