"""Typed records that cross the boundaries between rooms.

Shape suffixes: B sequences, G completions of one prompt, P prompt tokens, C completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Message = Mapping[str, str]
"""One chat turn: {"role": "system" | "user" | "assistant", "content": text}."""


@dataclass(frozen=True)
class Problem:
    """One row of a dataset: what is asked, and what a reward needs to judge an answer.

    index: the row's number in its dataset, from 0.
    messages: the conversation so far, ending with a user's turn.
    answer: the reference answer, if the dataset has one.
    metadata: everything else that the row holds (for reasoning-gym: `entry`, and its `score_answer`).
    """

    index: int
    messages: Sequence[Message]
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The last user turn, as text."""
        return self.messages[-1]["content"]


@dataclass(frozen=True)
class Prompt:
    """A problem drawn for a step and tokenized with the chat template.

    draw: position in the run's stream of draws, from 0; unique in a run. Sampling is keyed by it.
    token_ids: [P] the prompt with the generation prompt appended.
    """

    draw: int
    problem: Problem
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. `temperature` 0 is greedy; `top_k` None and `top_p` 1 keep all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    token_ids: [C] with the stop token if one was sampled.
    logprobs: [C] fp32, log-probability of each token under softmax(logits / temperature).
    sampling_logprobs: [C] fp32, under the distribution really sampled from (after top-k and top-p).
    finish_reason: "stop" (end token or stop string) or "length" (cut at the limit).
    weight_version: the policy version that sampled it.
    """

    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor
    text: str
    finish_reason: Literal["stop", "length"]
    weight_version: int


@dataclass(frozen=True)
class Group:
    """All completions of one prompt with their rewards: [G] fp32."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: torch.Tensor


@dataclass(frozen=True)
class TrainSequence:
    """One completion as the trainer sees it. Sequences with an equal `group` share `prompt_ids`.

    prompt_ids [P], completion_ids [C]: int64.
    generation_logprobs, sampling_logprobs: [C] fp32, from the generator.
    prev_logprobs: [C] fp32 of the policy before this batch's first optimizer step; None when the
    batch is one optimizer step, where they equal the current ones.
    reference_logprobs: [C] fp32 of the frozen reference policy; None without a KL penalty.
    advantages: [C] fp32, those of each token, equal ones where the algorithm has one a completion; None until they are
    estimated.
    values, returns: [C] fp32, of the value model before this batch's first update, and what it is fitted to; None
    without a value model.
    """

    group: int
    prompt_ids: torch.Tensor
    completion_ids: torch.Tensor
    generation_logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor
    prev_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
