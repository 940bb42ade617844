"""The line that a user reads for each kind of mistake, through `load_config` as a user gets it."""

import pytest

from headwater.config.explain import nearest_key, schema_keys, show
from headwater.config.load import load_config
from headwater.errors import UserError


def error_of(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config("grpo", overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("policy.generation.temprature", "policy.generation.temperature"),
        ("policy.temperature", "policy.generation.temperature"),
        ("policy.genration.temperature", "policy.generation.temperature"),
        ("grpo.lr", "policy.optimizer.lr"),
        ("lr", "policy.optimizer.lr"),
        ("polcy.model_name", "policy.model_name"),
        ("checkpointing.save_every", "checkpointing.save_period"),
        ("data.dataset", "data.train.dataset"),
        ("data.validation.sise", "data.validation.size"),
        ("env.rewards.0.wieght", "env.rewards.0.weight"),
        ("loss_fn.kl_penalty", "loss_fn.reference_policy_kl_penalty"),
    ],
)
def test_an_unknown_key_names_its_full_path_and_the_nearest_of_the_schema(unknown, nearest):
    assert error_of(f"{unknown}=1") == f"unknown key {unknown}; did you mean {nearest}?"


def test_the_nearest_key_keeps_the_number_of_the_list_item():
    assert nearest_key("env.rewards.3.wieght") == "env.rewards.3.weight"


def test_an_unknown_key_in_a_file_is_named_the_same_way(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("defaults: grpo\npolicy: {generation: {temprature: 1.0}}\nshuffel: true")
    with pytest.raises(UserError) as caught:
        load_config(str(path))
    assert str(caught.value) == (
        "unknown key policy.generation.temprature; did you mean policy.generation.temperature?; "
        "unknown key shuffel; did you mean data.shuffle?"
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("policy.optimizer.lr=abc", "policy.optimizer.lr: expected a number, got 'abc'"),
        ("policy.optimizer.lr=true", "policy.optimizer.lr: expected a number, got true"),
        ("policy.optimizer.lr=null", "policy.optimizer.lr: expected a number, got null"),
        ("policy.optimizer.lr=0", "policy.optimizer.lr: must be greater than 0, got 0"),
        ("policy.optimizer.lr=inf", "policy.optimizer.lr: must be a finite number, got inf"),
        ("grpo.max_num_steps=3.5", "grpo.max_num_steps: expected a whole number, got 3.5"),
        ("grpo.max_num_steps=", "grpo.max_num_steps: expected a whole number, got ''"),
        ("grpo.val_at_end=1", "grpo.val_at_end: expected true or false, got 1"),
        ("data.system_prompt=1", "data.system_prompt: expected text, got 1: put it in quotes"),
        ("policy.generation.stop_strings=x", "policy.generation.stop_strings: expected a list, got 'x'"),
        ("policy.optimizer=fast", "policy.optimizer: expected a mapping, got 'fast'"),
        ("data.train.options=[1]", "data.train.options: expected a mapping, got [1]"),
        ("policy.precision=float16", "policy.precision: expected 'bfloat16' or 'float32', got 'float16'"),
        ("policy.optimizer.betas=[0.9,x]", "policy.optimizer.betas.1: expected a number, got 'x'"),
        ("policy.optimizer.betas=[0.9,null]", "policy.optimizer.betas.1: expected a number, got null"),
        ("policy.optimizer.betas=[0.9,1.5]", "policy.optimizer: betas must lie in [0, 1)"),
        ("policy.optimizer.betas=0.9", "policy.optimizer.betas: expected a list, got 0.9"),
        ("policy.model_name=???", "policy.model_name: required and not set"),
        ("env.rewards=[{weight: 1}]", "env.rewards.0.reward: required and not set"),
        (
            "checkpointing.keep_top_k=2",
            "checkpointing: keep_top_k needs metric_name, such as metric_name=validation/accuracy",
        ),
        (
            "policy.train_global_batch_size=7",
            "policy.train_global_batch_size (7) does not divide grpo.num_prompts_per_step x "
            "grpo.num_generations_per_prompt (64)",
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(override, line):
    assert error_of(override) == line


def test_several_mistakes_make_one_line():
    assert error_of("policy.optimizer.lr=abc", "grpo.sed=1") == (
        "policy.optimizer.lr: expected a number, got 'abc'; unknown key grpo.sed; did you mean grpo.seed?"
    )


def test_a_whole_number_serves_where_a_number_is_asked_and_a_list_for_the_betas():
    config = load_config("grpo", ["policy.optimizer.lr=1", "policy.optimizer.betas=[0,0.5]"]).config
    assert (config.policy.optimizer.lr, config.policy.optimizer.betas) == (1.0, (0.0, 0.5))


def test_schema_keys_reach_every_depth():
    keys = schema_keys()
    assert {"policy", "policy.optimizer.betas", "data.validation.seed", "env.rewards.0.weight"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_long_values_are_shortened():
    assert show("x" * 500) == "'" + "x" * 56 + "..."
