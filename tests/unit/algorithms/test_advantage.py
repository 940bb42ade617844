import math

import pytest
import torch

from headwater.algorithms.advantage import ADVANTAGES, leave_one_out, mean, mean_std


def test_mean_std_divides_the_deviation_by_the_unbiased_std():
    # Group 1: mean 0.25, squared deviations 0.5625 + 3 x 0.0625 = 0.75, over 3 = 0.25, std 0.5.
    # Group 2: mean 3, deviations -2, -1, 1, 2, squares sum to 10, std sqrt(10 / 3) = 1.825742.
    advantages = mean_std(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 4.0, 5.0]]))
    expected = [[1.5, -0.5, -0.5, -0.5], [-1.095445, -0.547723, 0.547723, 1.095445]]
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=5e-6, rtol=0)


def test_mean_std_adds_a_millionth_to_the_std():
    # Deviations of half a millionth, std 0.7071e-6: 0.5 / 1.7071 = 0.29289.
    advantages = mean_std(torch.tensor([[0.0, 1e-6]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.292893, 0.292893]]), atol=1e-5, rtol=0)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2.
    torch.testing.assert_close(leave_one_out(torch.tensor([[1.0, 2.0, 6.0]])), torch.tensor([[-3.0, -1.5, 4.5]]))


def test_mean_subtracts_the_group_mean_alone():
    torch.testing.assert_close(mean(torch.tensor([[1.0, 2.0, 6.0]])), torch.tensor([[-2.0, -1.0, 3.0]]))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, -0.7, 1 / 3, 1e-30, 1e30, 123456.789])
@pytest.mark.parametrize("size", [2, 3, 5, 7, 16, 33])
def test_equal_rewards_give_exact_zeros(name, reward, size):
    advantages = ADVANTAGES[name](torch.full((2, size), reward))
    assert torch.equal(advantages, torch.zeros(2, size))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_do_not_touch_each_other(name):
    rewards = torch.tensor([[0.0, 1.0, 0.5], [7.0, 9.0, 8.5]])
    both = ADVANTAGES[name](rewards)
    assert torch.equal(both[1:], ADVANTAGES[name](rewards[1:]))
    assert both.dtype == torch.float32
    assert torch.allclose(both.sum(1), torch.zeros(2), atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused(name, bad):
    with pytest.raises(ValueError, match="finite"):
        ADVANTAGES[name](torch.tensor([[0.0, 1.0], [bad, 1.0]]))


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2, 2)])
def test_a_group_without_a_baseline_is_refused(name, shape):
    with pytest.raises(ValueError, match="2 or more completions"):
        ADVANTAGES[name](torch.zeros(shape))
