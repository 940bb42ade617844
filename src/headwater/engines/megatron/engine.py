"""Training by megatron-core over all ranks of torch's default group, with its kinds of parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model

from headwater.bridge.registry import find_family, folder_config
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.reader import ComponentReader
from headwater.config.schema import EngineConfig, PolicyConfig
from headwater.data.packing import PackedBatch, pack, padded
from headwater.data.types import TrainSequence
from headwater.engines.base import ForwardBackward, LossFn, OptimStep
from headwater.engines.megatron.lora import check_targets
from headwater.engines.megatron.microbatches import Microbatch, cut
from headwater.engines.megatron.model import build, check_sizes, initialize
from headwater.engines.megatron.offload import StorageParking
from headwater.engines.megatron.optimizer import MegatronAdam
from headwater.engines.megatron.state import optimizer_bytes, optimizer_chunks, weight_chunks
from headwater.engines.megatron.weights import Exporter, load_weights
from headwater.engines.torch.engine import DTYPES, OFFLOADED
from headwater.engines.torch.logprobs import VocabShard, selected_logprobs
from headwater.engines.torch.optimizer import STATE_PREFIX
from headwater.errors import HeadwaterError, UserError
from headwater.metrics.stat import Stat, merge
from headwater.models.resolve import shorten


class MegatronEngine:
    """`TrainEngine` over megatron-core; see `engines.base` for the meaning of each method.

    All ranks make the engine and call each of its methods together, with the same arguments, except `state_chunks`.
    model_path: a local Hugging Face folder. A frozen engine (`trainable=False`) has no optimizer and only scores; it is
    the base model where adapters are trained.
    """

    group = "policy"
    _gives_values = False

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
        self._moves = moves_on_host or device.type != "cpu"
        self._weights, self._optimizer_state = StorageParking("weights"), StorageParking("optimizer state")
        self.fence = Fence()
        megatron = config.megatron_cfg
        hf_config = folder_config(model_path, config.trust_remote_code)
        self.family = find_family(hf_config, megatron.converter_type)
        check_sizes(self.family.dims(hf_config), hf_config, megatron, self.group)
        check_targets(self.family.dims(hf_config), megatron.peft, self.group)
        initialize(megatron)
        peft = megatron.peft if trainable and megatron.peft.enabled else None
        dtype = DTYPES[config.precision]
        self.model = build(self.family, hf_config, megatron, dtype, values=self._gives_values, peft=peft)
        for chunk in self.model.chunks:
            chunk.to(device)
            _sample_head_alone(chunk, in_fp32=isinstance(config, PolicyConfig) and config.fp32_lm_head)
        needs_head = not hf_config.tie_word_embeddings and not self._gives_values
        load_weights(self.model, model_path, needs_head=needs_head)
        self._exporter = Exporter(self.model, self._weights.view)
        self.optimizer: MegatronAdam | None = None
        self._chunks: list[Any] = self.model.chunks
        if trainable:
            settings = DistributedDataParallelConfig(
                use_distributed_optimizer=megatron.use_distributed_optimizer,
                grad_reduce_in_fp32=megatron.distributed_data_parallel_config.grad_reduce_in_fp32,
                overlap_grad_reduce=False,
                average_in_collective=False,
            )
            self._chunks = [DistributedDataParallel(self.model.config, settings, chunk) for chunk in self.model.chunks]
            self.optimizer = MegatronAdam(self.model, self._chunks, config, self.group)
            for chunk in self._chunks:
                chunk.zero_grad_buffer()

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows."""
        return self.model.dims.vocabulary

    @property
    def checkpoint_bytes(self) -> int:
        """What this rank's tensors of a checkpoint take, the moments included that the first step makes."""
        total = sum(chunk.tensor.nbytes for chunk in weight_chunks(self.model, self._weights.view, copies=False))
        return total if self.optimizer is None else total + optimizer_bytes(self.model, self.optimizer)

    @property
    def num_trainable_parameters(self) -> int:
        """Count of the scalars that training changes, over all ranks."""
        own = [m for m in self.model.parameters() if m.owned and m.parameter.requires_grad]
        held = sum(math.prod(piece.shape) for m in own for piece in m.pieces if piece.saved)
        count = torch.tensor(held, device=self._device)
        dist.all_reduce(count)
        return int(count)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        outcomes: list[torch.Tensor] = []

        def keep(logprobs: torch.Tensor, part: Sequence[TrainSequence]) -> torch.Tensor:
            lengths = [len(sequence.completion_ids) for sequence in part]
            outcomes.extend(one.clone() for one in logprobs.cpu().split(lengths))
            return logprobs.sum()

        self._run(sequences, self._config.logprob_batch_size, keep, forward_only=True)
        return [logprobs for of_rank in self._of_data_ranks(outcomes) for logprobs in of_rank]

    def forward_backward(
        self, sequences: Sequence[TrainSequence], loss_fn: LossFn, denominator: float
    ) -> ForwardBackward:
        losses: list[float] = []
        stats: list[dict[str, Stat]] = []

        def loss_of(logprobs: torch.Tensor, part: Sequence[TrainSequence]) -> torch.Tensor:
            loss, part_stats = loss_fn(logprobs, part)
            losses.append(loss.item())
            stats.append(part_stats)
            return loss / denominator

        self._run(sequences, self._config.train_micro_batch_size, loss_of, forward_only=False)
        of_ranks = self._of_data_ranks((sum(losses), merge(stats)))
        return ForwardBackward(sum(loss for loss, _ in of_ranks), merge(part for _, part in of_ranks))

    def optim_step(self) -> OptimStep:
        assert self.optimizer is not None, "a frozen engine does not step"
        self._require_onloaded()
        self.fence.wait()
        finalize_model_grads(self._chunks)
        try:
            norm, lr = self.optimizer.step()
        finally:  # also where the gradient is refused, which must not come back in the next step's
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
        return OptimStep(norm, lr)

    def offload(self) -> None:
        if not self._moves:
            return
        self.fence.vacate()
        self._park_optimizer()
        gradients = [buffer.grad_data for chunk in self._chunks for buffer in _buffers(chunk)]
        self._weights.park([*(m.parameter for m in self.model.parameters()), *gradients])
        self._give_memory_back()

    def offload_optimizer(self) -> None:
        if self._moves:
            self.fence.vacate()
            self._park_optimizer()
            self._give_memory_back()

    def onload(self) -> None:
        if self._weights.occupied or self._optimizer_state.occupied:
            self.fence.wait()
            self._weights.bring_back()
            self._optimizer_state.bring_back()

    def _park_optimizer(self) -> None:
        """What is no view of the weights."""
        if self.optimizer is not None:
            own = {m.parameter.untyped_storage()._cdata for m in self.model.parameters()}
            self._optimizer_state.park(t for t in self.optimizer.tensors() if t.untyped_storage()._cdata not in own)

    def _give_memory_back(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def require_weights(self) -> None:
        """Raises HeadwaterError where they wait in host memory."""
        if self._weights.occupied:
            raise HeadwaterError(OFFLOADED)

    def _require_onloaded(self) -> None:
        self.require_weights()
        if self._optimizer_state.occupied:
            raise HeadwaterError(OFFLOADED)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._exporter.weights()

    def state_chunks(self) -> Iterator[Chunk]:
        yield from weight_chunks(self.model, self._weights.view, copies=False)
        if self.optimizer is not None:
            yield from optimizer_chunks(self.model, self.optimizer, self._optimizer_state.view, copies=False)

    def load_chunks(self, reader: ComponentReader) -> None:
        self._require_onloaded()
        self.fence.vacate()
        stored = set(reader.names())
        if self.optimizer is not None:
            for mapped in self.model.parameters():
                names = {f"{STATE_PREFIX}exp_avg.{piece.name}" for piece in mapped.pieces}
                self.optimizer.prepare_state(mapped.parameter, bool(names & stored))
        chunks = list(weight_chunks(self.model, self._weights.view, copies=True))
        if self.optimizer is not None:
            chunks += optimizer_chunks(self.model, self.optimizer, self._optimizer_state.view, copies=True)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, {chunk.name for chunk in chunks})
        if unread := stored.difference(*of_ranks):
            raise UserError(f"the checkpoint holds tensors that this model does not have: {shorten(sorted(unread))}")
        with torch.no_grad():
            for chunk in chunks:
                reader.read_into(chunk)

    def _run(self, sequences: Sequence[TrainSequence], size: int, loss_of: Any, *, forward_only: bool) -> None:
        """One pass of Megatron's schedule. loss_of: called on the last pipeline stage, for a rank's own sequences."""
        self.require_weights()
        stages = parallel_state.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        microbatches = cut(sequences, size, parallel_state.get_data_parallel_rank(), self._data_size, stages)
        batches = self._packed(microbatches)

        def step(iterator: Iterator[tuple[Microbatch, PackedBatch]], chunk: Any) -> tuple[torch.Tensor, Any]:
            microbatch, batch = next(iterator)
            output, positions = self._forward(chunk, batch)

            def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                logprobs = self._logprobs(logits, batch, positions)
                # Without sequences of its own a rank still takes part, with a gradient of zero.
                value = loss_of(logprobs, microbatch.sequences) if microbatch.is_own else logprobs.sum() * 0.0
                return value, torch.zeros((), dtype=torch.int, device=logits.device), {}

            return output, loss

        data = list(zip(microbatches, batches, strict=True))
        for chunk in self._chunks:
            chunk.train(not forward_only)
        rows, columns = batches[0].input_ids.shape
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(data) for _ in self._chunks] if len(self._chunks) > 1 else iter(data),
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(data),
            seq_length=columns,
            micro_batch_size=rows,
            forward_only=forward_only,
        )

    @property
    def _data_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()

    def _packed(self, microbatches: Sequence[Microbatch]) -> list[PackedBatch]:
        """Of one shape, which is what pipeline stages hand on."""
        packing, megatron = self._config.sequence_packing, self._config.megatron_cfg
        multiple = megatron.context_parallel_size
        if megatron.sequence_parallel:
            multiple *= megatron.tensor_model_parallel_size
        batches = [
            pack(
                microbatch.sequences,
                max_tokens_per_row=packing.max_tokens_per_row if packing.enabled else None,
                multiple_of=multiple,
            )
            for microbatch in microbatches
        ]
        rows = max(batch.input_ids.shape[0] for batch in batches)
        columns = max(batch.input_ids.shape[1] for batch in batches)
        return [padded(batch, rows, columns).to(self._device) for batch in batches]

    def _forward(self, chunk: Any, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """What this stage hands on, or logits [1, T', V'] on the last; and which of the T predictors are here."""
        size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
        each = batch.input_ids.shape[1] // size
        here = slice(each * rank, each * (rank + 1))
        columns = batch.predictor_columns - each * rank
        own = ((columns >= 0) & (columns < each)).nonzero()[:, 0]
        gpt = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
        gpt.picked = batch.predictor_rows[own], columns[own]
        output = chunk(
            batch.input_ids[:, here].contiguous(),
            batch.position_ids[:, here].contiguous(),
            batch.attention_mask()[:, :, here],
        )
        return output, own

    def _logprobs(self, logits: torch.Tensor, batch: PackedBatch, own: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [T] fp32 of all completion tokens of a microbatch, on each context-parallel rank."""
        found = self._of_own_tokens(logits[0], batch.targets[own])
        if parallel_state.get_context_parallel_world_size() == 1:
            return found
        whole = torch.zeros(len(batch.targets), dtype=found.dtype, device=found.device).index_put((own,), found)
        return _Sum.apply(whole, parallel_state.get_context_parallel_group())  # pyright: ignore[reportReturnType]

    def _of_own_tokens(self, here: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """From logits [T', V'] to log-probabilities [T'] fp32."""
        assert isinstance(self._config, PolicyConfig)
        begin = parallel_state.get_tensor_model_parallel_rank() * here.shape[-1]
        here = _without_padding(here, begin, self.model.dims.vocabulary)
        shard = None
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            shard = VocabShard(begin, parallel_state.get_tensor_model_parallel_group())
        return selected_logprobs(here, targets, self._config.generation.temperature, shard)

    def _of_data_ranks(self, value: Any) -> list[Any]:
        """What the last pipeline stage of each data rank has, in their order, on every rank."""
        state = parallel_state
        is_teller = (
            state.is_pipeline_last_stage(ignore_virtual=True)
            and state.get_tensor_model_parallel_rank() == 0
            and state.get_context_parallel_rank() == 0
        )
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (state.get_data_parallel_rank(), value) if is_teller else None)
        by_rank = dict(entry for entry in told if entry is not None)
        return [by_rank[rank] for rank in range(self._data_size)]


class MegatronValueEngine(MegatronEngine):
    """A value model: `TorchValueEngine` over megatron-core."""

    group = "value"
    _gives_values = True

    def values(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        """Value before each completion token, [C] fp32 a sequence, without gradients."""
        return self.logprobs(sequences)

    def _of_own_tokens(self, here: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return here.squeeze(-1)


class _Sum(torch.autograd.Function):
    """Add up over ranks, each of which holds other elements. All follow with the same loss: gradients stay theirs."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _without_padding(logits: torch.Tensor, begin: int, vocabulary: int) -> torch.Tensor:
    """Logits of tokens that there are none of count as nothing."""
    if begin + logits.shape[-1] <= vocabulary:
        return logits
    is_padding = torch.arange(begin, begin + logits.shape[-1], device=logits.device) >= vocabulary
    return logits.masked_fill(is_padding, torch.finfo(logits.dtype).min)


def _sample_head_alone(chunk: Any, *, in_fp32: bool) -> None:
    """Have the output layer, the widest there is, compute the positions alone that `chunk.picked` names.

    in_fp32: whatever the rest computes in, see `engines.head`.
    """
    if not chunk.post_process:
        return
    chunk.output_layer.sequence_parallel = False

    def pick(head: Any, args: tuple[torch.Tensor, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = args[0]
        if chunk.config.sequence_parallel:  # not while tokens are generated
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows, columns = chunk.picked
        hidden = hidden[columns, rows][:, None]
        if in_fp32:
            weight = options["weight"] if options.get("weight") is not None else head.weight
            return (hidden.float(), *args[1:]), {**options, "weight": weight.float()}
        return (hidden, *args[1:]), options

    chunk.output_layer.register_forward_pre_hook(pick, with_kwargs=True)


def _buffers(chunk: Any) -> list[Any]:
    """Megatron's flat buffers; a frozen model has none."""
    if not isinstance(chunk, DistributedDataParallel):
        return []
    wrapped: Any = chunk
    return [*wrapped.buffers, *wrapped.expert_parallel_buffers]
