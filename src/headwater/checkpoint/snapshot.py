"""The first state of a save: what the live tensors hold now, on the host, with a proof."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import digest
from headwater.checkpoint.dtypes import dtype_name
from headwater.errors import HeadwaterError


@dataclass(frozen=True)
class StagedChunk:
    """A chunk's bytes at the time of the snapshot.

    dtype: safetensors name. shape: of this box. offset: of this box in the global tensor.
    live_digest: of the live tensor, computed on its own device before the copy.
    data: uint8 [bytes], row-major, on the host; shares no memory with the live tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    live_digest: int
    data: np.ndarray


def snapshot(chunks: Iterable[Chunk]) -> list[StagedChunk]:
    """Digest every live tensor, then copy every one into host memory of its own.

    The two passes are separate on purpose: a copy that reads a stale view cannot lend that view to the digest.
    Raises HeadwaterError when a tensor's storage was freed, ValueError for two chunks at one place, a box
    outside of its global tensor, or a dtype that cannot be stored.
    """
    chunks = list(chunks)
    check_chunks(chunks)
    digests = [digest(chunk.tensor) for chunk in chunks]
    return [
        StagedChunk(
            name=chunk.name,
            dtype=dtype_name(chunk.tensor.dtype),
            shape=tuple(chunk.tensor.shape),
            global_shape=chunk.global_shape,
            offset=chunk.offset,
            live_digest=live,
            data=_host_copy(chunk.tensor),
        )
        for chunk, live in zip(chunks, digests, strict=True)
    ]


def check_chunks(chunks: Sequence[Chunk]) -> None:
    """Refuse what cannot be saved; raises as `snapshot` does."""
    check_boxes(chunks)
    for chunk in chunks:
        check_storage(chunk)


def check_boxes(chunks: Sequence[Chunk]) -> None:
    """What depends on names and shapes alone. Raises ValueError."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for chunk in chunks:
        _check_box(chunk)
        dtype_name(chunk.tensor.dtype)
        if (chunk.name, chunk.offset) in seen:
            raise ValueError(f"chunk {chunk.name} at offset {chunk.offset} is given twice")
        seen.add((chunk.name, chunk.offset))


def _host_copy(tensor: torch.Tensor) -> np.ndarray:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    host.copy_(tensor.detach())
    return host.reshape(-1).view(torch.uint8).numpy()


def _check_box(chunk: Chunk) -> None:
    shape = chunk.tensor.shape
    if shape == chunk.global_shape and not any(chunk.offset) and len(shape) == len(chunk.offset):
        return  # the whole tensor, as most are
    if not len(shape) == len(chunk.global_shape) == len(chunk.offset) or any(
        first < 0 or first + size > whole
        for first, size, whole in zip(chunk.offset, shape, chunk.global_shape, strict=True)
    ):
        raise ValueError(
            f"chunk {chunk.name}: a box of shape {tuple(shape)} at offset {chunk.offset} "
            f"does not lie in {chunk.global_shape}"
        )


def check_storage(chunk: Chunk) -> None:
    """A tensor whose storage was resized away still has a shape; reading it is undefined. Raises HeadwaterError."""
    tensor = chunk.tensor
    count = tensor.numel()
    if count == 0:
        return
    last = tensor.storage_offset() + (
        count - 1
        if tensor.is_contiguous()
        else sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    )
    if tensor.is_meta or (last + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise HeadwaterError(
            f"chunk {chunk.name} has no storage to save: it was freed or moved away without its view being renewed"
        )
