import math
from typing import Any

import pytest
import torch

from headwater.algorithms.kl import kl_estimate

LN2 = math.log(2)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Policy 1/2 and reference 1/4, then the other way round: d = -ln 2, then +ln 2.
        ("k1", [LN2, -LN2]),
        ("k2", [LN2**2 / 2, LN2**2 / 2]),
        ("k3", [0.5 - 1 + LN2, 2 - 1 - LN2]),
    ],
)
def test_estimates_of_known_probabilities(kind, expected):
    estimate = kl_estimate(torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log(), kind)
    torch.testing.assert_close(estimate, torch.tensor(expected))


@pytest.mark.parametrize(
    ("kind", "gradients"),
    # d/dlogp: k1: 1; k2: -d; k3: 1 - exp(d); at d = -ln 2 and +ln 2.
    [("k1", [1.0, 1.0]), ("k2", [LN2, -LN2]), ("k3", [0.5, -1.0])],
)
def test_gradients_reach_the_policy(kind, gradients):
    logprobs = torch.tensor([0.5, 0.25]).log().requires_grad_()
    kl_estimate(logprobs, torch.tensor([0.25, 0.5]).log(), kind).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradients))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_equal_policies_have_none(kind):
    logprobs = torch.tensor([-0.1, -3.0, -50.0])
    assert torch.equal(kl_estimate(logprobs, logprobs.clone(), kind).abs(), torch.zeros(3))


def test_k1_and_k3_are_unbiased():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        expectation = (policy * kl_estimate(policy.log(), reference.log(), kind)).sum()
        torch.testing.assert_close(expectation, exact)


def test_k3_keeps_small_differences():
    # d^2 / 2 + d^3 / 6 at d = 1e-3; exp(d) - 1 in fp32 would lose half of its digits.
    estimate = kl_estimate(torch.zeros(1), torch.tensor([1e-3]), "k3")
    torch.testing.assert_close(estimate, torch.tensor([5.0016671e-7]), rtol=3e-4, atol=0)


def test_k3_goes_on_along_its_tangent_beyond_ten_nats():
    logprobs = torch.tensor([-12.0, -200.0, -10.0]).requires_grad_()
    estimate = kl_estimate(logprobs, torch.zeros(3), "k3")
    at_ten, slope = math.exp(10) - 11, math.exp(10) - 1
    torch.testing.assert_close(estimate, torch.tensor([at_ten + 2 * slope, at_ten + 190 * slope, at_ten]))
    estimate.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.full((3,), -slope))


def test_k3_is_exact_where_the_policy_is_far_likelier():
    # exp(-200) - 1 + 200.
    assert kl_estimate(torch.zeros(1), torch.tensor([-200.0]), "k3").item() == 199.0


def test_another_kind_is_refused():
    kind: Any = "k4"
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), kind)
