"""Weights between Hugging Face's tensors and the ranks of a Megatron model: each rank reads and gives what it holds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headwater.bridge.folder import WeightFolder
from headwater.bridge.pieces import Piece
from headwater.checkpoint.write_request import listed
from headwater.engines.megatron.lora import Where
from headwater.engines.megatron.model import MappedParameter, MegatronModel
from headwater.engines.torch.parallel import put_together
from headwater.engines.torch.value import HEAD_NAME
from headwater.errors import UserError

BUCKET_BYTES = 256 << 20
_HEAD = "lm_head.weight"
_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq")


@torch.no_grad()
def load_weights(model: MegatronModel, path: Path, *, needs_head: bool) -> None:
    """Fill the model from a Hugging Face folder, of which each rank reads what it holds; all ranks call this together.

    needs_head: whether the language model's head is read: a tied one is the embedding, and a value model has its own,
    which stays as it is. Raises UserError that lists the names which are not mapped, not there, or mapped more than
    once.
    """
    folder = WeightFolder(path)
    stored = {name for name in folder.names if not _NOT_WEIGHTS.fullmatch(name)} - (set() if needs_head else {_HEAD})
    boxes = [box for box in _all_boxes(model) if not box.name.startswith(HEAD_NAME)]
    check_coverage(boxes, stored, str(path))
    with folder.opened() as opened:
        for mapped in model.parameters():
            if mapped.is_of_adapter or (mapped.pieces and mapped.pieces[0].name.startswith(HEAD_NAME)):
                continue
            mapped.parameter.data.zero_()  # rows of tokens that there are none of
            for piece in mapped.pieces:
                rows = mapped.parameter.data[piece.rows]
                rows.copy_(opened.box(piece).view(rows.shape))


def _all_boxes(model: MegatronModel) -> list[Piece]:
    """Of all ranks' weights, each box once for each rank that owns it."""
    weights = [mapped for mapped in model.parameters() if mapped.owned and not mapped.is_of_adapter]
    own = [piece for mapped in weights for piece in mapped.pieces if piece.saved]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    return [piece for of_rank in of_ranks for piece in of_rank]


def check_coverage(boxes: list[Piece], stored: set[str], where: str) -> None:
    """Raise UserError unless the boxes are the stored tensors, each element once."""
    mapped: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for box in boxes:
        mapped[box.name] = mapped.get(box.name, 0) + math.prod(box.shape)
        sizes[box.name] = math.prod(box.global_shape)
    faults = [
        ("are mapped, and not there", sorted(set(mapped) - stored)),
        ("are there, and not mapped", sorted(stored - set(mapped))),
        ("are mapped in part alone", sorted(name for name, count in mapped.items() if count < sizes[name])),
        ("are mapped more than once", sorted(name for name, count in mapped.items() if count > sizes[name])),
    ]
    found = [f"{listed(names)} {what}" for what, names in faults if names]
    if found:
        raise UserError(f"{where} does not fit the bridge to Megatron: {'; '.join(found)}")


@dataclass(frozen=True)
class _Global:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Exporter:
    """Puts Hugging Face's tensors together on every rank, some at a time. All ranks make and use it together."""

    def __init__(self, model: MegatronModel, where: Where, bucket_bytes: int = BUCKET_BYTES) -> None:
        """where: of a tensor that may be away."""
        self._model, self._where = model, where
        own = {
            piece.name: _Global(piece.name, piece.global_shape, mapped.parameter.dtype)
            for mapped in model.parameters()
            if mapped.owned and not mapped.is_of_adapter
            for piece in mapped.pieces
        }
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        known: dict[str, _Global] = {name: one for of_rank in of_ranks for name, one in of_rank.items()}
        self._buckets: list[list[_Global]] = [[]]
        for one in sorted(known.values(), key=lambda one: _natural(one.name)):
            bucket = self._buckets[-1]
            if bucket and (sum(other.nbytes for other in bucket) + one.nbytes > bucket_bytes):
                bucket = []
                self._buckets.append(bucket)
            bucket.append(one)

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, adapters merged into them, layers in order.

        At most one bucket, or one tensor, more than the model is held.
        """
        own: dict[str, list[tuple[Piece, MappedParameter]]] = {}
        for mapped in self._model.parameters():
            for piece in mapped.pieces if mapped.owned else ():
                if piece.saved:
                    own.setdefault(piece.name, []).append((piece, mapped))
        device = next(self._model.chunks[0].parameters()).device
        for bucket in self._buckets:
            places = [0]
            for one in bucket:
                places.append(places[-1] + -(-one.nbytes // 16) * 16)
            flat = torch.zeros(places[-1], dtype=torch.uint8, device=device)
            whole = [
                flat[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
                for begin, one in zip(places, bucket, strict=False)
            ]
            for one, tensor in zip(bucket, whole, strict=True):
                for piece, mapped in own.get(one.name, ()):
                    tensor[piece.index] = self._merged(mapped, piece.rows).view(piece.shape)
            if dist.get_world_size() > 1:
                put_together(flat)
            yield from zip((one.name for one in bucket), whole, strict=True)

    def _merged(self, mapped: MappedParameter, rows: slice) -> torch.Tensor:
        """Rows of a weight, its adapter in them."""
        weight = self._where(mapped.parameter.detach())
        return weight[rows] if mapped.adapter is None else mapped.adapter.merged(weight, rows, self._where)


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in names by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
