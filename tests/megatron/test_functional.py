"""`headwater functional`: the named jobs pass, and say so when nothing trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.functional.jobs import JOBS

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytestmark = pytest.mark.slow


def functional(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwater.cli.main", "functional", *words, "--output", str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )


@pytest.mark.parametrize("words", [*JOBS, "ppo_megatron checkpointing.strategy=native"])
def test_the_job_passes(words: str, tmp_path: Path) -> None:
    ended = functional(tmp_path, *words.split())
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "FAIL" not in ended.stdout
    assert "Warning" not in ended.stdout
    assert ended.stdout == (tmp_path / "run.log").read_text()
    data = json.loads((tmp_path / "metrics.json").read_text())
    last = max(data["train/reward"], key=int)
    assert data["train/optim_steps"][last] > 0
    checkpoints = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert len(checkpoints) == int(last)
    assert ended.stdout.count(": fresh (") == int(last) - 1


def test_a_job_that_trains_nothing_fails_and_what_an_earlier_one_left_does_not_help_it(tmp_path: Path) -> None:
    assert functional(tmp_path, "grpo_megatron", "grpo.max_num_steps=2").returncode == 0
    ended = functional(tmp_path, "grpo_megatron", "grpo.max_num_steps=2", "policy.optimizer.lr=1e-30")
    assert ended.returncode == 1
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAIL")]
    assert any("stale" in line for line in failed)
    assert any("kl_penalty" in line for line in failed)
    assert ended.stdout.splitlines()[-1].startswith("grpo_megatron: FAILED")


def test_the_training_s_own_exit_code_is_the_job_s(tmp_path: Path) -> None:
    ended = functional(tmp_path, "grpo_megatron", "policy.megatron_cfg.tensor_model_parallel_size=3")
    assert ended.returncode == 2
    assert "does not divide the model's attention heads" in (tmp_path / "run.log").read_text()
