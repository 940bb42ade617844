"""A disk that fails under the writer process: one line with the remedy, the previous save holds, the next works."""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import ELSEWHERE, MB, TROUBLES, Trouble, fill, mounted

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.config.schema import CheckpointingConfig
from headwater.errors import UserError

_CAP_DAC_OVERRIDE, _PR_CAPBSET_DROP = 1, 24


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "16m") as folder:
        yield folder


def save(manager: CheckpointManager, step: int) -> None:
    """4 MB that tell of their step."""
    chunks = [Chunk.whole("w", torch.full((MB,), float(step))), Chunk.whole("step", torch.tensor(step))]
    manager.save(step, {"policy": chunks}, {"step": step}, "", None, step)


def writer_of(manager: CheckpointManager) -> int:
    while (pid := manager.writer_pid) is None:
        time.sleep(0.01)
    return pid


def assert_only(root: Path, *steps: int) -> None:
    """These checkpoints and nothing else are there, and they hold what was saved."""
    folders = sorted(path for path in root.iterdir() if path.name != ".lock")
    assert [folder.name[:11] for folder in folders] == [f"step_{step:06d}" for step in steps]
    for step, folder in zip(steps, folders, strict=True):
        checkpoint = Checkpoint.open(folder)
        assert verify(checkpoint) == []
        assert torch.equal(checkpoint.component("policy").read("w"), torch.full((MB,), float(step)))


def failure(manager: CheckpointManager) -> str:
    """What the failed save is reported with, raised or noted as the policy is."""
    if manager._config.on_save_error == "stop":
        with pytest.raises(UserError) as caught:
            manager.wait_committed(60)
        return str(caught.value)
    manager.wait_committed(60)
    (note,) = [note for note in manager.take_news().notes if "not saved" in note]
    return note.removeprefix("not saved, training goes on: ")


@pytest.mark.parametrize("policy", ["stop", "continue"])
@pytest.mark.parametrize(("trouble", "said"), TROUBLES, ids=lambda value: getattr(value, "__name__", ""))
def test_trouble_that_comes_after_staging_costs_that_save_alone(trouble: Trouble, said: str, policy: Any, disk: Path):
    root = disk / "checkpoints"
    config = CheckpointingConfig(checkpoint_dir=str(root), keep_latest_k=None, on_save_error=policy)
    manager = CheckpointManager(config, "run", "model")
    try:
        save(manager, 1)
        manager.wait_committed(60)
        writer = writer_of(manager)
        for step in (2, 3):  # as often as there are buffers to lose
            os.kill(writer, signal.SIGSTOP)  # so that free space was seen before the trouble comes
            save(manager, step)
            manager.wait_staged(60)
            try:
                with trouble(disk, writer):
                    os.kill(writer, signal.SIGCONT)
                    line = failure(manager)
            finally:
                os.kill(writer, signal.SIGCONT)
            assert line == f"saving step {step} to {root} failed: {said}{ELSEWHERE}"
            assert_only(root, 1)
        save(manager, 4)
        manager.wait_committed(60)
        assert_only(root, 1, 4)
        assert manager.writer_pid == writer
    finally:
        manager.close()


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_disk_that_fills_up_under_a_synchronous_save(policy: Any, disk: Path, monkeypatch: pytest.MonkeyPatch):
    from headwater.checkpoint import preflight

    root = disk / "checkpoints"
    config = CheckpointingConfig(checkpoint_dir=str(root), strategy="sync", keep_latest_k=None, on_save_error=policy)
    manager = CheckpointManager(config, "run", "model")
    try:
        save(manager, 1)
        with monkeypatch.context() as patch:
            real = preflight.require_free

            def require_then_fill(folder: Path, needed: int) -> None:
                real(folder, needed)
                fill(disk, spare=MB)

            patch.setattr(preflight, "require_free", require_then_fill)
            if policy == "stop":
                with pytest.raises(UserError, match=r"saving step 2 to .* failed: No space left on device"):
                    save(manager, 2)
            else:
                save(manager, 2)
                assert any("not saved, training goes on: saving step 2" in n for n in manager.take_news().notes)
        assert_only(root, 1)
        (disk / "filler").unlink()
        save(manager, 3)
        assert_only(root, 1, 3)
    finally:
        manager.close()


def test_a_disk_too_full_before_the_save_is_said_with_both_sizes(disk: Path):
    root = disk / "checkpoints"
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), keep_latest_k=None), "run", "model")
    try:
        save(manager, 1)
        manager.wait_committed(60)
        filler = fill(disk, spare=MB)
        with pytest.raises(UserError, match=r"a checkpoint in .* needs 4\.2 MB, 1\.0 MB is free: free space there"):
            save(manager, 2)
        assert_only(root, 1)
        filler.unlink()
        save(manager, 3)
        manager.wait_committed(60)
        assert_only(root, 1, 3)
    finally:
        manager.close()


PLANT = """
import errno, os
from pathlib import Path
here = Path(__file__).parent
def planted(real):
    def write(fd, data, *rest):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/step_" in path and (here / "fails").exists():
            with open(here / "failed", "a") as log:
                log.write(path + "\\n")
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(fd, data, *rest)
    return write
os.pwrite, os.pwritev = planted(os.pwrite), planted(os.pwritev)
"""


def plant(folder: Path, code: str) -> str:
    """Have each Python started with the PYTHONPATH that is returned run `code` first."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_quota_that_is_used_up_in_the_writer(
    policy: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", plant(tmp_path / "plant", PLANT))
    config = CheckpointingConfig(checkpoint_dir=str(root), keep_latest_k=None, on_save_error=policy)
    manager = CheckpointManager(config, "run", "model")
    try:
        save(manager, 1)
        manager.wait_committed(60)
        (tmp_path / "plant" / "fails").touch()
        save(manager, 2)
        line = failure(manager)
        assert "/step_000002-" in (tmp_path / "plant" / "failed").read_text()
        said = f"{os.strerror(errno.EDQUOT)}: free some of the quota, or lower checkpointing.keep_latest_k, {ELSEWHERE}"
        assert line == f"saving step 2 to {root} failed: {said}"
        assert_only(root, 1)
        (tmp_path / "plant" / "fails").unlink()
        save(manager, 3)
        manager.wait_committed(60)
        assert_only(root, 1, 3)
    finally:
        manager.close()


UNPRIVILEGED = """
import json, os, sys, torch
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError
root, said = sys.argv[1], []
manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=root, keep_latest_k=None), "run", "model")
for step, mode in ((1, 0o700), (2, 0o500), (3, 0o700)):
    os.chmod(root, mode)
    try:
        manager.save(step, {"policy": [Chunk.whole("w", torch.full((1 << 20,), float(step)))]}, {}, "", None, step)
        manager.wait_committed(60)
    except HeadwaterError as error:
        said.append((step, type(error).__name__, str(error)))
manager.close()
print(json.dumps(said))
"""


def test_a_folder_that_may_not_be_written_any_more(root: Path):
    def bind_to_permissions() -> None:
        if os.geteuid() == 0 and ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, _CAP_DAC_OVERRIDE, 0, 0, 0):
            os._exit(77)

    words = [sys.executable, "-c", UNPRIVILEGED, str(root)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, preexec_fn=bind_to_permissions)
    if done.returncode == 77:
        pytest.skip("root cannot give up its right to pass over permissions here")
    said = f"saving step 2 to {root} failed: Permission denied: change its permissions, {ELSEWHERE}"
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == [[2, "UserError", said]]
    assert_only(root, 1, 3)


# Another program takes all that is free when the writer has begun step 2, and gives it back when that has failed.
# The save of step 3 comes meanwhile, and finds no room.
FILLING = """
import os, time
from pathlib import Path
here = Path(__file__).parent
def filling(real):
    def write(fd, data, *rest):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "/step_000002-" not in path:
            return real(fd, data, *rest)
        filler = Path(path.split("/checkpoints/")[0], "filler")
        with open(filler, "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 20)):
                    pass
            except OSError:
                pass
        try:
            time.sleep(2)
            return real(fd, data, *rest)
        except OSError as error:
            (here / "failed").write_text(f"{error.errno} {path}")
            raise
        finally:
            filler.unlink(missing_ok=True)
    return write
os.pwrite, os.pwritev = filling(os.pwrite), filling(os.pwritev)
"""


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_training_run_whose_disk_fills_up_obeys_its_policy(policy: str, tmp_path: Path):
    with mounted(tmp_path / "disk", "128m") as disk:
        root = disk / "checkpoints"
        quiet = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "data.validation=null"]
        folders = [f"checkpointing.checkpoint_dir={root}", f"logger.log_dir={tmp_path}/logs"]
        saves = ["checkpointing.save_period=1", f"checkpointing.on_save_error={policy}"]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "headwater.cli.main",
                "train",
                "grpo_tiny",
                "grpo.max_num_steps=3",
                *quiet,
                *folders,
                *saves,
            ],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "PYTHONPATH": plant(tmp_path / "plant", FILLING)},
        )
        failed = (tmp_path / "plant" / "failed").read_text()
        assert failed.startswith(f"{errno.ENOSPC} {root}/step_000002-")
        line = f"saving step 2 to {root} failed: No space left on device: free space there, or lower "
        left = sorted(path.name[:11] for path in root.iterdir() if path.name != ".lock")
        if policy == "stop":
            assert done.returncode == 2
            assert done.stderr.count("\n") == 1, done.stderr
            assert done.stderr.startswith(f"headwater: error: {line}")
            assert left in (["step_000001"], ["step_000001", "step_000003"])  # step 3 may have begun meanwhile
        else:
            assert done.returncode == 0, done.stderr
            assert "not saved, training goes on: saving step 2 to" in " ".join(done.stdout.split())
            assert left == ["step_000001", "step_000003"]
        for folder in root.glob("step_*"):
            assert verify(Checkpoint.open(folder)) == []
