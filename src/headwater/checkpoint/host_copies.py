"""What a save has staged, for whoever moves the same tensors to the host next: an offload is a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.host_buffer import Lease
from headwater.checkpoint.plan import ComponentPlan
from headwater.checkpoint.watch import Watch, stamp

_Stamp = tuple[int, int]


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
        self._plans = dict(plans)
        self._stamps = seen.before
        self._changing = {
            name: [index for index, chunk in enumerate(parts) if chunk.changes_in_forward]
            for name, parts in chunks.items()
        }

    @cached_property
    def _places(self) -> dict[_Stamp, tuple[str, int]]:
        places = [
            (name, index)
            for name, plan in self._plans.items()
            for index in range(len(plan.parts))
            if index not in self._changing[name]
        ]
        return dict(zip(zip(*self._stamps, strict=True), places, strict=True))

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What was staged of a contiguous tensor that has not been written or moved since; None where it was.

        Valid, and not to be written, while the lease is kept.
        """
        place = self._places.get(stamp(tensor))
        if place is None or not tensor.is_contiguous():
            return None
        name, index = place
        plan = self._plans[name]
        _, dtype, shape, _, _ = plan.parts[index]
        begin, end = plan.layout.ranges[index]
        if (dtype, shape) != (tensor.dtype, tensor.shape) or begin == end:
            return None
        return torch.from_numpy(self._lease.image(name, plan.layout.size)[begin:end]).view(dtype).view(shape)

    def keep(self) -> Callable[[], None] | None:
        """Have the bytes stay until the function returned is called; None where they are gone already."""
        return self._lease.let_go if self._lease.keep() else None
