"""Generation by the very model that megatron-core trains: nothing to sync, and the two cannot differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from transformers import GenerationConfig, PreTrainedTokenizerBase

from headwater.bridge.registry import folder_config
from headwater.data.types import Completion, Prompt, SamplingParams
from headwater.engines.generate.kv_cache import PreallocatedLayer
from headwater.engines.generate.native import Decoder, SamplingLoop
from headwater.engines.megatron.engine import MegatronEngine
from headwater.engines.megatron.model import MegatronModel
from headwater.engines.megatron.modules import MaskedAttention
from headwater.engines.torch.parallel import share


class MegatronGenerator(SamplingLoop):
    """`GenerateEngine` over the ranks of a MegatronEngine, which make it and call it together.

    Ranks that hold parts of one model generate the same, together; all others share the prompts.
    model_path: of the model that is trained.
    """

    def __init__(
        self,
        engine: MegatronEngine,
        model_path: Path,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        max_batch_size: int,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(tokenizer, _generation_defaults(model_path, trust_remote_code), max_batch_size)
        self._engine, self._device = engine, device
        self._team = Team()

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams
    ) -> list[tuple[Completion, ...]]:
        """Raises HeadwaterError where the weights wait in host memory."""
        self._engine.require_weights()
        with _decoding(self._engine.model.chunks):
            own = super().generate(share(prompts, self._team.number, self._team.count), num_samples, params)
        return self._team.gather(own)

    def _decoder(self, prompts: Sequence[Prompt], max_new_tokens: int) -> Decoder:
        return _MegatronDecoder(self._engine.model, self._team, prompts, max_new_tokens, self._device)


class Team:
    """Ranks that generate the same prompts: of one tensor-parallel group and one pipeline, and all that share experts.

    Experts are reached by collectives in each layer, so who shares them runs the same passes. number: of this rank's
    team. count: how many teams there are.
    """

    def __init__(self) -> None:
        state = parallel_state
        tensor, of_expert = state.get_tensor_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size()
        size = math.lcm(tensor, state.get_expert_model_parallel_world_size() * (of_expert or 1))
        # Megatron numbers ranks by pipeline stage first, and within a stage those of a group are neighbours.
        of_stage = dist.get_world_size() // state.get_pipeline_model_parallel_world_size()
        self.number, self.count = dist.get_rank() % of_stage // size, of_stage // size
        self._leaders = range(0, of_stage, size)
        self._first = dist.get_rank() // size * size
        self._of_stage: Any = dist.new_subgroups(size)[0] if size > tensor else None
        self.pipeline: Any = state.get_pipeline_model_parallel_group()

    def agree(self, logits: torch.Tensor) -> None:
        """Take the logits of the last pipeline stage, and there of the team's first rank.

        Replicas may differ in the last bits; were one to sample another token, it would run other passes.
        """
        if self._of_stage is not None and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            dist.broadcast(logits, self._first, group=self._of_stage)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(logits, last, group=self.pipeline)

    def gather(self, answers: list[tuple[Completion, ...]]) -> list[tuple[Completion, ...]]:
        """Of all teams, in their order, on every rank."""
        if self.count == 1:
            return answers
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, answers if dist.get_rank() in self._leaders else None)
        return [group for leader in self._leaders for group in of_ranks[leader]]


class _MegatronDecoder(Decoder):
    def __init__(
        self,
        model: MegatronModel,
        team: Team,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        device: torch.device,
    ) -> None:
        super().__init__(prompts, device)
        self._model, self._team, self._device = model, team, device
        self._caches: list[PreallocatedLayer] = []
        for attention in _attentions(model.chunks):
            attention.cache = PreallocatedLayer(self.longest + max_new_tokens)
            self._caches.append(attention.cache)

    def _select_cache(self, rows: torch.Tensor) -> None:
        for cache in self._caches:
            cache.batch_select_indices(rows)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, columns = tokens.shape
        mask, config = self._attention_mask(columns), self._model.config
        logits = torch.empty(rows, self._model.dims.vocabulary, dtype=torch.float32, device=self._device)
        for chunk in self._model.chunks:  # one, or one a virtual stage: the pipeline is passed as often
            if not chunk.pre_process:
                hidden = torch.empty(
                    columns, rows, config.hidden_size, dtype=config.pipeline_dtype, device=self._device
                )
                previous = parallel_state.get_pipeline_model_parallel_prev_rank()
                dist.recv(hidden, previous, group=self._team.pipeline)
                chunk.set_input_tensor(hidden)
            last = torch.full((rows,), columns - 1, device=self._device)
            chunk.picked = torch.arange(rows, device=self._device), last
            output = chunk(tokens, positions, mask)
            if chunk.post_process:
                logits.copy_(gather_from_tensor_model_parallel_region(output)[0, :, : logits.shape[1]])
            else:
                following = parallel_state.get_pipeline_model_parallel_next_rank()
                dist.send(output.contiguous(), following, group=self._team.pipeline)
        self._team.agree(logits)
        return logits

    def _attention_mask(self, columns: int) -> torch.Tensor:
        """[B, 1, S, L] bool for the last S of L tokens. Padding, which nobody reads, sees itself: else all were NaN."""
        length = self._mask.shape[1]
        place = torch.arange(length, device=self._device)
        query = place[length - columns :, None]
        return (((place <= query) & self._mask.bool()[:, None]) | (place == query))[:, None]


@contextmanager
def _decoding(chunks: Sequence[Any]) -> Iterator[None]:
    """Evaluation mode, without sequence parallelism, which cannot cut a single token. Caches are dropped at the end."""
    switched: list[tuple[Any, str]] = []
    for chunk in chunks:
        chunk.eval()  # who trains or scores sets the mode anew
        for owner in (owner for module in chunk.modules() for owner in (module, getattr(module, "config", None))):
            for flag in ("sequence_parallel", "reduce_scatter_embeddings"):
                if getattr(owner, flag, False):
                    setattr(owner, flag, False)
                    switched.append((owner, flag))
    try:
        yield
    finally:
        for owner, flag in switched:
            setattr(owner, flag, True)
        for chunk in chunks:
            chunk.picked = None
            if not chunk.pre_process:
                chunk.set_input_tensor(None)
        for attention in _attentions(chunks):
            attention.cache = None


def _attentions(chunks: Sequence[Any]) -> list[MaskedAttention]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, MaskedAttention)]


def _generation_defaults(model_path: Path, trust_remote_code: bool) -> GenerationConfig:
    if (model_path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(model_path, local_files_only=True)
    return GenerationConfig.from_model_config(folder_config(model_path, trust_remote_code))
