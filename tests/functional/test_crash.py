"""SIGKILL at any moment of a run that saves every step: what was reported committed is there, verifies and resumes."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main

SEEDED = range(3)
RANDOM = range(3, 40)


def words(folder: Path, steps: int) -> list[str]:
    folders = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"]
    quiet = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "data.validation=null"]
    return ["train", "grpo_tiny", *folders, *quiet, "checkpointing.save_period=1", f"grpo.max_num_steps={steps}"]


@pytest.mark.parametrize("seed", [*SEEDED, *(pytest.param(seed, marks=pytest.mark.soak) for seed in RANDOM)])
def test_a_killed_run_resumes_from_what_it_had_committed(tmp_path: Path, seed: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headwater.cli.main", *words(tmp_path, 100_000)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said = ""
    while "step 2/" not in said or "committed" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    time.sleep(random.Random(seed).uniform(0, 0.6))
    process.send_signal(signal.SIGKILL)
    said += process.communicate(timeout=60)[0]

    reported = [int(step) for step in re.findall(r"committed .*/step_(\d+)-", said)]
    assert reported
    assert main(["ckpt", "verify", str(tmp_path / "checkpoints")]) == 0
    found = max(int(f.parent.name[5:11]) for f in (tmp_path / "checkpoints").glob("step_*/manifest.json"))
    assert found >= max(reported)
    assert main(words(tmp_path, found + 1)) == 0
    newest = Checkpoint.open(max((tmp_path / "checkpoints").glob("step_*")))
    state = newest.trainer_state()
    assert state["step"] == state["optim_steps"] == found + 1
