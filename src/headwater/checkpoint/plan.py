"""What is worked out from the structure of a save: names, shapes, dtypes and boxes, and never from a tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.dtypes import dtype_name
from headwater.checkpoint.layout import PAGE, Box, FileLayout, lay_out
from headwater.checkpoint.manifest import ChunkEntry
from headwater.checkpoint.ranks import rank_file
from headwater.checkpoint.snapshot import check_boxes, check_storage
from headwater.checkpoint.write_request import encode_structure

_Key = tuple[str, str, tuple[int, ...]]
_Part = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class ComponentPlan:
    """A rank's file of one component. What takes time to work out is worked out when asked for, in the background.

    parts: name, dtype, shape, global shape and offset of each chunk, in the order given.
    """

    def __init__(self, component: str, parts: Sequence[_Part], rank: int) -> None:
        self.path = rank_file(component, rank)
        self._component = component
        self.parts = parts

    @cached_property
    def size_bound(self) -> int:
        """Bytes that the file will not exceed."""
        headers = sum(12 * len(name) + 150 + 50 * len(shape) for name, _, shape, _, _ in self.parts)
        return sum(dtype.itemsize * math.prod(shape) for _, dtype, shape, _, _ in self.parts) + headers + 2 * PAGE

    @cached_property
    def _boxes(self) -> list[Box]:
        return [
            Box(name, dtype_name(dtype), tuple(shape), global_shape, offset)
            for name, dtype, shape, global_shape, offset in self.parts
        ]

    @cached_property
    def layout(self) -> FileLayout:
        return lay_out(self._boxes)

    @cached_property
    def keys(self) -> tuple[_Key, ...]:
        """Component, name and offset of each chunk, in the order given."""
        return tuple((self._component, name, offset) for name, _, _, _, offset in self.parts)

    @cached_property
    def structure(self) -> bytes:
        """The chunks as a manifest lists them, in the order of the file; see `encode_structure`."""
        return encode_structure(
            ChunkEntry(
                component=self._component,
                name=self._boxes[index].name,
                global_shape=self._boxes[index].global_shape,
                offset=self._boxes[index].offset,
                shape=self._boxes[index].shape,
                dtype=self._boxes[index].dtype,
                file=self.path,
                begin=self.layout.ranges[index][0],
                end=self.layout.ranges[index][1],
                digest=0,
            )
            for index in self.layout.order
        )


class Planner:
    """Plans of structures seen lately: names, shapes, dtypes and boxes are cached, never a tensor or a pointer."""

    def __init__(self, rank: int = 0, remembered: int = 8) -> None:
        self._rank = rank
        self._remembered = remembered
        self._plans: dict[str, list[ComponentPlan]] = defaultdict(list)  # of a component, the newest first

    def plan(self, component: str, chunks: Sequence[Chunk]) -> ComponentPlan:
        """Raises as `snapshot` does for chunks that cannot be saved."""
        parts = [(c.name, c.tensor.dtype, c.tensor.shape, c.global_shape, c.offset) for c in chunks]
        known = self._plans[component]
        plan = next((plan for plan in known if plan.parts == parts), None)
        if plan is None:
            check_boxes(chunks)
            plan = ComponentPlan(component, parts, self._rank)
            known.insert(0, plan)
            del known[self._remembered :]
        for chunk in chunks:
            check_storage(chunk)
        return plan
