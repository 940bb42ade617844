from collections.abc import Callable

import pytest
import torch

from headwater.config.load import load_config
from headwater.config.schema import TorchConfig
from headwater.engines.torch.engine import TorchEngine
from headwater.engines.torch.parallel import Layout
from headwater.errors import UserError
from headwater.workers.train_rank import _require_same_tokens


def test_a_value_model_that_knows_other_tokens_is_one_line(make_engine: Callable[..., TorchEngine]):
    config = load_config("ppo_tiny").config.value
    assert config is not None
    policy, value = make_engine(), make_engine()
    _require_same_tokens(config, policy, value)
    value.model.resize_token_embeddings(64)
    with pytest.raises(UserError, match=r"value.model_name=builtin:tiny knows 64 tokens and the policy \d+: choose"):
        _require_same_tokens(config, policy, value)


@pytest.mark.parametrize("recipe", ["ppo", "ppo_tiny"])
def test_the_value_model_of_a_recipe_trusts_what_the_policy_trusts(recipe: str):
    value = load_config(recipe, ["policy.trust_remote_code=true"]).config.value
    assert value is not None
    assert value.trust_remote_code


def test_a_message_names_the_group_whose_key_it_is():
    with pytest.raises(UserError, match=r"^value\.torch_cfg\.tensor_parallel_size \(2\) does not divide"):
        Layout.of_process_group(TorchConfig(tensor_parallel_size=2), torch.device("cpu"), "value")
