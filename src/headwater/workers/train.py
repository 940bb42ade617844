"""The policy as the controller sees it: scoring with its reference, and the two halves of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headwater.algorithms.losses.policy import (
    Denominators,
    PolicyLossInputs,
    denominator,
    needs_all_groups,
    policy_loss,
)
from headwater.config.schema import LossConfig
from headwater.data.types import Group, TrainSequence
from headwater.engines.base import ForwardBackward, OptimStep, TrainEngine
from headwater.metrics.stat import Stat


def train_sequences(groups: Sequence[Group]) -> list[TrainSequence]:
    """Completions of all groups in order."""
    return [
        TrainSequence(
            group=group.prompt.draw,
            prompt_ids=torch.tensor(group.prompt.token_ids),
            completion_ids=torch.tensor(completion.token_ids),
            generation_logprobs=completion.logprobs,
            sampling_logprobs=completion.sampling_logprobs,
        )
        for group in groups
        for completion in group.completions
    ]


def with_advantages(sequences: Sequence[TrainSequence], advantages: torch.Tensor) -> list[TrainSequence]:
    """Sequences in the order of `train_sequences`, with one advantage a completion: [N, G] fp32."""
    return [
        replace(sequence, advantages=advantage.repeat(len(sequence.completion_ids)))
        for sequence, advantage in zip(sequences, advantages.flatten(), strict=True)
    ]


class PolicyWorker:
    """The trained policy and, where the loss has a KL penalty, its frozen reference."""

    def __init__(
        self,
        engine: TrainEngine,
        reference: TrainEngine | None,
        loss: LossConfig,
        *,
        skip_without_signal: bool,
        offload_optimizer_for_logprob: bool = False,
    ) -> None:
        self.engine = engine
        self.reference = reference
        self._loss = loss
        self._offloads_optimizer = offload_optimizer_for_logprob
        self._skips = skip_without_signal and not needs_all_groups(loss)
        self.tokens_trained = 0
        """Completion tokens that went through a backward pass so far."""

    def is_worth_a_step(self, batch: Sequence[TrainSequence]) -> bool:
        """Whether anything of the batch is trained on."""
        return any(self._is_trained(sequence) for sequence in batch)

    def score(
        self, sequences: Sequence[TrainSequence], *, optim_steps: int, for_reward: bool = False
    ) -> list[TrainSequence]:
        """Add what the loss compares with: the reference's log-probs, and the policy's own before the first step.

        With a single optimizer step over the sequences the policy's own are those of the training pass
        itself, so nothing is computed for them, unless they count in the reward (`for_reward`).
        """
        scored = list(sequences)
        if self._offloads_optimizer and (optim_steps > 1 or for_reward or self.reference is not None):
            self.engine.offload_optimizer()
        if optim_steps > 1 or for_reward:
            before = self.engine.logprobs(self._worth_training(scored))
            by_index = iter(before)
            scored = [replace(s, prev_logprobs=next(by_index)) if self._is_trained(s) else s for s in scored]
        if self.reference is not None:
            self.reference.onload()
            reference = self.reference.logprobs(scored)
            self.reference.offload()
            scored = [replace(s, reference_logprobs=logprobs) for s, logprobs in zip(scored, reference, strict=True)]
        self.engine.onload()
        return scored

    def forward_backward(self, batch: Sequence[TrainSequence]) -> ForwardBackward:
        """Accumulate the gradient of the batch's loss, whose denominators count skipped groups too.

        The `loss_sum` returned is divided already: it is the loss of the batch.
        """
        denominators = Denominators(
            tokens=float(sum(len(sequence.completion_ids) for sequence in batch)), sequences=float(len(batch))
        )
        divisor = denominator(self._loss, denominators)
        trained = self._worth_training(batch)
        result = self.engine.forward_backward(trained, self._loss_fn, divisor)
        self.tokens_trained += sum(len(sequence.completion_ids) for sequence in trained)
        return ForwardBackward(result.loss_sum / divisor, result.stats)

    def optim_step(self) -> OptimStep:
        """Apply the accumulated gradient."""
        return self.engine.optim_step()

    def _is_trained(self, sequence: TrainSequence) -> bool:
        return not self._skips or sequence.advantages is None or bool(sequence.advantages.any())

    def _worth_training(self, batch: Sequence[TrainSequence]) -> list[TrainSequence]:
        return [sequence for sequence in batch if self._is_trained(sequence)]

    def _loss_fn(
        self, logprobs_T: torch.Tensor, sequences: Sequence[TrainSequence]
    ) -> tuple[torch.Tensor, dict[str, Stat]]:
        device = logprobs_T.device
        lengths = torch.tensor([len(sequence.completion_ids) for sequence in sequences])
        index_T = torch.arange(len(sequences)).repeat_interleave(lengths)
        advantages = [sequence.advantages for sequence in sequences if sequence.advantages is not None]
        assert len(advantages) == len(sequences), "advantages were estimated before"
        inputs = PolicyLossInputs(
            logprobs_T=logprobs_T,
            generation_logprobs_T=_flat([s.generation_logprobs for s in sequences], device),
            sampling_logprobs_T=_flat([s.sampling_logprobs for s in sequences], device),
            prev_logprobs_T=_flat_or_none([s.prev_logprobs for s in sequences], device),
            reference_logprobs_T=_flat_or_none([s.reference_logprobs for s in sequences], device),
            advantages_T=_flat(advantages, device),
            sequence_T=index_T.to(device),
            num_sequences=len(sequences),
        )
        return policy_loss(inputs, self._loss)


def _flat(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.cat(list(parts)).to(device)


def _flat_or_none(parts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return _flat(present, device) if len(present) == len(parts) else None
