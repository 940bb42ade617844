"""The real small model: slow, and the same promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.metrics.sinks import read_jsonl

NO_VALIDATION = ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0", "data.validation=null")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_steps_equal_two_plus_two(tmp_path: Path, capsys) -> None:
    def train(name: str, steps: int) -> None:
        folders = [f"checkpointing.checkpoint_dir={tmp_path}/{name}", f"logger.log_dir={tmp_path}/{name}-logs"]
        words = [*folders, *NO_VALIDATION, "data.shuffle=true", f"grpo.max_num_steps={steps}"]
        assert main(["train", "grpo", *words, "checkpointing.keep_latest_k=1"]) == 0

    train("whole", 4)
    train("halves", 2)
    train("halves", 4)
    for name in ("whole", "halves"):
        metrics = read_jsonl(tmp_path / f"{name}-logs" / "metrics.jsonl")
        assert metrics["train/optim_steps"][4] >= 2
        assert max(metrics["train/reward_std"].values()) > 0
        assert max(metrics["train/token_mult_prob_error"].values()) < 1.05
        assert main(["ckpt", "verify", str(tmp_path / name)]) == 0
    capsys.readouterr()
    assert main(["ckpt", "diff", str(tmp_path / "whole"), str(tmp_path / "halves")]) == 0
    assert "identical" in capsys.readouterr().out
    (folder,) = (tmp_path / "whole").glob("step_*")
    assert Checkpoint.open(folder).trainer_state()["step"] == 4
