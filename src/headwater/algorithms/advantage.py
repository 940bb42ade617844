"""Group advantages: how much better a completion is than the others of its prompt.

Each function maps rewards [N, G] fp32 (N groups of G completions) to advantages [N, G] fp32. A group whose
rewards are all equal gets exact zeros, so that it can be told from one with a signal.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

AdvantageFn = Callable[[torch.Tensor], torch.Tensor]
"""rewards [N, G] -> advantages [N, G]. Raises ValueError where rewards have another shape or are not finite."""

STD_EPSILON = 1e-6
"""Added to a group's standard deviation before dividing by it."""


def mean_std(rewards: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) within the group, std unbiased: GRPO (Shao et al., 2024, arXiv:2402.03300)."""
    deviation = _deviation(rewards)
    return deviation / (deviation.std(dim=1, keepdim=True) + STD_EPSILON)


def leave_one_out(rewards: torch.Tensor) -> torch.Tensor:
    """r minus the mean of the other G - 1 rewards: RLOO (Ahmadian et al., 2024, arXiv:2402.14740)."""
    deviation = _deviation(rewards)
    size = rewards.shape[1]
    return deviation * (size / (size - 1))


def mean(rewards: torch.Tensor) -> torch.Tensor:
    """r - mean within the group, not divided by the std: Dr. GRPO (Liu et al., 2025, arXiv:2503.20783)."""
    return _deviation(rewards)


ADVANTAGES: dict[str, AdvantageFn] = {"mean_std": mean_std, "leave_one_out": leave_one_out, "mean": mean}
"""By the name that `grpo.advantage` gives."""


def _deviation(rewards: torch.Tensor) -> torch.Tensor:
    """r - mean of each group, fp32."""
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards must be [groups, 2 or more completions], got {list(rewards.shape)}")
    if not torch.isfinite(rewards).all():
        raise ValueError("rewards must be finite, got NaN or infinity")
    # Relative to the group's first reward: the mean of equal numbers such as 0.1 is not that number in
    # fp32, and dividing what is left by a std of the same size would make advantages out of rounding.
    relative = rewards.float() - rewards[:, :1].float()
    return relative - relative.mean(dim=1, keepdim=True)
