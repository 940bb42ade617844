"""Tiny runs of the real command. Each asserts that something trained: varied rewards and optimizer steps taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.metrics.sinks import read_jsonl


class Run:
    """The tiny recipe in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.logs = folder / "logs"

    def words(self, *overrides: str) -> list[str]:
        folders = [f"checkpointing.checkpoint_dir={self.checkpoints}", f"logger.log_dir={self.logs}"]
        return ["train", "grpo_tiny", *folders, *overrides]

    def train(self, *overrides: str) -> int:
        return main(self.words(*overrides))

    def metrics(self) -> dict[str, dict[int, float]]:
        return read_jsonl(self.logs / "metrics.jsonl")

    def assert_trained(self, steps: int) -> None:
        """Every step had a reward variance, and took its optimizer step."""
        metrics = self.metrics()
        assert sorted(metrics["train/loss"]) == list(range(1, steps + 1))
        assert all(metrics["train/reward_std"][step] > 0 for step in range(1, steps + 1))
        assert metrics["train/optim_steps"][steps] == steps
        assert min(metrics["train/grad_norm"].values()) > 0

    def trainer(self) -> dict:
        return newest(self).trainer_state()


def newest(run: Run) -> Checkpoint:
    return Checkpoint.open(max(run.checkpoints.glob("step_*")))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


LOGGED = {
    "train/loss",
    "train/reward",
    "train/grad_norm",
    "train/lr",
    "train/token_mult_prob_error",
    "train/gen_kl_error",
    "train/probs_ratio_min",
    "train/probs_ratio_clamped_max",
    "train/approx_entropy",
    "train/advantages/mean",
    "train/mean_gen_tokens_per_sample",
    "train/num_trainable_parameters",
    "validation/avg_length",
    "timing/train/total_step_time",
    "timing/train/generation",
    "timing/train/reward",
    "timing/train/policy_and_reference_logprobs",
    "timing/train/policy_training",
    "timing/train/checkpointing",
    "timing/train/prepare_for_generation/total",
    "timing/train/prepare_for_generation/transfer_and_update_weights",
    "performance/tokens_per_sec",
    "performance/generation_tokens_per_sec",
    "checkpoint/stage_s",
    "checkpoint/write_s",
    "checkpoint/commit_s",
    "checkpoint/bytes",
}
FOUR = ("grpo.max_num_steps=4", "data.shuffle=true")
RECIPES = {
    "fp32": (),
    "bf16": ("policy.precision=bfloat16",),
    "kl": ("loss_fn.reference_policy_kl_penalty=0.05",),
    "two optimizer steps": ("policy.train_global_batch_size=8", "policy.train_micro_batch_size=8"),
    "schedule": ("policy.scheduler={name: cosine, warmup_steps: 2, decay_steps: 10}",),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_four_steps_equal_two_plus_two(tmp_path: Path, capsys, recipe) -> None:
    whole, halves = Run(tmp_path / "whole"), Run(tmp_path / "halves")
    assert whole.train(*FOUR, *recipe) == 0
    assert halves.train(*FOUR, *recipe, "grpo.max_num_steps=2") == 0
    assert halves.train(*FOUR, *recipe) == 0
    assert "at step 2" in capsys.readouterr().out
    for run in (whole, halves):
        optim_steps = 8 if recipe == RECIPES["two optimizer steps"] else 4
        assert run.metrics()["train/optim_steps"][4] == optim_steps
        assert all(value > 0 for value in run.metrics()["train/reward_std"].values())
    assert main(["ckpt", "diff", str(newest(whole).folder), str(newest(halves).folder)]) == 0
    assert "identical" in capsys.readouterr().out
    losses = [run.metrics()["train/loss"] for run in (whole, halves)]
    assert losses[0] == losses[1]


def test_the_diff_sees_a_different_seed(tmp_path: Path, capsys) -> None:
    one, other = Run(tmp_path / "one"), Run(tmp_path / "other")
    one.train("grpo.max_num_steps=2")
    other.train("grpo.max_num_steps=2", "grpo.seed=5")
    assert main(["ckpt", "diff", str(newest(one).folder), str(newest(other).folder)]) == 1
    assert "identical" not in capsys.readouterr().out.splitlines()[-1]


def test_a_run_trains_saves_validates_and_logs(run: Run, capsys) -> None:
    assert run.train() == 0
    run.assert_trained(4)
    metrics = run.metrics()
    assert set(metrics) >= LOGGED
    assert sorted(metrics["validation/accuracy"]) == [0, 2, 4]
    assert metrics["refit/version"] == {1: 1, 2: 2, 3: 3, 4: 4}
    assert sorted(metrics["checkpoint/stall_s"]) == [2, 4]
    assert max(metrics["train/token_mult_prob_error"].values()) < 1.001
    output = capsys.readouterr().out
    assert "validation accuracy" in output
    assert "step 4/4" in output
    assert main(["ckpt", "verify", str(run.checkpoints)]) == 0
    assert newest(run).trainer_state()["step"] == 4


def test_every_optimizer_chunk_advances_between_saves(run: Run) -> None:
    run.train("grpo.max_num_steps=4", "checkpointing.save_period=1")
    metrics = run.metrics()
    assert metrics["checkpoint/chunks_repeated"][4] == 0
    assert metrics["checkpoint/chunks_advanced"][4] > 100


def test_the_reward_rises(run: Run) -> None:
    assert run.train("grpo.max_num_steps=14", "policy.optimizer.lr=0.005", "checkpointing.save_period=100") == 0
    run.assert_trained(14)
    rewards = [value for _, value in sorted(run.metrics()["train/reward"].items())]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.1


def test_a_finished_run_starts_again_with_nothing_to_do(run: Run, capsys) -> None:
    run.train("grpo.max_num_steps=1")
    before = newest(run).folder
    capsys.readouterr()
    assert run.train("grpo.max_num_steps=1") == 0
    assert "nothing to do" in capsys.readouterr().out
    assert newest(run).folder == before


def test_the_reference_policy_stays_the_base_model_after_a_resume(run: Run) -> None:
    kl = "loss_fn.reference_policy_kl_penalty=0.05"
    run.train("grpo.max_num_steps=2", kl)
    run.train("grpo.max_num_steps=4", kl)
    # The policy has moved away from the reference, which did not follow it.
    assert 0 < run.metrics()["train/kl_penalty"][2] < run.metrics()["train/kl_penalty"][4]


def test_a_step_without_any_signal_takes_no_optimizer_step(run: Run, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "flat_reward.py").write_text("def same(problem, completion):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    assert run.train("grpo.max_num_steps=2", "env.rewards=[{reward: 'flat_reward:same'}]") == 0
    metrics = run.metrics()
    assert metrics["train/optim_steps"] == {1: 0, 2: 0}
    assert metrics["train/groups_with_signal"] == {1: 0, 2: 0}
    assert metrics["refit/version"] == {1: 0, 2: 0}
    assert "train/loss" not in metrics


def test_best_checkpoints_are_kept_by_metric(run: Run) -> None:
    assert (
        run.train(
            "grpo.max_num_steps=4",
            "checkpointing.save_period=1",
            "checkpointing.keep_latest_k=1",
            "checkpointing.keep_top_k=1",
            "checkpointing.metric_name=train/reward",
            "checkpointing.higher_is_better=false",
            "policy.optimizer.lr=0.005",
        )
        == 0
    )
    rewards = run.metrics()["train/reward"]
    best = min(rewards, key=lambda step: rewards[step])
    assert best != 4  # or the newest alone would do
    kept = {int(folder.name.split("_")[1].split("-")[0]) for folder in run.checkpoints.glob("step_*")}
    assert kept == {4, best}


def test_what_was_trained_before_a_failing_reward_is_saved(run: Run, monkeypatch, tmp_path: Path, capsys) -> None:
    (tmp_path / "late_failure.py").write_text(LATE_FAILURE)
    monkeypatch.chdir(tmp_path)
    rewards = "env.rewards=[{reward: 'late_failure:count'}]"
    quiet = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "data.validation=null")
    assert run.train("grpo.max_num_steps=9", "checkpointing.save_period=100", rewards, *quiet) == 1
    assert "late_failure:count raised" in capsys.readouterr().err
    assert run.trainer()["step"] == 3
    assert main(["ckpt", "verify", str(run.checkpoints)]) == 0


def test_a_gradient_that_is_not_finite_changes_nothing_and_ends_the_run(run: Run, capsys) -> None:
    # A rate this high drives the weights of the tiny model to infinity within a few steps.
    code = run.train("grpo.max_num_steps=50", "policy.optimizer.lr=1e30", "checkpointing.save_period=1", "grpo.seed=1")
    assert code == 1
    assert "not finite" in (said := capsys.readouterr().err) or "gradient norm is" in said
    assert main(["ckpt", "verify", str(run.checkpoints)]) == 0


def test_a_reader_that_goes_away_does_not_end_the_run(run: Run) -> None:
    command = [sys.executable, "-m", "headwater.cli.main", *run.words("grpo.max_num_steps=3")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0, process.stderr.read() if process.stderr else ""
    run.assert_trained(3)
    assert run.trainer()["step"] == 3


LATE_FAILURE = """
calls = 0


def count(problem, completion):
    global calls
    calls += 1
    if calls > 56:  # in the fourth step of sixteen
        raise RuntimeError("enough")
    return len(set(completion)) / 100
"""
SLOW_REWARD = """
import time

calls = 0


def slow(problem, completion):
    global calls
    calls += 1
    if calls > 100:
        print("asleep", flush=True)
        time.sleep(600)
    return len(set(completion)) / 100
"""


def start(run: Run, *overrides: str) -> subprocess.Popen[str]:
    """The command in a process of its own, stopped somewhere in a long run."""
    command = [sys.executable, "-m", "headwater.cli.main", *run.words("grpo.max_num_steps=100000", *overrides)]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"no line with {text!r}:\n{seen}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_saves_its_last_step(run: Run, number: int, code: int) -> None:
    process = start(run, "checkpointing.save_period=100000", "grpo.val_period=100000")
    read_until(process, "step 3/")
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert "once more to quit at once" in output
    assert "interrupted at step" in output
    last = max(run.metrics()["train/loss"])
    assert run.trainer()["step"] == last >= 3
    assert main(["ckpt", "verify", str(run.checkpoints)]) == 0
    assert run.train(f"grpo.max_num_steps={last + 1}") == 0
    run.assert_trained(last + 1)


def test_a_second_interrupt_ends_at_once_and_keeps_what_is_committed(run: Run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    monkeypatch.chdir(tmp_path)
    process = start(
        run,
        "checkpointing.save_period=1",
        "env.rewards=[{reward: 'slow_reward:slow'}]",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "data.validation=null",
    )
    read_until(process, "asleep")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # the first waits for the step's end
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert main(["ckpt", "verify", str(run.checkpoints)]) == 0
    assert run.trainer()["step"] == 6
