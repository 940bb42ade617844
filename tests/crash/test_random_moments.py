"""SIGKILL of the trainer or its writer at random moments of `headwater train`, which saves every step."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_runs import KilledRun, Matrix, Unkilled, assert_resumes, words_of

SEEDS = range(8)
SOAK_SEEDS = range(8, 58)


def victim_of(seed: int) -> str:
    return "writer" if seed % 2 else "trainer"


def strategy_of(seed: int) -> str:
    return "sync" if seed % 4 == 2 else "native"


def wait_for_commit(run: KilledRun, step: int) -> None:
    run.read_until(f"committed {run.folder}/checkpoints/step_{step:06d}-")


def kill(case: int, folder: Path) -> KilledRun:
    chance = random.Random(case)
    run = KilledRun(words_of(True, folder, strategy_of(case), 10_000), folder)
    wait_for_commit(run, chance.randint(1, 5))
    time.sleep(chance.uniform(0, 0.4))  # a step and its save take about half of it
    if victim_of(case) == "writer":
        pid = run.writer_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for_commit(run, run.committed_steps[-1] + 4)  # one step that began after the kill, at least
        assert run.writer_pid() not in (None, pid)
        assert run.errors.count("the checkpoint writer died: starting another one") == 1
    run.process.send_signal(signal.SIGKILL)
    run.end()
    run.assert_nothing_is_left()
    return run


@pytest.mark.parametrize("case", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.soak) for seed in SOAK_SEEDS)])
def test_a_run_killed_at_a_random_moment_resumes_from_what_it_had_committed(
    case: int, killed: Callable[[int], KilledRun], unkilled: Unkilled, matrix: Matrix
):
    run = killed(case)
    assert run.process.returncode == -signal.SIGKILL
    matrix.moments += 1
    matrix.killed += 1
    steps = run.committed_steps
    assert steps == list(range(1, len(steps) + 1))
    assert_resumes(run, True, strategy_of(case), unkilled)
    matrix.resumed += 1
