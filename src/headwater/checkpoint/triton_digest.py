"""The weighted sums of `byte_digest` for many tensors of one GPU in a single launch, at the speed of its memory."""

# Without postponed annotations: Triton reads those of a kernel's parameters.
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from headwater.checkpoint.byte_digest import BLOCK_BYTES, LANE_WEIGHTS, block_weights

_COLUMNS = 4
_WIDTH = 2048


@triton.jit
def _sum_blocks(table, lane_weights, sums, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Each program adds one block to its tensor's sum. table: address, bytes, block weight, tensor's index."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    address, nbytes = tl.load(row), tl.load(row + 1)
    lanes = address.to(tl.pointer_type(tl.uint64))
    count = nbytes // 8
    partial = tl.zeros((WIDTH,), tl.uint64)
    for start in range(0, count, WIDTH):
        lane = start + tl.arange(0, WIDTH)
        mixed = tl.load(lanes + lane, mask=lane < count, other=0)
        weight = tl.load(lane_weights + lane, mask=lane < count, other=0).to(tl.uint64, bitcast=True)
        mixed = (mixed ^ (mixed >> 32)) * weight
        partial += mixed ^ (mixed >> 29)
    total = tl.sum(partial, 0)
    if nbytes % 8 > 0:
        byte = tl.arange(0, 8)
        tail = (address + count * 8).to(tl.pointer_type(tl.uint8))
        parts = tl.load(tail + byte, mask=byte < nbytes % 8, other=0).to(tl.uint64)
        last = tl.sum(parts << (byte * 8).to(tl.uint64), 0)
        weight = tl.load(lane_weights + count).to(tl.uint64, bitcast=True)
        last = (last ^ (last >> 32)) * weight
        total += last ^ (last >> 29)
    block_weight = tl.load(row + 2).to(tl.uint64, bitcast=True)
    total = (total ^ (total >> 31)) * block_weight
    tl.atomic_add(sums + tl.load(row + 3), total.to(tl.int64, bitcast=True))


def sum_blocks(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [tensors] on their device, computed in its current stream without waiting for it.

    tensors: of one device, contiguous, their addresses multiples of 8. Sizes that come again have most of the table
    ready; addresses are read at each call. Nothing stays on the device afterwards.
    """
    device = tensors[0].device
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    known = _rows(tuple([tensor.nbytes for tensor in tensors]))
    if len(known) == 0:
        return sums
    table = torch.empty(known.shape, dtype=torch.int64, device="cpu", pin_memory=True)
    rows = table.numpy()
    rows[:] = known
    rows[:, 0] += np.array([tensor.data_ptr() for tensor in tensors], np.int64)[rows[:, 3]]
    with torch.cuda.device(device):
        launch = _sum_blocks[(len(rows),)]  # pyright: ignore[reportIndexIssue]
        on_device = table.to(device, non_blocking=True), _lane_weights().to(device, non_blocking=True)
        launch(*on_device, sums, _COLUMNS, _WIDTH, num_warps=8)
    return sums


@cache
def _lane_weights() -> torch.Tensor:
    return torch.from_numpy(LANE_WEIGHTS.view(np.int64)).pin_memory()


@lru_cache(maxsize=64)
def _rows(sizes: tuple[int, ...]) -> np.ndarray:
    """The table without addresses: the offset of each block in its tensor stands for them."""
    blocks = np.array([-(-size // BLOCK_BYTES) for size in sizes], np.int64)
    owner = np.repeat(np.arange(len(sizes)), blocks)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    rows = np.empty((len(owner), _COLUMNS), np.int64)
    rows[:, 0] = number * BLOCK_BYTES
    rows[:, 1] = np.minimum(np.array(sizes, np.int64)[owner] - rows[:, 0], BLOCK_BYTES)
    rows[:, 2] = block_weights(0, int(blocks.max(initial=0))).view(np.int64)[number]
    rows[:, 3] = owner
    return rows
