"""Token rewards, generalized advantage estimation and whitening, over completions of unequal length.

Completions lie one after the other: T tokens in all, B completions, lengths_B their lengths. A completion is an
episode: what follows its last token is worth nothing, also where it was cut at its limit.
"""

from __future__ import annotations

import torch

WHITENING_EPSILON = 1e-8
"""Added to the standard deviation before dividing by it."""


def token_rewards(
    rewards_B: torch.Tensor, lengths_B: torch.Tensor, kl_T: torch.Tensor | None, kl_penalty: float
) -> torch.Tensor:
    """A reward for each token: the completion's at its last one, less `kl_penalty` times `kl_T` everywhere.

    rewards_B fp32; lengths_B int64, each 1 or more; kl_T fp32 [T], None for no penalty. Returns fp32 [T].
    Raises ValueError for a reward that is not finite.
    """
    if not torch.isfinite(rewards_B).all():
        raise ValueError("rewards must be finite, got NaN or infinity")
    ends_B = lengths_B.cumsum(0)
    rewards_T = torch.zeros(int(ends_B[-1]))
    if kl_T is not None:
        rewards_T = rewards_T - kl_penalty * kl_T
    return rewards_T.index_add(0, ends_B - 1, rewards_B)


def gae(
    rewards_T: torch.Tensor, values_T: torch.Tensor, lengths_B: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and the returns to fit the value model to (Schulman et al., 2016, arXiv:1506.02438).

    Within a completion, from its last token t = C - 1 on backwards, with value[C] = advantage[C] = 0:

        delta[t]     = reward[t] + gamma * value[t + 1] - value[t]
        advantage[t] = delta[t] + gamma * lam * advantage[t + 1]
        return[t]    = advantage[t] + value[t]

    rewards_T, values_T: fp32 [T]; value[t] is that of the state before token t. lengths_B: int64, each 1 or more.
    Returns (advantages_T, returns_T), fp32 [T]. Each completion's numbers depend on its own tokens alone.
    """
    size, longest = len(lengths_B), int(lengths_B.max())
    is_token_BC = torch.arange(longest) < lengths_B[:, None]
    rewards_BC, values_BC = (torch.zeros(size, longest).masked_scatter(is_token_BC, x) for x in (rewards_T, values_T))
    advantages_BC = torch.zeros(size, longest)
    next_value_B, next_advantage_B = torch.zeros(size), torch.zeros(size)
    for t in reversed(range(longest)):
        delta_B = rewards_BC[:, t] + gamma * next_value_B - values_BC[:, t]
        # Behind a completion's end all is zero, so that the recursion begins at its own last token.
        advantages_BC[:, t] = delta_B + gamma * lam * next_advantage_B
        next_value_B, next_advantage_B = values_BC[:, t], advantages_BC[:, t]
    advantages_T = advantages_BC[is_token_BC]
    return advantages_T, advantages_T + values_T


def whiten(advantages_T: torch.Tensor) -> torch.Tensor:
    """(a - mean) / (std + 1e-8) over all tokens given, std biased: each token counts alike, whatever its completion.

    advantages_T: fp32 [T], T >= 1; so is the result.
    """
    exact_T = advantages_T.double()
    deviation_T = exact_T - exact_T.mean()
    return (deviation_T / (deviation_T.square().mean().sqrt() + WHITENING_EPSILON)).float()


def explained_variance(values_T: torch.Tensor, returns_T: torch.Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect value model, 0 for a constant one.

    values_T, returns_T: fp32 [T]. None where the returns do not vary.
    """
    returns, errors = returns_T.double(), (returns_T - values_T).double()
    variance = returns.var(correction=0).item()
    return 1 - errors.var(correction=0).item() / variance if variance > 0 else None
