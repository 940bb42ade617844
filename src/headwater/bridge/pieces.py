"""Which box of which Hugging Face tensor each row of a Megatron parameter is.

A Megatron parameter that a rank holds is a stack of pieces: consecutive rows (dimension 0) that are a box of one
Hugging Face tensor. Import, export, and checkpoints all follow from them. The rules below say how Megatron stacks and
cuts (Shoeybi et al., 2019, arXiv:1909.08053): one for each kind of parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One of `size` ranks that share something out."""

    size: int = 1
    rank: int = 0

    def part(self, length: int) -> tuple[int, int]:
        """Begin and end of this rank's part of `length`, which `size` divides."""
        each = length // self.size
        return each * self.rank, each * (self.rank + 1)


@dataclass(frozen=True)
class Place:
    """Where a rank stands. expert_tensor: tensor parallelism within an expert."""

    tensor: Slot = Slot()
    expert: Slot = Slot()
    expert_tensor: Slot = Slot()


@dataclass(frozen=True)
class Dimensions:
    """Of a model, as the rules need them. vocabulary: without padding."""

    hidden: int
    heads: int
    query_groups: int
    head_size: int
    vocabulary: int
    feed_forward: int
    expert_feed_forward: int = 0
    shared_expert_feed_forward: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Piece:
    """Rows of a Megatron parameter, from `row` on, that are a box of the Hugging Face tensor `name`.

    offset, shape: the box in the tensor, whose whole shape is global_shape. saved: whether this rank is the first of
    those along a tensor-parallel group that hold the very same.
    """

    name: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    row: int = 0
    saved: bool = True

    @property
    def rows(self) -> slice:
        """Of the Megatron parameter."""
        return slice(self.row, self.row + self.shape[0])

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the box lies in the Hugging Face tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))


class Rule(Protocol):
    """A kind of parameter. `megatron` and the Hugging Face names may hold {layer} and {expert}."""

    @property
    def megatron(self) -> str: ...

    @property
    def hugging_face(self) -> Sequence[str]: ...

    def pieces(self, names: Sequence[str], slot: Slot, dims: Dimensions) -> list[Piece]:
        """Of one parameter, in the order of its rows. names: `hugging_face` with the numbers filled in."""
        ...


@dataclass(frozen=True)
class Copied:
    """The same on every rank, such as a norm or a router. shape: of the tensor, as names of `Dimensions`."""

    megatron: str
    name: str
    shape: tuple[str | int, ...] = ("hidden",)

    @property
    def hugging_face(self) -> Sequence[str]:
        return (self.name,)

    def pieces(self, names: Sequence[str], slot: Slot, dims: Dimensions) -> list[Piece]:
        shape = tuple(size if isinstance(size, int) else getattr(dims, size) for size in self.shape)
        return [Piece(names[0], shape, (0,) * len(shape), shape, saved=slot.rank == 0)]


@dataclass(frozen=True)
class Vocabulary:
    """Cut by rows, which are tokens; Megatron pads them so that all ranks have as many."""

    megatron: str
    name: str

    @property
    def hugging_face(self) -> Sequence[str]:
        return (self.name,)

    def pieces(self, names: Sequence[str], slot: Slot, dims: Dimensions) -> list[Piece]:
        begin, end = slot.part(padded_vocabulary(dims.vocabulary, slot.size))
        end = min(end, dims.vocabulary)
        shape = (dims.vocabulary, dims.hidden)
        return [Piece(names[0], shape, (begin, 0), (end - begin, dims.hidden))] if begin < end else []


def padded_vocabulary(vocabulary: int, tensor_size: int) -> int:
    """The least multiple of 128 times the tensor-parallel size."""
    unit = 128 * tensor_size
    return -(-vocabulary // unit) * unit


@dataclass(frozen=True)
class Output:
    """A projection back to the hidden size, cut by columns. width: the name in `Dimensions` of the size that is cut."""

    megatron: str
    name: str
    width: str

    @property
    def hugging_face(self) -> Sequence[str]:
        return (self.name,)

    def pieces(self, names: Sequence[str], slot: Slot, dims: Dimensions) -> list[Piece]:
        width = dims.heads * dims.head_size if self.width == "heads" else getattr(dims, self.width)
        begin, end = slot.part(width)
        return [Piece(names[0], (dims.hidden, width), (0, begin), (dims.hidden, end - begin))]


@dataclass(frozen=True)
class GateUp:
    """Two projections of a gated feed-forward layer, stacked; each is cut by rows."""

    megatron: str
    gate: str
    up: str
    width: str

    @property
    def hugging_face(self) -> Sequence[str]:
        return (self.gate, self.up)

    def pieces(self, names: Sequence[str], slot: Slot, dims: Dimensions) -> list[Piece]:
        width: int = getattr(dims, self.width)
        begin, end = slot.part(width)
        whole, shape = (width, dims.hidden), (end - begin, dims.hidden)
        return [Piece(name, whole, (begin, 0), shape, index * shape[0]) for index, name in enumerate(names)]


@dataclass(frozen=True)
class QueryKeyValue:
    """Three projections, interleaved by query group: its queries, then its key, then its value; groups are cut.

    bias: of the projections, in place of their weights.
    """

    megatron: str
    query: str
    key: str
    value: str
    bias: bool = False

    @property
    def hugging_face(self) -> Sequence[str]:
        return (self.query, self.key, self.value)

    def pieces(self, names: Sequence[str], slot: Slot, dims: Dimensions) -> list[Piece]:
        columns = () if self.bias else (dims.hidden,)
        of_query = dims.heads // dims.query_groups * dims.head_size
        found, row = [], 0
        for group in range(*slot.part(dims.query_groups)):
            for name, rows in zip(names, (of_query, dims.head_size, dims.head_size), strict=True):
                offset = (rows * group, *(0 for _ in columns))
                found.append(Piece(name, (rows * dims.query_groups, *columns), offset, (rows, *columns), row))
                row += rows
        return found


def fill(names: Sequence[str], numbers: Mapping[str, int]) -> list[str]:
    """Names with {layer} and {expert} replaced."""
    return [name.format(**numbers) for name in names]
