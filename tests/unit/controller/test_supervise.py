"""Tolerated failures have a budget."""

from __future__ import annotations

import logging

import pytest

from headwater.controller.supervise import FailureBudget
from headwater.errors import HeadwaterError


def test_each_tolerated_failure_is_shown_and_the_first_above_the_budget_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    budget, causes = FailureBudget("environment errors", 2), [ValueError(f"answer {number}") for number in range(3)]

    with caplog.at_level(logging.WARNING):
        budget.spend(causes[0])
        budget.spend(causes[1])
    with pytest.raises(
        HeadwaterError, match="3 environment errors, and 2 are tolerated: ValueError: answer 2"
    ) as raised:
        budget.spend(causes[2])

    assert [record.message for record in caplog.records] == [
        "1 of 2 tolerated environment errors: ValueError: answer 0",
        "2 of 2 tolerated environment errors: ValueError: answer 1",
    ]
    assert raised.value.__cause__ is causes[2]
    assert budget.count == 3


def test_a_budget_of_nothing_tolerates_nothing() -> None:
    with pytest.raises(HeadwaterError, match="1 environment errors, and 0 are tolerated: KeyError"):
        FailureBudget("environment errors", 0).spend(KeyError("entry"))
