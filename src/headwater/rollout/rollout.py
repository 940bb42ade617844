"""From drawn prompts to scored groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from headwater.data.datasets import ProblemSource
from headwater.data.prompts import PromptCursor
from headwater.data.tokenize import check_fits, encode_prompt
from headwater.data.types import Completion, Group, Problem, Prompt, SamplingParams
from headwater.engines.base import GenerateEngine
from headwater.errors import UserError
from headwater.rollout.env import Environment, Episode, Score


@dataclass(frozen=True)
class PromptStream:
    """Prompts of a run, drawn in a reproducible order and tokenized.

    held_out: questions that are never drawn, because the run is validated on them.
    """

    source: ProblemSource
    cursor: PromptCursor
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    max_total: int
    held_out: frozenset[str] = frozenset()

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts.

        Raises UserError where a prompt leaves no room for its completion, or where all are held out.
        """
        prompts: list[Prompt] = []
        passed_over = 0
        while len(prompts) < count:
            ((draw, row),) = self.cursor.next(1)
            problem = self.source[row]
            if problem.question not in self.held_out:
                prompts.append(self._prompt(draw, problem))
                passed_over = 0
                continue
            passed_over += 1
            if passed_over >= 2 * len(self.source):  # a whole epoch, wherever it began
                raise UserError("every row of data.train is in data.validation too: set data.exclude_validation=false")
        return prompts

    def all(self) -> list[Prompt]:
        """Every row once, in order: for validation."""
        return [self._prompt(problem.index, problem) for problem in self.source]

    def _prompt(self, draw: int, problem: Problem) -> Prompt:
        token_ids = encode_prompt(self.tokenizer, problem.messages)
        check_fits(token_ids, self.max_new_tokens, self.max_total, row=problem.index)
        return Prompt(draw, problem, token_ids)


def score_groups(
    environment: Environment, prompts: Sequence[Prompt], answers: Sequence[tuple[Completion, ...]]
) -> list[Group]:
    """The completions of each prompt with their rewards."""
    scores = _score(environment, prompts, answers)
    return [
        Group(prompt, completions, torch.tensor([score.total for score in group_scores], dtype=torch.float32))
        for prompt, completions, group_scores in zip(prompts, answers, scores, strict=True)
    ]


@dataclass(frozen=True)
class Validation:
    """accuracy: share of completions that the environment calls correct. reward: mean total. length: mean tokens."""

    accuracy: float
    reward: float
    length: float


def validate(
    generator: GenerateEngine, environment: Environment, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[list[Completion], list[Score]]:
    """One greedy completion of each prompt, and its score."""
    answers = generator.generate(prompts, 1, replace(params, temperature=0.0))
    scores = _score(environment, prompts, answers)
    return [completions[0] for completions in answers], [group_scores[0] for group_scores in scores]


def summarize(completions: Sequence[Completion], scores: Sequence[Score]) -> Validation:
    """Means over a validation set, which must not be empty."""
    count = len(completions)
    return Validation(
        accuracy=sum(score.correct for score in scores) / count,
        reward=sum(score.total for score in scores) / count,
        length=sum(len(completion.token_ids) for completion in completions) / count,
    )


def _score(
    environment: Environment, prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]]
) -> list[list[Score]]:
    episodes = [
        Episode(prompt.problem, completion.text, completion.finish_reason)
        for prompt, completions in zip(prompts, answers, strict=True)
        for completion in completions
    ]
    scores = iter(environment.score(episodes))
    return [[next(scores) for _ in completions] for completions in answers]
