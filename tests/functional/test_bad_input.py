"""What a user can get wrong: one clear line on stderr that names the remedy, exit code 2, nothing trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli.main import main


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Run the tiny recipe with overrides in an empty folder; returns exit code and what was said."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, recipe: str = "grpo_tiny") -> tuple[int, str]:
        code = main(["train", recipe, *words])
        return code, capsys.readouterr().err

    return run


def assert_one_line(result: tuple[int, str], *parts: str) -> None:
    code, said = result
    assert code == 2, said
    assert said.count("\n") == 1
    assert said.startswith("headwater: error: ")
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("policy.generation.temprature=1.0", ("policy.generation.temprature", "policy.generation.temperature")),
        ("policy.optimizer.lr=fast", ("policy.optimizer.lr", "fast")),
        ("grpo.max_num_steps=1.5", ("grpo.max_num_steps",)),
        ("policy.train_global_batch_size=7", ("policy.train_global_batch_size (7)", "does not divide")),
        ("policy.train_micro_batch_size=3", ("policy.train_micro_batch_size (3)", "does not divide")),
        ("checkpointing.keep_top_k=2", ("keep_top_k needs metric_name",)),
        ("policy.generation.stop_strings=['']", ("policy.generation.stop_strings",)),
        ("policy.generation.max_batch_size=2", ("max_batch_size (2)",)),
        ("loss_fn.truncated_importance_sampling_ratio=2.0", ("use_importance_sampling_correction",)),
        ("grpo.seed=99999999999999999999", ("grpo.seed",)),
        ("policy.max_total_sequence_length=100000", ("exceeds the context", "512 tokens")),
        ("grpo.num_generations_per_prompt=1", ("num_generations_per_prompt must be 2 or more",)),
        ("policy.model_name=./nowhere", ("./nowhere",)),
        ("policy.model_name=.", ("config.json",)),
        ("policy.model_name=builtin:tiniest", ("builtin:tiny",)),
        ("data.train.dataset=nowhere.jsonl", ("nowhere.jsonl",)),
        ("data.train.dataset=reasoning_gym:chain_sums", ("chain_sum",)),
        ("data.train.dataset=empty.jsonl", ("empty.jsonl", "no rows")),
        ("policy.max_total_sequence_length=20", ("exceeds", "max_total_sequence_length")),
        ("policy.max_total_sequence_length=16", ("leaves no room for a prompt",)),
        ("env.rewards=[{reward: nothing}]", ("no reward 'nothing'", "letter_share")),
        ("env.rewards=[{reward: 'no_such_module:f'}]", ("no_such_module",)),
        ("checkpointing.checkpoint_dir=/proc/headwater", ("/proc/headwater",)),
        ("logger.log_dir=/proc/headwater", ("/proc/headwater",)),
        ("policy.tokenizer.name=./nowhere", ("./nowhere",)),
    ],
)
def test_bad_values(train, tmp_path: Path, override: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    words = [override]
    if override.startswith("data.train.dataset="):
        words.append("data.train.size=null" if ".jsonl" in override else "data.train.size=8")
    assert_one_line(train(*words), *parts)


def test_a_prompt_beyond_the_context(train, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(f'{{"prompt": "{"x" * 2000}", "answer": "1"}}')
    assert_one_line(train("data.train.dataset=long.jsonl"), "(row 0)", "policy.max_total_sequence_length")


def test_an_unknown_recipe_names_the_known_ones(train) -> None:
    assert_one_line(train(recipe="grpo_tinny"), "grpo_tinny", "grpo_tiny")


def test_a_word_that_is_no_override(train) -> None:
    assert_one_line(train("grpo.max_num_steps"), "grpo.max_num_steps", "neither a recipe")


def test_a_checkpoint_of_another_model(train, tiny_model: Path, tmp_path: Path) -> None:
    import json
    import shutil

    code, said = train("grpo.max_num_steps=1")
    assert code == 0, said
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    config["num_attention_heads"] //= 2
    config["head_dim"] *= 2
    (other / "config.json").write_text(json.dumps(config))
    result = train("grpo.max_num_steps=2", f"policy.model_name={other}")
    assert_one_line(result, "is a checkpoint of", "checkpointing.checkpoint_dir")


def test_the_name_of_a_metric_that_nothing_logs(train) -> None:
    result = train("checkpointing.keep_top_k=1", "checkpointing.metric_name=validation/acuracy")
    assert_one_line(result, "validation/acuracy", "validation/accuracy")


def test_a_validation_metric_without_a_validation_at_each_save(train) -> None:
    best = ("checkpointing.keep_top_k=1", "checkpointing.metric_name=validation/accuracy")
    assert_one_line(train(*best, "checkpointing.save_period=3"), "grpo.val_period (2)", "save_period (3)")


def test_words_that_are_no_command_or_option(capsys) -> None:
    for words in (["trian"], ["train", "--no-such-option"], ["ckpt", "ls"], ["ckpt", "ls", "a", "b"], []):
        code = main(words)
        assert_one_line((code, capsys.readouterr().err), "--help")


def test_overrides_and_debug_may_stand_behind_an_option(train, capsys) -> None:
    assert main(["train", "grpo_tiny", "--print-config", "grpo.seed=3", "--debug"]) == 0
    assert "#   grpo.seed: 0 -> 3" in capsys.readouterr().out


def test_checkpoints_of_other_weights_or_precision(train, tiny_model: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    train("grpo.max_num_steps=1")
    other = tmp_path / "sibling"
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert_one_line(train("grpo.max_num_steps=2", f"policy.model_name={other}"), "other weights", "policy.model_name")
    assert_one_line(train("grpo.max_num_steps=2", "policy.precision=bfloat16"), "policy.precision")


def test_a_checkpoint_that_draws_in_another_order(train) -> None:
    train("grpo.max_num_steps=1")
    assert_one_line(train("grpo.max_num_steps=2", "data.seed=7"), "another seed", "data.seed")
    assert_one_line(train("grpo.max_num_steps=2", "data.shuffle=false"), "another shuffle", "data.shuffle")


def test_the_readmes_own_run(train, tiny_model: Path, tmp_path: Path) -> None:
    """The command of the README's "Your own run", word for word but for the model and the number of steps."""
    import re
    import shlex

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    command = re.search(r"headwater (train grpo policy.model_name=.*?\n)headwater", readme, re.DOTALL)
    assert command is not None
    words = [word for word in shlex.split(command[1].replace("\\\n", " ")) if not word.startswith("policy.model_name")]
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code is not None
    (tmp_path / "my_rewards.py").write_text(code[1])
    for name in ("problems.jsonl", "held_out.jsonl"):
        rows = [f'{{"prompt": "What is {i} + 1? ({name})", "answer": "{i + 1}"}}' for i in range(8)]
        (tmp_path / name).write_text("\n".join(rows))
    tiny = [f"policy.model_name={tiny_model}", "grpo.max_num_steps=1", "policy.generation.max_new_tokens=4"]
    assert train(*words[2:], *tiny, recipe=words[1]) == (0, "")


def test_a_checkpoint_of_another_dataset(train) -> None:
    train("grpo.max_num_steps=1")
    result = train("grpo.max_num_steps=2", "data.train.size=32")
    assert_one_line(result, "another dataset", "checkpointing.checkpoint_dir")


def test_a_corrupt_checkpoint_is_not_resumed_from(train, tmp_path: Path) -> None:
    train("grpo.max_num_steps=1")
    (file,) = tmp_path.glob("runs/grpo_tiny/checkpoints/step_*/policy/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert_one_line(train("grpo.max_num_steps=2"), file.name)


@pytest.mark.parametrize("value", ["'text'", "float('nan')", "1 / 0"])
def test_a_reward_that_fails_stops_the_run_and_is_named(train, tmp_path: Path, value: str) -> None:
    (tmp_path / "my_broken_reward.py").write_text(f"def broken(problem, completion):\n    return {value}\n")

    code, said = train("env.rewards=[{reward: 'my_broken_reward:broken'}]", "grpo.val_at_start=false")
    assert code == 1
    assert said.count("\n") == 1
    for part in ("my_broken_reward:broken", "prompt", "completion", "Write lowercase letters"):
        assert part in said


def test_a_reward_may_fail_as_often_as_the_user_says(train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = """
def shaky(problem, completion):
    if problem.index % 8 == 3:
        raise OSError("no answer from the judge")
    return float(len(completion))
"""
    (tmp_path / "my_shaky_reward.py").write_text(code)
    words = ["env.rewards=[{reward: 'my_shaky_reward:shaky'}]", "grpo.val_at_start=false", "grpo.max_num_steps=3"]
    assert train(*words, "env.tolerated_failures=9") == (0, "")
    assert "no answer from the judge" in caplog.text
    assert "completions earn 0 (failure 1 of the 9 tolerated)" in caplog.text
    assert len(list(tmp_path.glob("runs/grpo_tiny/checkpoints/step_000003-*"))) == 1
