from pathlib import Path

import pytest

from headwater.cli.main import main
from headwater.config.load import load_config, recipe_names
from headwater.errors import UserError

MINIMAL = """
policy: {model_name: builtin:tiny, train_global_batch_size: 4}
grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 1}
data: {train: {dataset: "builtin:letters", options: {a: 1, b: 2}}}
env: {rewards: [{reward: letter_share, options: {c: 3}}, {reward: format}]}
"""


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of(recipe: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_packaged_recipes_are_valid_and_load_again_from_their_resolved_form(tmp_path):
    assert {"grpo", "grpo_tiny"} <= set(recipe_names())
    for name in recipe_names():
        loaded = load_config(name)
        assert loaded.difference == []
        again = load_config(write(tmp_path, f"{name}.yaml", loaded.resolved_yaml))
        assert again.config == loaded.config
        assert again.resolved_yaml == loaded.resolved_yaml


def test_the_resolved_form_holds_defaults_and_keeps_literal_text(tmp_path):
    loaded = load_config("grpo", [r"data.system_prompt=a \\\${b} c", "policy.tokenizer.name='1e-5'"])
    assert loaded.config.data.system_prompt == r"a \${b} c"
    assert "ratio_clip_max: 0.2" in loaded.resolved_yaml
    assert load_config(write(tmp_path, "again.yaml", loaded.resolved_yaml)).config == loaded.config


def test_only_what_megatron_trains_can_generate_by_megatron():
    assert error_of("grpo", "policy.generation.backend=megatron").endswith(
        "generation.backend=megatron needs megatron_cfg.enabled=true: its model is the trainer's"
    )
    chosen = load_config("grpo", ["policy.generation.backend=megatron", "policy.megatron_cfg.enabled=true"]).config
    assert chosen.policy.generation.backend == "megatron"


def test_a_child_changes_its_parent_and_leaves_the_rest():
    parent, child = load_config("grpo").config, load_config("grpo_tiny").config
    assert child.policy.model_name == "builtin:tiny"
    assert child.policy.generation == parent.policy.generation
    assert child.grpo.val_at_end is True
    assert child.data.shuffle == parent.data.shuffle


def test_options_of_a_child_replace_those_of_its_parent(tmp_path):
    assert load_config("grpo_tiny").config.data.train.options == {}
    write(tmp_path, "parent.yaml", MINIMAL)
    child = write(tmp_path, "child.yaml", "defaults: parent.yaml\ndata: {train: {size: 3, options: {b: 5}}}")
    assert load_config(child).config.data.train.options == {"b": 5}
    untouched = write(tmp_path, "untouched.yaml", "defaults: parent.yaml\ndata: {train: {size: 3}}")
    assert load_config(untouched).config.data.train.options == {"a": 1, "b": 2}


def test_lists_of_a_child_replace_those_of_its_parent(tmp_path):
    write(tmp_path, "parent.yaml", MINIMAL)
    child = write(tmp_path, "child.yaml", "defaults: parent.yaml\nenv: {rewards: [{reward: format}]}")
    rewards = load_config(child).config.env.rewards
    assert rewards is not None
    assert [reward.reward for reward in rewards] == ["format"]


def test_parents_are_found_beside_the_child_by_path_and_among_the_packaged_by_name(tmp_path):
    write(tmp_path, "base/root.yaml", "defaults: grpo_tiny\ngrpo: {seed: 1, max_num_steps: 9}")
    write(tmp_path, "mid/middle.yaml", "defaults: ../base/root.yaml\ngrpo: {seed: 2}")
    leaf = write(tmp_path, "leaf.yaml", "defaults: mid/middle.yaml\ngrpo: {val_period: 4}")
    config = load_config(leaf).config
    assert (config.grpo.seed, config.grpo.max_num_steps, config.grpo.val_period) == (2, 9, 4)
    assert config.policy.model_name == "builtin:tiny"


def test_recipes_that_inherit_in_a_circle_are_refused(tmp_path):
    write(tmp_path, "a.yaml", "defaults: b.yaml")
    b = write(tmp_path, "b.yaml", "defaults: a.yaml")
    assert error_of(b) == f"recipes inherit in a circle: {b} -> {tmp_path / 'a.yaml'} -> {b}"
    assert "circle" in error_of(write(tmp_path, "self.yaml", "defaults: self.yaml"))


def test_an_unknown_recipe_lists_the_packaged_ones_with_the_nearest():
    message = error_of("grpo_tinny")
    assert message.startswith("unknown recipe grpo_tinny: did you mean grpo_tiny?")
    assert ", ".join(recipe_names()) in message
    assert "YAML file" in error_of("missing/recipe.yaml")


def test_a_missing_parent_is_named(tmp_path):
    assert "unknown recipe gone.yaml" in error_of(write(tmp_path, "child.yaml", "defaults: gone.yaml"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("grpo: {seed: 1", "line 1"),
        ("- a\n- b", "a list"),
        ("grpo:\n  seed: 1\n  seed: 2", "duplicate key seed"),
        ("defaults: [grpo]", "defaults must be"),
        ("defaults: grpo\ngrpo: {seed: '${'}", "seed"),
    ],
)
def test_a_broken_recipe_is_named_with_its_fault(tmp_path, text, part):
    path = write(tmp_path, "broken.yaml", text)
    message = error_of(path)
    assert path in message
    assert part in message


def test_a_recipe_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in error_of(str(tmp_path / "binary.yaml"))


def test_overrides_apply_in_order_and_the_difference_shows_them():
    loaded = load_config(
        "grpo",
        [
            "policy.optimizer.lr=1e-3",
            "policy.optimizer.lr=1e-5",
            "policy.generation.stop_strings=['a b', c]",
            "+policy.max_grad_norm=null",
            "data.train.options={max_terms: 3, new: true}",
            "env.rewards.0.weight=2",
        ],
    )
    assert loaded.difference == [
        "policy.max_grad_norm: 1.0 -> null",
        "policy.optimizer.lr: 3e-05 -> 1e-05",
        'policy.generation.stop_strings: [] -> ["a b", "c"]',
        "data.train.options.max_terms: 2 -> 3",
        "+ data.train.options.new: true",
        "env.rewards.0.weight: 1.0 -> 2.0",
        "- data.train.options.min_terms: 2",
        "- data.train.options.min_digits: 1",
        "- data.train.options.max_digits: 2",
    ]
    assert loaded.config.data.train.options == {"max_terms": 3, "new": True}


def test_an_override_equal_to_the_recipe_is_no_difference():
    assert load_config("grpo", ["policy.optimizer.lr=0.00003", "grpo.seed=0"]).difference == []


def test_overrides_may_complete_a_recipe(tmp_path):
    recipe = write(tmp_path, "open.yaml", "defaults: grpo\npolicy:\n  model_name: ???")
    assert error_of(recipe) == "policy.model_name: required and not set"
    loaded = load_config(recipe, ["policy.model_name=builtin:tiny"])
    assert loaded.config.policy.model_name == "builtin:tiny"
    assert loaded.difference == ['policy.model_name: "???" -> "builtin:tiny"']


def test_a_recipe_is_not_changed_by_an_earlier_load_with_overrides():
    before = load_config("grpo")
    load_config("grpo", ["env.rewards.0.weight=7", "data.train.options.min_terms=9"])
    assert load_config("grpo").config == before.config


def test_interpolations_reach_other_keys_and_schema_defaults():
    loaded = load_config("grpo", ["logger.log_dir=${checkpointing.checkpoint_dir}/logs", "grpo.seed=${data.seed}"])
    assert loaded.config.logger.log_dir == "runs/grpo/checkpoints/logs"
    assert loaded.config.grpo.seed == 0


@pytest.mark.parametrize("value", ["${data.sed}", "${grpo.seed}", "${grpo}", "${", "${nothing:1}"])
def test_an_interpolation_that_leads_nowhere_names_its_key(value):
    assert error_of("grpo", f"grpo.seed={value}").startswith("grpo.seed: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ckpt_assume_constant_structure", "false"),
        ("use_persistent_ckpt_worker", "false"),
        ("async_ckpt_use_cpu_shm", "true"),
    ],
)
def test_what_only_nvrx_reads_is_refused_without_it(key: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"{key} is read only with strategy=nvrx: set strategy=nvrx, or leave it out"):
        load_config("grpo_tiny", [f"checkpointing.{key}={value}"])


def test_nvrx_without_megatron_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "grpo_tiny", "checkpointing.strategy=nvrx"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpointing.strategy=nvrx saves Megatron models: set megatron_cfg.enabled=true" in line
