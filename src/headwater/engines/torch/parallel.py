"""Which ranks hold which part of a model: FSDP over `data` ranks times tensor parallel over `tensor` ranks.

Rank r of the process group has data rank r // tensor_size and tensor rank r % tensor_size, so that the ranks of one
tensor-parallel group, which talk most, are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headwater.config.schema import TorchConfig
from headwater.errors import UserError

T = TypeVar("T")

TENSOR_PARALLEL_FAMILIES = ("llama", "qwen2", "qwen3")
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


@dataclass(frozen=True)
class Layout:
    """rank: of this process. data_size x tensor_size = world. mesh: with dimensions "data" and "tensor"; None alone."""

    rank: int = 0
    data_size: int = 1
    tensor_size: int = 1
    sequence_parallel: bool = False
    mesh: DeviceMesh | None = None

    @classmethod
    def of_process_group(cls, config: TorchConfig, device: torch.device, group: str = "policy") -> Layout:
        """The layout of torch's default process group, whose every rank calls this; alone where there is none.

        group: of the configuration, as messages name it.
        Raises UserError where the tensor-parallel size does not divide the number of processes.
        """
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        tensor_size = config.tensor_parallel_size
        if world % tensor_size:
            raise UserError(
                f"{group}.torch_cfg.tensor_parallel_size ({tensor_size}) does not divide the number of training "
                f"processes ({world})"
            )
        if world == 1:
            return cls()
        data_size = world // tensor_size
        mesh = init_device_mesh(device.type, (data_size, tensor_size), mesh_dim_names=("data", "tensor"))
        return cls(dist.get_rank(), data_size, tensor_size, config.sequence_parallel, mesh)

    @property
    def world(self) -> int:
        return self.data_size * self.tensor_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    def axis(self, name: str) -> DeviceMesh:
        """The one-dimensional mesh, "data" or "tensor", that this rank is in."""
        assert self.mesh is not None, "a process alone has no mesh"
        return self.mesh[name]

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This data rank's part of what every rank was given: contiguous, since neighbours share their prompt."""
        return share(items, self.data_rank, self.data_size)

    def largest_share(self, count: int) -> int:
        """The most items that any data rank has of `count`."""
        return -(-count // self.data_size)

    def gather(self, value: T) -> list[T]:
        """The value of each data rank, in order. Tensor-parallel ranks of one data rank have the same."""
        if self.data_size == 1:
            return [value]
        values: list[Any] = [None] * self.data_size
        dist.all_gather_object(values, value, group=self.axis("data").get_group())
        return values

    def add(self, value: float, device: torch.device) -> float:
        """The sum of a number over all ranks, in fp64."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(total)
        return total.item()


def share(items: Sequence[T], rank: int, ranks: int) -> Sequence[T]:
    """One rank's part of what all ranks were given: contiguous, the first ranks have one more."""
    each, more = divmod(len(items), ranks)
    begin = each * rank + min(more, rank)
    return items[begin : begin + each + (rank < more)]


def put_together(tensor: torch.Tensor, group: Any = None) -> None:
    """Make `tensor` equal, in place, to the union of what the group's ranks hold of it; the rest must be zero bytes.

    Exact for every dtype and value, since it adds bytes of which all but one are zero. tensor: contiguous.
    """
    dist.all_reduce(tensor.view(-1).view(torch.uint8), group=group)


def check_model(config: Any, layout: Layout, group: str = "policy") -> None:
    """Raise UserError where a model (its transformers configuration) cannot be cut into `tensor_size` parts."""
    size = layout.tensor_size
    if size == 1:
        return
    key = f"{group}.torch_cfg.tensor_parallel_size"
    if config.model_type not in TENSOR_PARALLEL_FAMILIES:
        raise UserError(
            f"{key}={size}: there is no tensor-parallel plan for {config.model_type} models, only for "
            f"{', '.join(TENSOR_PARALLEL_FAMILIES)}; set it to 1"
        )
    for name in _DIVIDED:
        value = getattr(config, name, None)
        if value is not None and value % size:
            raise UserError(f"{key}={size} does not divide the model's {name} ({value})")
    if config.vocab_size < size:
        raise UserError(f"{key}={size} is more than the model's vocab_size ({config.vocab_size})")
