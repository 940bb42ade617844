"""What a training backend and a generation backend offer. The controller decides when; engines only do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.reader import ComponentReader
from headwater.data.types import Completion, Prompt, SamplingParams, TrainSequence
from headwater.metrics.stat import Stat

LossFn = Callable[[torch.Tensor, Sequence[TrainSequence]], tuple[torch.Tensor, dict[str, Stat]]]
"""(log-probs [T] fp32 of the completion tokens, in order, and their sequences) -> (unreduced sum, metrics)."""


@dataclass(frozen=True)
class ForwardBackward:
    """loss_sum: the unreduced sum of the loss over the sequences. stats: metrics of the loss."""

    loss_sum: float
    stats: dict[str, Stat]


@dataclass(frozen=True)
class OptimStep:
    """grad_norm: global L2 norm before clipping. lr: the learning rate of the step taken."""

    grad_norm: float
    lr: float


class TrainEngine(Protocol):
    """A model that can be scored, trained, moved, exported, saved and loaded.

    fence: each method that changes or moves storage passes it first.
    """

    fence: Fence

    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """Log-probability of each completion token, [C] fp32 a sequence, without gradients."""
        ...

    def forward_backward(
        self, sequences: Sequence[TrainSequence], loss_fn: LossFn, denominator: float
    ) -> ForwardBackward:
        """Add the gradients of loss_fn's sum over `denominator` to those accumulated so far."""
        ...

    def optim_step(self) -> OptimStep:
        """Clip, apply and clear the accumulated gradients."""
        ...

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory. What a save has just staged is not copied again.

        Until `onload` the state may be saved, but not used or written.
        """
        ...

    def offload_optimizer(self) -> None:
        """Move master weights and moments alone, so that a forward pass has their memory; `onload` brings them back."""
        ...

    def onload(self) -> None:
        """Move all that was offloaded back to the device."""
        ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and live tensors, tied ones once."""
        ...

    def state_chunks(self) -> Iterator[Chunk]:
        """All that training changes: weights, master weights, moments, steps. Live tensors, read anew at each call."""
        ...

    def load_chunks(self, reader: ComponentReader) -> None:
        """Fill the state in place from a checkpoint."""
        ...


class ValueEngine(TrainEngine, Protocol):
    """A value model. What its loss functions get is values in place of log-probs."""

    def values(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """Value of the state before each completion token, [C] fp32 a sequence, without gradients."""
        ...


class GenerateEngine(Protocol):
    """A model that answers prompts."""

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        """`num_samples` completions of each prompt, in the prompts' order."""
        ...

    def receive_weights(self, version: int) -> None:
        """Generate with the weights of `version` from now on."""
        ...
