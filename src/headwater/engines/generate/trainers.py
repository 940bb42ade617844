"""Native generation over the ranks that train: each answers its share of the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from headwater.bridge.folder import WeightFolder
from headwater.checkpoint.digest import digest
from headwater.data.types import Completion, Prompt, SamplingParams
from headwater.engines.attention import register_attention
from headwater.engines.base import TrainEngine
from headwater.engines.generate.native import NativeGenerator
from headwater.engines.head import Fp32Head
from headwater.engines.torch.engine import TorchEngine
from headwater.engines.torch.parallel import share
from headwater.engines.torch.sharding import gathered
from headwater.errors import HeadwaterError
from headwater.models.quiet import quiet_transformers
from headwater.models.resolve import load_model

Answers = list[tuple[Completion, ...]]


class SharedWeights:
    """`GenerateEngine` that reads the trainer's own module: nothing to sync, and the two cannot differ."""

    def __init__(self, engine: TorchEngine, tokenizer: PreTrainedTokenizerBase, max_batch_size: int) -> None:
        self._engine = engine
        self._native = NativeGenerator(engine.model, tokenizer, max_batch_size)

    def generate(self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams) -> Answers:
        layout = self._engine.layout
        with gathered(self._engine.model):
            own = self._native.generate(layout.share(prompts), num_samples, params)
        return [completions for of_rank in layout.gather(own) for completions in of_rank]

    def receive_weights(self, version: int) -> None:
        self._native.receive_weights(version)


class CopiedWeights:
    """`GenerateEngine` with a transformers model of its own on each rank, filled from what a trainer exports.

    Each tensor that arrives is compared by digest with what was exported. model_path: of the model that is trained.
    """

    def __init__(
        self,
        engine: TrainEngine,
        model_path: Path,
        dtype: torch.dtype,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
        max_batch_size: int,
        *,
        fp32_lm_head: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        self._engine = engine
        self._model: Any = load_model(model_path, dtype, register_attention(), trust_remote_code).to(device)
        if fp32_lm_head:
            Fp32Head(self._model.get_output_embeddings())
        self._native = NativeGenerator(self._model, tokenizer, max_batch_size)
        # Some families hold tensors in another form than a folder does, such as all experts of a layer in one.
        self._as_stored = set(WeightFolder(model_path).names) <= self._model.state_dict().keys()

    def generate(self, prompts: Sequence[Prompt], num_samples: int, params: SamplingParams) -> Answers:
        world = dist.get_world_size()
        own = self._native.generate(share(prompts, dist.get_rank(), world), num_samples, params)
        of_ranks: list[Any] = [None] * world
        dist.all_gather_object(of_ranks, own)
        return [completions for answers in of_ranks for completions in answers]

    @torch.no_grad()
    def receive_weights(self, version: int) -> None:
        """Raises HeadwaterError where what arrived is not what was exported, or a weight was not exported."""
        weights = self._engine.export_weights()
        if not self._as_stored:
            weights = self._converted({name: tensor.cpu() for name, tensor in weights})
        live, arrived = self._model.state_dict(), set()
        for name, tensor in weights:
            target = live[name]
            target.copy_(tensor)
            arrived.add(target.data_ptr())
            if digest(target) != digest(tensor.to(target.dtype)):
                raise HeadwaterError(f"version {version}: {name} arrived with other values than were exported")
        missing = [name for name, tensor in live.items() if tensor.data_ptr() not in arrived]
        if missing:
            raise HeadwaterError(f"version {version}: the trainer did not export {missing[0]}")
        self._native.receive_weights(version)

    def _converted(self, stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """As transformers holds what a folder stores."""
        with quiet_transformers():
            whole = type(self._model).from_pretrained(
                None, config=self._model.config, state_dict=stored, dtype=self._model.dtype
            )
        yield from whole.state_dict().items()
