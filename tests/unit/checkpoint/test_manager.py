import errno
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.checkpoint import manager as manager_module
from headwater.checkpoint import preflight
from headwater.checkpoint import pruner as pruner_module
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.commit import committed
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.manifest import read_manifest
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.checkpoint.snapshot import StagedChunk, snapshot
from headwater.checkpoint.strategies import sync as sync_module
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError

MakeManager = Callable[..., CheckpointManager]
Save = Callable[..., Path]


def steps(root: Path) -> list[int]:
    return sorted(read_manifest(folder).step for folder in root.glob("step_*"))


def fail_with(code: int) -> Callable[..., Any]:
    def fail(*args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_saved_checkpoint_holds_and_is_the_latest(make_manager: MakeManager, save: Save):
    manager = make_manager()
    assert manager.latest() is None
    folder = save(10, manager)
    assert re.fullmatch(r"step_000010-[0-9a-f]{8}", folder.name)
    latest = manager.latest()
    assert latest is not None
    assert latest.folder == folder
    assert verify(latest) == []
    manifest = latest.manifest
    assert (manifest.run_id, manifest.step, manifest.weight_version, manifest.model_identity) == (
        "run-1",
        10,
        110,
        "model-a",
    )
    assert folder.name.endswith(manifest.save_id)
    assert {file.path for file in manifest.files} == {
        "policy/rank-00000.safetensors",
        "trainer.json",
        "config.yaml",
        "tokenizer/tokenizer.json",
    }
    assert (folder / "config.yaml").read_text() == "grpo: {}\n"


def test_live_digest_of_the_manifest_is_that_of_the_live_tensor(save: Save, chunks: list[Chunk]):
    from headwater.checkpoint.digest import digest

    stored = {chunk.name: chunk.digest for chunk in read_manifest(save(1)).chunks}
    assert stored == {chunk.name: digest(chunk.tensor) for chunk in chunks}


def test_several_components_each_have_a_folder(make_manager: MakeManager, chunks: list[Chunk]):
    folder = make_manager().save(1, {"policy": chunks, "value": chunks}, {}, "", None, 1)
    assert Checkpoint.open(folder).components() == ["policy", "value"]
    assert (folder / "value" / "rank-00000.safetensors").is_file()
    assert not (folder / "tokenizer").exists()


@pytest.mark.parametrize("name", ["../x", "tokenizer", "Policy", ""])
def test_component_name_that_is_no_plain_name_is_refused(name: str, make_manager: MakeManager, root: Path):
    manager = make_manager()
    with pytest.raises(ValueError, match="cannot name a component"):
        manager.save(1, {name: []}, {}, "", None, 1)
    assert list(root.glob("step_*")) == []


def corrupting(index: int) -> Callable[[Any], list[StagedChunk]]:
    """A snapshot whose copy of one chunk is not what the live tensor holds."""

    def run(chunks: Any) -> list[StagedChunk]:
        staged = snapshot(chunks)
        staged[index].data[-1] ^= 1
        return staged

    return run


def test_bytes_that_are_not_the_live_ones_fail_the_save_and_keep_the_previous(
    make_manager: MakeManager, save: Save, root: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = make_manager()
    first = save(1, manager)
    monkeypatch.setattr(sync_module, "snapshot", corrupting(1))
    with pytest.raises(
        HeadwaterError, match=r"does not hold what the live tensors held.*policy layer\.weight$"
    ) as caught:
        save(2, manager)
    assert not isinstance(caught.value, UserError)
    assert list(root.glob("step_*")) == [first]
    assert make_manager().latest().folder == first  # type: ignore[union-attr]


def test_many_differing_chunks_are_counted(make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch):
    def run(chunks: Any) -> list[StagedChunk]:
        staged = snapshot(chunks)
        for item in staged:
            item.data[0] ^= 1
        return staged

    monkeypatch.setattr(sync_module, "snapshot", run)
    many = [Chunk.whole(f"w{index}", torch.ones(1)) for index in range(8)]
    with pytest.raises(HeadwaterError, match=r"policy w0, .*policy w4 and 3 more"):
        make_manager().save(1, {"policy": many}, {}, "", None, 1)


CODES = [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.EFBIG]
PLACES = ["writer.os.fsync", "commit.os.rename", "commit.os.fsync"]
PLACES += ["strategies.sync.new_folder", "strategies.sync.write_bytes"]


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("place", PLACES)
def test_refusal_of_the_file_system_is_one_line_and_keeps_the_previous(
    code: int, place: str, make_manager: MakeManager, save: Save, root: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = make_manager()
    first = save(1, manager)
    with monkeypatch.context() as patch:
        patch.setattr(f"headwater.checkpoint.{place}", fail_with(code))
        with pytest.raises(UserError) as caught:
            save(2, manager)
    message = str(caught.value)
    assert message.startswith(f"saving step 2 to {root} failed: {os.strerror(code)}: ")
    assert "set checkpointing.checkpoint_dir" in message
    assert "\n" not in message
    assert list(root.glob("step_*")) == [first]
    assert verify(Checkpoint.open(first)) == []
    assert steps(root) == [1]
    save(3, manager)
    assert steps(root) == [1, 3]


def test_file_size_limit_of_the_system_is_reported(make_manager: MakeManager, root: Path):
    manager = make_manager()
    big = [Chunk.whole("w", torch.zeros(100_000))]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match=r"File too large: raise the limit on file sizes \(ulimit -f\)"):
            manager.save(1, {"policy": big}, {}, "", None, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(root.glob("step_*")) == []


@pytest.mark.parametrize(("error", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (RuntimeError, UserError)])
def test_interrupt_and_failing_tokenizer_leave_no_folder(
    error: type[BaseException],
    seen: type[BaseException],
    make_manager: MakeManager,
    chunks: list[Chunk],
    root: Path,
):
    def fail(folder: Path) -> None:
        (folder / "half.json").write_text("{")
        raise error

    manager = make_manager()
    with pytest.raises(seen):
        manager.save(1, {"policy": chunks}, {}, "", fail, 1)
    assert list(root.glob("step_*")) == []


def test_interrupt_after_the_commit_keeps_the_checkpoint(
    make_manager: MakeManager, save: Save, monkeypatch: pytest.MonkeyPatch
):
    real = sync_module.commit

    def commit_then_interrupt(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    manager = make_manager()
    monkeypatch.setattr(sync_module, "commit", commit_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(5, manager)
    latest = manager.latest()
    assert latest is not None
    assert latest.manifest.step == 5


@pytest.mark.parametrize("state", [{"loss": float("nan")}, {"tensor": torch.ones(1)}, {"set": {1}}])
def test_trainer_state_that_is_not_json_is_refused_before_anything_is_written(
    state: dict[str, Any], make_manager: MakeManager, save: Save, root: Path
):
    with pytest.raises(HeadwaterError, match="the trainer's state cannot be saved as JSON"):
        save(1, make_manager(), state)
    assert list(root.glob("step_*")) == []


def test_too_little_free_space_is_told_before_anything_is_staged(
    make_manager: MakeManager, save: Save, root: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = make_manager()
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 1500)
    monkeypatch.setattr(sync_module, "snapshot", lambda chunks: pytest.fail("staged"))
    with pytest.raises(
        UserError, match=r"needs \d+\.\d kB, 1\.5 kB is free: free space there, or lower .*keep_latest_k"
    ):
        save(1, manager)
    assert list(root.glob("step_*")) == []


def test_bytes_needed_cover_what_a_save_writes(make_manager: MakeManager, save: Save, monkeypatch: pytest.MonkeyPatch):
    needed: list[int] = []
    monkeypatch.setattr(preflight, "require_free", lambda root, count: needed.append(count))
    folder = save(1, make_manager())
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= needed[0]


def test_folder_under_a_file_cannot_be_used(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be used: Not a directory: set checkpointing\.checkpoint_dir"):
        CheckpointManager(CheckpointingConfig(checkpoint_dir=str(tmp_path / "file" / "x")), "run", "model")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_folder_that_cannot_be_written_is_told_at_start(
    code: int, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch, root: Path
):
    monkeypatch.setattr(Path, "mkdir", fail_with(code))
    with pytest.raises(UserError, match=f"checkpoint folder {root} cannot be used: {os.strerror(code)}"):
        make_manager()


def test_unknown_free_space_is_told_at_start(make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight.os, "statvfs", fail_with(errno.ENOSYS))
    with pytest.raises(UserError, match=r"free space of .* cannot be known"):
        make_manager()


def test_file_system_without_free_space_is_told_at_start(make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch):
    class Nothing:
        f_blocks = f_bavail = f_frsize = 0

    monkeypatch.setattr(preflight.os, "statvfs", lambda root: Nothing)
    with pytest.raises(UserError, match="does not tell its free space"):
        make_manager()


def test_two_live_runs_cannot_share_a_folder(make_manager: MakeManager, root: Path):
    first = make_manager()
    with pytest.raises(UserError, match=rf"in use by another run \(process {os.getpid()}\)"):
        CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), strategy="sync"), "run-2", "model-a")
    first.close()
    CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), strategy="sync"), "run-2", "model-a").close()


def test_killed_run_gives_up_its_lock_and_its_leftovers_are_removed(make_manager: MakeManager, save: Save, root: Path):
    kept = save(1)
    make_manager().close()
    script = (
        "import os, signal, sys\n"
        "from headwater.checkpoint.manager import CheckpointManager\n"
        "from headwater.config.schema import CheckpointingConfig\n"
        "manager = CheckpointManager(CheckpointingConfig(\n"
        "    checkpoint_dir=sys.argv[1], strategy='sync'), 'run', 'model-a')\n"
        "manager.save(2, {'policy': []}, {}, '', lambda folder: os.kill(os.getpid(), signal.SIGKILL), 2)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(root)], check=False).returncode == -9
    assert len(list(root.glob("step_*"))) == 2
    latest = make_manager().latest()
    assert latest is not None
    assert latest.folder == kept
    assert list(root.glob("step_*")) == [kept]


def test_other_folders_are_left_alone_at_start(make_manager: MakeManager, root: Path, tmp_path: Path):
    for name in ("step_1", "notes", "step_000001-0123abcd.bak"):
        (root / name).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "step_000001-0123abcd").symlink_to(tmp_path / "elsewhere")
    make_manager()
    assert {path.name for path in root.iterdir()} >= {"step_1", "notes", "step_000001-0123abcd.bak"}
    assert (tmp_path / "elsewhere").is_dir()


def test_uncommitted_folders_are_never_the_latest(make_manager: MakeManager, save: Save, root: Path):
    manager = make_manager()
    first = save(1, manager)
    second = save(2, manager)
    (second / "manifest.json").unlink()
    latest = manager.latest()
    assert latest is not None
    assert latest.folder == first


def test_latest_is_by_step_and_then_by_time_of_saving(make_manager: MakeManager, save: Save):
    manager = make_manager(keep_latest_k=None)
    save(10, manager)
    pinned = save(20, manager)
    (pinned / "PINNED").touch()
    again = save(20, manager)
    save(15, manager)
    latest = manager.latest()
    assert latest is not None
    assert latest.folder == again


def test_time_of_saving_rises_when_the_clock_is_set_back(
    make_manager: MakeManager, save: Save, monkeypatch: pytest.MonkeyPatch
):
    manager = make_manager()
    before = read_manifest(save(1, manager)).saved_at_ns
    monkeypatch.setattr(manager_module.time, "time_ns", lambda: 5)
    assert read_manifest(save(2, manager)).saved_at_ns == before + 1
    assert read_manifest(save(2, make_manager())).saved_at_ns == before + 2


@pytest.mark.parametrize("damage", ["manifest", "cut", "missing"])
def test_corrupt_newest_is_an_error_and_no_fallback(damage: str, make_manager: MakeManager, save: Save):
    manager = make_manager()
    older = save(1, manager)
    folder = save(2, manager)
    tensors = folder / "policy" / "rank-00000.safetensors"
    if damage == "manifest":
        (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-100])
    elif damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    else:
        tensors.unlink()
    with pytest.raises(
        UserError, match=f"cannot be resumed from.*{folder.name}.*to resume from {older.name}"
    ) as caught:
        manager.latest()
    assert "\n" not in str(caught.value)


def test_checkpoint_of_another_model_is_refused(make_manager: MakeManager, save: Save):
    save(1)
    with pytest.raises(UserError, match=r"is a checkpoint of model-a, this run trains model-b: set policy\.model_name"):
        make_manager(model_identity="model-b").latest()


def test_oldest_are_pruned_and_pinned_stay(make_manager: MakeManager, save: Save, root: Path):
    manager = make_manager(keep_latest_k=2)
    (save(1, manager) / "PINNED").touch()
    for step in (2, 3, 4):
        save(step, manager)
    assert steps(root) == [1, 3, 4]


def test_uncommitted_folders_are_not_counted_in_pruning(make_manager: MakeManager, save: Save, root: Path):
    manager = make_manager(keep_latest_k=2)
    save(1, manager)
    save(2, manager)
    for step in (8, 9):
        (root / f"step_{step:06d}-0123abcd").mkdir()
    manager.record_metric(2, 0.5)
    assert [committed(folder) for folder in sorted(root.glob("step_*"))] == [True, True, False, False]


def test_corrupt_manifests_are_not_counted_in_pruning_nor_removed(make_manager: MakeManager, save: Save, root: Path):
    manager = make_manager(keep_latest_k=2)
    folders = [save(step, manager) for step in (1, 2)]
    (folders[1] / "manifest.json").write_text("{")
    save(3, manager)
    assert len(list(root.glob("step_*"))) == 3
    save(4, manager)
    assert not folders[0].exists()
    assert folders[1].exists()


def test_same_step_saved_again_replaces_the_first(make_manager: MakeManager, save: Save, root: Path):
    manager = make_manager(keep_latest_k=5)
    save(1, manager)
    again = save(1, manager)
    assert list(root.glob("step_*")) == [again]


def test_previous_is_pruned_only_after_the_commit(
    make_manager: MakeManager, save: Save, root: Path, monkeypatch: pytest.MonkeyPatch
):
    manager = make_manager(keep_latest_k=1)
    first = save(1, manager)
    seen: list[bool] = []
    real = sync_module.commit

    def watched(*args: Any) -> None:
        seen.append(committed(first))
        real(*args)
        seen.append(committed(first))

    monkeypatch.setattr(sync_module, "commit", watched)
    save(2, manager)
    assert seen == [True, True]
    assert steps(root) == [2]


def test_failed_pruning_is_a_warning_and_the_save_holds(
    make_manager: MakeManager, save: Save, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    manager = make_manager(keep_latest_k=1)
    save(1, manager)
    monkeypatch.setattr(pruner_module, "remove", fail_with(errno.EIO))
    assert committed(save(2, manager))
    assert "could not prune" in caplog.text


def test_best_by_metric_is_kept_across_a_restart(make_manager: MakeManager, save: Save, root: Path):
    config = {"keep_latest_k": 1, "keep_top_k": 1, "metric_name": "validation/accuracy"}
    manager = make_manager(**config)
    manager.record_metric(1, 0.9)
    save(1, manager)
    manager.record_metric(2, 0.1)
    save(2, manager, {"metric_history": manager.metric_history})
    manager = make_manager(**config)
    latest = manager.latest()
    assert latest is not None
    manager.restore_metric_history(latest.trainer_state()["metric_history"])
    assert manager.metric_history == {"1": 0.9, "2": 0.1}
    save(3, manager)
    assert steps(root) == [1, 3]
    manager.record_metric(3, 0.95)
    assert steps(root) == [3]


def test_metric_that_is_not_finite_is_forgotten_and_the_history_stays_json(make_manager: MakeManager):
    manager = make_manager()
    manager.record_metric(1, 0.5)
    manager.record_metric(1, float("nan"))
    manager.record_metric(2, float("inf"))
    manager.record_metric(3, 0.25)
    assert json.dumps(manager.metric_history, allow_nan=False) == '{"3": 0.25}'


def test_timings_count_bytes_and_chunks_that_advanced(make_manager: MakeManager, save: Save, chunks: list[Chunk]):
    manager = make_manager()
    folder = save(1, manager)
    metrics = manager.take_news().metrics
    assert metrics["checkpoint/chunks_advanced"] == 4
    assert metrics["checkpoint/chunks_repeated"] == 0
    chunks[0].tensor.add_(1)
    folder = save(2, manager)
    timings = manager.take_news().metrics
    assert set(timings) == {
        "checkpoint/stall_s",
        "checkpoint/stage_s",
        "checkpoint/write_s",
        "checkpoint/readback_s",
        "checkpoint/commit_s",
        "checkpoint/bytes",
        "checkpoint/chunks_advanced",
        "checkpoint/chunks_repeated",
    }
    assert (timings["checkpoint/chunks_advanced"], timings["checkpoint/chunks_repeated"]) == (1, 3)
    assert timings["checkpoint/bytes"] == sum(file.size for file in read_manifest(folder).files)
    parts = sum(timings[f"checkpoint/{part}_s"] for part in ("stage", "write", "commit"))
    assert 0 < parts <= timings["checkpoint/stall_s"]


def test_nothing_in_a_checkpoint_is_a_pickle(save: Save):
    suffixes = {path.suffix for path in save(1).rglob("*") if path.is_file()}
    assert suffixes == {".json", ".yaml", ".safetensors"}
