"""A disk that fails under NVRx: one line with the remedy, the previous save holds, the next works."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import ELSEWHERE, MB, TROUBLES, Trouble, fill, mounted
from nvrx_saves import MakeManager, entries, failure, writer_of
from tensor_saves import same, save, stored

from headwater.checkpoint.strategies import joint_commit, nvrx_items
from headwater.errors import UserError

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "16m") as folder:
        yield folder


@pytest.fixture
def root(disk: Path) -> Path:
    return disk / "checkpoints"


def tensors(step: int) -> dict[str, torch.Tensor]:
    """4 MB that tell of their step."""
    return {"w": torch.full((MB,), float(step))}


@pytest.mark.parametrize(("trouble", "said"), TROUBLES, ids=lambda value: getattr(value, "__name__", ""))
def test_trouble_while_nvrx_writes_costs_that_save_alone(trouble: Trouble, said: str, make: MakeManager, root: Path):
    manager = make()
    saver: Any = manager._saver
    save(manager, 1, tensors(1))
    manager.wait_committed(60)
    real = saver._library.request
    with ExitStack() as begun:

        def request(*arguments: Any) -> Any:
            """Free space was seen, and the folder is made."""
            made = real(*arguments)
            saver._library.request = real
            begun.enter_context(trouble(root.parent, writer_of(manager)))
            return made

        saver._library.request = request
        save(manager, 2, tensors(2))
        line = str(failure(manager))
    assert line == f"saving step 2 to {root} failed: {said}{ELSEWHERE}"
    newest = manager.latest()
    assert newest is not None
    assert newest.manifest.step == 1
    assert entries(root) == [".lock", ".nvrx", "step_000001"]
    save(manager, 3, tensors(3))
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors(3))
    manager.close()
    assert entries(root) == [".lock", "step_000001", "step_000003"]


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_folder_that_cannot_be_written_when_a_save_begins(policy: str, make: MakeManager, root: Path):
    (trouble, said) = next(some for some in TROUBLES if some[0].__name__ == "read_only")
    manager = make(on_save_error=policy)
    save(manager, 1, tensors(1))
    manager.wait_committed(60)
    writer = manager.writer_pid
    line = f"saving step 2 to {root} failed: {said}{ELSEWHERE}"
    with trouble(root.parent, writer_of(manager)):
        if policy == "stop":
            with pytest.raises(UserError) as caught:
                save(manager, 2, tensors(2))
            assert str(caught.value) == line
        else:
            save(manager, 2, tensors(2))
            assert any(line in note for note in manager.take_news().notes)
    save(manager, 3, tensors(3))
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors(3))
    assert manager.writer_pid == writer


def test_a_disk_that_is_full_at_the_commit_leaves_nothing_behind(
    make: MakeManager, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """NVRx has written and proven all, and there is no room for the manifest."""
    manager, real = make(), joint_commit.commit
    save(manager, 1, tensors(1))
    manager.wait_committed(60)

    def commit(*arguments: Any) -> None:
        filler = fill(root.parent, spare=0)
        try:
            real(*arguments)
        finally:
            filler.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(joint_commit, "commit", commit)
        save(manager, 2, tensors(2))
        assert "saving step 2 to" in (line := str(failure(manager)))
        assert "No space left on device: free space there" in line
    assert entries(root) == [".lock", ".nvrx", "step_000001"]
    save(manager, 3, tensors(3))
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors(3))


def test_too_little_shared_memory_is_said_before_it_is_touched(
    make: MakeManager, root: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = make()
    monkeypatch.setattr(nvrx_items, "_SHARED_MEMORY", str(root.parent))
    monkeypatch.setattr(manager, "require_space", lambda needed: None)
    filler = fill(root.parent, spare=2 * MB)
    with pytest.raises(UserError, match=r"8\.4 MB of host memory through .*, where 2\.1 MB is free: enlarge it"):
        save(manager, 1, tensors(1))
    filler.unlink()
    save(manager, 2, tensors(2))
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors(2))


def test_a_stopped_process_does_not_keep_a_full_disk_from_being_said(make: MakeManager, root: Path):
    manager = make(writer_silence_s=3.0)
    save(manager, 1, tensors(1))
    manager.wait_committed(60)
    os.kill(writer_of(manager), signal.SIGSTOP)
    filler = fill(root.parent, spare=MB)
    with pytest.raises(UserError, match=r"a checkpoint in .* needs 4\.2 MB, 1\.0 MB is free: free space there"):
        save(manager, 2, tensors(2))
    filler.unlink()
    save(manager, 3, tensors(3))
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors(3))
