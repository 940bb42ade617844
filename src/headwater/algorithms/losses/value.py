"""The clipped loss of the value model, as a pure function of tensors.

Per token, with R its return and v_old its value before the update:

    loss = max((v - R)^2, (clip(v, v_old - clip_range, v_old + clip_range) - R)^2) / 2

Pessimistic like the policy's: a value that left its range in the right direction has no gradient (the loss of the
implementation that belongs to Schulman et al., 2017, arXiv:1707.06347). Without a range it is the squared error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwater.metrics import names
from headwater.metrics.stat import Stat


@dataclass(frozen=True)
class ValueLossInputs:
    """The completion tokens of a microbatch, flattened over its sequences: fp32 [T] each.

    values_T: of the value model being trained; requires grad.
    old_values_T: of the value model before the step's first update.
    returns_T: what the values are fitted to.
    """

    values_T: torch.Tensor
    old_values_T: torch.Tensor
    returns_T: torch.Tensor


def value_loss(inputs: ValueLossInputs, clip_range: float | None) -> tuple[torch.Tensor, dict[str, Stat]]:
    """The unreduced loss of a microbatch and its metrics.

    Returns a scalar fp32 with gradient: the sum over tokens; divide by the tokens of the whole global batch.
    The metrics are means over tokens and add up over microbatches: `train/critic/loss`, and `train/critic/vf_clipfrac`,
    the share of tokens whose clipped error is the larger one.
    Raises ValueError without tokens.
    """
    if not inputs.values_T.numel():
        raise ValueError("a microbatch needs at least one completion token")
    error_T = (inputs.values_T - inputs.returns_T).square()
    is_clipped_T = torch.zeros_like(error_T)
    if clip_range is not None:
        low_T, high_T = inputs.old_values_T - clip_range, inputs.old_values_T + clip_range
        clipped_error_T = (inputs.values_T.clamp(low_T, high_T) - inputs.returns_T).square()
        is_clipped_T = clipped_error_T > error_T
        error_T = torch.maximum(error_T, clipped_error_T)
    loss = error_T.sum() / 2
    tokens = error_T.numel()
    total, clipped = torch.stack([loss.detach().double(), is_clipped_T.sum().double()]).tolist()
    return loss, {
        names.TRAIN_CRITIC_LOSS: Stat.mean(total, tokens),
        names.TRAIN_CRITIC_VF_CLIPFRAC: Stat.mean(clipped, tokens),
    }
