"""Log-probabilities of chosen tokens, without keeping a softmax of the whole vocabulary."""

from __future__ import annotations

from typing import Any

import torch

# Rows of logits converted to fp32 at a time: small enough for a CPU's cache, and to bound the memory on a GPU.
_ROWS = {"cpu": 64}
_ROWS_ON_DEVICE = 2048


class _SelectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        log_totals = torch.empty(len(logits), device=logits.device)
        chosen = torch.empty(len(logits), device=logits.device)
        for rows in _slices(len(logits), logits.device):
            scaled = logits[rows].float() / temperature
            log_totals[rows] = scaled.logsumexp(-1)
            chosen[rows] = scaled.gather(-1, targets[rows, None])[:, 0]
        ctx.save_for_backward(logits, targets, log_totals)
        ctx.temperature = temperature
        return chosen - log_totals

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad,) = grad_outputs
        logits, targets, log_totals = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        scale = grad / ctx.temperature
        for rows in _slices(len(logits), logits.device):
            probs = (logits[rows].float() / ctx.temperature).sub_(log_totals[rows, None]).exp_()
            probs.mul_(-scale[rows, None])
            probs.scatter_add_(-1, targets[rows, None], scale[rows, None])
            grad_logits[rows] = probs.to(logits.dtype)
        return grad_logits, None, None


def _slices(length: int, device: torch.device) -> list[slice]:
    step = _ROWS.get(device.type, _ROWS_ON_DEVICE)
    return [slice(start, start + step) for start in range(0, length, step)]


def selected_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) at `targets`, with gradients.

    logits [T, V] of any float dtype, targets [T] int64; returns fp32 [T]. The backward pass recomputes
    the softmax instead of keeping it.
    """
    return _SelectedLogprobs.apply(logits, targets, temperature)  # pyright: ignore[reportReturnType]
