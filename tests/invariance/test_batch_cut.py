"""The same batch gives the same losses and gradients however it is cut into microbatches, packed or padded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwater.config.load import load_config
from headwater.metrics.stat import reduce
from headwater.workers.train import PolicyWorker


def losses_and_gradients(make_engine, sequences, *overrides: str, skip: bool = False):
    engine = make_engine(*overrides)
    worker = PolicyWorker(engine, None, load_config("grpo_tiny", overrides).config.loss_fn, skip_without_signal=skip)
    result = worker.forward_backward(sequences)
    return result, engine.optimizer.gradients()


def assert_same(one, other, **tolerance: float) -> None:
    (result, gradients), (other_result, other_gradients) = one, other
    assert result.loss_sum == pytest.approx(other_result.loss_sum, rel=1e-5)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, other_gradients[name], **(tolerance or {"rtol": 1e-4, "atol": 2e-7}))
    assert sum(gradient.abs().sum() for gradient in gradients.values()) > 0


LOSSES = [
    (),
    ("loss_fn.token_level_loss=false",),
    ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"),
]


@pytest.mark.parametrize("loss", LOSSES, ids=["token", "sequence", "gspo"])
@pytest.mark.parametrize("packed", ["true", "false"], ids=["packed", "padded"])
@pytest.mark.parametrize("size", [16, 8, 2], ids=["1-microbatch", "2-microbatches", "8-microbatches"])
def test_losses_and_gradients_do_not_depend_on_the_cut(make_engine, recorded_rollout, size, packed, loss) -> None:
    whole = losses_and_gradients(
        make_engine,
        recorded_rollout,
        *loss,
        "policy.sequence_packing.enabled=false",
        "policy.train_micro_batch_size=16",
    )
    cut = losses_and_gradients(
        make_engine,
        recorded_rollout,
        *loss,
        f"policy.sequence_packing.enabled={packed}",
        f"policy.train_micro_batch_size={size}",
    )
    assert_same(whole, cut)
    assert reduce(whole[0].stats) == pytest.approx(reduce(cut[0].stats), rel=1e-4)


def test_bf16_gradients_are_added_up_in_fp32(make_engine, recorded_rollout) -> None:
    def gradients(size: int) -> dict[str, torch.Tensor]:
        overrides = ("policy.precision=bfloat16", f"policy.train_micro_batch_size={size}")
        return losses_and_gradients(make_engine, recorded_rollout, *overrides)[1]

    one, eight = gradients(16), gradients(2)
    error = torch.cat([(one[name] - eight[name]).flatten() for name in one]).norm()
    assert error < 0.02 * torch.cat([gradient.flatten() for gradient in one.values()]).norm()

    # Exactly the sum of what each microbatch gives alone: sums kept in bf16 would round at each of the eight.
    engine = make_engine("policy.precision=bfloat16", "policy.train_micro_batch_size=2")

    def loss(logprobs: torch.Tensor, _) -> tuple[torch.Tensor, dict]:
        return logprobs.sum(), {}

    parts = []
    for start in range(0, 16, 2):
        engine.forward_backward(recorded_rollout[start : start + 2], loss, 7.0)
        parts.append(engine.optimizer.gradients())
        engine.optimizer.zero_grad()
    engine.forward_backward(recorded_rollout, loss, 7.0)
    for name, gradient in engine.optimizer.gradients().items():
        total = torch.zeros_like(gradient)
        for part in parts:
            total += part[name]
        assert torch.equal(gradient, total), name


def test_rows_of_any_capacity_give_the_same_logprobs(make_engine, recorded_rollout) -> None:
    expected = make_engine("policy.sequence_packing.enabled=false").logprobs(recorded_rollout)
    for capacity in (16, 40, 1000):
        found = make_engine(f"policy.sequence_packing.max_tokens_per_row={capacity}").logprobs(recorded_rollout)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_packed_logprobs_equal_those_of_each_sequence_alone(make_engine, recorded_rollout) -> None:
    engine = make_engine()
    for sequence, found in zip(recorded_rollout, engine.logprobs(recorded_rollout), strict=True):
        ids = torch.cat([sequence.prompt_ids, sequence.completion_ids])[None]
        with torch.no_grad():
            logprobs = engine.model(ids).logits[0, len(sequence.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, sequence.completion_ids[:, None])[:, 0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_skipping_groups_without_a_signal_changes_no_gradient(make_engine, recorded_rollout) -> None:
    silent = [
        replace(s, advantages=torch.zeros_like(s.generation_logprobs)) if s.group in (1, 2) else s
        for s in recorded_rollout
    ]
    kept = losses_and_gradients(make_engine, silent, skip=False)
    skipped = losses_and_gradients(make_engine, silent, skip=True)
    assert_same(kept, skipped)


def test_skipped_groups_cost_no_forward_pass(make_engine, recorded_rollout) -> None:
    engine = make_engine("policy.train_micro_batch_size=4")
    worker = PolicyWorker(engine, None, load_config("grpo_tiny").config.loss_fn, skip_without_signal=True)
    calls = []
    engine.model.register_forward_pre_hook(lambda *_: calls.append(1))
    worker.forward_backward(
        [
            replace(s, advantages=torch.zeros_like(s.generation_logprobs)) if s.group != 3 else s
            for s in recorded_rollout
        ]
    )
    assert len(calls) == 1


def test_with_a_kl_penalty_no_group_is_skipped(make_engine, recorded_rollout) -> None:
    engine, reference = make_engine(), make_engine(trainable=False)
    loss = load_config("grpo_tiny", ["loss_fn.reference_policy_kl_penalty=0.1"]).config.loss_fn
    worker = PolicyWorker(engine, reference, loss, skip_without_signal=True)
    with torch.no_grad():
        for param in engine.model.parameters():
            param.mul_(1.01)  # away from the reference, so that the KL has a gradient
    silent = worker.score(
        [replace(s, advantages=torch.zeros_like(s.generation_logprobs)) for s in recorded_rollout], optim_steps=1
    )
    assert worker.is_worth_a_step(silent)
    result = worker.forward_backward(silent)
    assert result.loss_sum > 0
    assert worker.optim_step().grad_norm > 0


def test_activation_checkpointing_changes_no_gradient(make_engine, recorded_rollout) -> None:
    plain = losses_and_gradients(make_engine, recorded_rollout)
    recomputed = losses_and_gradients(make_engine, recorded_rollout, "policy.torch_cfg.activation_checkpointing=true")
    assert_same(plain, recomputed)
