"""`checkpointing.checkpoint_must_save_by`: a run that ends in order before its time slot does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.checkpoint.host_buffer import BufferPool
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.cli.main import main
from headwater.controller import interrupt, loop

KEY = "checkpointing.checkpoint_must_save_by"


def words(folder: Path, *more: str) -> list[str]:
    folders = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"]
    short = ["policy.generation.max_new_tokens=4", "grpo.val_at_start=false", "grpo.val_period=1"]
    return ["train", "grpo_tiny", *folders, *short, *more]


def steps(folder: Path) -> list[int]:
    found = [Checkpoint.open(path) for path in (folder / "checkpoints").glob("step_*")]
    assert all(verify(checkpoint) == [] for checkpoint in found)
    assert all(checkpoint.trainer_state()["step"] == checkpoint.manifest.step for checkpoint in found)
    return sorted(checkpoint.manifest.step for checkpoint in found)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that were trained, in all runs of this test; the process is an hour old from when the third one is."""
    done: list[int] = []
    real = loop.train_step

    def train_step(run: Any, timer: Any) -> dict[str, float]:
        metrics = real(run, timer)
        done.append(run.state.step)
        return metrics

    monkeypatch.setattr(loop, "train_step", train_step)
    monkeypatch.setattr(interrupt, "process_age_s", lambda: 3600.0 if len(done) >= 3 else 3599.99)
    return done


def test_the_first_step_that_ends_then_is_saved_and_the_run_ends_and_resumes(
    trained: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = words(tmp_path, f"{KEY}=01:00:00", "checkpointing.save_period=100")
    assert main([*run, "grpo.max_num_steps=100"]) == 0
    said = capsys.readouterr()
    assert trained == [1, 2, 3]
    assert steps(tmp_path) == [3]
    (line,) = [line for line in said.out.splitlines() if KEY in line]
    assert line == f"{KEY}=01:00:00 has come: ended at step 3; resume with the same command"
    assert "step 2: validation accuracy" in said.out
    assert "step 3: validation accuracy" not in said.out  # there is no time left for it
    assert said.err == ""

    # Started again in a process that is too old already, it still gets one step further.
    assert main([*run, "grpo.max_num_steps=100"]) == 0
    assert trained == [1, 2, 3, 4]
    assert steps(tmp_path) == [3, 4]
    assert main([*run, "grpo.max_num_steps=5"]) == 0
    assert trained == [1, 2, 3, 4, 5]
    assert KEY not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("when", ["before the save", "during the save"])
def test_a_busy_writer_does_not_have_the_last_step_skipped(
    when: str, trained: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    acquire, refused = BufferPool.acquire, []

    def busy(pool: BufferPool, sizes: Any, pin: bool, timeout: float) -> Any:
        """Never a free buffer for who does not wait for one."""
        if timeout > 0:
            return acquire(pool, sizes, pin, timeout)
        refused.append(len(trained))
        return None

    monkeypatch.setattr(BufferPool, "acquire", busy)
    last = 3 if when == "before the save" else 2
    monkeypatch.setattr(
        interrupt, "process_age_s", lambda: 3600.0 if len(trained) >= 3 or len(refused) >= last else 3599.99
    )
    skip = ["checkpointing.when_busy=skip", "checkpointing.save_period=1", "checkpointing.keep_latest_k=9"]
    assert main([*words(tmp_path, f"{KEY}=01:00:00", *skip), "grpo.max_num_steps=100"]) == 0
    assert refused == [1, 2]
    assert trained == list(range(1, last + 1))
    assert steps(tmp_path) == [last]


def test_a_process_counts_from_its_own_start(tmp_path: Path):
    run = words(tmp_path, f"{KEY}=00:00:00:01", "checkpointing.save_period=100", "grpo.max_num_steps=20")
    done = subprocess.run(
        [sys.executable, "-m", "headwater.cli.main", *run], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{KEY}=00:00:00:01 has come: ended at step 1; resume with" in " ".join(done.stdout.split())
    assert steps(tmp_path) == [1]  # importing torch alone takes longer than a second
