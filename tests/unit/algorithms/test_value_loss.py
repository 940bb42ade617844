from __future__ import annotations

import pytest
import torch

from headwater.algorithms.losses.value import ValueLossInputs, value_loss
from headwater.metrics.stat import merge, reduce

# Of each token: value now, value before, return. Inside the range; outside it on the way to the return; outside it and
# too far away; on the wrong side.
NOW, BEFORE, RETURNS = [1.1, 2.0, 3.0, -1.0], [1.0, 1.0, 1.0, 0.0], [2.0, 3.0, 1.5, 1.0]


def inputs(rows: slice = slice(None)) -> ValueLossInputs:
    values_T = torch.tensor(NOW[rows], requires_grad=True)
    return ValueLossInputs(values_T, torch.tensor(BEFORE[rows]), torch.tensor(RETURNS[rows]))


def test_each_token_has_the_larger_of_the_clipped_and_the_plain_error() -> None:
    given = inputs()
    loss, stats = value_loss(given, 0.5)
    # 0.9^2; max(1^2, (1.5 - 3)^2); max(1.5^2, 0^2); max(2^2, (-0.5 - 1)^2); all halved.
    assert loss.item() == pytest.approx((0.81 + 2.25 + 2.25 + 4.0) / 2)
    assert reduce(stats) == pytest.approx(
        {"train/critic/loss": (0.81 + 2.25 + 2.25 + 4.0) / 8, "train/critic/vf_clipfrac": 0.25}
    )
    loss.backward()
    # Half the square has the error as its gradient; the token that left its range on the way has none.
    assert given.values_T.grad is not None
    assert given.values_T.grad.tolist() == pytest.approx([-0.9, 0.0, 1.5, -2.0])


def test_without_a_range_it_is_the_squared_error() -> None:
    loss, stats = value_loss(inputs(), None)
    assert loss.item() == pytest.approx((0.81 + 1.0 + 2.25 + 4.0) / 2)
    assert reduce(stats)["train/critic/vf_clipfrac"] == 0


def test_sums_and_metrics_add_up_over_microbatches() -> None:
    whole, whole_stats = value_loss(inputs(), 0.5)
    parts = [value_loss(inputs(rows), 0.5) for rows in (slice(0, 1), slice(1, 4))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    assert reduce(merge(stats for _, stats in parts)) == pytest.approx(reduce(whole_stats))


def test_no_tokens_are_refused() -> None:
    empty = torch.empty(0)
    with pytest.raises(ValueError, match="at least one"):
        value_loss(ValueLossInputs(empty, empty, empty), 0.5)
