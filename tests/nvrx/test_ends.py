"""However a trainer ends, nothing of NVRx lives on, and the next run finds the last checkpoint that was committed."""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nvrx_saves import Hold, MakeManager, entries, failure, python_words, restarts, tree, wait_gone, writer_of
from process_tree import state, wait_until
from tensor_saves import Tensors, same, save, stored

from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.strategies import nvrx_writer
from headwater.errors import HeadwaterError

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
HERE = Path(__file__).parent


def start(how: str, root: Path, hold: Hold) -> tuple[subprocess.Popen[str], list[int]]:
    """A trainer that is about to end, and all of its processes."""
    folder = hold.folder.parent
    process = subprocess.Popen(
        python_words(str(HERE / "trainer.py"), root, how, folder),
        env={**os.environ, "PYTHONPATH": hold.python_path},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (folder / "ready").exists() or process.poll() is not None, "it has saved")
    assert process.poll() is None or not how.startswith("killed"), process.communicate()[1]
    return process, [*tree(process.pid), int((folder / "ready").read_text())]


def resumes(make: MakeManager, root: Path, hold: Hold, step: int) -> CheckpointManager:
    """The next run, which finds that step's checkpoint as the newest, and nothing of what was not committed."""
    hold.off()
    manager = make()
    assert ".nvrx" not in entries(root)
    assert {name for name in entries(root) if name.startswith("step_")} == {f"step_{n:06d}" for n in (1, step)}
    newest = manager.latest()
    assert newest is not None
    assert newest.manifest.step == step
    assert torch.equal(newest.component("policy").read("w"), torch.full((1000,), float(step)))
    return manager


def goes_on(manager: CheckpointManager, root: Path, tensors: Tensors) -> None:
    save(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors)
    manager.close()
    assert [name for name in entries(root) if not name.startswith("step_")] == [".lock"]


@pytest.mark.parametrize("how", ["killed idle", "killed beside a spare", "killed writing", "killed stopped writing"])
def test_a_killed_trainer_leaves_no_process_and_the_next_run_goes_on(
    how: str,
    make: MakeManager,
    root: Path,
    tensors: Tensors,
    hold: Hold,
    record_property: Callable[[str, object], None],
):
    process, all_of_them = start(how, root, hold)
    if "stopped" in how:
        os.kill(all_of_them[-1], signal.SIGSTOP)
        wait_until(lambda: state(all_of_them[-1]) == "T", "it stands still")
    process.kill()
    started = time.monotonic()
    wait_gone(all_of_them[1:], 30)
    record_property("figure", f"trainer {how}: all of NVRx is gone {time.monotonic() - started:.1f} s later")
    process.communicate(timeout=30)
    manager = resumes(make, root, hold, 1)
    if how == "killed writing":
        goes_on(manager, root, tensors)


@pytest.mark.parametrize(
    "how",
    [
        "ends idle",
        "ends beside a spare",
        "ends writing",
        "raises writing",
        "closes writing",
        "closes after a fork",
        "ends lost",
    ],
)
def test_a_trainer_that_ends_leaves_no_process_and_does_not_hang(how: str, make: MakeManager, root: Path, hold: Hold):
    process, all_of_them = start(how, root, hold)
    _, errors = process.communicate(timeout=40)
    assert (process.returncode == 0) == (not how.startswith("raises")), errors
    wait_gone(all_of_them)
    resumes(make, root, hold, 2 if how.startswith("closes") or how == "ends lost" else 1)


def test_closing_does_not_wait_for_a_process_that_is_starting(make: MakeManager):
    manager = make()
    manager.prepare({}, False, None)
    saver: Any = manager._saver
    wait_until(lambda: saver._writer is not None, "it starts")
    starting = saver._writer.pid
    os.kill(starting, signal.SIGSTOP)
    assert saver._writer.is_starting
    manager.close()
    wait_gone([starting])
    assert not multiprocessing.active_children()


def test_a_process_that_is_ended_while_it_starts_is_not_started_again(
    make: MakeManager, monkeypatch: pytest.MonkeyPatch
):
    manager = make()
    saver: Any = manager._saver
    real = nvrx_writer.Writer._wait_for_call

    def ended(self: Any) -> None:
        self.kill()
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(nvrx_writer.Writer, "_wait_for_call", ended)
        with pytest.raises(nvrx_writer.WriterLostError, match="was ended"):
            saver._running().wait_ready(None)
    assert not multiprocessing.active_children()


def test_a_process_that_cannot_be_started_is_told_of(
    make: MakeManager, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    def start(self: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    manager = make()
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.process.BaseProcess, "start", start)
        with pytest.raises(HeadwaterError, match="NVRx's writer process cannot be started: "):
            save(manager, 1, tensors)
    save(manager, 2, tensors)
    manager.wait_committed(60)


def test_a_process_whose_start_fails_halfway_is_ended(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    started: list[int] = []
    real = nvrx_writer.Writer._start

    def start(self: Any) -> None:
        real(self)
        started.append(self.pid)
        raise RuntimeError("can't start new thread")

    manager = make()
    with monkeypatch.context() as patch:
        patch.setattr(nvrx_writer.Writer, "_start", start)
        with pytest.raises(HeadwaterError, match="can't start new thread"):
            save(manager, 1, tensors)
    wait_gone(started)
    save(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors)


def test_a_script_that_trains_when_it_is_imported_ends_with_an_error(root: Path):
    """NVRx's process imports the main module again, as any spawned process does."""
    process = subprocess.Popen(python_words(str(HERE / "unguarded.py"), root), stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == 1
    assert "NVRx's writer process" in errors
    assert "ended with exit code 1" in errors
    assert 'if __name__ == "__main__"' in errors.splitlines()[-1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_while_a_save_is_staged_leaves_nothing_of_it(
    error: type[BaseException], make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    manager = make()
    writer = writer_of(manager)
    real = nvrx_writer.Writer.stage

    def stage(self: Any, request: Any, device: Any) -> None:
        real(self, request, device)
        wait_until(lambda: any(root.glob(".nvrx/*/report.json")), "NVRx has written it")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(nvrx_writer.Writer, "stage", stage)
        with pytest.raises((error, HeadwaterError)):
            save(manager, 1, tensors)
    assert manager.pending == 0
    assert not list((root / ".nvrx").iterdir())
    wait_gone([writer])
    tensors["a"].add_(1)
    save(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors)
    assert entries(root) == [".lock", ".nvrx", "step_000002"]
    assert restarts(manager) == 1


def test_closing_waits_for_the_save_in_flight(make: MakeManager, root: Path, tensors: Tensors):
    manager = make()
    save(manager, 1, tensors)
    manager.close()
    assert same(stored(root, 1), tensors)
    assert entries(root) == [".lock", "step_000001"]


def test_a_saver_that_is_closed_loses_the_save_in_flight_and_nothing_else(
    make: MakeManager, root: Path, tensors: Tensors, hold: Hold, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(nvrx_writer, "_CLOSE_S", 0.5)
    manager = make()
    writer = writer_of(manager)
    hold.on()
    save(manager, 1, tensors)
    hold.wait_writing()
    lost = tree(writer)
    assert manager._saver is not None
    manager._saver.close()
    wait_gone(lost)
    assert str(failure(manager)) == "the checkpoints are closed"
    hold.off()
    assert entries(root) == [".lock"]
