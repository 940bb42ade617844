"""Drawing tokens from logits with random numbers that depend on nothing but their place.

A shared generator's stream depends on who drew before. Here each draw is keyed by (seed, prompt,
sample, position), so a completion does not depend on the batch it was sampled in, on which rows had
finished, or on whether the run was interrupted and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headwater.data.types import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256


def _mix(value: np.ndarray) -> np.ndarray:
    """The splitmix64 finalizer (Steele, Lea & Flood, 2014): uint64 to uint64, a bijection."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def keyed_uniform(seed: int, draws: np.ndarray, samples: np.ndarray, position: int) -> np.ndarray:
    """Uniform numbers in [0, 1), float64 [B], one for each (seed, draw, sample, position).

    draws, samples: integer arrays [B]; which prompt of the run, and which of its completions.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.full(len(draws), seed, np.uint64) + _GOLDEN)
        for part in (draws.astype(np.uint64), samples.astype(np.uint64), np.full(len(draws), position, np.uint64)):
            state = _mix(state + (part + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class Sampled:
    """tokens int64 [B]; logprobs and sampling_logprobs fp32 [B] (see `data.types.Completion`)."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor


def filter_logits(logits: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """Set to -inf what top-k and then nucleus sampling (arXiv:1904.09751) exclude. fp32 [B, V] to fp32 [B, V].

    The likeliest token is always kept; ties at the k-th logit are all kept.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        excluded = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    return logits


def sample(logits: torch.Tensor, params: SamplingParams, uniform: np.ndarray) -> Sampled:
    """Draw one token a row by inverting the cumulative distribution.

    logits [B, V], any float dtype. uniform: float64 [B] in [0, 1), one number a row. With temperature 0
    the likeliest token is taken and its log-probability is that of the unscaled distribution.
    """
    logits = logits.float()
    if params.temperature == 0:
        tokens = logits.argmax(-1)
        logprobs = _gather(logits, tokens) - logits.logsumexp(-1)
        return Sampled(tokens, logprobs, logprobs)
    if params.temperature != 1.0:
        logits = logits / params.temperature
    allowed = filter_logits(logits, params.top_k, params.top_p)
    tokens, log_total = _invert_cdf(allowed, torch.from_numpy(uniform).to(logits.device))
    sampling_logprobs = _gather(allowed, tokens) - log_total
    if allowed is logits:
        return Sampled(tokens, sampling_logprobs, sampling_logprobs)
    return Sampled(tokens, _gather(logits, tokens) - logits.logsumexp(-1), sampling_logprobs)


def _gather(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, index[:, None])[:, 0]


def _invert_cdf(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [B] and log of the normalizer fp32 [B].

    Two levels, blocks of the vocabulary and then tokens of one block: a cumulative sum over a whole
    vocabulary is slow on a CPU and loses precision in fp32.
    """
    peak = logits.max(-1, keepdim=True).values
    weights = (logits - peak).exp_()
    vocab = weights.shape[-1]
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.view(len(weights), -1, _BLOCK)
    block_cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform[:, None] * block_cdf[:, -1:]
    block = _first_above(block_cdf, target)
    below = torch.where(block > 0, block_cdf.gather(-1, (block - 1).clamp(min=0)), 0.0)
    rows = torch.arange(len(weights), device=weights.device)
    inner_cdf = blocks[rows, block[:, 0]].double().cumsum(-1)
    tokens = (block * _BLOCK + _first_above(inner_cdf, target - below)).clamp(max=vocab - 1)
    return tokens[:, 0], block_cdf[:, -1].log().float() + peak[:, 0]


def _first_above(cdf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index of the first entry above `target`: never an entry of zero probability, nor one past the end.

    Rounding can put the target at or above the last sum; then the last entry that adds anything is meant,
    which is the first one that reaches the total.
    """
    index = torch.searchsorted(cdf, target, right=True)
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous(), right=False)
    return torch.minimum(index, last).clamp(max=cdf.shape[-1] - 1)  # past the end only where the sums are NaN
