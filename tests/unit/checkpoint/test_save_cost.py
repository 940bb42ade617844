"""What a save spares its program: collections of garbage during the call, and manifests read again."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from headwater import AsyncCheckpointer
from headwater.checkpoint import pruner as pruner_module
from headwater.checkpoint.catalog import look_at
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.collector import collector_paused, collector_running
from headwater.checkpoint.manager import CheckpointManager

Chunks = Iterator[Chunk]


def many(seen: list[bool] | None = None) -> Chunks:
    """More than the collector's threshold, and what it would be told in between."""
    for number in range(3000):
        if seen is not None:
            seen.append(gc.isenabled())
        yield Chunk.whole(f"w{number}", torch.zeros(3))


def save(manager: CheckpointManager, step: int, chunks: Chunks) -> None:
    manager.save(step, {"policy": chunks}, {}, "", None, step)
    manager.wait_committed()
    manager.wait_pruned()


@pytest.mark.parametrize("on", [True, False], ids=["collector on", "turned off by the program"])
def test_a_save_is_not_held_up_by_the_collector_and_leaves_it_as_it_was(
    make_manager: Callable[..., CheckpointManager], on: bool
):
    manager = make_manager(strategy="native")
    seen: list[bool] = []
    if not on:
        gc.disable()
    try:
        save(manager, 1, many(seen))
        assert gc.isenabled() == on
        with pytest.raises(ValueError, match="step"):
            manager.save(-1, {}, {}, "", None, 0)
        assert gc.isenabled() == on
    finally:
        gc.enable()
    assert seen.count(False) == 3000


def test_the_collector_runs_where_a_save_may_wait_long(
    make_manager: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch
):
    manager = make_manager(strategy="native")
    assert manager._saver is not None
    seen: list[bool] = []
    real = manager._saver._pool.acquire
    monkeypatch.setattr(manager._saver._pool, "acquire", lambda *args: (seen.append(gc.isenabled()), real(*args))[1])
    gc.disable()
    try:
        save(manager, 1, many())
    finally:
        gc.enable()
    save(manager, 2, many())
    assert seen == [False, True]
    assert gc.isenabled()


def test_a_wait_that_outlasts_the_save_of_another_thread_leaves_the_collector_on():
    with ExitStack() as save, ExitStack() as wait:
        save.enter_context(collector_paused())
        wait.enter_context(collector_running())
        save.close()
        assert gc.isenabled()
        wait.close()
        try:
            assert gc.isenabled()
        finally:
            gc.enable()


def test_the_same_of_a_state_dict(root: Path):
    with AsyncCheckpointer(root) as checkpointer:
        state = {"w": torch.zeros(3)}
        checkpointer.save(1, state)

        class Asked(dict[str, torch.Tensor]):
            enabled: bool | None = None

            def items(self):  # pyright: ignore[reportIncompatibleMethodOverride]
                Asked.enabled = gc.isenabled()
                return super().items()

        checkpointer.save(2, Asked(state))
        assert Asked.enabled is False
        assert gc.isenabled()


def test_a_manifest_that_this_run_wrote_is_not_read_again(
    make_manager: Callable[..., CheckpointManager], root: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = make_manager(strategy="native", keep_latest_k=2)
    read: list[str] = []
    monkeypatch.setattr(pruner_module, "look_at", lambda folder: (read.append(folder.name), look_at(folder))[1])
    for step in (1, 2, 3):
        save(manager, step, iter([Chunk.whole("w", torch.zeros(3))]))
    assert read == []
    assert sorted(folder.name[:11] for folder in root.glob("step_*")) == ["step_000002", "step_000003"]


def test_one_that_was_changed_since_is_read_and_not_believed(
    make_manager: Callable[..., CheckpointManager], root: Path
):
    """It is neither counted among the newest two nor removed."""
    manager = make_manager(strategy="native", keep_latest_k=2)
    for step in (1, 2, 3, 4):
        save(manager, step, iter([Chunk.whole("w", torch.zeros(3))]))
        if step == 2:
            (folder,) = root.glob("step_000002-*")
            (folder / "manifest.json").write_text("{}")
    assert sorted(folder.name[:11] for folder in root.glob("step_*")) == ["step_000002", "step_000003", "step_000004"]
