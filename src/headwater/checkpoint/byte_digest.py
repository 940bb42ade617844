"""The 64-bit digest of bytes in numpy, without torch: what the writer process and readers of foreign files need.

The bytes are read as little-endian 64-bit lanes, the last one padded with zeros. A lane is folded (high half
into the low), multiplied by an odd weight of its position in the block and folded again; the lanes of a block
are summed, the sum is folded, multiplied by an odd weight of the block and summed. All arithmetic is modulo
2**64. The length in bytes is mixed into the result, so padding is not content. Each step on a single lane is
a bijection, so a change within one lane is always seen.

It finds stale, torn, moved and corrupt data. It is no defence against someone who forges data on purpose.
"""

from __future__ import annotations

import os
import threading

import numpy as np

BLOCK_LANES = 1 << 16
BLOCK_BYTES = BLOCK_LANES * 8
_MASK = (1 << 64) - 1
_U64 = np.dtype("<u8")
_PART_BLOCKS = 16  # a thread is worth its start from 8 MiB on
_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

BytesLike = bytes | bytearray | memoryview | np.ndarray


def _splitmix64(index: np.ndarray) -> np.ndarray:
    """Element `index` of the splitmix64 sequence seeded with 0 (Steele et al., 2014): uint64 to uint64."""
    z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _odd_weights(first: int, count: int) -> np.ndarray:
    return _splitmix64(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)


LANE_WEIGHTS = _odd_weights(0, BLOCK_LANES)


def block_weights(first_block: int, count: int) -> np.ndarray:
    """Odd weights of `count` blocks from `first_block` on: uint64 [count]."""
    return _odd_weights(BLOCK_LANES + first_block, count)


def finish(total: int, nbytes: int) -> int:
    """The digest of `nbytes` bytes whose blocks have the weighted sum `total`."""
    length = _splitmix64(np.array([nbytes], dtype=np.uint64))
    return int(_splitmix64(np.array([total & _MASK], dtype=np.uint64) ^ length)[0])


class Digester:
    """The digest of a stream of buffers; how the stream was cut into buffers does not matter."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._blocks = 0
        self._total = 0
        self._pending = bytearray()

    def update(self, buffer: BytesLike) -> None:
        """Append the bytes of a contiguous buffer."""
        data = np.frombuffer(buffer, dtype=np.uint8)
        self._nbytes += len(data)
        if self._pending:
            taken = min(len(data), BLOCK_BYTES - len(self._pending))
            self._pending += data[:taken].tobytes()
            data = data[taken:]
            if len(self._pending) == BLOCK_BYTES:
                self._total += _sum_blocks(np.frombuffer(bytes(self._pending), dtype=np.uint8), self._blocks)
                self._blocks += 1
                self._pending.clear()
        whole = len(data) // BLOCK_BYTES
        self._total += _sum_blocks(data[: whole * BLOCK_BYTES], self._blocks)
        self._blocks += whole
        self._pending += data[whole * BLOCK_BYTES :].tobytes()

    def value(self) -> int:
        """The digest of everything given so far: 0 <= value < 2**64."""
        tail = np.frombuffer(bytes(self._pending) + bytes(-len(self._pending) % 8), dtype=np.uint8)
        return finish(self._total + _sum_blocks(tail, self._blocks), self._nbytes)


def _sum_blocks(data: np.ndarray, first_block: int) -> int:
    """The weighted sum of the blocks in `data` (whole lanes; only the last block may be short).

    Blocks are independent, and numpy lets go of the interpreter lock, so large data is shared out to threads.
    """
    blocks = -(-len(data) // BLOCK_BYTES)
    parts = max(1, min(_THREADS, blocks // _PART_BLOCKS))
    if parts == 1:
        return _sum_serially(data, first_block)
    bounds = [blocks * part // parts for part in range(parts + 1)]
    sums = [0] * parts

    def run(part: int) -> None:
        begin, end = bounds[part], bounds[part + 1]
        sums[part] = _sum_serially(data[begin * BLOCK_BYTES : end * BLOCK_BYTES], first_block + begin)

    threads = [threading.Thread(target=run, args=(part,), name="headwater-digest") for part in range(1, parts)]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    return sum(sums) & _MASK


def _sum_serially(data: np.ndarray, first_block: int) -> int:
    lanes = data.view(_U64)
    weights = block_weights(first_block, -(-len(lanes) // BLOCK_LANES))
    longest = min(len(lanes), BLOCK_LANES)
    mixed_space, shifted_space = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    total = 0
    for row, weight in enumerate(weights):
        block = lanes[row * BLOCK_LANES : (row + 1) * BLOCK_LANES]
        mixed, shifted = mixed_space[: len(block)], shifted_space[: len(block)]
        np.right_shift(block, np.uint64(32), out=shifted)
        np.bitwise_xor(block, shifted, out=mixed)
        np.multiply(mixed, LANE_WEIGHTS[: len(block)], out=mixed)
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
