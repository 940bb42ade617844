"""Log-probabilities of chosen tokens, without keeping a softmax of the whole vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Rows of logits converted to fp32 at a time: small enough for a CPU's cache, and to bound the memory on a GPU.
_ROWS = {"cpu": 64}
_ROWS_ON_DEVICE = 2048


@dataclass(frozen=True)
class VocabShard:
    """The logits' columns are tokens `begin` on of a vocabulary that is cut over `group`."""

    begin: int
    group: Any


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, shard: VocabShard | None
    ) -> torch.Tensor:
        here = None
        if shard is not None:
            targets = targets - shard.begin
            here = (targets >= 0) & (targets < logits.shape[-1])
            targets = targets.clamp(0, logits.shape[-1] - 1)
        log_totals = torch.empty(len(logits), device=logits.device)
        chosen = torch.empty(len(logits), device=logits.device)
        for rows in _slices(len(logits), logits.device):
            scaled = logits[rows].float() / temperature
            log_totals[rows] = scaled.logsumexp(-1)
            chosen[rows] = scaled.gather(-1, targets[rows, None])[:, 0]
        if shard is not None and here is not None:
            log_totals = _logsumexp_over_ranks(log_totals, shard.group)
            chosen.masked_fill_(~here, 0.0)
            dist.all_reduce(chosen, group=shard.group)
        ctx.save_for_backward(logits, targets, log_totals, here)
        ctx.temperature = temperature
        return chosen - log_totals

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grad_outputs
        logits, targets, log_totals, here = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        scale = grad / ctx.temperature
        at_target = scale if here is None else scale * here
        for rows in _slices(len(logits), logits.device):
            probs = (logits[rows].float() / ctx.temperature).sub_(log_totals[rows, None]).exp_()
            probs.mul_(-scale[rows, None])
            probs.scatter_add_(-1, targets[rows, None], at_target[rows, None])
            grad_logits[rows] = probs.to(logits.dtype)
        return grad_logits, None, None, None


def _logsumexp_over_ranks(log_totals: torch.Tensor, group: Any) -> torch.Tensor:
    largest = log_totals.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = (log_totals - largest).exp()
    dist.all_reduce(total, group=group)
    return largest + total.log()


def _slices(length: int, device: torch.device) -> list[slice]:
    step = _ROWS.get(device.type, _ROWS_ON_DEVICE)
    return [slice(start, start + step) for start in range(0, length, step)]


def selected_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, shard: VocabShard | None = None
) -> torch.Tensor:
    """log softmax(logits / temperature) at `targets`, with gradients.

    logits [T, V] of any float dtype, targets [T] int64; returns fp32 [T]. The backward pass recomputes
    the softmax instead of keeping it. shard: where each rank of a group has some columns of the same rows;
    all of them then return the same, and the gradient is that of the own columns.
    """
    return _SelectedLogprobs.apply(logits, targets, temperature, shard)  # pyright: ignore[reportReturnType]
