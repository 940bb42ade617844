"""The value model: the policy's engine with another head."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.config.load import load_config
from headwater.engines.torch.value import TorchValueEngine
from headwater.errors import HeadwaterError, UserError
from headwater.workers.value import ValueWorker, estimate_advantages

PPO = load_config("ppo_tiny").config.ppo


@pytest.fixture
def make_value(tiny_model: Path):
    def make(*overrides: str) -> TorchValueEngine:
        config = load_config("ppo_tiny", overrides).config
        assert config.value is not None
        return TorchValueEngine(config.value, tiny_model, torch.device("cpu"))

    return make


@pytest.fixture
def batch(make_value, recorded_rollout):
    assert PPO is not None
    rewards = torch.linspace(0, 1, len(recorded_rollout))
    return estimate_advantages(recorded_rollout, rewards, make_value().values(recorded_rollout), PPO)[0]


def test_the_checkpoint_has_the_backbone_and_the_value_head_and_no_language_head(make_value, make_engine) -> None:
    names = {name for name, _ in make_value().export_weights()}
    policy = {name for name, _ in make_engine().export_weights()}
    assert names == policy | {"value_head.weight", "value_head.bias"}


def test_values_are_those_of_the_state_before_each_token(make_value, recorded_rollout) -> None:
    engine = make_value()
    with torch.no_grad():
        engine.model.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    for sequence, found in zip(recorded_rollout, engine.values(recorded_rollout), strict=True):
        ids = torch.cat([sequence.prompt_ids, sequence.completion_ids])[None]
        with torch.no_grad():
            hidden = engine.model.base_model(ids).last_hidden_state[0, len(sequence.prompt_ids) - 1 : -1]
            expected = engine.model.value_head(hidden)[:, 0]
        assert len(found) == len(sequence.completion_ids)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_head_is_fp32_and_begins_alike_and_small_under_any_seed(make_value, recorded_rollout) -> None:
    torch.manual_seed(5)
    one = make_value("value.precision=bfloat16")
    torch.manual_seed(6)
    other = make_value("value.precision=bfloat16")
    assert one.model.value_head.weight.dtype == torch.float32
    assert one.model.dtype == torch.bfloat16
    assert torch.equal(one.model.value_head.weight, other.model.value_head.weight)
    assert one.model.value_head.weight.any()
    values = torch.cat(one.values(recorded_rollout))
    assert values.dtype == torch.float32
    assert 0 < values.abs().max() < 0.1


def test_gradients_do_not_depend_on_microbatches_or_packing(make_value, batch) -> None:
    found = []
    for overrides in ((), ("value.train_micro_batch_size=2",), ("value.sequence_packing.enabled=false",)):
        engine = make_value(*overrides)
        result = ValueWorker(engine, 0.2).forward_backward(batch)
        found.append((result.loss_sum, engine.optimizer.gradients()))
    for loss, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-3, atol=1e-8)
    assert all(gradient.any() for gradient in found[0][1].values())  # of each layer, from the first step on


def test_the_loss_is_that_of_values_and_returns_over_all_tokens(make_value, batch) -> None:
    result = ValueWorker(make_value(), None).forward_backward(batch)
    errors = torch.cat([s.values - s.returns for s in batch])
    assert result.loss_sum == pytest.approx(errors.square().mean().item() / 2, rel=1e-5)


def test_a_gradient_that_is_not_finite_names_the_value_models_key(make_value, batch) -> None:
    worker = ValueWorker(make_value(), None)
    worker.forward_backward([replace(s, returns=torch.full_like(s.returns, math.nan)) for s in batch])
    with pytest.raises(HeadwaterError, match=r"value\.optimizer\.lr"):
        worker.optim_step()


def test_a_context_that_is_too_short_names_the_value_models_key(make_value) -> None:
    with pytest.raises(UserError, match=r"value\.max_total_sequence_length \(9999\)"):
        make_value("value.max_total_sequence_length=9999")


def test_the_kl_lowers_the_reward_of_each_token(recorded_rollout) -> None:
    assert PPO is not None
    config = PPO.model_copy(update={"kl_penalty_in_reward": 0.5, "whiten_advantages": False, "gae_lambda": 1.0})
    scored = [
        replace(s, prev_logprobs=s.generation_logprobs + 1, reference_logprobs=s.generation_logprobs)
        for s in recorded_rollout
    ]
    values = [torch.zeros(len(s.completion_ids)) for s in scored]
    found, _ = estimate_advantages(scored, torch.ones(len(scored)), values, config)
    for sequence in found:
        length = len(sequence.completion_ids)
        expected = torch.tensor([1 - 0.5 * (length - t) for t in range(length)])  # log-ratio 1 at each token to come
        torch.testing.assert_close(sequence.returns, expected)
        torch.testing.assert_close(sequence.advantages, expected)


def test_advantages_are_whitened_over_the_whole_step(recorded_rollout) -> None:
    assert PPO is not None
    values = [torch.zeros(len(s.completion_ids)) for s in recorded_rollout]
    rewards = torch.linspace(0, 1, len(recorded_rollout))
    found, _ = estimate_advantages(recorded_rollout, rewards, values, PPO)
    advantages = torch.cat([s.advantages for s in found])
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.square().mean().item() == pytest.approx(1, abs=1e-5)
    returns = torch.cat([s.returns for s in found])
    assert returns.max().item() == pytest.approx(1, abs=1e-6)  # the value model is fitted to what was not whitened
