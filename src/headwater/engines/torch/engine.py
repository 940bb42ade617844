"""Training of any transformers causal LM with full attention, in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
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
from headwater.engines.torch.logprobs import selected_logprobs
from headwater.engines.torch.offload import Parking
from headwater.engines.torch.optimizer import STATE_PREFIX, MasterAdamW
from headwater.errors import HeadwaterError, UserError
from headwater.metrics.stat import Stat, merge
from headwater.models.resolve import load_model, shorten

_OFFLOADED = "the engine is offloaded: onload it before its state is used or written"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchEngine:
    """`TrainEngine` over a transformers model; see `engines.base` for the meaning of each method.

    model_path: a local Hugging Face folder. A frozen engine (`trainable=False`) has no optimizer and
    only scores: the reference policy.
    moves_on_host: an offload really moves storage where the device is the host already, too; otherwise it does nothing.
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
            dtype=_DTYPES[config.precision],
            attn_implementation=register_attention(),
            trust_remote_code=config.trust_remote_code,
        )
        _require_context(self.model, config.max_total_sequence_length, self.group)
        _disable_dropout(self.model)
        self._fp32_head = self._prepare_head()
        self.model.requires_grad_(trainable)
        self.model.to(device)  # pyright: ignore[reportArgumentType]
        self.model.train(trainable and config.torch_cfg.activation_checkpointing)
        if self.model.training:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        params = {name: param for name, param in self.model.named_parameters() if param.requires_grad}
        self.optimizer = MasterAdamW(params, config.optimizer, config.scheduler, self.group) if params else None
        self._moves = moves_on_host or device.type != "cpu"
        self._parked_weights, self._parked_optimizer = Parking("weights"), Parking("optimizer state")

    @property
    def num_trainable_parameters(self) -> int:
        """Count of the scalars that training changes."""
        return sum(param.numel() for param in self.model.parameters() if param.requires_grad)

    @property
    def checkpoint_bytes(self) -> int:
        """What the tensors of a checkpoint take, the moments included that the first step makes."""
        weights = sum(tensor.numel() * tensor.element_size() for _, tensor in self.export_weights())
        trainable = [param for param in self.model.parameters() if param.requires_grad]
        return weights + sum(param.numel() * (8 if param.dtype == torch.float32 else 12) for param in trainable)

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
        result: list[torch.Tensor] = []
        for part in _cut(sequences, self._config.logprob_batch_size):
            lengths = [len(sequence.completion_ids) for sequence in part]
            result += self._forward(part).cpu().split(lengths)
        return result

    def forward_backward(
        self, sequences: Sequence[TrainSequence], loss_fn: LossFn, denominator: float
    ) -> ForwardBackward:
        self._require_onloaded()
        loss_sum = 0.0
        stats: list[dict[str, Stat]] = []
        for part in _cut(sequences, self._config.train_micro_batch_size):
            loss, part_stats = loss_fn(self._forward(part), part)
            (loss / denominator).backward()
            loss_sum += loss.item()
            stats.append(part_stats)
        return ForwardBackward(loss_sum, merge(stats))

    def optim_step(self) -> OptimStep:
        assert self.optimizer is not None, "a frozen engine does not step"
        self._require_onloaded()
        self.fence.wait()
        norm, lr = self.optimizer.step(self._config.max_grad_norm)
        return OptimStep(norm, lr)

    def offload(self) -> None:
        if self._moves:
            passed = self.fence.wait()
            if self._fp32_head is not None:
                self._fp32_head.release()
            self._parked_weights.park([*self.model.parameters(), *self.model.buffers(), *self._gradients()], passed)
            self._park_optimizer(passed)

    def offload_optimizer(self) -> None:
        if self._moves:
            self._park_optimizer(self.fence.wait())

    def _park_optimizer(self, passed: Sequence[Staged]) -> None:
        if self.optimizer is not None:
            self._parked_optimizer.park(self.optimizer.tensors(), passed)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        if self._parked_weights.occupied or self._parked_optimizer.occupied:
            self.fence.wait()
            self._parked_weights.bring_back()
            self._parked_optimizer.bring_back()

    def _gradients(self) -> Iterator[torch.Tensor]:
        """Those that the model's own parameters have; the optimizer has the others."""
        return (param.grad for param in self.model.parameters() if param.grad is not None)

    def _require_onloaded(self) -> None:
        if self._parked_weights.occupied or self._parked_optimizer.occupied:
            raise HeadwaterError(_OFFLOADED)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # a tied weight appears under both its names
                seen.add(id(tensor))
                yield name, tensor.detach()

    def state_chunks(self) -> Iterator[Chunk]:
        params = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, tensor in self.export_weights():
            yield Chunk.whole(name, tensor, changes_in_forward=name not in params)
        if self.optimizer is not None:
            yield from self.optimizer.state_chunks()

    def load_chunks(self, reader: ComponentReader) -> None:
        self._require_onloaded()
        self.fence.wait()
        if self.optimizer is not None:
            self.optimizer.prepare_state({name for name in reader.names() if name.startswith(STATE_PREFIX)})
        chunks = list(self.state_chunks())
        unread = set(reader.names()) - {chunk.name for chunk in chunks}
        if unread:
            raise UserError(f"the checkpoint holds tensors that this model does not have: {shorten(sorted(unread))}")
        with torch.no_grad():
            for chunk in chunks:
                reader.read_into(chunk)

    def _forward(self, sequences: Sequence[TrainSequence]) -> torch.Tensor:
        """Log-probabilities [T] fp32 of all completion tokens, in order, under the sampling temperature."""
        assert isinstance(self._config, PolicyConfig)
        batch = self._packed(sequences)
        return selected_logprobs(self._logits(batch), batch.targets, self._config.generation.temperature)

    def _prepare_head(self) -> Fp32Head | None:
        assert isinstance(self._config, PolicyConfig)
        return _fp32_head(self.model) if self._config.fp32_lm_head else None

    def _packed(self, sequences: Sequence[TrainSequence]) -> PackedBatch:
        if self._parked_weights.occupied:
            raise HeadwaterError(_OFFLOADED)
        packing = self._config.sequence_packing
        batch = pack(sequences, max_tokens_per_row=packing.max_tokens_per_row if packing.enabled else None)
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
        handle = head.register_forward_pre_hook(pick)
        try:
            return self.model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask(),
                position_ids=batch.position_ids,
                use_cache=False,
            ).logits
        finally:
            handle.remove()


def _fp32_head(model: PreTrainedModel) -> Fp32Head:
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):
        raise UserError(f"policy.fp32_lm_head: {type(model).__name__} has no linear head; set it to false")
    return Fp32Head(head)


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
