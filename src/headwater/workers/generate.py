"""Generation by the ranks that train, as the controller sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headwater.data.types import Completion, Problem, Prompt, SamplingParams
from headwater.workers.group import WorkerGroup
from headwater.workers.train_rank import TrainRank


class TrainerGenerator:
    """`GenerateEngine` whose weights are the trainer's own; see `engines.base` for the meaning of each method."""

    def __init__(self, ranks: WorkerGroup[TrainRank]) -> None:
        self._ranks = ranks

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        # What a reward needs of a problem, such as a user's objects, stays in this process.
        asked = [replace(prompt, problem=Problem(prompt.problem.index, ())) for prompt in prompts]
        return self._ranks.call(TrainRank.generate, asked, num_samples, params)[0]

    def receive_weights(self, version: int) -> None:
        self._ranks.call(TrainRank.receive_weights, version)
