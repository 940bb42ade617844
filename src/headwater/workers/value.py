"""The value model as the controller sees it: values before an update, and the two halves of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headwater.algorithms.gae import explained_variance, gae, token_rewards, whiten
from headwater.algorithms.kl import kl_estimate
from headwater.algorithms.losses.value import ValueLossInputs, value_loss
from headwater.config.schema import PpoConfig
from headwater.data.types import TrainSequence
from headwater.engines.base import ForwardBackward, OptimStep, ValueEngine
from headwater.metrics.stat import Stat


def estimate_advantages(
    sequences: Sequence[TrainSequence], rewards: torch.Tensor, values: Sequence[torch.Tensor], config: PpoConfig
) -> tuple[list[TrainSequence], float | None]:
    """Add values, returns and advantages to the sequences of a whole step.

    rewards: [B] fp32, one a sequence. values: [C] fp32 a sequence. With `kl_penalty_in_reward` the sequences have both
    prev_logprobs and reference_logprobs. Also returns how much of the returns' variance the values explain, None where
    the returns do not vary.
    """
    lengths_B = torch.tensor([len(sequence.completion_ids) for sequence in sequences])
    values_T = torch.cat(list(values))
    kl_T = _kl(sequences) if config.kl_penalty_in_reward > 0 else None
    rewards_T = token_rewards(rewards, lengths_B, kl_T, config.kl_penalty_in_reward)
    advantages_T, returns_T = gae(rewards_T, values_T, lengths_B, gamma=config.gae_gamma, lam=config.gae_lambda)
    explained = explained_variance(values_T, returns_T)
    if config.whiten_advantages:
        advantages_T = whiten(advantages_T)
    lengths = lengths_B.tolist()
    parts = zip(sequences, values, advantages_T.split(lengths), returns_T.split(lengths), strict=True)
    # Of their own memory: what is sent to another process goes with all that its memory holds.
    return [replace(s, values=v, advantages=a.clone(), returns=r.clone()) for s, v, a, r in parts], explained


def _kl(sequences: Sequence[TrainSequence]) -> torch.Tensor:
    """k1 estimate of the KL from the reference at each token: [T] fp32."""
    policy = [s.prev_logprobs for s in sequences if s.prev_logprobs is not None]
    reference = [s.reference_logprobs for s in sequences if s.reference_logprobs is not None]
    assert len(policy) == len(reference) == len(sequences), "scored with both before"
    return kl_estimate(torch.cat(policy), torch.cat(reference), "k1")


class ValueWorker:
    """The value model, trained on returns.

    clip_range: see `algorithms.losses.value`.
    """

    def __init__(self, engine: ValueEngine, clip_range: float | None) -> None:
        self.engine = engine
        self._clip_range = clip_range

    def values(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """Value of the state before each completion token, [C] fp32 a sequence."""
        return self.engine.values(sequences)

    def forward_backward(self, batch: Sequence[TrainSequence]) -> ForwardBackward:
        """Accumulate the gradient of the loss over the batch's tokens. The `loss_sum` returned is divided by them."""
        tokens = float(sum(len(sequence.completion_ids) for sequence in batch))
        result = self.engine.forward_backward(batch, self._loss_fn, tokens)
        return ForwardBackward(result.loss_sum / tokens, result.stats)

    def optim_step(self) -> OptimStep:
        """Apply the accumulated gradient."""
        return self.engine.optim_step()

    def _loss_fn(
        self, values_T: torch.Tensor, sequences: Sequence[TrainSequence]
    ) -> tuple[torch.Tensor, dict[str, Stat]]:
        old = [s.values for s in sequences if s.values is not None]
        returns = [s.returns for s in sequences if s.returns is not None]
        assert len(old) == len(returns) == len(sequences), "advantages were estimated before"
        inputs = ValueLossInputs(values_T, torch.cat(old).to(values_T.device), torch.cat(returns).to(values_T.device))
        return value_loss(inputs, self._clip_range)
