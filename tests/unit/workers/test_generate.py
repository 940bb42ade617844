"""Generation by the ranks that train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from headwater.data.types import Problem, Prompt, SamplingParams
from headwater.workers.generate import TrainerGenerator
from headwater.workers.group import InlineGroup
from headwater.workers.train_rank import TrainRank


class _Rank:
    def __init__(self) -> None:
        self.asked: Sequence[Prompt] = ()

    def generate(self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams) -> list[Any]:
        self.asked = prompts
        return []


def test_objects_of_a_problem_stay_with_the_rewards() -> None:
    rank = _Rank()
    problem = Problem(7, [{"role": "user", "content": "x"}], answer="y", metadata={"score_answer": lambda: 1})
    ranks = cast(InlineGroup[TrainRank], InlineGroup("trainer", rank))
    TrainerGenerator(ranks).generate([Prompt(3, problem, (1, 2))], 1, SamplingParams(max_new_tokens=1))
    (asked,) = rank.asked
    assert (asked.draw, asked.token_ids, asked.problem.index) == (3, (1, 2), 7)
    assert (asked.problem.metadata, asked.problem.answer) == ({}, None)
