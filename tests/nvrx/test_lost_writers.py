"""NVRx's process is killed, stopped or ended at any time: the save is repaired or refused in a line, nothing hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvrx_saves import Hold, MakeManager, entries, failure, restarts, save_and_go_on, tree, wait_gone, writer_of
from process_tree import is_alive
from tensor_saves import Tensors, same, save, stored

from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.strategies import nvrx_writer
from headwater.checkpoint.strategies.nvrx_sent import SentMemory
from headwater.errors import HeadwaterError

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
LOSSES = [signal.SIGKILL, signal.SIGSTOP]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("state", ["idle", "writing"])
def test_a_lost_process_is_replaced_and_the_save_commits(
    state: str,
    loss: signal.Signals,
    make: MakeManager,
    root: Path,
    tensors: Tensors,
    hold: Hold,
    record_property: Callable[[str, object], None],
):
    manager = make(writer_silence_s=3.0)
    save(manager, 1, tensors)
    manager.wait_committed(60)
    tensors["a"].add_(1)
    writer = writer_of(manager)
    if state == "writing":
        hold.on()
        live = save_and_go_on(manager, 2, tensors)
        hold.wait_writing()
        lost = tree(writer)
        os.kill(writer, loss)
        hold.off()
        started = time.monotonic()
    else:
        lost = tree(writer)
        os.kill(writer, loss)
        started = time.monotonic()
        live = save_and_go_on(manager, 2, tensors)
    manager.wait_committed(60)
    seconds = time.monotonic() - started
    record_property("figure", f"NVRx's process {state}, {loss.name}: the save is committed {seconds:.1f} s later")
    assert seconds < 30
    assert same(stored(root, 2), live)
    assert manager.writer_pid not in (None, writer)
    assert restarts(manager) == 1
    wait_gone(lost)
    live = save_and_go_on(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), live)
    assert entries(root) == [".lock", ".nvrx", "step_000001", "step_000002", "step_000003"]
    assert not list((root / ".nvrx").iterdir())


def test_device_memory_is_taken_back_once_the_process_is_no_more(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """Not while it could still read it; what is taken back is in tests/gpu."""
    manager = make()
    save(manager, 1, tensors)
    manager.wait_committed(60)
    writer, found = writer_of(manager), list[tuple[SentMemory, bool]]()
    sent: SentMemory = manager._saver._writer.sent  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    monkeypatch.setattr(SentMemory, "take_back", lambda self: found.append((self, is_alive(writer))))
    os.kill(writer, signal.SIGSTOP)
    manager._saver._replace()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    assert found == [(sent, False)]


def held_fork(manager: CheckpointManager, hold: Hold, tensors: Tensors) -> tuple[Tensors, int, int]:
    """What was live at a save that is being written, NVRx's process, and the one that it forked to write."""
    writer = writer_of(manager)
    hold.on()
    live = save_and_go_on(manager, 1, tensors)
    forked = hold.wait_writing()
    if forked == writer:
        pytest.skip("this version of NVRx writes in threads")
    return live, writer, forked


def test_what_nvrx_forked_ends_with_it(make: MakeManager, root: Path, tensors: Tensors, hold: Hold):
    """Before 0.5 it forks to write; such a process would go on writing, or wait for ever."""
    manager = make()
    live, writer, forked = held_fork(manager, hold, tensors)
    os.kill(writer, signal.SIGKILL)
    manager._saver.wait_staged(60)  # pyright: ignore[reportOptionalMemberAccess]
    wait_gone([writer, forked])
    hold.off()
    manager.wait_committed(60)
    assert same(stored(root, 1), live)


def test_a_forked_process_that_is_killed_does_not_hang_the_save(
    make: MakeManager, root: Path, tensors: Tensors, hold: Hold
):
    """NVRx itself waits for ever for what it was to tell."""
    manager = make()
    live, _, forked = held_fork(manager, hold, tensors)
    os.kill(forked, signal.SIGKILL)
    hold.off()
    manager.wait_committed(30)
    assert same(stored(root, 1), live)
    assert restarts(manager) == 1


def test_three_losses_in_a_row_are_one_error_and_the_next_save_works(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    manager = make()
    writer_of(manager)
    real, killed = nvrx_writer.Writer.stage, list[int | None]()

    def stage(self: nvrx_writer.Writer, request: Any, device: Any) -> None:
        self.wait_ready(device)
        killed.append(self.pid)
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        real(self, request, device)

    with monkeypatch.context() as patch:
        patch.setattr(nvrx_writer.Writer, "stage", stage)
        with pytest.raises(HeadwaterError) as caught:
            save(manager, 1, tensors)
    assert str(caught.value) == (
        f"saving step 1 failed 3 times: NVRx's writer process {killed[2]} ended with exit code -9"
    )
    assert len(set(killed)) == 3
    save(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors)
    assert restarts(manager) == 3
    assert entries(root) == [".lock", ".nvrx", "step_000002"]


def test_a_loss_that_training_has_gone_past_is_an_error_and_never_another_steps_values(
    make: MakeManager, root: Path, tensors: Tensors, hold: Hold
):
    """On a device, where the live tensors are read again; here a save that says that it has such."""
    manager, fence = make(), Fence()
    writer = writer_of(manager)
    hold.on()
    save(manager, 1, tensors, fence)
    hold.wait_writing()
    saver: Any = manager._saver
    saver._writing.items.identity = ((0,),)
    fence.wait()
    os.kill(writer, signal.SIGKILL)
    hold.off()
    line = str(failure(manager))
    assert line.startswith(f"the checkpoint of step 1 is lost: NVRx's writer process {writer} ended with exit code -9")
    assert entries(root) == [".lock", ".nvrx"]
    save(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors)
    assert restarts(manager) == 1


def test_let_go_of_a_stopped_process_ends_it(make: MakeManager, root: Path, tensors: Tensors):
    """With it go its handles, which is what whoever moves memory waits for."""
    manager, fence = make(writer_silence_s=2.0), Fence()
    save(manager, 1, tensors, fence)
    manager.wait_committed(60)
    writer = writer_of(manager)
    saver: Any = manager._saver
    assert saver._writer.holds_device_memory
    os.kill(writer, signal.SIGSTOP)
    fence.vacate()
    wait_gone([writer])
    save(manager, 2, tensors, fence)
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors)


def test_let_go_keeps_the_process(make: MakeManager, tensors: Tensors):
    manager, fence = make(), Fence()
    save(manager, 1, tensors, fence)
    manager.wait_committed(60)
    writer, saver = manager.writer_pid, manager._saver
    fence.vacate()
    assert not saver._writer.holds_device_memory  # pyright: ignore
    save(manager, 2, tensors, fence)
    manager.wait_committed(60)
    assert manager.writer_pid == writer
    assert restarts(manager) == 0


def test_memory_that_moves_while_nvrx_writes_does_not_disturb_the_write(
    make: MakeManager, root: Path, tensors: Tensors, hold: Hold
):
    manager, fence = make(), Fence()
    writer_of(manager)
    hold.on()
    live = save_and_go_on(manager, 1, tensors)
    hold.wait_writing()
    fence.keep_handles(manager._saver)  # pyright: ignore
    fence.vacate()
    hold.off()
    manager.wait_committed(60)
    assert same(stored(root, 1), live)
    assert restarts(manager) == 0


def abort(caller: Any) -> None:
    """NVRx's own end of its process."""
    try:
        caller.close(abort=True)
    except TypeError:
        caller.close()  # before 0.5, which waits for what is being written


@pytest.mark.parametrize("state", ["idle", "writing"])
def test_nvrx_closed_behind_our_back_is_a_loss_like_any(
    state: str, make: MakeManager, root: Path, tensors: Tensors, hold: Hold
):
    """As a stack does that aborts all of its callers; NVRx would start another process, which nobody ends."""
    manager = make()
    writer, saver = writer_of(manager), manager._saver
    caller: Any = saver._writer._caller  # pyright: ignore

    if state == "idle":
        abort(caller)
        live = save_and_go_on(manager, 1, tensors)
    else:
        hold.on()
        live = save_and_go_on(manager, 1, tensors)
        hold.wait_writing()
        threading.Timer(0.3, hold.off).start()
        abort(caller)
    manager.wait_committed(60)
    assert same(stored(root, 1), live)
    assert not is_alive(writer)
    mine = tree(os.getpid())
    names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in mine[1:]]
    assert sum("spawn_main" in name and "resource_tracker" not in name for name in names) <= 1
    live = save_and_go_on(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), live)


def test_nvrx_that_is_being_closed_when_its_process_is_replaced_ends_in_order(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """What finds the process dead ends it while NVRx, in another thread, waits for it to die."""
    manager = make()
    writer, saver = writer_of(manager), manager._saver
    caller: Any = saver._writer._caller  # pyright: ignore
    process = caller.process
    seen = list[Any]()

    def and_replaced(end: Callable[..., None]) -> Callable[..., None]:
        def ended(*arguments: float | None, **named: float | None) -> None:
            end(*arguments, **named)
            saver._replace()  # pyright: ignore
            seen.append(caller.process)

        return ended

    for name in ("join", "kill"):  # 0.5 does not wait
        monkeypatch.setattr(process, name, and_replaced(getattr(process, name)))
    abort(caller)
    wait_gone([writer])
    assert not seen[0].is_alive()
    for end in (seen[0].terminate, seen[0].kill, seen[0].join):
        end()
    live = save_and_go_on(manager, 1, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 1), live)


def test_what_cannot_be_sent_is_an_error_and_the_next_save_works(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """A queue drops what its thread cannot pickle, and NVRx waits for an answer that never comes."""
    manager = make()
    writer_of(manager)
    real = nvrx_writer.Library.request

    def request(self: nvrx_writer.Library, *arguments: Any) -> Any:
        return real(self, *arguments)._replace(async_fn=lambda *_: None)

    with monkeypatch.context() as patch:
        patch.setattr(nvrx_writer.Library, "request", request)
        with pytest.raises(HeadwaterError, match=r"NVRx's writer process cannot be sent the tensors \(.*pickle.*\)"):
            save(manager, 1, tensors)
    live = save_and_go_on(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), live)
