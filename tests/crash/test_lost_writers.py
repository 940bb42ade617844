"""What becomes of other saves, and of the disk, when the writer dies at every attempt at one save."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from crash_runs import HERE, Plan

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig


def test_a_save_that_kills_its_writer_at_every_attempt_takes_neither_the_one_behind_it_nor_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoints, marks = tmp_path / "checkpoints", tmp_path / "marks"
    marks.mkdir()
    plan = Plan("writer", "before_rename", kills=3)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "inject"))
    monkeypatch.setenv("CRASH_PLAN", plan.environment(checkpoints, marks)["CRASH_PLAN"])
    config = CheckpointingConfig(checkpoint_dir=str(checkpoints), on_save_error="continue", keep_latest_k=None)
    manager = CheckpointManager(config, "run", "model")

    def save(step: int) -> None:
        manager.save(step, {"policy": [Chunk.whole("w", torch.full((1000,), float(step)))]}, {}, "", None, step)

    save(1)
    manager.wait_committed(60)
    assert manager.writer_pid is not None
    os.kill(manager.writer_pid, signal.SIGSTOP)
    save(2)
    save(3)  # waits behind the other
    assert manager.pending == 2
    time.sleep(0.5)  # both are with the writer
    os.kill(manager.writer_pid, signal.SIGCONT)
    manager.wait_committed(60)
    news = manager.take_news()
    manager.close()
    assert len(list(marks.iterdir())) == plan.kills
    assert [note for note in news.notes if "not saved" in note] == [
        "not saved, training goes on: saving step 2 failed: its writer process died 3 times"
    ]
    assert sorted(folder.name[:11] for folder in checkpoints.glob("step_*")) == ["step_000001", "step_000003"]
    assert all((folder / "manifest.json").exists() for folder in checkpoints.glob("step_*"))
