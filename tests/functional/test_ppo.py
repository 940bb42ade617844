"""Tiny PPO runs of the real command: both models train, in turn, and both are in each checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.controller import loop
from headwater.engines.torch.offload import Parking
from headwater.errors import HeadwaterError
from headwater.metrics.sinks import read_jsonl
from headwater.workers.train import PolicyWorker

pytestmark = pytest.mark.usefixtures("one_thread")
QUIET = ("ppo.val_period=0", "ppo.val_at_start=false", "ppo.val_at_end=false", "data.validation=null")
SHORT = (
    "ppo.num_prompts_per_step=4",
    "policy.generation.max_new_tokens=4",
    "policy.train_global_batch_size=2",
    "policy.train_micro_batch_size=2",
    *QUIET,
)


class Run:
    """The tiny recipe in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.checkpoints = folder / "checkpoints"
        self.logs = folder / "logs"

    def train(self, *overrides: str, recipe: str = "ppo_tiny") -> int:
        folders = [f"checkpointing.checkpoint_dir={self.checkpoints}", f"logger.log_dir={self.logs}"]
        return main(["train", recipe, *folders, *overrides])

    def metrics(self) -> dict[str, dict[int, float]]:
        return read_jsonl(self.logs / "metrics.jsonl")

    def at(self, step: int) -> Checkpoint:
        (folder,) = self.checkpoints.glob(f"step_{step:06d}-*")
        return Checkpoint.open(folder)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was moved to the host, in order."""
    names: list[str] = []
    real = Parking.park

    def park(self: Parking, *args: object) -> int:
        names.append(self._what)
        return real(self, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Parking, "park", park)
    return names


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def digests(checkpoint: Checkpoint, component: str) -> dict[str, int]:
    return {chunk.name: chunk.digest for chunk in checkpoint.manifest.chunks if chunk.component == component}


RECIPES = {
    "fp32": (),
    "bf16": ("policy.precision=bfloat16",),
    "kl in the reward, two epochs": ("ppo.kl_penalty_in_reward=0.1", "ppo.ppo_epochs=2"),
    "other batches for the value model": ("value.train_global_batch_size=1", "value.train_micro_batch_size=1"),
    "resumed within the warm-up": ("ppo.policy_training_start_step=4",),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_four_steps_equal_two_plus_two(tmp_path: Path, capsys, recipe) -> None:
    whole, halves = Run(tmp_path / "whole"), Run(tmp_path / "halves")
    assert whole.train(*SHORT, *recipe) == 0
    assert halves.train(*SHORT, *recipe, "ppo.max_num_steps=2") == 0
    assert halves.train(*SHORT, *recipe) == 0
    assert "at step 2" in capsys.readouterr().out
    assert whole.at(4).components() == ["policy", "value"]
    assert main(["ckpt", "diff", str(whole.at(4).folder), str(halves.at(4).folder)]) == 0
    assert "identical" in capsys.readouterr().out
    one, other = whole.metrics(), halves.metrics()
    for tag in ("train/loss", "train/reward", "train/critic/loss", "train/critic/optim_steps", "train/grad_norm"):
        assert one[tag] == other[tag]
    batches, value_batches = 2, 4 if "value.train_global_batch_size=1" in recipe else 2
    epochs = 2 if "ppo.ppo_epochs=2" in recipe else 1
    trained_steps = 1 if "ppo.policy_training_start_step=4" in recipe else 3
    assert one["train/optim_steps"][4] == trained_steps * batches * epochs
    assert one["train/critic/optim_steps"][4] == 4 * value_batches * epochs
    assert whole.at(4).trainer_state()["value_optim_steps"] == 4 * value_batches * epochs
    assert min(one["train/critic/grad_norm"].values()) > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_warm_up_leaves_the_policy_untouched_until_its_step(run: Run, capsys, precision: str) -> None:
    options = (f"policy.precision={precision}", "ppo.policy_training_start_step=3", "checkpointing.keep_latest_k=null")
    assert run.train(*SHORT, *options, "checkpointing.save_period=1") == 0
    saved = {step: run.at(step) for step in (1, 2, 3, 4)}
    policy = {step: digests(saved[step], "policy") for step in saved}
    value = {step: digests(saved[step], "value") for step in saved}

    assert policy[1] == policy[2]
    assert not any("exp_avg" in name for name in policy[2])
    changed = {name for name in policy[2] if policy[3][name] != policy[2][name]}
    assert len(changed) > len(policy[2]) / 2
    assert any("exp_avg" in name for name in policy[3])
    for before, after in ((1, 2), (2, 3), (3, 4)):
        moments = [name for name in value[before] if "exp_avg" in name]
        assert moments
        assert all(value[before][name] != value[after][name] for name in moments)

    assert [saved[step].manifest.weight_version for step in saved] == [0, 0, 1, 2]
    metrics = run.metrics()
    assert metrics["refit/version"] == {1: 0, 2: 0, 3: 1, 4: 2}
    assert sorted(metrics["train/loss"]) == [3, 4]
    assert metrics["train/optim_steps"] == {1: 0, 2: 0, 3: 2, 4: 4}
    assert metrics["train/critic/optim_steps"] == {1: 2, 2: 4, 3: 6, 4: 8}

    capsys.readouterr()
    for before, after, idle in ((1, 2, True), (2, 3, False), (3, 4, False)):
        assert main(["ckpt", "freshness", str(saved[before].folder), str(saved[after].folder)]) == 0
        said = capsys.readouterr().out
        assert ("policy" in said and "idle" in said) == idle, said
    # Each way round that is not newer is told.
    assert main(["ckpt", "freshness", str(saved[4].folder), str(saved[3].folder)]) == 1


def test_the_reward_and_the_explained_variance_rise(run: Run) -> None:
    learning = (
        "ppo.max_num_steps=26",
        "ppo.num_prompts_per_step=64",
        "ppo.policy_training_start_step=6",
        "ppo.gae_lambda=1",
        "policy.generation.max_new_tokens=4",
        "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=64",
        "policy.optimizer.lr=0.003",
        "value.train_global_batch_size=16",
        "value.train_micro_batch_size=16",
        "value.optimizer.lr=0.003",
    )
    assert run.train(*learning, *QUIET, "checkpointing.enabled=false") == 0
    metrics = run.metrics()
    rewards = [metrics["train/reward"][step] for step in range(1, 27)]
    explained = [metrics["train/critic/explained_var"][step] for step in range(1, 27)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.4
    assert abs(explained[0]) < 0.02
    assert sum(explained[-5:]) / 5 > sum(explained[:5]) / 5 + 0.05


def test_a_run_logs_and_shows_the_critic(run: Run, capsys) -> None:
    assert run.train("ppo.max_num_steps=2") == 0
    metrics = run.metrics()
    logged = ("loss", "explained_var", "vf_clipfrac", "grad_norm", "lr", "optim_steps")
    assert all(sorted(metrics[f"train/critic/{tag}"]) == [1, 2] for tag in logged)
    assert sorted(metrics["timing/train/value_training"]) == sorted(metrics["timing/train/values"]) == [1, 2]
    assert sorted(metrics["validation/accuracy"]) == [0, 2]
    output = capsys.readouterr().out
    assert "PPO: builtin:tiny" in output
    assert "value model: builtin:tiny" in output
    assert "critic " in output
    assert "explained " in output
    assert main(["ckpt", "verify", str(run.checkpoints)]) == 0


def test_the_kl_in_the_reward_builds_the_reference_policy(run: Run) -> None:
    assert run.train(*SHORT, "ppo.kl_penalty_in_reward=0.1", "policy.optimizer.lr=0.003") == 0
    assert run.metrics()["train/kl_penalty"][4] > 0


def test_a_policy_step_that_fails_after_the_value_models_leaves_no_step_half_saved(run: Run, monkeypatch) -> None:
    def fail(_: PolicyWorker) -> None:
        raise HeadwaterError("the gradient norm is nan")

    monkeypatch.setattr(PolicyWorker, "optim_step", fail)
    assert run.train(*SHORT, "checkpointing.save_period=100", "ppo.policy_training_start_step=3") == 1
    assert run.metrics()["train/critic/optim_steps"] == {1: 2, 2: 4}
    assert not list(run.checkpoints.glob("step_*"))  # step 2's value model is gone


def test_a_start_step_beyond_the_end_is_told_and_trains_the_value_model_alone(run: Run, capsys) -> None:
    assert run.train(*SHORT, "ppo.max_num_steps=1", "ppo.policy_training_start_step=9") == 0
    assert "the policy is not trained: ppo.policy_training_start_step (9)" in capsys.readouterr().out
    assert run.metrics()["train/critic/optim_steps"] == {1: 2}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("grpo.seed=1", ("grpo", "ppo", "both set")),
        ("ppo=null", ("exactly one of grpo and ppo",)),
        ("value=null", ("ppo needs value",)),
        ("ppo.epochs=2", ("unknown key ppo.epochs", "ppo.ppo_epochs")),
        ("value.generation.temperature=2", ("unknown key value.generation.temperature",)),
        ("value.train_global_batch_size=5", ("value.train_global_batch_size (5)", "does not divide")),
        ("value.train_micro_batch_size=3", ("value.train_micro_batch_size (3)", "does not divide")),
        ("value.max_total_sequence_length=64", ("value.max_total_sequence_length (64)", "policy.max_total")),
        ("value.clip_range=0", ("value.clip_range",)),
        ("ppo.gae_lambda=1.5", ("ppo.gae_lambda",)),
        ("ppo.val_period=3", ("ppo.val_period", "save_period")),
        ("value.model_name=./nowhere", ("./nowhere",)),
    ],
)
def test_a_wrong_key_is_one_line(run: Run, capsys, override: str, parts: tuple[str, ...]) -> None:
    best = ("checkpointing.metric_name=validation/accuracy", "checkpointing.keep_top_k=1")
    assert run.train(override, *(best if "val_period" in override else ())) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    for part in parts:
        assert part in said


def test_one_algorithm_does_not_resume_the_others_checkpoint(run: Run, capsys) -> None:
    assert run.train(*SHORT, "ppo.max_num_steps=1") == 0
    assert run.train(recipe="grpo_tiny") == 2
    assert "holds policy and value, this run trains policy: choose a new" in capsys.readouterr().err


def test_another_value_model_than_the_checkpoints_is_refused(run: Run, capsys) -> None:
    assert run.train(*SHORT, "ppo.max_num_steps=1") == 0
    assert run.train(*SHORT, "value.precision=bfloat16") == 2
    assert "value.model_name holds at value.precision" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_optimizer_that_leaves_for_generation_trains_as_one_that_stays(
    tmp_path: Path, moved: list[str], precision: str
) -> None:
    options = (*SHORT, f"policy.precision={precision}", "ppo.max_num_steps=3", "ppo.policy_training_start_step=1")
    stay, leaves = Run(tmp_path / "stay"), Run(tmp_path / "leaves")
    assert stay.train(*options) == 0
    assert moved == []
    assert leaves.train(*options, "policy.offload_policy_before_refit=true") == 0
    assert moved == ["optimizer state"] * 4  # before each step's generation, and after the last step
    assert main(["ckpt", "diff", str(stay.at(3).folder), str(leaves.at(3).folder)]) == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_save_while_the_optimizer_is_away_holds_it(run: Run, tmp_path: Path, monkeypatch, capsys, precision) -> None:
    whole = Run(tmp_path / "whole")
    options = (*SHORT, f"policy.precision={precision}", "ppo.policy_training_start_step=1", "ppo.max_num_steps=3")
    away = ("policy.offload_policy_before_refit=true", "checkpointing.save_period=100")
    assert whole.train(*options) == 0
    real, calls = loop.score_groups, []

    def score(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise HeadwaterError("no such answer")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "score_groups", score)
        assert run.train(*options, *away) == 1
    assert run.at(2).manifest.step == 2
    assert run.train(*options, *away) == 0
    assert "at step 2" in capsys.readouterr().out
    assert main(["ckpt", "diff", str(whole.at(3).folder), str(run.at(3).folder)]) == 0


def test_models_that_take_turns_train_as_those_that_stay(tmp_path: Path, moved: list[str]) -> None:
    """Each leaves its memory for the other, and the optimizer leaves while log-probabilities are computed."""
    options = (
        *SHORT,
        "ppo.ppo_epochs=2",
        "ppo.max_num_steps=2",
        "checkpointing.save_period=1",
        "ppo.policy_training_start_step=1",
    )
    stay, turns = Run(tmp_path / "stay"), Run(tmp_path / "turns")
    assert stay.train(*options) == 0
    assert moved == []
    assert turns.train(*options, "ppo.models_take_turns=true", "policy.offload_optimizer_for_logprob=true") == 0
    a_step = ["optimizer state", "weights", "optimizer state", "weights", "optimizer state"]
    assert moved == [*a_step[-2:], *a_step, *a_step]
    for step in (1, 2):
        assert main(["ckpt", "diff", str(stay.at(step).folder), str(turns.at(step).folder)]) == 0
    assert main(["ckpt", "freshness", str(turns.at(1).folder), str(turns.at(2).folder)]) == 0
