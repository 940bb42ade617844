"""Per-token estimates of the KL divergence from a reference policy (Schulman, 2020, "Approximating KL divergence")."""

from __future__ import annotations

import math
from typing import Literal

import torch

K3_LINEAR_FROM = 10.0
"""In nats: from this log-ratio on k3 goes on along its tangent, so that one token can neither overflow nor
drown all others, and still is pulled back."""


def kl_estimate(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """KL(policy || reference) at each token that the policy sampled.

    With d = reference_logprobs - logprobs:
    k1 = -d: unbiased, high variance, negative at times;
    k2 = d^2 / 2: biased, positive; its gradient is the KL's;
    k3 = exp(d) - 1 - d: unbiased, positive; linear from d = 10 on.

    logprobs, reference_logprobs: any one shape, fp32, in nats. Returns that shape; gradients flow to both.
    Raises ValueError for another kind.
    """
    log_ratio = reference_logprobs - logprobs
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        bounded = log_ratio.clamp(max=K3_LINEAR_FROM)
        beyond = torch.relu(log_ratio - K3_LINEAR_FROM)
        return torch.expm1(bounded) - bounded + math.expm1(K3_LINEAR_FROM) * beyond
    raise ValueError(f"KL kind must be k1, k2 or k3, got {kind!r}")
