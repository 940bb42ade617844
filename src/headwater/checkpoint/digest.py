"""A 64-bit digest of bytes that has the same value on a GPU and on a CPU.

The bytes are read as little-endian 64-bit lanes, the last one padded with zeros. A lane is folded (high half
into the low), multiplied by an odd weight of its position in the block and folded again; the lanes of a block
are summed, the sum is folded, multiplied by an odd weight of the block and summed. All arithmetic is modulo
2**64. The length in bytes is mixed into the result, so padding is not content. Each step on a single lane is
a bijection, so a change within one lane is always seen.

It finds stale, torn, moved and corrupt data. It is no defence against someone who forges data on purpose.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

BLOCK_LANES = 1 << 16
BLOCK_BYTES = BLOCK_LANES * 8
_SLAB_BYTES = 256 * BLOCK_BYTES  # bounds the temporaries of the torch path to a few hundred MB
_MASK = (1 << 64) - 1
_U64 = np.dtype("<u8")

BytesLike = bytes | bytearray | memoryview | np.ndarray


def _splitmix64(index: np.ndarray) -> np.ndarray:
    """Element `index` of the splitmix64 sequence seeded with 0 (Steele et al., 2014): uint64 to uint64."""
    z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _odd_weights(first: int, count: int) -> np.ndarray:
    return _splitmix64(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)


_LANE_WEIGHTS = _odd_weights(0, BLOCK_LANES)


def _block_weights(first_block: int, count: int) -> np.ndarray:
    return _odd_weights(BLOCK_LANES + first_block, count)


def _finish(total: int, nbytes: int) -> int:
    length = _splitmix64(np.array([nbytes], dtype=np.uint64))
    return int(_splitmix64(np.array([total & _MASK], dtype=np.uint64) ^ length)[0])


class Digester:
    """The digest of a stream of buffers; how the stream was cut into buffers does not matter."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._blocks = 0
        self._total = 0
        self._pending = bytearray()
        self._mixed = np.empty(BLOCK_LANES, np.uint64)
        self._shifted = np.empty(BLOCK_LANES, np.uint64)

    def update(self, buffer: BytesLike) -> None:
        """Append the bytes of a contiguous buffer."""
        data = np.frombuffer(buffer, dtype=np.uint8)
        self._nbytes += len(data)
        if self._pending:
            taken = min(len(data), BLOCK_BYTES - len(self._pending))
            self._pending += data[:taken].tobytes()
            data = data[taken:]
            if len(self._pending) == BLOCK_BYTES:
                self._total += self._sum(np.frombuffer(bytes(self._pending), dtype=np.uint8))
                self._blocks += 1
                self._pending.clear()
        whole = len(data) // BLOCK_BYTES
        self._total += self._sum(data[: whole * BLOCK_BYTES])
        self._blocks += whole
        self._pending += data[whole * BLOCK_BYTES :].tobytes()

    def value(self) -> int:
        """The digest of everything given so far: 0 <= value < 2**64."""
        tail = np.frombuffer(bytes(self._pending) + bytes(-len(self._pending) % 8), dtype=np.uint8)
        return _finish(self._total + self._sum(tail), self._nbytes)

    def _sum(self, data: np.ndarray) -> int:
        """The weighted sum of the blocks in `data` (whole lanes; only the last block may be short)."""
        lanes = data.view(_U64)
        weights = _block_weights(self._blocks, -(-len(lanes) // BLOCK_LANES))
        total = 0
        for row, weight in enumerate(weights):
            block = lanes[row * BLOCK_LANES : (row + 1) * BLOCK_LANES]
            mixed, shifted = self._mixed[: len(block)], self._shifted[: len(block)]
            np.right_shift(block, np.uint64(32), out=shifted)
            np.bitwise_xor(block, shifted, out=mixed)
            np.multiply(mixed, _LANE_WEIGHTS[: len(block)], out=mixed)
            np.right_shift(mixed, np.uint64(29), out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            block_sum = int(mixed.sum(dtype=np.uint64))
            total += (block_sum ^ (block_sum >> 31)) * int(weight)
        return total & _MASK


def digest_bytes(buffer: BytesLike) -> int:
    """The digest of a contiguous bytes-like object, as an unsigned 64-bit number."""
    digester = Digester()
    digester.update(buffer)
    return digester.value()


def digest(tensor: torch.Tensor) -> int:
    """The digest of a tensor's elements in row-major order, computed on the tensor's own device.

    tensor: any shape, strides and dtype of whole bytes. Shape and dtype are not part of the value: it equals
        `digest_bytes` of the contiguous bytes.
    """
    if tensor.device.type == "cpu":
        return digest_bytes(_flat_bytes(tensor).numpy())
    return digest_on_device(tensor)


def digest_on_device(tensor: torch.Tensor) -> int:
    """`digest` in plain torch operations on the tensor's device; synchronizes once, at the end."""
    data = _flat_bytes(tensor)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _SLAB_BYTES):
        lanes = _lanes(data[start : start + _SLAB_BYTES])
        whole = lanes.numel() // BLOCK_LANES
        first_block = start // BLOCK_BYTES
        rows, tail = lanes[: whole * BLOCK_LANES].view(whole, BLOCK_LANES), lanes[whole * BLOCK_LANES :]
        total += _weighted_sum(rows, first_block)
        total += _weighted_sum(tail.view(1, -1), first_block + whole)
    return _finish(int(total.item()), data.numel())


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


@lru_cache(maxsize=8)
def _lane_weights_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_LANE_WEIGHTS.view(np.int64)).to(device)


def _weighted_sum(rows: torch.Tensor, first_block: int) -> torch.Tensor:
    """int64 [blocks, lanes] to an int64 scalar. Shifts of int64 are arithmetic, so masks clear the copied sign."""
    weights = torch.from_numpy(_block_weights(first_block, rows.shape[0]).view(np.int64)).to(rows.device)
    mixed = (rows ^ ((rows >> 32) & ((1 << 32) - 1))) * _lane_weights_on(rows.device)[: rows.shape[1]]
    mixed = mixed ^ ((mixed >> 29) & ((1 << 35) - 1))
    sums = mixed.sum(dim=1)
    return ((sums ^ ((sums >> 31) & ((1 << 33) - 1))) * weights).sum()
