"""The digest of `byte_digest` of live tensors, on their own device: the same value on a GPU and on a CPU."""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch

from headwater.checkpoint.byte_digest import (
    BLOCK_BYTES,
    BLOCK_LANES,
    LANE_WEIGHTS,
    BytesLike,
    Digester,
    block_weights,
    digest_bytes,
    digest_many,
    finish,
)

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_LANES",
    "BytesLike",
    "Digester",
    "device_sum",
    "device_sums",
    "digest",
    "digest_all",
    "digest_bytes",
    "digest_on_device",
    "digests",
    "finish",
    "warm_up_device",
]
_Value = TypeVar("_Value")
_log = logging.getLogger(__name__)
_SLAB_BYTES = 256 * BLOCK_BYTES  # bounds the temporaries of the torch path to a few hundred MB


def digest(tensor: torch.Tensor) -> int:
    """The digest of a tensor's elements in row-major order, computed on the tensor's own device.

    tensor: any shape, strides and dtype of whole bytes. Shape and dtype are not part of the value: it equals
        `digest_bytes` of the contiguous bytes.
    """
    return digests([tensor])[0] if tensor.device.type == "cpu" else digest_on_device(tensor)


def digest_all(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`digest` of several tensors anywhere: of each device in one go, behind what its stream was asked for."""
    places: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        places[tensor.device].append(index)
    values = [0] * len(tensors)
    for device, there in places.items():
        some = [tensors[index] for index in there]
        found = digests(some) if device.type == "cpu" else device_sums(some).tolist()
        for index, value in zip(there, found, strict=True):
            values[index] = value if device.type == "cpu" else finish(value, tensors[index].nbytes)
    return values


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`digest` of several tensors in host memory, shared out to threads."""
    return _in_place_and_others(tensors, _digests_together)


def _digests_together(tensors: Sequence[torch.Tensor]) -> list[int]:
    data = [_flat_bytes(tensor) for tensor in tensors]  # may be copies, to be kept until they are read
    return digest_many([_borrowed(item) for item in data])


def _in_place_and_others(
    tensors: Sequence[torch.Tensor], compute: Callable[[Sequence[torch.Tensor]], Sequence[_Value]]
) -> list[_Value]:
    """One value of each tensor: together for all that are read in place, one by one for the others."""
    together = [index for index, tensor in enumerate(tensors) if _readable_in_place(tensor)]
    values = dict(zip(together, compute([tensors[index] for index in together]), strict=True)) if together else {}
    return [values[index] if index in values else compute([tensor])[0] for index, tensor in enumerate(tensors)]


def _readable_in_place(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 8 == 0


def digest_on_device(tensor: torch.Tensor) -> int:
    """`digest` in plain torch operations on the tensor's device; synchronizes once, at the end."""
    return finish(int(device_sum(tensor).item()), tensor.numel() * tensor.element_size())


def device_sum(tensor: torch.Tensor) -> torch.Tensor:
    """What `finish` makes the digest of: an int64 scalar on the tensor's device, computed in its current stream."""
    data = _flat_bytes(tensor)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _SLAB_BYTES):
        lanes = _lanes(data[start : start + _SLAB_BYTES])
        whole = lanes.numel() // BLOCK_LANES
        first_block = start // BLOCK_BYTES
        rows, tail = lanes[: whole * BLOCK_LANES].view(whole, BLOCK_LANES), lanes[whole * BLOCK_LANES :]
        total += _weighted_sum(rows, first_block)
        total += _weighted_sum(tail.view(1, -1), first_block + whole)
    return total


def device_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`device_sum` of several tensors of one device, in one launch where Triton is there: int64 [tensors]."""
    sum_blocks = _kernel_on(tensors[0].device) if tensors[0].is_cuda else None
    if sum_blocks is None:
        return torch.stack([device_sum(tensor) for tensor in tensors])
    if all(map(_readable_in_place, tensors)):
        return sum_blocks(tensors)
    return torch.stack(_in_place_and_others(tensors, lambda some: sum_blocks(list(map(_in_place, some))).unbind()))


def warm_up_device(device: torch.device) -> None:
    """Have the kernel of `device_sums` compiled, which takes seconds once; waits for it."""
    device_sums([torch.zeros(1, dtype=torch.uint8, device=device)]).tolist()


@cache
def _kernel_on(device: torch.device) -> Callable[[Sequence[torch.Tensor]], torch.Tensor] | None:
    try:
        from headwater.checkpoint.triton_digest import sum_blocks

        probe = torch.arange(11, dtype=torch.uint8, device="cpu")
        (total,) = sum_blocks([probe.to(device)]).tolist()
        if finish(total, probe.numel()) != digest(probe):
            raise RuntimeError("its kernel computes another value")
        return sum_blocks
    except Exception as error:
        _log.warning("digests on %s are computed by plain torch operations, which is slower: %s", device, error)
        return None


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _readable_in_place(tensor) else tensor.detach().clone(memory_format=torch.contiguous_format)


def _borrowed(data: torch.Tensor) -> np.ndarray:
    """uint8 [n] as numpy sees it, while `data` lives. `Tensor.numpy` would forbid its storage ever to be resized."""
    if data.numel() == 0:
        return np.empty(0, np.uint8)
    address: Any = (ctypes.c_uint8 * data.numel()).from_address(data.data_ptr())
    return np.frombuffer(address, np.uint8)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _lanes(data: torch.Tensor) -> torch.Tensor:
    """uint8 [n] to int64 [ceil(n / 8)]; copies where the bytes are not whole, aligned lanes."""
    padding = -data.numel() % 8
    if padding:
        data = torch.nn.functional.pad(data, (0, padding))
    elif data.data_ptr() % 8 or data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _lane_weights_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(LANE_WEIGHTS.view(np.int64)).to(device)


def _weighted_sum(rows: torch.Tensor, first_block: int) -> torch.Tensor:
    """int64 [blocks, lanes] to an int64 scalar. Shifts of int64 are arithmetic, so masks clear the copied sign."""
    weights = torch.from_numpy(block_weights(first_block, rows.shape[0]).view(np.int64)).to(rows.device)
    mixed = (rows ^ ((rows >> 32) & ((1 << 32) - 1))) * _lane_weights_on(rows.device)[: rows.shape[1]]
    mixed = mixed ^ ((mixed >> 29) & ((1 << 35) - 1))
    sums = mixed.sum(dim=1)
    return ((sums ^ ((sums >> 31) & ((1 << 33) - 1))) * weights).sum()
