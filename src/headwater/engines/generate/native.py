"""Sampling completions, by a transformers model or another. Tensor-parallel ranks generate the same, together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from headwater.data.types import Completion, Prompt, SamplingParams
from headwater.engines.generate.kv_cache import make_cache
from headwater.engines.generate.sampling import keyed_uniform, sample
from headwater.errors import HeadwaterError, UserError

# A finished row is dropped from the batch once this share of the rows has finished: dropping copies the cache.
_DROP_SHARE = 8


class SamplingLoop(ABC):
    """Samples completions from a causal LM that somebody else trains. What decodes a batch is a subclass's.

    Each prompt is prefilled once and its keys and values are shared out to the group; rows that have
    finished leave the batch. `max_batch_size` bounds the rows decoded at a time. defaults: the model's for generation.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, defaults: GenerationConfig | None, max_batch_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        self._end_tokens = torch.tensor(_end_tokens(tokenizer, defaults))
        self.weight_version = 0

    @abstractmethod
    def _decoder(self, prompts: Sequence[Prompt], max_new_tokens: int) -> Decoder: ...

    def receive_weights(self, version: int) -> None:
        """The model already holds the weights of `version`; completions are stamped with it from now on."""
        self.weight_version = version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        """`num_samples` completions of each prompt, in the prompts' order."""
        at_a_time = max(1, self._max_batch_size // num_samples)
        groups: list[tuple[Completion, ...]] = []
        for start in range(0, len(prompts), at_a_time):
            groups += self._generate_batch(prompts[start : start + at_a_time], num_samples, params)
        return groups

    def _generate_batch(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        decoder = self._decoder(prompts, params.max_new_tokens)
        logits = decoder.prefill()
        device = logits.device
        of_prompt = torch.arange(len(prompts), device=device).repeat_interleave(num_samples)
        logits = logits[of_prompt]
        decoder.select(of_prompt)

        rows = len(prompts) * num_samples
        draws = np.repeat([prompt.draw for prompt in prompts], num_samples)
        samples = np.tile(np.arange(num_samples), len(prompts))
        tokens = torch.zeros(rows, params.max_new_tokens, dtype=torch.int64)
        logprobs = torch.zeros(rows, params.max_new_tokens)
        sampling_logprobs = torch.zeros(rows, params.max_new_tokens)
        lengths = torch.full((rows,), params.max_new_tokens)
        stopped = torch.zeros(rows, dtype=torch.bool)
        live = torch.arange(rows)  # the row of the batch's i-th entry
        for position in range(params.max_new_tokens):
            uniform = keyed_uniform(params.seed, draws[live.numpy()], samples[live.numpy()], position)
            drawn = sample(logits, params, uniform)
            drawn_tokens, drawn_logprobs = drawn.tokens.cpu(), drawn.logprobs.cpu()
            if not drawn_logprobs.isfinite().all():
                raise HeadwaterError("the policy's logits are not finite: its weights hold NaN or infinity")
            going = ~stopped[live]
            rows_going = live[going]
            tokens[rows_going, position] = drawn_tokens[going]
            logprobs[rows_going, position] = drawn_logprobs[going]
            sampling_logprobs[rows_going, position] = drawn.sampling_logprobs.cpu()[going]

            ended = torch.isin(drawn_tokens, self._end_tokens) | self._hit_stop_string(
                tokens[live, : position + 1], params
            )
            newly = live[going & ended]
            stopped[newly] = True
            lengths[newly] = position + 1
            remaining = ~stopped[live]
            if position + 1 == params.max_new_tokens or not remaining.any():
                break
            if (~remaining).sum() * _DROP_SHARE >= len(live):
                decoder.select(remaining.nonzero()[:, 0].to(device))
                drawn_tokens, live = drawn_tokens[remaining], live[remaining]
            logits = decoder.step(drawn_tokens.to(device))

        completions = [
            Completion(
                token_ids=tuple(tokens[row, : lengths[row]].tolist()),
                logprobs=logprobs[row, : lengths[row]].clone(),
                sampling_logprobs=sampling_logprobs[row, : lengths[row]].clone(),
                text=str(self._tokenizer.decode(tokens[row, : lengths[row]].tolist(), skip_special_tokens=True)),
                finish_reason="stop" if stopped[row] else "length",
                weight_version=self.weight_version,
            )
            for row in range(rows)
        ]
        return [tuple(completions[start : start + num_samples]) for start in range(0, rows, num_samples)]

    def _hit_stop_string(self, tokens: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """[B] bool: the text of the tokens [B, C] contains a stop string that the last token completed."""
        if not params.stop_strings:
            return torch.zeros(len(tokens), dtype=torch.bool)
        # Each token adds a byte or more of text (special ones, which add none, aside), so the string lies in these.
        window = max(len(text.encode()) for text in params.stop_strings) + 8
        texts = self._tokenizer.batch_decode(tokens[:, -window:].tolist(), skip_special_tokens=True)
        return torch.tensor([any(stop in text for stop in params.stop_strings) for text in texts])


class Decoder(ABC):
    """A batch of left-padded prompts that is continued: mask and positions, kept in step with the model's cache."""

    def __init__(self, prompts: Sequence[Prompt], device: torch.device) -> None:
        self.longest = max(len(prompt.token_ids) for prompt in prompts)
        self._tokens = torch.zeros(len(prompts), self.longest, dtype=torch.int64)
        self._mask = torch.zeros(len(prompts), self.longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):  # left-padded: the last column is every prompt's last token
            self._tokens[row, self.longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            self._mask[row, self.longest - len(prompt.token_ids) :] = 1
        self._tokens, self._mask = self._tokens.to(device), self._mask.to(device)
        self._positions = self._mask.sum(1, keepdim=True) - 1

    @abstractmethod
    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add tokens [B, S] at positions [B, S] to the cache, and return logits [B, V] after the last.

        `_mask` [B, L] int64 tells the tokens of the cache, these included, from padding.
        """

    @abstractmethod
    def _select_cache(self, rows: torch.Tensor) -> None: ...

    def prefill(self) -> torch.Tensor:
        """Logits [B, V] after each prompt."""
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        return self._forward(self._tokens, positions)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after one more token a row, [B]."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), 1)], dim=1)
        self._positions = self._positions + 1
        return self._forward(tokens[:, None], self._positions)

    def select(self, rows: torch.Tensor) -> None:
        """Make the batch these rows, which may be repeated or left out."""
        self._select_cache(rows)
        self._mask = self._mask[rows]
        self._positions = self._positions[rows]


class NativeGenerator(SamplingLoop):
    """Samples completions from a transformers causal LM that somebody else trains."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_batch_size: int) -> None:
        super().__init__(tokenizer, model.generation_config, max_batch_size)
        self._model = model

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        training = self._model.training
        self._model.eval()
        try:
            return super().generate(prompts, num_samples, params)
        finally:
            self._model.train(training)

    def _decoder(self, prompts: Sequence[Prompt], max_new_tokens: int) -> Decoder:
        return _TransformersDecoder(self._model, prompts, max_new_tokens)


class _TransformersDecoder(Decoder):
    def __init__(self, model: PreTrainedModel, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        super().__init__(prompts, model.device)
        self._model = model
        self._cache = make_cache(model.config, self.longest + max_new_tokens)

    def _select_cache(self, rows: torch.Tensor) -> None:
        self._cache.batch_select_indices(rows)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits
        if isinstance(logits, DTensor):  # cut by vocabulary over tensor-parallel ranks
            logits = logits.full_tensor()
        return logits[:, -1]


def _end_tokens(tokenizer: PreTrainedTokenizerBase, defaults: GenerationConfig | None) -> list[int]:
    """Ids that end a completion: the tokenizer's and those of the model's generation defaults."""
    configured: Any = defaults.eos_token_id if defaults is not None else None
    own: Any = tokenizer.eos_token_id
    ids = {own, *(configured if isinstance(configured, list) else [configured])} - {None}
    if not ids:
        raise UserError("neither the tokenizer nor the model names an end token: completions would never stop")
    return sorted(ids)
