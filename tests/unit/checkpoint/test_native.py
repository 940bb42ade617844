"""Saves that overlap with training: what is committed is what the tensors held at the call, or nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_saves import Tensors, copy_of, same, save, stored
from torch.multiprocessing.reductions import StorageWeakRef

from headwater.checkpoint import preflight
from headwater.checkpoint import pruner as pruner_module
from headwater.checkpoint import staging as staging_module
from headwater.checkpoint.byte_digest import warm_up
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.small_files import TokenizerFiles
from headwater.checkpoint.staging import Stager
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError

MakeManager = Callable[..., CheckpointManager]


@pytest.fixture
def make(root: Path) -> Iterator[MakeManager]:
    made: list[CheckpointManager] = []

    def run(**config: Any) -> CheckpointManager:
        options = {"strategy": "native", "keep_latest_k": None, **config}
        made.append(CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), **options), "run", "model"))
        return made[-1]

    yield run
    for manager in made:
        manager.close()


@pytest.fixture
def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(300, 70, generator=generator), "b": torch.randn(50, generator=generator).bfloat16()}


@dataclass
class SlowCopies:
    """begun: a copy is about to be made, all is digested. go: until this is set, none is made."""

    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    events = SlowCopies()
    real = Stager._copy

    def copy(self: Stager, *args: Any) -> None:
        events.begun.set()
        assert events.go.wait(60)
        real(self, *args)

    monkeypatch.setattr(Stager, "_copy", copy)
    return events


def overwrite(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.add_(1)


def replace(tensors: Tensors) -> None:
    for name, tensor in list(tensors.items()):
        tensors[name] = tensor * 3


def resize_to_zero_and_back(tensors: Tensors) -> None:
    for tensor in tensors.values():
        values = tensor * 2
        size = tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(size)
        tensor.copy_(values)


def move_off_and_back(tensors: Tensors) -> None:
    for tensor in tensors.values():
        moved = tensor.clone() - 1
        tensor.data = torch.empty(0, dtype=tensor.dtype)
        tensor.data = moved


def retie(tensors: Tensors) -> None:
    tensors["b"] = tensors["a"][0, :50].bfloat16()
    tensors["a"] = tensors["a"].flip(0).contiguous()


def free(tensors: Tensors) -> None:
    del tensors["b"]
    tensors["a"] = tensors["a"] + 4


MUTATIONS = [overwrite, replace, resize_to_zero_and_back, move_off_and_back, retie, free]


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_both_checkpoints_hold_the_values_of_their_step(
    mutate: Callable[[Tensors], None], make: MakeManager, root: Path, tensors: Tensors
):
    manager, fence = make(), Fence()
    first = copy_of(tensors)
    save(manager, 1, tensors, fence)
    fence.wait()
    mutate(tensors)
    second = copy_of(tensors)
    save(manager, 2, tensors, fence)
    fence.wait()
    mutate(tensors) if "b" in tensors else overwrite(tensors)
    manager.wait_committed(60)
    assert not same(first, second)
    assert same(stored(root, 1), first)
    assert same(stored(root, 2), second)


def test_the_fence_holds_back_who_changes_storage_until_it_was_copied(
    make: MakeManager, root: Path, tensors: Tensors, slow_copies: SlowCopies
):
    manager, fence = make(), Fence()
    expected = copy_of(tensors)
    save(manager, 1, tensors, fence)
    threading.Timer(0.2, slow_copies.go.set).start()
    fence.wait()
    overwrite(tensors)
    assert fence.take_waited_s() > 0
    assert fence.take_waited_s() == 0
    manager.wait_committed(60)
    assert same(stored(root, 1), expected)


def overwrite_behind_torchs_back(tensors: Tensors) -> None:
    for tensor in tensors.values():
        before = tensor._version
        tensor.data.add_(1)
        assert tensor._version == before


@pytest.mark.parametrize(
    ("mutate", "seen"),
    [
        (overwrite, "policy a, policy b changed while step 2 was still being copied"),
        (resize_to_zero_and_back, "policy a, policy b changed while step 2 was still being copied"),
        (move_off_and_back, "policy a, policy b changed while step 2 was still being copied"),
        (overwrite_behind_torchs_back, "does not hold what the live tensors held.*policy a, policy b$"),
    ],
)
def test_without_the_fence_a_torn_read_is_refused_and_the_previous_stays_the_newest(
    mutate: Callable[[Tensors], None],
    seen: str,
    make: MakeManager,
    root: Path,
    tensors: Tensors,
    slow_copies: SlowCopies,
):
    manager, fence = make(), Fence()
    slow_copies.go.set()
    save(manager, 1, tensors, fence)
    fence.wait()
    slow_copies.go.clear()
    fence.remove_for_test()
    slow_copies.begun.clear()
    save(manager, 2, tensors, fence)
    fence.wait()
    assert slow_copies.begun.wait(60)
    mutate(tensors)
    slow_copies.go.set()
    with pytest.raises(HeadwaterError, match=seen):
        manager.wait_committed(60)
    assert [folder.name[:11] for folder in root.glob("step_*")] == ["step_000001"]
    latest = manager.latest()
    assert latest is not None
    assert latest.manifest.step == 1
    save(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors)


def test_without_the_fence_what_changes_before_it_is_digested_is_refused(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    manager = make()
    go = threading.Event()
    real = staging_module.digests
    monkeypatch.setattr(staging_module, "digests", lambda tensors: (go.wait(60), real(tensors))[1])
    save(manager, 1, tensors)
    overwrite(tensors)
    go.set()
    with pytest.raises(HeadwaterError, match="policy a, policy b changed while step 1 was still being copied"):
        manager.wait_committed(60)
    assert not list(root.glob("step_*"))


def test_a_stale_view_in_staging_is_refused(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """A copier that remembers tensors of the first save, as a cache keyed by names would."""
    manager = make()
    real, remembered = staging_module._source, {}
    monkeypatch.setattr(staging_module, "_source", lambda chunk: remembered.setdefault(chunk.name, real(chunk)))
    save(manager, 1, tensors)
    manager.wait_committed(60)
    replace(tensors)
    save(manager, 2, tensors)
    with pytest.raises(HeadwaterError, match="does not hold what the live tensors held"):
        manager.wait_committed(60)
    assert len(list(root.glob("step_*"))) == 1


def test_what_a_forward_pass_changes_is_copied_at_the_call(make: MakeManager, root: Path, slow_copies: SlowCopies):
    manager = make()
    mean = torch.ones(5)
    chunks = [Chunk.whole("mean", mean, changes_in_forward=True)]
    manager.save(1, {"policy": chunks}, {}, "", None, 1)
    mean.add_(1)
    slow_copies.go.set()
    manager.wait_committed(60)
    assert same(stored(root, 1), {"mean": torch.ones(5)})


@pytest.mark.parametrize("fails", [False, True])
def test_behind_the_fence_nothing_keeps_the_tensors_alive(
    fails: bool, make: MakeManager, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """Memory that is given up after the fence is free, though the save is not written yet."""
    manager, fence = make(on_save_error="continue"), Fence()
    pid = None if fails else stopped_in_a_save(manager, tensors, 1)
    if fails:
        monkeypatch.setattr(staging_module, "_copies", lambda *_: iter([(torch.zeros(1), torch.zeros(3, 3))]))
    save(manager, 2, tensors, fence)
    fence.wait()
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors.values()]
    tensors.clear()
    expired = [storage.expired() for storage in storages]
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    assert expired == [True, True]


def stopped_in_a_save(manager: CheckpointManager, tensors: Tensors, step: int) -> int:
    """Stop the writer, then save; returns its pid. It has the save's message and cannot have committed."""
    while (pid := manager.writer_pid) is None:
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    save(manager, step, tensors)
    manager.wait_staged(60)
    return pid


def test_a_killed_writer_is_replaced_and_the_same_save_commits(make: MakeManager, root: Path, tensors: Tensors):
    manager = make()
    pid = stopped_in_a_save(manager, tensors, 1)
    os.kill(pid, signal.SIGKILL)
    manager.wait_committed(60)
    assert same(stored(root, 1), tensors)
    assert manager.writer_pid not in (None, pid)
    assert manager.take_news().metrics["checkpoint/writer_restarts"] == 1


def test_a_stopped_writer_is_replaced_and_the_same_save_commits(make: MakeManager, root: Path, tensors: Tensors):
    manager = make(writer_silence_s=3.0)
    pid = stopped_in_a_save(manager, tensors, 1)
    save(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 1), tensors)
    assert same(stored(root, 2), tensors)
    assert not Path(f"/proc/{pid}").exists()


def test_a_writer_killed_in_mid_file_leaves_one_whole_checkpoint(make: MakeManager, root: Path):
    manager = make()
    tensors = {f"w{index}": torch.randn(1_000_000) for index in range(20)}
    save(manager, 1, tensors)
    pid = manager.writer_pid
    while not any(path.stat().st_size for path in root.glob("step_*/policy/*")):
        time.sleep(0.001)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    manager.wait_committed(60)
    assert same(stored(root, 1), tensors)


def test_a_full_disk_is_one_line_and_the_next_save_works(make: MakeManager, root: Path, tensors: Tensors):
    manager = make()
    save(manager, 1, tensors)
    manager.wait_committed(60)
    root.chmod(0o500)
    blocked = root / "step_blocked"
    if os.geteuid() == 0:  # permissions do not bind root: take the folder away under the writer instead
        root.chmod(0o700)
        root.rename(root.with_name("away"))
        blocked = root.with_name("away")
        with pytest.raises(UserError, match="No such file or directory"):
            save(manager, 2, tensors)
        blocked.rename(root)
    else:
        save(manager, 2, tensors)
        with pytest.raises(UserError, match=r"saving step 2 to .* failed: Permission denied: change its permissions"):
            manager.wait_committed(60)
        root.chmod(0o700)
    save(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors)


def test_an_error_in_the_writer_is_raised_once_by_the_next_call_or_reported(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    manager = make(on_save_error="continue")
    monkeypatch.setattr(TokenizerFiles, "of", lambda self, tokenizer: {"/dev/full": b"x"})
    save(manager, 1, tensors)
    manager.wait_committed(60)
    monkeypatch.undo()
    (note,) = [note for note in manager.take_news().notes if "not saved" in note]
    assert "saving step 1 to" in note
    assert "set checkpointing.checkpoint_dir" in note
    assert list(root.glob("step_*")) == []
    save(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors)


@pytest.mark.parametrize("policy", ["skip", "wait"])
def test_with_both_buffers_busy_the_policy_is_obeyed(policy: str, make: MakeManager, root: Path, tensors: Tensors):
    manager = make(when_busy=policy)
    pid = stopped_in_a_save(manager, tensors, 1)
    save(manager, 2, tensors)
    assert manager.pending == 2
    if policy == "skip":
        save(manager, 3, tensors)
        news = manager.take_news()
        assert news.metrics["checkpoint/skipped"] == 1
        assert news.notes[-1] == "skipped the save of step 3: the writer is busy"
        os.kill(pid, signal.SIGCONT)
        save(manager, 4, tensors, may_skip=False)
    else:
        threading.Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()
        save(manager, 4, tensors)
        assert manager.take_news().metrics["checkpoint/busy_wait_s"] > 0
    manager.wait_committed(60)
    assert {int(folder.name[5:11]) for folder in root.glob("step_*")} == {1, 2, 4}


def test_a_closed_manager_saves_nothing(make: MakeManager, root: Path, tensors: Tensors):
    manager = make()
    manager.close()
    with pytest.raises(HeadwaterError, match=f"step 1 cannot be saved: the checkpoints in {root} are closed"):
        save(manager, 1, tensors)
    assert not list(root.glob("step_*"))


@pytest.mark.parametrize("step", [-1, 1.5, "3", True])
def test_steps_are_whole_numbers(step: Any, make: MakeManager, tensors: Tensors):
    with pytest.raises(ValueError, match="a step is a whole number of 0 or more"):
        save(make(), step, tensors)


def test_a_save_that_is_waiting_when_its_supervisor_ends_is_told_so(make: MakeManager, root: Path, tensors: Tensors):
    manager = make(on_save_error="continue")
    pid = stopped_in_a_save(manager, tensors, 1)
    assert manager._saver is not None
    manager._saver.close()
    manager.wait_committed(10)
    assert not Path(f"/proc/{pid}").exists()
    assert any("closed before this save was written" in note for note in manager.take_news().notes)


def test_what_goes_wrong_after_a_commit_ends_no_later_save(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    manager = make()
    with monkeypatch.context() as patch:
        patch.setattr(manager._pruner, "prune", lambda: 1 / 0)
        save(manager, 1, tensors)
        manager.wait_committed(60)
    save(manager, 2, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 2), tensors)


@pytest.fixture
def slow_removal(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a checkpoint is really removed, half a second after that is asked for."""
    removed = threading.Event()
    real = pruner_module.remove
    monkeypatch.setattr(pruner_module, "remove", lambda folder: (time.sleep(0.5), real(folder), removed.set()))
    return removed


def test_a_commit_does_not_wait_for_the_removal_of_the_old_but_closing_does(
    make: MakeManager, root: Path, tensors: Tensors, slow_removal: threading.Event
):
    manager = make(keep_latest_k=1)
    for step in (1, 2):
        save(manager, step, tensors)
        manager.wait_committed(60)
    assert not slow_removal.is_set()
    manager.close()
    assert [folder.name[:11] for folder in root.glob("step_*")] == ["step_000002"]


def test_a_save_that_lacks_the_space_of_what_is_being_removed_waits_for_it(
    make: MakeManager, root: Path, tensors: Tensors, slow_removal: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    manager = make(keep_latest_k=1)
    for step in (1, 2):
        save(manager, step, tensors)
        manager.wait_committed(60)
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 1 << 30 if slow_removal.is_set() else 0)
    save(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors)


def test_structure_may_grow_between_saves(make: MakeManager, root: Path, tensors: Tensors):
    manager = make()
    for step in range(1, 5):
        tensors[f"moment{step}"] = torch.full((step * 5000,), float(step))
        save(manager, step, tensors)
        manager.wait_committed(60)
        assert same(stored(root, step), tensors)


def settled_descriptors(pid: int) -> int:
    """Of a process that may still be closing what it has committed with."""
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(0.02)
    return min(counts)


def test_descriptors_and_threads_stay_flat(make: MakeManager, tensors: Tensors):
    warm_up()  # or a thread does it while this counts
    manager = make(keep_latest_k=1)
    counts = []
    for step in range(1, 31):
        save(manager, step, tensors)
        if step in (5, 30):
            manager.wait_committed(60)
            manager.wait_pruned()
            pid = manager.writer_pid
            fds = [settled_descriptors(number) for number in (os.getpid(), pid)]
            counts.append((*fds, threading.active_count()))
    assert counts[0] == counts[1]


def test_nothing_is_left_of_a_killed_trainer(root: Path):
    script = (
        "import os, signal, sys, torch\n"
        "from headwater.checkpoint.chunk import Chunk\n"
        "from headwater.checkpoint.manager import CheckpointManager\n"
        "from headwater.config.schema import CheckpointingConfig\n"
        "manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=sys.argv[1]), 'run', 'model')\n"
        "for step in range(1, 4):\n"
        "    manager.save(step, {'policy': [Chunk.whole('w', torch.randn(3_000_000))]}, {}, '', None, step)\n"
        "print(manager.writer_pid, flush=True)\n"
        "os.kill(manager.writer_pid, signal.SIGSTOP)\n"  # one that cannot see the end of its socket
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    writer = Path(f"/proc/{done.stdout.strip()}/cmdline")
    deadline = time.monotonic() + 5
    while writer.exists() and b"writer_process" in writer.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not (writer.exists() and b"writer_process" in writer.read_bytes())
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "headwater" in name}


def test_the_writer_process_does_not_import_torch(make: MakeManager, tensors: Tensors):
    manager = make()
    save(manager, 1, tensors)
    manager.wait_committed(60)
    assert "libtorch" not in Path(f"/proc/{manager.writer_pid}/maps").read_text()
