"""All that a run consists of, wired together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import Config
from headwater.controller.state import TrainerState
from headwater.data.types import Prompt, SamplingParams
from headwater.engines.base import GenerateEngine, TrainEngine
from headwater.metrics.progress import Progress
from headwater.metrics.sinks import MetricSink
from headwater.refit.sync import WeightSync
from headwater.rollout.env import Environment
from headwater.rollout.rollout import PromptStream
from headwater.workers.train import PolicyWorker
from headwater.workers.value import ValueWorker


@dataclass(frozen=True)
class Runtime:
    """One run. `state` is what changes and is saved besides tensors; the rest is fixed for the process.

    value: with PPO alone.
    """

    config: Config
    config_yaml: str
    state: TrainerState
    prompts: PromptStream
    validation: Sequence[Prompt]
    environment: Environment
    sampling: SamplingParams
    policy: PolicyWorker
    value: ValueWorker | None
    generator: GenerateEngine
    sync: WeightSync
    checkpoints: CheckpointManager | None
    save_tokenizer: Callable[[Path], object]
    sinks: Sequence[MetricSink]
    progress: Progress

    @property
    def trained(self) -> dict[str, TrainEngine]:
        """The engines whose state a checkpoint holds, by the name of its component."""
        engines: dict[str, TrainEngine] = {"policy": self.policy.engine}
        if self.value is not None:
            engines["value"] = self.value.engine
        return engines
