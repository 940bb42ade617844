"""A model spread over ranks, and which box of each Hugging Face tensor this rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from headwater.checkpoint.chunk import Chunk
from headwater.engines.torch.parallel import Layout, put_together
from headwater.engines.torch.tensor_parallel import parallelize


@dataclass(frozen=True)
class Part:
    """This rank's box of a global tensor, and whether this is the rank that saves it and counts its gradient."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    saved: bool = True

    @classmethod
    def whole(cls, shape: tuple[int, ...], saved: bool = True) -> Part:
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape), saved)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the box lies in the global tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))

    def chunk(self, name: str, tensor: torch.Tensor, changes_in_forward: bool = False) -> Chunk:
        """A chunk of this box. tensor: the local one."""
        return Chunk(name, tensor, self.global_shape, self.offset, changes_in_forward)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without gradient, in the very storage; the tensor itself where it is whole."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `local(param)`, summed over all ranks that contributed to it."""
    grad = param.grad
    if isinstance(grad, DTensor):
        assert isinstance(param, DTensor)
        return grad.redistribute(placements=param.placements).to_local()
    return grad


def distribute(model: PreTrainedModel, layout: Layout) -> dict[str, Part]:
    """Spread a model, whole and equal on every rank, over them in place. Returns the part of each state dict entry."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if layout.world == 1:
        return {name: Part.whole(shape) for name, shape in shapes.items()}
    if layout.tensor_size > 1:
        parallelize(model, layout)
    tensor_dims = {name: _tensor_dim(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    if layout.data_size > 1:
        _shard_over_data(model, layout)
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: _part(shape, tensor_dims[name], layout) if name in params else Part.whole(shape, layout.rank == 0)
        for name, shape in shapes.items()
    }


def _tensor_dim(tensor: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism cuts."""
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    return placement.dim if isinstance(placement, Shard) else None


def _shard_over_data(model: PreTrainedModel, layout: Layout) -> None:
    blocks = set(getattr(model, "_no_split_modules", None) or [])
    units = [module for module in model.modules() if type(module).__name__ in blocks]
    head = model.get_output_embeddings()
    if head is not None and head.weight.dtype != model.dtype:  # what is gathered together has one dtype
        units.append(head)
    # A root that stayed gathered after scoring would go on with the weights from before the next optimizer step.
    for module in [*units, model]:
        fully_shard(
            module,
            mesh=layout.axis("data"),
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # denominators are global: gradients are sums over ranks, not means
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@contextmanager
def gathered(model: PreTrainedModel) -> Iterator[None]:
    """Hold the weights of all data ranks here, so that forward passes in here wait for none of them.

    All ranks enter and leave together. What is written to weights in here is lost.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)


def _part(shape: tuple[int, ...], tensor_dim: int | None, layout: Layout) -> Part:
    """Cut as DTensor cuts over tensor ranks, then as FSDP cuts the outcome by rows: the first ranks get more."""
    offset, size = [0] * len(shape), list(shape)
    if tensor_dim is not None:
        _cut(offset, size, tensor_dim, layout.tensor_size, layout.tensor_rank)
    if layout.data_size > 1:
        _cut(offset, size, 0, layout.data_size, layout.data_rank)
    is_copy = tensor_dim is None and layout.tensor_rank > 0
    return Part(shape, tuple(offset), tuple(size), saved=not is_copy and math.prod(size) > 0)


def _cut(offset: list[int], size: list[int], dim: int, parts: int, index: int) -> None:
    each = -(-size[dim] // parts)
    begin, end = min(each * index, size[dim]), min(each * (index + 1), size[dim])
    offset[dim] += begin
    size[dim] = end - begin


def whole_tensor(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The global tensor on every rank, put together from the parts; all ranks call this for the same tensor."""
    if part.shape == part.global_shape and not isinstance(tensor, DTensor):
        return tensor.detach()
    whole = torch.zeros(part.global_shape, dtype=tensor.dtype, device=tensor.device)
    if part.saved:
        whole[part.index] = local(tensor)
    put_together(whole)
    return whole
