from __future__ import annotations

import pytest
import torch

from headwater.algorithms.gae import explained_variance, gae, token_rewards, whiten


def test_the_recursion_by_hand_over_two_completions_of_unequal_length() -> None:
    rewards_T = torch.tensor([0.0, 0.0, 1.0, 2.0])
    values_T = torch.tensor([0.5, 0.25, 0.75, 1.0])
    advantages_T, returns_T = gae(rewards_T, values_T, torch.tensor([3, 1]), gamma=0.5, lam=0.5)
    # Backwards: 1 - 0.75; 0.5 * 0.75 - 0.25 + 0.25 * 0.25; 0.5 * 0.25 - 0.5 + 0.25 * 0.1875; and 2 - 1 alone.
    expected_T = torch.tensor([-0.328125, 0.1875, 0.25, 1.0])
    torch.testing.assert_close(advantages_T, expected_T, rtol=0, atol=0)
    torch.testing.assert_close(returns_T, expected_T + values_T, rtol=0, atol=0)


def test_lambda_one_gives_the_discounted_rewards_to_come_whatever_the_values() -> None:
    rewards_T = torch.tensor([1.0, 2.0, 4.0])
    _, returns_T = gae(rewards_T, torch.tensor([7.0, -3.0, 11.0]), torch.tensor([3]), gamma=0.5, lam=1.0)
    torch.testing.assert_close(returns_T, torch.tensor([3.0, 4.0, 4.0]))


def test_lambda_zero_gives_the_one_step_error() -> None:
    values_T = torch.tensor([0.5, 0.25])
    advantages_T, _ = gae(torch.tensor([0.0, 1.0]), values_T, torch.tensor([2]), gamma=1.0, lam=0.0)
    torch.testing.assert_close(advantages_T, torch.tensor([-0.25, 0.75]))


def test_a_completion_depends_on_itself_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 1, 3]
    rewards, values = torch.randn(9, generator=generator), torch.randn(9, generator=generator)
    together = gae(rewards, values, torch.tensor(lengths), gamma=0.9, lam=0.8)[0].split(lengths)
    for part, r, v in zip(together, rewards.split(lengths), values.split(lengths), strict=True):
        assert torch.equal(part, gae(r, v, torch.tensor([len(r)]), gamma=0.9, lam=0.8)[0])


def test_the_reward_stands_at_the_last_token_and_the_kl_at_each() -> None:
    lengths_B = torch.tensor([2, 1])
    rewards_B = torch.tensor([1.0, 2.0])
    assert token_rewards(rewards_B, lengths_B, None, 0.0).tolist() == [0.0, 1.0, 2.0]
    kl_T = torch.tensor([1.0, -2.0, 4.0])
    assert token_rewards(rewards_B, lengths_B, kl_T, 0.5).tolist() == [-0.5, 2.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        token_rewards(torch.tensor([bad]), torch.tensor([1]), None, 0.0)


def test_whitening_counts_each_token_alike() -> None:
    # One token of one completion and three of another: the mean of the four is 1, not that of the two means.
    assert whiten(torch.tensor([4.0, 0.0, 0.0, 0.0])).tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], abs=1e-6)


def test_whitening_equal_advantages_gives_zeros() -> None:
    assert whiten(torch.full((3,), 0.1)).tolist() == [0.0, 0.0, 0.0]


def test_explained_variance_of_perfect_constant_and_worse_values() -> None:
    returns_T = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns_T, returns_T) == 1
    assert explained_variance(torch.full((3,), 5.0), returns_T) == 0
    assert explained_variance(-returns_T, returns_T) == -3
    assert explained_variance(returns_T, torch.ones(3)) is None
