"""What a save has staged, for whoever moves the same tensors to the host next: an offload is a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.host_buffer import Lease
from headwater.checkpoint.plan import ComponentPlan
from headwater.checkpoint.watch import Watch, stamp


class _Place(NamedTuple):
    """begin: its first byte in the component's image."""

    component: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


class HostImage:
    """Tensors in host memory that is laid out as a file, each with one call of torch. memory: uint8 [bytes]."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """The one whose bytes, row by row, begin there, at a multiple of its item's size."""
        whole = self._typed.get(dtype)
        if whole is None:
            items = len(self._memory) // dtype.itemsize
            whole = self._typed[dtype] = torch.from_numpy(self._memory[: items * dtype.itemsize]).view(dtype)
        strides, stride = [], 1
        for size in reversed(shape):
            strides.append(stride)
            stride *= size
        return whole.as_strided(shape, strides[::-1], begin // dtype.itemsize)


class HostCopies:
    """Finds the staged bytes of live tensors, without holding a tensor.

    seen: made of the chunks' tensors at the save's call, those that a forward pass changes left out.
    """

    def __init__(
        self,
        lease: Lease,
        plans: Mapping[str, ComponentPlan],
        chunks: Mapping[str, Sequence[Chunk]],
        seen: Watch,
    ) -> None:
        self._lease = lease
        self._sizes = {name: plan.layout.size for name, plan in plans.items()}
        places = [
            _Place(name, part[1], part[2], begin)
            for name, plan in plans.items()
            for chunk, part, (begin, _) in zip(chunks[name], plan.parts, plan.layout.ranges, strict=True)
            if not chunk.changes_in_forward
        ]
        self._places = dict(zip(zip(*seen.before, strict=True), places, strict=True))

    def of(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """By id, what was staged of those that are contiguous and have not been written or moved since.

        Valid, and not to be written, while the lease is kept.
        """
        images = {name: HostImage(self._lease.image(name, size)) for name, size in self._sizes.items()}
        found: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            place = self._places.get(stamp(tensor))
            if place is None or place[1:3] != (tensor.dtype, tensor.shape) or not tensor.is_contiguous():
                continue
            found[id(tensor)] = images[place.component].tensor(place.begin, tensor.dtype, tensor.shape)
        return found

    def keep(self) -> Callable[[], None] | None:
        """Have the bytes stay until the function returned is called; None where they are gone already."""
        return self._lease.let_go if self._lease.keep() else None
