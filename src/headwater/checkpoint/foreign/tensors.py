"""Reading tensors of a torch.distributed.checkpoint folder, a part at a time; nothing of them is unpickled."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch

from headwater.checkpoint.dtypes import DTYPES
from headwater.checkpoint.foreign.archive import BadArchiveError
from headwater.checkpoint.foreign.pickles import RefusedPickleError, load_layout
from headwater.checkpoint.foreign.record import StoredChunk
from headwater.errors import UserError

_Index = tuple[int, ...]


class StoredTensor:
    """A tensor that is stored as boxes. dtype: safetensors name. shape: as far as the boxes reach."""

    def __init__(self, chunks: Sequence[StoredChunk]) -> None:
        self._chunks = chunks
        self.key, self.dtype = chunks[0].key, chunks[0].dtype
        ends = [[b + n for b, n in zip(chunk.offset, chunk.shape, strict=True)] for chunk in chunks]
        self.shape = tuple(max(along) for along in zip(*ends, strict=True))
        # Boxes of many layers and experts are mostly of one: looked up, not searched for.
        self._by_index: dict[int, dict[_Index | None, list[StoredChunk]]] = {}

    def read(self, index: _Index) -> torch.Tensor:
        """The part at an index into the first dimensions, whole, on the CPU.

        Raises UserError where the boxes do not cover it, each element once, or one of them is damaged.
        """
        shape = self.shape[len(index) :]
        out = torch.empty(shape, dtype=DTYPES[self.dtype], device="cpu")
        filled = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for chunk in self._boxes_at(index):
            inner = tuple(i - b for i, b in zip(index, chunk.offset, strict=False))
            if not all(0 <= i < n for i, n in zip(inner, chunk.shape, strict=False)):
                continue
            box = zip(chunk.offset[len(index) :], chunk.shape[len(index) :], strict=True)
            target = tuple(slice(begin, begin + size) for begin, size in box)
            if filled[target].any():
                raise UserError(f"{chunk.bytes.path.parent}: boxes of {self.key} overlap, at {chunk.offset} for one")
            filled[target] = True
            out[target] = _read(chunk, inner)
        if not filled.all():
            raise UserError(f"{self._chunks[0].bytes.path.parent}: the stored boxes of {self.key} do not cover it")
        return out

    def _boxes_at(self, index: _Index) -> list[StoredChunk]:
        n = len(index)
        if n not in self._by_index:
            found: dict[_Index | None, list[StoredChunk]] = {}
            for chunk in self._chunks:
                found.setdefault(chunk.offset[:n] if chunk.shape[:n] == (1,) * n else None, []).append(chunk)
            self._by_index[n] = found
        return self._by_index[n].get(index, []) + self._by_index[n].get(None, [])


def _read(chunk: StoredChunk, index: _Index) -> torch.Tensor:
    """The part of a stored box at an index into its first dimensions; only its bytes are read."""
    path, dtype = chunk.bytes.path, DTYPES[chunk.dtype]
    damaged = UserError(f"{path}: the stored box of {chunk.key} at {chunk.offset} is damaged")
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        layout = load_layout(descriptor, chunk.bytes.begin, chunk.bytes.end)
        if (layout.dtype, layout.shape) != (chunk.dtype, chunk.shape):
            raise damaged
        shape, strides = chunk.shape[len(index) :], layout.strides[len(index) :]
        first = layout.offset + sum(i * stride for i, stride in zip(index, layout.strides, strict=False))
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device="cpu")
        begin = layout.begin + first * dtype.itemsize
        if begin + count * dtype.itemsize > layout.end or count > math.prod(shape):
            raise damaged
        raw = np.empty(count * dtype.itemsize, np.uint8)
        done = 0
        while done < len(raw):
            got = os.preadv(descriptor, [raw[done:].data], begin + done)
            if got == 0:
                raise damaged
            done += got
    except RefusedPickleError as error:
        raise RefusedPickleError(f"{path}: {chunk.key}: refused: {error}") from None
    except (BadArchiveError, OSError):
        raise damaged from None
    finally:
        os.close(descriptor)
    return torch.from_numpy(raw).view(dtype).as_strided(shape, strides)
