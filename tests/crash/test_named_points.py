"""SIGKILL of the trainer or its writer at each named point of a save."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from crash_runs import KilledRun, Matrix, Plan, Unkilled, assert_resumes, words_of

from headwater.checkpoint.catalog import scan

STEPS = 4
BEFORE_COMMIT = [
    "folder_made",
    "mid_file",
    "before_file_fsync",
    "before_manifest",
    "before_manifest_fsync",
    "before_rename",
]
STAGING = ["call", "digested", "mid_copy"]
PRUNING = ["before_prune", "manifest_pruned", "in_rmtree"]

WRITER = [Plan("writer", point) for point in (*BEFORE_COMMIT, "after_rename")]
WRITER += [Plan("writer", point, occurrence=2, saves=2) for point in ("before_rename", "after_rename")]

TRAINER = [Plan("trainer", point) for point in (*STAGING, "staged", "before_handover")]
TRAINER += [Plan("writer", point, victim="trainer") for point in ("mid_file", "before_rename", "after_rename")]
TRAINER += [Plan("trainer", point, step=1) for point in PRUNING]  # of two that are kept, step 3 supersedes step 1
TRAINER += [
    Plan("writer", point, victim="trainer", occurrence=2, saves=2) for point in ("before_rename", "after_rename")
]
TRAINER += [Plan("trainer", point, saves=2) for point in PRUNING]

SYNC = [Plan("trainer", point, strategy="sync") for point in (*STAGING, *BEFORE_COMMIT, "after_rename")]
SYNC += [Plan("trainer", point, step=1, strategy="sync") for point in PRUNING]
SYNC += [Plan("trainer", point, occurrence=2, saves=2, strategy="sync") for point in ("before_rename", "after_rename")]

EVERY_ATTEMPT = [Plan("writer", point, kills=3) for point in BEFORE_COMMIT]

IN_HEADWATER_TRAIN = {"mid_copy", "before_rename"}


def cases(plans: list[Plan]) -> list[object]:
    """In train_loop.py, where start-up is short, and a few in `headwater train`; the soak has all of them there."""
    programs = [replace(plan, cli=True) for plan in plans if plan.saves == 1]
    fast = [plan for plan in programs if plan.point in IN_HEADWATER_TRAIN and plan.strategy == "native"]
    return [
        *(pytest.param(plan, id=str(plan)) for plan in plans + fast),
        *(pytest.param(plan, id=str(plan), marks=pytest.mark.soak) for plan in programs if plan not in fast),
    ]


def kill(case: Plan, folder: Path) -> KilledRun:
    run = KilledRun(words_of(case.cli, folder, case.strategy, STEPS, case.saves), folder, case)
    run.end()
    run.assert_nothing_is_left()
    return run


def folder_of(mark: dict[str, Any]) -> str:
    """Name of the save's folder that a kill was about."""
    found = re.search(r"step_\d+-[0-9a-f]+", mark["path"])
    assert found, mark
    return found[0]


def assert_killed(run: KilledRun, plan: Plan, victim: str) -> None:
    """It was killed at that very point, as often as planned, in the process that is to be there."""
    assert len(run.marks) == plan.kills, run.said + run.errors
    for mark in run.marks:
        assert (mark["role"], mark["point"]) == (plan.role, plan.point)
        assert (mark["victim_pid"] == run.process.pid) == (victim == "trainer")
        assert (mark["at_pid"] == run.process.pid) == (plan.role == "trainer")
        assert len(mark["writers"]) == (plan.strategy == "native" and victim == "trainer")
        if plan.point == "mid_file":
            assert 0 < mark["written"] < mark["of"]
    assert len({mark["victim_pid"] for mark in run.marks}) == plan.kills
    assert (run.process.returncode == -signal.SIGKILL) == (victim == "trainer")


@pytest.mark.parametrize("case", cases(TRAINER + SYNC))
def test_a_trainer_killed_at_a_named_point_leaves_nothing_and_resumes_from_what_it_had_committed(
    case: Plan, killed: Callable[[Plan], KilledRun], unkilled: Unkilled, matrix: Matrix
):
    run = killed(case)
    assert_killed(run, case, "trainer")
    matrix.add_point(case)
    assert_resumes(run, case.cli, case.strategy, unkilled)
    matrix.resumed += 1


@pytest.mark.parametrize("case", cases(WRITER))
def test_a_writer_killed_at_a_named_point_is_replaced_and_each_save_commits_once(
    case: Plan, killed: Callable[[Plan], KilledRun], unkilled: Unkilled, matrix: Matrix
):
    run = killed(case)
    assert_killed(run, case, "writer")
    matrix.add_point(case)
    assert run.process.returncode == 0, run.errors
    assert run.errors.count("the checkpoint writer died: starting another one") == 1
    assert run.committed_steps == [step for step in range(1, STEPS + 1) for _ in range(case.saves)]
    assert len(set(run.committed)) == len(run.committed)
    assert (folder_of(run.marks[0]) in run.committed) == (case.point == "after_rename")
    assert_resumes(run, case.cli, case.strategy, unkilled)
    matrix.resumed += 1


@pytest.mark.parametrize("case", cases(EVERY_ATTEMPT))
def test_a_save_whose_writer_is_killed_at_every_attempt_ends_the_run_with_one_line(
    case: Plan, killed: Callable[[Plan], KilledRun], unkilled: Unkilled, matrix: Matrix
):
    run = killed(case)
    assert_killed(run, case, "writer")
    matrix.add_point(case)
    assert run.process.returncode == 1
    (line,) = [line for line in run.errors.splitlines() if "WARNING" not in line]
    assert line == f"headwater: error: saving step {case.step} failed: its writer process died {case.kills} times"
    assert case.step not in run.committed_steps
    assert all(item.committed for item in scan(run.folder / "checkpoints"))
    assert_resumes(run, case.cli, case.strategy, unkilled)
    matrix.resumed += 1
