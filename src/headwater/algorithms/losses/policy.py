"""The clipped policy loss: GRPO and its variants, as a pure function of tensors.

Per token t of a sequence i, with A its advantage:

    ratio     = exp(logprob - prev_logprob)                                     (PPO, arXiv:1707.06347)
                or exp of its mean over the sequence                            (GSPO, arXiv:2507.18071)
    surrogate = min(ratio * A, clip(ratio, 1 - ratio_clip_min, 1 + ratio_clip_max) * A)
                and for A < 0 not below ratio_clip_c * A                        (dual clip, arXiv:1912.09729)
    weight    = min(exp(prev_logprob - sampling_logprob), cap), no gradient     (truncated importance sampling)
    loss      = -weight * surrogate + reference_policy_kl_penalty * KL(policy || reference)

Summed over tokens, or over sequences of each one's token mean. The caller divides by a denominator of the whole
global batch, so that a batch may be cut into microbatches in any way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.algorithms.kl import kl_estimate
from headwater.config.schema import LossConfig
from headwater.metrics.stat import Stat

MAX_LOG_RATIO = 20.0
"""In nats. A larger log-ratio is cut before exp, so that infinity times zero never makes a NaN."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """The completion tokens of a microbatch, flattened over its sequences: [T] each.

    logprobs_T: fp32, of the policy being trained; requires grad.
    generation_logprobs_T: fp32, as the generator computed them, under softmax(logits / temperature).
    sampling_logprobs_T: fp32, under the distribution really sampled from (after top-k and top-p).
    prev_logprobs_T: fp32, of the policy before the batch's first optimizer step; None: the current ones.
    reference_logprobs_T: fp32, of the frozen reference policy; None: there is none.
    advantages_T: fp32, the advantage of the token's sequence.
    sequence_T: int64, the token's sequence within the microbatch, 0 to num_sequences - 1.
    entropy_T: fp32, of the policy's distribution at the token; a metric only; None: it is estimated.
    """

    logprobs_T: torch.Tensor
    generation_logprobs_T: torch.Tensor
    sampling_logprobs_T: torch.Tensor
    prev_logprobs_T: torch.Tensor | None
    reference_logprobs_T: torch.Tensor | None
    advantages_T: torch.Tensor
    sequence_T: torch.Tensor
    num_sequences: int
    entropy_T: torch.Tensor | None = None


@dataclass(frozen=True)
class Denominators:
    """Of one optimizer step: completion tokens and sequences of the global batch, those of skipped groups included."""

    tokens: float
    sequences: float


def denominator(config: LossConfig, denominators: Denominators) -> float:
    """What the sum that `policy_loss` returns is divided by: tokens, or sequences."""
    return denominators.tokens if config.token_level_loss else denominators.sequences


def needs_all_groups(config: LossConfig) -> bool:
    """Whether a group whose advantages are all zero still has a gradient: from the KL penalty alone."""
    return config.reference_policy_kl_penalty > 0


def policy_loss(inputs: PolicyLossInputs, config: LossConfig) -> tuple[torch.Tensor, dict[str, Stat]]:
    """The unreduced loss of a microbatch and its metrics.

    Returns a scalar fp32 with gradient: the sum over tokens (`token_level_loss`) or over sequences of each one's
    token mean; divide by `denominator`. The metrics carry their weights and add up over microbatches.
    Raises ValueError without tokens, and for a KL penalty without reference log-probs.
    """
    if not inputs.logprobs_T.numel():
        raise ValueError("a microbatch needs at least one completion token")
    if config.reference_policy_kl_penalty > 0 and inputs.reference_logprobs_T is None:
        raise ValueError("reference_policy_kl_penalty is above 0 and reference_logprobs_T is None")

    logprobs_T = inputs.logprobs_T
    prev_T = (logprobs_T if inputs.prev_logprobs_T is None else inputs.prev_logprobs_T).detach()
    ratio_T = _ratio(logprobs_T, prev_T, inputs, config)
    clamped_T = ratio_T.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)

    loss_T = -_surrogate(ratio_T, clamped_T, inputs.advantages_T, config.ratio_clip_c)
    if config.use_importance_sampling_correction:
        loss_T = loss_T * _importance_weight(prev_T, inputs.sampling_logprobs_T, config)
    kl_T = None
    if inputs.reference_logprobs_T is not None:
        kl_T = kl_estimate(logprobs_T, inputs.reference_logprobs_T, config.reference_policy_kl_type)
        if config.reference_policy_kl_penalty > 0:
            loss_T = loss_T + config.reference_policy_kl_penalty * kl_T

    if not config.token_level_loss:
        loss_T = loss_T / _tokens_of_own_sequence(inputs)
    return loss_T.sum(), _metrics(inputs, prev_T, ratio_T, clamped_T, kl_T)


def _ratio(
    logprobs_T: torch.Tensor, prev_T: torch.Tensor, inputs: PolicyLossInputs, config: LossConfig
) -> torch.Tensor:
    """Probability ratio of the policy to the one before the batch: [T]; equal within a sequence for GSPO."""
    log_ratio_T = logprobs_T - prev_T
    if config.sequence_level_importance_ratios:
        share_T = log_ratio_T / _tokens_of_own_sequence(inputs)
        mean_S = torch.zeros(inputs.num_sequences, dtype=share_T.dtype, device=share_T.device)
        log_ratio_T = mean_S.index_add(0, inputs.sequence_T, share_T)[inputs.sequence_T]
    return log_ratio_T.clamp(max=MAX_LOG_RATIO).exp()


def _surrogate(
    ratio_T: torch.Tensor, clamped_T: torch.Tensor, advantages_T: torch.Tensor, dual_clip: float | None
) -> torch.Tensor:
    """The pessimistic clipped objective, to be maximized: [T]."""
    surrogate_T = torch.minimum(ratio_T * advantages_T, clamped_T * advantages_T)
    if dual_clip is None:
        return surrogate_T
    bounded_T = torch.maximum(surrogate_T, dual_clip * advantages_T)
    return torch.where(advantages_T < 0, bounded_T, surrogate_T)


def _importance_weight(prev_T: torch.Tensor, sampling_T: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Probability of the trainer over that of the sampler, cut at the cap, without gradient: [T]."""
    weight_T = (prev_T - sampling_T).clamp(max=MAX_LOG_RATIO).exp()
    cap = config.truncated_importance_sampling_ratio
    return weight_T if cap is None else weight_T.clamp(max=cap)


def _tokens_of_own_sequence(inputs: PolicyLossInputs) -> torch.Tensor:
    """For each token, how many tokens its sequence has: [T] int64."""
    return torch.bincount(inputs.sequence_T, minlength=inputs.num_sequences)[inputs.sequence_T]


@torch.no_grad()
def _metrics(
    inputs: PolicyLossInputs,
    prev_T: torch.Tensor,
    ratio_T: torch.Tensor,
    clamped_T: torch.Tensor,
    kl_T: torch.Tensor | None,
) -> dict[str, Stat]:
    """Means over tokens and extremes, under the tags of `train/`.

    token_mult_prob_error: exp(|prev - generation|): the factor by which trainer and generator disagree.
    gen_kl_error: k3 estimate of KL(generator || trainer).
    approx_entropy: of entropy_T, or estimated as -(p / p_generation) log p at the sampled tokens.
    kl_penalty: KL to the reference policy, before its weight; absent without a reference policy.
    """
    logprobs_T, generation_T, advantages_T = inputs.logprobs_T, inputs.generation_logprobs_T, inputs.advantages_T
    entropy_T = inputs.entropy_T
    if entropy_T is None:
        entropy_T = -(logprobs_T - generation_T).exp() * logprobs_T
    mean_over_tokens = {
        "token_mult_prob_error": (prev_T - generation_T).abs().exp(),
        "gen_kl_error": kl_estimate(generation_T, prev_T, "k3"),
        "probs_ratio": ratio_T,
        "probs_ratio_clamped": clamped_T,
        "approx_entropy": entropy_T,
        "advantages/mean": advantages_T,
    }
    if kl_T is not None:
        mean_over_tokens["kl_penalty"] = kl_T
    extremes = {"probs_ratio_": ratio_T, "probs_ratio_clamped_": clamped_T, "advantages/": advantages_T}

    # One transfer from the device, not one a metric.
    totals = [values_T.double().sum() for values_T in mean_over_tokens.values()]
    bounds = [bound for values_T in extremes.values() for bound in torch.aminmax(values_T.double())]
    numbers = torch.stack([*totals, *bounds]).tolist()

    tokens = logprobs_T.numel()
    stats = {f"train/{name}": Stat.mean(numbers.pop(0), tokens) for name in mean_over_tokens}
    for name in extremes:
        stats[f"train/{name}min"] = Stat.min(numbers.pop(0))
        stats[f"train/{name}max"] = Stat.max(numbers.pop(0))
    return stats
