from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.config.load import load_config
from headwater.functional.jobs import JOBS
from headwater.functional.run import run_job
from headwater.metrics.expressions import check


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a job first: grpo_megatron"),
        (["grpo.seed=1"], "name a job first: grpo_megatron"),
        (["grpo_megatorn"], "there is no functional job grpo_megatorn; there are grpo_megatron"),
        (["grpo_megatron", "seed"], "'seed' is neither a job, which comes first, nor an override"),
        (["grpo_megatron", "grpo.sed=1"], "unknown key grpo.sed"),
    ],
)
def test_what_is_no_job_is_one_line(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["functional", *words, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("headwater: error:")
    assert error.count("\n") == 1
    assert said in error


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "thesis.tex").write_text("mine")
    assert main(["functional", "grpo_megatron", "--output", str(tmp_path)]) == 2
    assert "holds thesis.tex" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "mine"
    assert (tmp_path / "logs").is_dir()


def test_the_folder_of_a_run_that_is_no_job_s_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "checkpoints" / "step_000064-0a1b2c3d").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    assert main(["functional", "grpo_megatron", "--output", str(tmp_path)]) == 2
    assert "holds checkpoints, which is no job's" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "step_000064-0a1b2c3d").is_dir()


@pytest.mark.parametrize("key", ["checkpointing.checkpoint_dir", "logger.log_dir"])
def test_the_places_are_the_job_s_own(key: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["functional", "grpo_megatron", f"{key}={tmp_path}", "--output", str(tmp_path / "out")]) == 2
    assert f"{key} is the job's own: give --output" in capsys.readouterr().err


@pytest.mark.parametrize("reader_leaves", [False, True])
def test_what_a_training_says_is_kept_and_judged_also_when_the_reader_leaves(
    reader_leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nfor i in $(seq 9000); do echo a line that is said $i; done\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    shown = []

    def show(line: str) -> None:
        shown.append(line)
        if reader_leaves:
            raise BrokenPipeError

    folder = tmp_path / "[out]"
    assert run_job(JOBS["grpo_megatron"], [], folder, show) == 3
    lines = (folder / "run.log").read_text().splitlines()
    assert len(lines) == len(shown) == 9002
    assert lines[0].startswith("$ headwater train grpo_megatron")
    assert lines[-1] == f"grpo_megatron: FAILED, the training ended with exit code 3; see {folder / 'run.log'}"


@pytest.mark.parametrize("name", JOBS)
def test_each_check_can_be_read_and_a_metric_that_is_missing_fails_it(name: str) -> None:
    checks = JOBS[name].checks(load_config(name).config)
    assert len(checks) > 8
    for expression in checks:
        result = check(expression, {})
        assert not result.holds
        assert "train/" in result.reason or "refit/" in result.reason
