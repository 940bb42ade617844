from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.config.load import load_config
from headwater.functional.jobs import JOBS
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


@pytest.mark.parametrize("name", JOBS)
def test_each_check_can_be_read_and_a_metric_that_is_missing_fails_it(name: str) -> None:
    checks = JOBS[name].checks(load_config(name).config)
    assert len(checks) > 8
    for expression in checks:
        result = check(expression, {})
        assert not result.holds
        assert "train/" in result.reason or "refit/" in result.reason
