"""Golden numbers by hand. Ratios are given as such: the log-probs are made from them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from headwater.algorithms.losses.policy import (
    Denominators,
    PolicyLossInputs,
    denominator,
    needs_all_groups,
    policy_loss,
)
from headwater.config.schema import LossConfig
from headwater.metrics.stat import merge, reduce

PREV = 0.25
"""Probability of every token before the batch, where a test sets ratios."""


def make_inputs(
    ratios: Sequence[float], advantages: Sequence[float], sequence: Sequence[int] | None = None
) -> PolicyLossInputs:
    """Tokens whose probability ratio is given; generator and sampler agree with the previous policy."""
    prev = torch.full((len(ratios),), math.log(PREV))
    sequence = sequence or [0] * len(ratios)
    return PolicyLossInputs(
        logprobs_T=(prev + torch.tensor(ratios, dtype=torch.float32).log()).requires_grad_(),
        generation_logprobs_T=prev,
        sampling_logprobs_T=prev,
        prev_logprobs_T=prev,
        reference_logprobs_T=None,
        advantages_T=torch.tensor(advantages, dtype=torch.float32),
        sequence_T=torch.tensor(sequence),
        num_sequences=max(sequence) + 1,
    )


def loss_and_gradient(inputs: PolicyLossInputs, config: LossConfig) -> tuple[float, torch.Tensor]:
    loss, _ = policy_loss(inputs, config)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_T)
    return loss.item(), gradient


def metrics_of(inputs: PolicyLossInputs, config: LossConfig | None = None) -> dict[str, float]:
    return reduce(policy_loss(inputs, config or LossConfig())[1])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range: -ratio A, and its derivative by the log-prob is the same
        (1.5, 2.0, -2.6, 0.0),  # above, good: cut at 1.3
        (0.5, 2.0, -1.0, -1.0),  # below, good: not cut, it should come back
        (0.5, -2.0, 1.8, 0.0),  # below, bad: cut at 0.9
        (1.5, -2.0, 3.0, 3.0),  # above, bad: not cut
        (1.1, 0.0, 0.0, 0.0),
    ],
)
def test_each_side_of_the_clipped_surrogate(ratio, advantage, loss, gradient):
    config = LossConfig(ratio_clip_min=0.1, ratio_clip_max=0.3)
    actual, actual_gradient = loss_and_gradient(make_inputs([ratio], [advantage]), config)
    assert actual == pytest.approx(loss)
    assert actual_gradient.tolist() == pytest.approx([gradient])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -2.0, 6.0, 0.0),  # cut at 3 x 2
        (2.5, -2.0, 5.0, 5.0),  # under the bound
        (0.5, -2.0, 1.6, 0.0),  # the ordinary clip at 0.8
        (5.0, 2.0, -2.4, 0.0),  # a good token is clipped at 1.2 as ever
        (0.1, 2.0, -0.2, -0.2),
    ],
)
def test_dual_clip_bounds_negative_advantages_alone(ratio, advantage, loss, gradient):
    actual, actual_gradient = loss_and_gradient(make_inputs([ratio], [advantage]), LossConfig(ratio_clip_c=3.0))
    assert actual == pytest.approx(loss)
    assert actual_gradient.tolist() == pytest.approx([gradient])


def test_without_previous_logprobs_the_ratio_is_one_and_the_gradient_minus_the_advantage():
    inputs = replace(make_inputs([1.7, 0.2, 1.0], [2.0, -1.0, 0.5]), prev_logprobs_T=None)
    loss, gradient = loss_and_gradient(inputs, LossConfig(ratio_clip_min=0.0, ratio_clip_max=0.0))
    assert loss == pytest.approx(-1.5)
    assert gradient.tolist() == [-2.0, 1.0, -0.5]


def test_token_level_sums_over_tokens_and_sequence_level_over_sequence_means():
    inputs = make_inputs([1.1, 0.9, 1.0, 1.0], [1.0, 1.0, 1.0, -2.0], [0, 0, 0, 1])
    token_loss, token_gradient = loss_and_gradient(inputs, LossConfig())
    assert token_loss == pytest.approx(-1.1 - 0.9 - 1.0 + 2.0)
    assert token_gradient.tolist() == pytest.approx([-1.1, -0.9, -1.0, 2.0])
    sequence_loss, sequence_gradient = loss_and_gradient(inputs, LossConfig(token_level_loss=False))
    assert sequence_loss == pytest.approx(-(1.1 + 0.9 + 1.0) / 3 + 2.0)
    assert sequence_gradient.tolist() == pytest.approx([-1.1 / 3, -0.9 / 3, -1.0 / 3, 2.0])


def test_the_denominator_follows_the_aggregation():
    denominators = Denominators(tokens=120.0, sequences=8.0)
    assert denominator(LossConfig(), denominators) == 120.0
    assert denominator(LossConfig(token_level_loss=False), denominators) == 8.0


def test_gspo_takes_the_geometric_mean_of_a_sequence_as_the_ratio_of_its_tokens():
    # Sequence 0: sqrt(1.44 x 1) = 1.2. Sequence 1: 0.9. Per-token clipping at 1.25 would cut the 1.44.
    inputs = make_inputs([1.44, 1.0, 0.9], [2.0, 2.0, -1.0], [0, 0, 1])
    config = LossConfig(sequence_level_importance_ratios=True, token_level_loss=False, ratio_clip_max=0.25)
    loss, gradient = loss_and_gradient(inputs, config)
    assert loss == pytest.approx(-1.2 * 2 + 0.9)
    # d(mean of tokens) = A s / |y| for each token of the sequence.
    assert gradient.tolist() == pytest.approx([-1.2, -1.2, 0.9])


def test_gspo_clips_whole_sequences():
    # Sequence 0: 1.4 x 1.1 -> 1.2410 is above 1.2: no gradient, not even for the token at 1.1.
    inputs = make_inputs([1.4, 1.1, 0.9], [2.0, 2.0, -1.0], [0, 0, 1])
    config = LossConfig(sequence_level_importance_ratios=True, token_level_loss=False)
    loss, gradient = loss_and_gradient(inputs, config)
    assert loss == pytest.approx(-1.2 * 2 + 0.9)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 0.9])


def test_importance_correction_weights_each_token_up_to_its_cap_without_gradient():
    # Sampled with 0.5, 0.2, 0.05 where the previous policy has 0.25: weights 0.5, 1.25 and 5, cut at 2.
    inputs = replace(make_inputs([1.0, 1.1, 0.9], [1.0] * 3), sampling_logprobs_T=torch.tensor([0.5, 0.2, 0.05]).log())
    config = LossConfig(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=2.0)
    loss, gradient = loss_and_gradient(inputs, config)
    assert loss == pytest.approx(-(0.5 + 1.25 * 1.1 + 2 * 0.9))
    assert gradient.tolist() == pytest.approx([-0.5, -1.25 * 1.1, -2 * 0.9])


def test_importance_correction_without_a_cap():
    inputs = replace(make_inputs([1.0], [1.0]), sampling_logprobs_T=torch.tensor([0.05]).log())
    config = LossConfig(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=None)
    assert loss_and_gradient(inputs, config)[0] == pytest.approx(-5.0)


def test_importance_correction_of_the_current_policy_has_no_gradient_of_its_own():
    # Current 0.25, no previous: weight 0.25 / 0.5. With a gradient through the weight it would be -1.
    inputs = make_inputs([1.0], [1.0])
    inputs = replace(inputs, prev_logprobs_T=None, sampling_logprobs_T=torch.tensor([0.5]).log())
    loss, gradient = loss_and_gradient(inputs, LossConfig(use_importance_sampling_correction=True))
    assert (loss, gradient.item()) == pytest.approx((-0.5, -0.5))


def test_importance_correction_reads_the_sampling_distribution_not_the_generators():
    inputs = replace(make_inputs([1.0], [1.0]), generation_logprobs_T=torch.tensor([0.05]).log())
    assert loss_and_gradient(inputs, LossConfig(use_importance_sampling_correction=True))[0] == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("kind", "kl", "kl_gradient"),
    # Policy 0.25, reference 0.5: d = ln 2. The gradient by the log-prob: 1, -d, 1 - exp(d).
    [
        ("k1", -math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, -math.log(2)),
        ("k3", 1 - math.log(2), -1.0),
    ],
)
def test_kl_penalty_adds_its_weight_times_the_estimate(kind, kl, kl_gradient):
    inputs = replace(make_inputs([1.0], [3.0]), reference_logprobs_T=torch.tensor([0.5]).log())
    config = LossConfig(reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind)
    loss, gradient = loss_and_gradient(inputs, config)
    assert loss == pytest.approx(-3.0 + 0.1 * kl)
    assert gradient.item() == pytest.approx(-3.0 + 0.1 * kl_gradient)
    assert metrics_of(inputs, config)["train/kl_penalty"] == pytest.approx(kl, rel=1e-5)


def test_kl_penalty_is_not_scaled_by_the_importance_correction():
    inputs = make_inputs([1.0], [0.0])
    inputs = replace(
        inputs,
        reference_logprobs_T=torch.tensor([0.5]).log(),
        sampling_logprobs_T=torch.tensor([0.125]).log(),
    )
    config = LossConfig(reference_policy_kl_penalty=1.0, use_importance_sampling_correction=True)
    assert loss_and_gradient(inputs, config)[0] == pytest.approx(1 - math.log(2))


def test_a_kl_penalty_needs_reference_logprobs():
    with pytest.raises(ValueError, match="reference_logprobs_T"):
        policy_loss(make_inputs([1.0], [1.0]), LossConfig(reference_policy_kl_penalty=0.1))


def test_only_a_kl_penalty_gives_a_group_without_advantages_a_gradient():
    inputs = make_inputs([1.0, 1.3], [0.0, 0.0])
    inputs = replace(inputs, reference_logprobs_T=torch.tensor([0.5, 0.1]).log())
    without, with_kl = LossConfig(), LossConfig(reference_policy_kl_penalty=0.1)
    assert not needs_all_groups(without)
    assert not loss_and_gradient(inputs, without)[1].any()
    assert needs_all_groups(with_kl)
    assert loss_and_gradient(inputs, with_kl)[1].all()


def test_a_ratio_beyond_fp32_stays_a_number():
    inputs = replace(make_inputs([1.0] * 3, [1.0, -1.0, 0.0]), prev_logprobs_T=torch.full((3,), -200.0))
    loss, gradient = loss_and_gradient(inputs, LossConfig())
    assert math.isfinite(loss)
    assert torch.isfinite(gradient).all()


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="at least one completion token"):
        policy_loss(replace(make_inputs([1.0], [1.0]), logprobs_T=torch.zeros(0)), LossConfig())


def test_metrics_of_known_probabilities():
    # Before the batch 0.25; now 0.375, 0.25, 0.125; the generator had 0.5, 0.25, 0.2.
    inputs = make_inputs([1.5, 1.0, 0.5], [2.0, -1.0, 0.5])
    inputs = replace(inputs, generation_logprobs_T=torch.tensor([0.5, 0.25, 0.2]).log())
    metrics = metrics_of(inputs, LossConfig(ratio_clip_min=0.1, ratio_clip_max=0.3))
    entropy = -(0.375 / 0.5 * math.log(0.375) + math.log(0.25) + 0.125 / 0.2 * math.log(0.125)) / 3
    gen_kl = ((0.5 - 1 - math.log(0.5)) + 0.0 + (1.25 - 1 - math.log(1.25))) / 3
    assert metrics == pytest.approx(
        {
            "train/token_mult_prob_error": (2.0 + 1.0 + 1.25) / 3,
            "train/gen_kl_error": gen_kl,
            "train/probs_ratio": 1.0,
            "train/probs_ratio_min": 0.5,
            "train/probs_ratio_max": 1.5,
            "train/probs_ratio_clamped": (1.3 + 1.0 + 0.9) / 3,
            "train/probs_ratio_clamped_min": 0.9,
            "train/probs_ratio_clamped_max": 1.3,
            "train/approx_entropy": entropy,
            "train/advantages/mean": 0.5,
            "train/advantages/min": -1.0,
            "train/advantages/max": 2.0,
        },
        rel=1e-5,
    )


def test_mismatch_compares_the_current_policy_where_there_is_no_previous_one():
    inputs = replace(make_inputs([1.0], [1.0]), prev_logprobs_T=None, generation_logprobs_T=torch.tensor([0.5]).log())
    assert metrics_of(inputs)["train/token_mult_prob_error"] == pytest.approx(2.0)


def test_a_given_entropy_is_reported_as_it_is():
    inputs = replace(make_inputs([1.0, 1.0], [1.0, 1.0]), entropy_T=torch.tensor([1.0, 4.0]))
    assert metrics_of(inputs)["train/approx_entropy"] == 2.5


def random_inputs(lengths: Sequence[int]) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    logprobs = -torch.rand(tokens, generator=generator) * 3 - 0.05

    def near() -> torch.Tensor:
        return logprobs + 0.3 * torch.randn(tokens, generator=generator)

    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return PolicyLossInputs(
        logprobs_T=logprobs.clone().requires_grad_(),
        generation_logprobs_T=near(),
        sampling_logprobs_T=near(),
        prev_logprobs_T=near(),
        reference_logprobs_T=near(),
        advantages_T=torch.randn(len(lengths), generator=generator)[sequence],
        sequence_T=sequence,
        num_sequences=len(lengths),
        entropy_T=torch.rand(tokens, generator=generator),
    )


def part_of(inputs: PolicyLossInputs, first: int, end: int) -> PolicyLossInputs:
    """The sequences from `first` to before `end`, as a microbatch of their own."""
    chosen = (inputs.sequence_T >= first) & (inputs.sequence_T < end)
    tensors = {name: value[chosen] for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    return replace(inputs, **tensors | {"sequence_T": tensors["sequence_T"] - first}, num_sequences=end - first)


CONFIGS = {
    "token": LossConfig(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True, ratio_clip_c=1.5),
    "sequence": LossConfig(token_level_loss=False, reference_policy_kl_penalty=0.1, reference_policy_kl_type="k2"),
    "gspo": LossConfig(token_level_loss=False, sequence_level_importance_ratios=True, ratio_clip_max=0.05),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6], [3], [1, 5]])
def test_microbatches_add_up_to_the_whole(config, cuts):
    inputs = random_inputs([3, 1, 7, 4, 2, 9, 5])
    whole, whole_stats = policy_loss(inputs, config)
    (whole_gradient,) = torch.autograd.grad(whole, inputs.logprobs_T)
    edges = [0, *cuts, 7]
    parts = [policy_loss(part_of(inputs, *edge), config) for edge in pairwise(edges)]
    total = torch.stack([loss for loss, _ in parts]).sum()
    (gradient,) = torch.autograd.grad(total, inputs.logprobs_T)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(gradient, whole_gradient)
    assert reduce(merge([stats for _, stats in parts])) == pytest.approx(reduce(whole_stats))


def test_the_order_of_tokens_does_not_matter():
    inputs = random_inputs([3, 1, 7])
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    shuffled = {name: value[order] for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    for config in CONFIGS.values():
        loss, _ = policy_loss(inputs, config)
        torch.testing.assert_close(policy_loss(replace(inputs, **shuffled), config)[0], loss)
