"""All that a run consists of, wired together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from headwater.config.schema import Config
from headwater.controller.state import TrainerState
from headwater.data.types import Prompt, SamplingParams
from headwater.engines.base import GenerateEngine
from headwater.metrics.progress import Progress
from headwater.metrics.sinks import MetricSink
from headwater.refit.sync import WeightSync
from headwater.rollout.env import Environment
from headwater.rollout.rollout import PromptStream
from headwater.workers.group import WorkerGroup
from headwater.workers.train_rank import TrainRank

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Runtime:
    """One run. `state` is what changes and is saved besides tensors; the rest is fixed for the process.

    ranks: what trains and saves, in this process or in many.
    """

    config: Config
    state: TrainerState
    prompts: PromptStream
    validation: Sequence[Prompt]
    environment: Environment
    sampling: SamplingParams
    ranks: WorkerGroup[TrainRank]
    generator: GenerateEngine
    sync: WeightSync
    sinks: Sequence[MetricSink]
    progress: Progress

    def call(self, method: Callable[Concatenate[TrainRank, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of all ranks at once, such as `TrainRank.score`; what rank 0 answers."""
        return self.ranks.call(method, *args, **kwargs)[0]
