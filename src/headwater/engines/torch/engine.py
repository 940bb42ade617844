"""Training of any transformers causal LM with full attention, in one process or in several ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence, Staged
from headwater.checkpoint.reader import ComponentReader
from headwater.config.schema import EngineConfig, PolicyConfig
from headwater.data.packing import PackedBatch, pack
from headwater.data.types import TrainSequence
from headwater.engines.attention import register_attention
from headwater.engines.base import ForwardBackward, LossFn, OptimStep
from headwater.engines.head import Fp32Head
from headwater.engines.torch.logprobs import VocabShard, selected_logprobs
from headwater.engines.torch.offload import Parking
from headwater.engines.torch.optimizer import STATE_PREFIX, MasterAdamW
from headwater.engines.torch.parallel import Layout, check_model
from headwater.engines.torch.sharding import distribute, local, whole_tensor
from headwater.errors import HeadwaterError, UserError
from headwater.metrics.stat import Stat, merge
from headwater.models.resolve import load_model, shorten

OFFLOADED = "the engine is offloaded: onload it before its state is used or written"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchEngine:
    """`TrainEngine` over a transformers model; see `engines.base` for the meaning of each method.

    model_path: a local Hugging Face folder. A frozen engine (`trainable=False`) has no optimizer and
    only scores: the reference policy.
    moves_on_host: an offload really moves storage where the device is the host already, too; otherwise it does nothing.

    Where torch.distributed is initialized, all of its ranks make the engine and call each of its methods together,
    with the same arguments, except `state_chunks`: sequences are split inside, and all ranks return the same.
    """

    group = "policy"
    """Of the configuration, as messages name it."""

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        device: torch.device,
        *,
        trainable: bool = True,
        moves_on_host: bool = False,
    ) -> None:
        self._config = config
        self._device = device
        self.fence = Fence()
        self.model: PreTrainedModel = load_model(
            model_path,
            dtype=DTYPES[config.precision],
            attn_implementation=register_attention(),
            trust_remote_code=config.trust_remote_code,
        )
        _require_context(self.model, config.max_total_sequence_length, self.group)
        _disable_dropout(self.model)
        self._layout = Layout.of_process_group(config.torch_cfg, device, self.group)
        check_model(self.model.config.get_text_config(), self._layout, self.group)
        self._fp32_head = self._prepare_head()
        self.model.requires_grad_(trainable)
        self._parts = distribute(self.model, self._layout)
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        self.model.train(trainable and config.torch_cfg.activation_checkpointing)
        if self.model.training:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.optimizer = (
            MasterAdamW(params, config.optimizer, config.scheduler, self.group, self._layout, self._parts)
            if params
            else None
        )
        self._moves = moves_on_host or device.type != "cpu"
        self._parked_weights, self._parked_optimizer = Parking("weights"), Parking("optimizer state")
        self._shards_offloaded = self._optimizer_shards_offloaded = False

    @property
    def num_trainable_parameters(self) -> int:
        """Count of the scalars that training changes."""
        return sum(param.numel() for param in self.model.parameters() if param.requires_grad)

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.num_embeddings

    @property
    def layout(self) -> Layout:
        """Which part of the model and of each batch is this rank's."""
        return self._layout

    @property
    def checkpoint_bytes(self) -> int:
        """What this rank's tensors of a checkpoint take, the moments included that the first step makes."""
        total = 0
        for name, tensor in self._tensors():
            if self._parts[name].saved:
                optimizer = 8 if tensor.dtype == torch.float32 else 12
                total += self._parts[name].numel * (tensor.element_size() + optimizer * tensor.requires_grad)
        return total

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        own: list[torch.Tensor] = []
        for part, is_own in self._microbatches(sequences, self._config.logprob_batch_size):
            values = self._forward(part).cpu()
            if is_own:
                own += [one.clone() for one in values.split([len(sequence.completion_ids) for sequence in part])]
        return [values for of_rank in self._layout.gather(own) for values in of_rank]

    def forward_backward(
        self, sequences: Sequence[TrainSequence], loss_fn: LossFn, denominator: float
    ) -> ForwardBackward:
        self._require_onloaded()
        loss_sum = 0.0
        stats: list[dict[str, Stat]] = []
        for part, is_own in self._microbatches(sequences, self._config.train_micro_batch_size):
            logprobs = self._forward(part)
            if is_own:
                loss, part_stats = loss_fn(logprobs, part)
                (loss / denominator).backward()
                loss_sum += loss.item()
                stats.append(part_stats)
            else:
                logprobs.backward(torch.zeros_like(logprobs))
            if self.optimizer is not None:
                self.optimizer.take_gradients()
        of_ranks = self._layout.gather((loss_sum, merge(stats)))
        return ForwardBackward(sum(loss for loss, _ in of_ranks), merge(stats for _, stats in of_ranks))

    def _microbatches(
        self, sequences: Sequence[TrainSequence], size: int
    ) -> list[tuple[Sequence[TrainSequence], bool]]:
        """This rank's microbatches, and whether each is its own.

        All ranks have the same number, since each pass gathers weights from all: one with fewer goes through any
        sequence in place of those that it lacks.
        """
        own = _cut(self._layout.share(sequences), size)
        rounds = -(-self._layout.largest_share(len(sequences)) // size)
        return [(part, True) for part in own] + [(sequences[:1], False)] * (rounds - len(own))

    def optim_step(self) -> OptimStep:
        assert self.optimizer is not None, "a frozen engine does not step"
        self._require_onloaded()
        self.fence.wait()
        norm, lr = self.optimizer.step(self._config.max_grad_norm)
        return OptimStep(norm, lr)

    def offload(self) -> None:
        if self._layout.world > 1:
            self._move_shards(torch.device("cpu"))
            self._shards_offloaded = True
            self._give_memory_back()
        elif self._moves:
            passed = self.fence.vacate()
            if self._fp32_head is not None:
                self._fp32_head.release()
            self._parked_weights.park([*self.model.parameters(), *self.model.buffers()], passed, self._gradients())
            self._park_optimizer(passed)

    def offload_optimizer(self) -> None:
        if self._layout.world > 1:
            self.fence.vacate()
            if self.optimizer is not None:
                self.optimizer.move(torch.device("cpu"))
                self._optimizer_shards_offloaded = True
                self._give_memory_back()
        elif self._moves:
            self._park_optimizer(self.fence.vacate())

    def _park_optimizer(self, passed: Sequence[Staged]) -> None:
        if self.optimizer is not None:
            self._parked_optimizer.park(self.optimizer.tensors(), passed, self.optimizer.master_gradients())
        self._give_memory_back()

    def _give_memory_back(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self._shards_offloaded or self._optimizer_shards_offloaded:
            self._move_shards(self._device)
            self._shards_offloaded = self._optimizer_shards_offloaded = False
        elif self._parked_weights.occupied or self._parked_optimizer.occupied:
            self.fence.wait()
            self._parked_weights.bring_back()
            self._parked_optimizer.bring_back()

    def _move_shards(self, device: torch.device) -> None:
        """Through pageable memory: FSDP makes its parameters anew where they move."""
        self.fence.vacate()
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        if self.optimizer is not None:
            self.optimizer.move(device)

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Those that the model's own parameters have; the optimizer has the others."""
        return (param.grad for param in self.model.parameters() if param.grad is not None)

    def _require_weights(self) -> None:
        if self._parked_weights.occupied or self._shards_offloaded:
            raise HeadwaterError(OFFLOADED)

    def _require_onloaded(self) -> None:
        self._require_weights()
        if self._parked_optimizer.occupied or self._optimizer_shards_offloaded:
            raise HeadwaterError(OFFLOADED)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors():
            yield name, whole_tensor(tensor, self._parts[name])

    def state_chunks(self) -> Iterator[Chunk]:
        for name, tensor in self._tensors():
            if self._parts[name].saved:
                yield self._chunk(name, tensor)
        if self.optimizer is not None:
            yield from self.optimizer.state_chunks()

    def load_chunks(self, reader: ComponentReader) -> None:
        self._require_onloaded()
        self.fence.vacate()
        if self.optimizer is not None:
            self.optimizer.prepare_state({name for name in reader.names() if name.startswith(STATE_PREFIX)})
        chunks = [self._chunk(name, tensor) for name, tensor in self._tensors()]
        if self.optimizer is not None:
            chunks += self.optimizer.state_chunks(copies=True)
        unread = set(reader.names()) - {chunk.name for chunk in chunks}
        if unread:
            raise UserError(f"the checkpoint holds tensors that this model does not have: {shorten(sorted(unread))}")
        with torch.no_grad():
            for chunk in chunks:
                reader.read_into(chunk)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers as they are now, tied ones once."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # a tied weight appears under both its names
                seen.add(id(tensor))
                yield name, tensor

    def _chunk(self, name: str, tensor: torch.Tensor) -> Chunk:
        is_buffer = not isinstance(tensor, torch.nn.Parameter)
        return self._parts[name].chunk(name, local(tensor), changes_in_forward=is_buffer)

    def _forward(self, sequences: Sequence[TrainSequence]) -> torch.Tensor:
        """Log-probabilities [T] fp32 of all completion tokens, in order, under the sampling temperature."""
        assert isinstance(self._config, PolicyConfig)
        batch = self._packed(sequences)
        logits, shard = self._logits(batch), None
        if isinstance(logits, DTensor):
            columns = -(-logits.shape[-1] // self._layout.tensor_size)
            shard = VocabShard(columns * self._layout.tensor_rank, self._layout.axis("tensor").get_group())
            logits = logits.to_local()
        return selected_logprobs(logits, batch.targets, self._config.generation.temperature, shard)

    def _prepare_head(self) -> Fp32Head | None:
        assert isinstance(self._config, PolicyConfig)
        return _fp32_head(self.model, self._layout.world == 1) if self._config.fp32_lm_head else None

    def _packed(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        self._require_weights()
        packing = self._config.sequence_packing
        batch = pack(
            sequences,
            max_tokens_per_row=packing.max_tokens_per_row if packing.enabled else None,
            multiple_of=self._layout.tensor_size if self._layout.sequence_parallel else 1,
        )
        return batch.to(self.model.device)

    def _logits(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [T, V] at the predicting positions only: the head is the widest layer there is.

        The positions are picked in front of the head by a hook, so that whatever a family does after it
        (scaling, soft caps) is kept.
        """

        def pick(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (args[0][batch.predictor_rows, batch.predictor_columns], *args[1:])

        head = self.model.get_output_embeddings()
        assert head is not None, "a causal LM has a head"
        # In front of tensor parallelism's own hook, after which the input is no plain tensor.
        handle = head.register_forward_pre_hook(pick, prepend=True)
        try:
            return self.model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask(),
                position_ids=batch.position_ids,
                use_cache=False,
            ).logits
        finally:
            handle.remove()


def _fp32_head(model: PreTrainedModel, keeps_copy: bool) -> Fp32Head:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise UserError(f"policy.fp32_lm_head: {type(model).__name__} has no linear head; set it to false")
    return Fp32Head(head, keeps_copy=keeps_copy)


def _cut(sequences: Sequence[TrainSequence], size: int) -> list[Sequence[TrainSequence]]:
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def _require_context(model: PreTrainedModel, longest: int, group: str) -> None:
    """Refuse a model that was not made for `longest` tokens, or whose layers would not attend to all of them.

    The mask of packed rows is handed to every layer as it is, so a narrower window would be ignored.
    """
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise UserError(
            f"{group}.max_total_sequence_length ({longest}) exceeds the context of {type(model).__name__}: "
            f"{context} tokens"
        )
    other = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if other:
        raise UserError(f"{type(model).__name__} has {', '.join(sorted(other))} layers; only attention is supported")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < longest and getattr(config, "use_sliding_window", True):
        raise UserError(
            f"{type(model).__name__} attends to {window} tokens only: "
            f"set {group}.max_total_sequence_length to that or less"
        )


def _disable_dropout(model: PreTrainedModel) -> None:
    # Dropout would make trainer and generator disagree; the field trains policies without it.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                vars(module)[name] = 0.0
