"""Weights and optimizer state of a Megatron model as boxes of Hugging Face's tensors, in place.

What a rank of the distributed optimizer holds of a parameter is a range of its elements, row by row. A range within a
piece is at most three boxes: the end of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from headwater.bridge.pieces import Piece
from headwater.checkpoint.chunk import Chunk
from headwater.engines.megatron.lora import Where
from headwater.engines.megatron.model import MappedParameter, MegatronModel
from headwater.engines.megatron.optimizer import MegatronAdam
from headwater.engines.torch.optimizer import STATE_PREFIX


def weight_chunks(model: MegatronModel, where: Where, *, copies: bool) -> Iterator[Chunk]:
    """Of what is trained. where: of a tensor that may be away. copies: also those that another rank saves."""
    for mapped in model.parameters():
        if not mapped.parameter.requires_grad:
            continue
        for piece in mapped.pieces:
            if copies or (mapped.owned and piece.saved):
                rows = where(mapped.parameter.detach())[piece.rows]
                yield Chunk(piece.name, rows.view(piece.shape), piece.global_shape, piece.offset)


def optimizer_chunks(model: MegatronModel, optimizer: MegatronAdam, where: Where, *, copies: bool) -> Iterator[Chunk]:
    """Masters (`param`, where the model is not fp32), moments and steps. copies: also those that another rank saves."""
    for mapped in model.parameters():
        begin, end, states = optimizer.shard(mapped.parameter)
        for piece in mapped.pieces:
            if not (copies or _is_saved(mapped, piece, optimizer)):
                continue
            for key, values in states.items():
                if key != "step":
                    held = where(values.detach()).view(-1)
                    yield from _boxes(f"{STATE_PREFIX}{key}.{piece.name}", held, mapped, piece, begin, end)
                elif copies or (begin <= _first(mapped, piece) < end and not any(piece.offset)):
                    yield Chunk.whole(f"{STATE_PREFIX}step.{piece.name}", where(values.detach()))


def optimizer_bytes(model: MegatronModel, optimizer: MegatronAdam) -> int:
    """What masters and moments take that this rank saves, once the first step has made them."""
    total = 0
    for mapped in model.parameters():
        begin, end, _ = optimizer.shard(mapped.parameter)
        for piece in mapped.pieces:
            if _is_saved(mapped, piece, optimizer):
                first = _first(mapped, piece)
                held = max(0, min(end, first + math.prod(piece.shape)) - max(begin, first))
                total += held * (8 if mapped.parameter.dtype == torch.float32 else 12)
    return total


def _is_saved(mapped: MappedParameter, piece: Piece, optimizer: MegatronAdam) -> bool:
    return piece.saved and not mapped.tied_copy and (optimizer.is_distributed or mapped.owned)


def _first(mapped: MappedParameter, piece: Piece) -> int:
    """Where the piece begins among the parameter's elements."""
    return piece.row * math.prod(mapped.parameter.shape[1:])


def _boxes(
    name: str, flat: torch.Tensor, mapped: MappedParameter, piece: Piece, begin: int, end: int
) -> Iterator[Chunk]:
    """Of elements `begin` to `end` of the parameter, which are `flat`, those that are of the piece."""
    first = _first(mapped, piece)
    last = first + piece.shape[0] * (piece.shape[1] if len(piece.shape) > 1 else 1)
    low, high = max(begin, first), min(end, last)
    if low >= high:
        return
    if len(piece.shape) == 1:
        yield Chunk(name, flat[low - begin : high - begin], piece.global_shape, (piece.offset[0] + low - first,))
        return
    width, at = piece.shape[1], low
    while at < high:
        row, column = divmod(at - first, width)
        whole_rows = (high - at) // width if column == 0 else 0
        shape = (whole_rows, width) if whole_rows else (1, min(width - column, high - at))
        count = shape[0] * shape[1]
        offset = (piece.offset[0] + row, piece.offset[1] + column)
        yield Chunk(name, flat[at - begin : at - begin + count].view(shape), piece.global_shape, offset)
        at += count
