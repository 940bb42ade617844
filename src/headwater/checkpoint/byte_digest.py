"""The 64-bit digest of bytes on the host, without torch: what the writer process and readers of foreign files need.

The bytes are read as little-endian 64-bit lanes, the last one padded with zeros. A lane is folded (high half
into the low), multiplied by an odd weight of its position in the block and folded again; the lanes of a block
are summed, the sum is folded, multiplied by an odd weight of the block and summed. All arithmetic is modulo
2**64. The length in bytes is mixed into the result, so padding is not content. Each step on a single lane is
a bijection, so a change within one lane is always seen.

It finds stale, torn, moved and corrupt data. It is no defence against someone who forges data on purpose.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

BLOCK_LANES = 1 << 16
BLOCK_BYTES = BLOCK_LANES * 8
_log = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
_U64 = np.dtype("<u8")
_PART_BLOCKS = 16  # what a thread takes at once
_THREAD_BYTES = 8 << 20  # a thread is worth its start from here on
_WORTH_COMPILING = 8 << 20
_PROBED_LANES = 1001
_THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

BytesLike = bytes | bytearray | memoryview | np.ndarray
_InnerLoop = Callable[[np.ndarray, np.ndarray, np.ndarray], int]


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


_FIRST_BLOCK_WEIGHTS = block_weights(0, 1 << 15)


def _known_block_weights(first_block: int, count: int) -> np.ndarray:
    last = first_block + count
    return _FIRST_BLOCK_WEIGHTS[first_block:last] if last <= 1 << 15 else block_weights(first_block, count)


def finish(total: int, nbytes: int) -> int:
    """The digest of `nbytes` bytes whose blocks have the weighted sum `total`."""
    return _mix(total & _MASK ^ _mix(nbytes))


def _mix(index: int) -> int:
    """`_splitmix64` of one number; for that, plain integers are ten times faster than arrays."""
    z = (index + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return z ^ z >> 31


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
                self._add(np.frombuffer(bytes(self._pending), dtype=np.uint8))
                self._pending.clear()
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        self._add(data[:whole])
        self._pending += data[whole:].tobytes()

    def _add(self, data: np.ndarray) -> None:
        (total,) = _sums([_Part(0, data, self._blocks)], 1)
        self._total += total
        self._blocks += len(data) // BLOCK_BYTES

    def value(self) -> int:
        """The digest of everything given so far: 0 <= value < 2**64."""
        (tail,) = _sums([_Part(0, _padded(self._pending), self._blocks)], 1)
        return finish(self._total + tail, self._nbytes)


def digest_bytes(buffer: BytesLike) -> int:
    """The digest of a contiguous bytes-like object, as an unsigned 64-bit number."""
    return digest_many([buffer])[0]


def digest_many(buffers: Sequence[BytesLike]) -> list[int]:
    """`digest_bytes` of each contiguous buffer, shared out to threads."""
    parts: list[_Part] = []
    lengths: list[int] = []
    for index, buffer in enumerate(buffers):
        data = np.frombuffer(buffer, dtype=np.uint8)
        lengths.append(len(data))
        whole_blocks = len(data) // BLOCK_BYTES if len(data) % 8 else -(-len(data) // BLOCK_BYTES)
        body = data[: whole_blocks * BLOCK_BYTES]
        for first in range(0, whole_blocks, _PART_BLOCKS):
            parts.append(_Part(index, body[first * BLOCK_BYTES : (first + _PART_BLOCKS) * BLOCK_BYTES], first))
        if len(data) % 8:
            parts.append(_Part(index, _padded(data[len(body) :]), whole_blocks))
    totals = _sums(parts, len(lengths))
    return [finish(total, nbytes) for total, nbytes in zip(totals, lengths, strict=True)]


class _Part(NamedTuple):
    """data: uint8, whole lanes; only its last block may be short. first_block: of its buffer, which is `buffer`."""

    buffer: int
    data: np.ndarray
    first_block: int


def _padded(data: BytesLike) -> np.ndarray:
    return np.frombuffer(bytes(data) + bytes(-len(data) % 8), dtype=np.uint8)


def _sums(parts: Sequence[_Part], buffers: int) -> list[int]:
    """The weighted sum of each buffer's blocks. Blocks are independent, and no loop holds the interpreter lock."""
    nbytes = sum(len(part.data) for part in parts)
    sum_blocks = _inner_loop(nbytes)
    totals = [0] * buffers
    todo = iter(parts)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                part = next(todo, None)
            if part is None:
                return
            lanes = part.data.view(_U64)
            weights = _known_block_weights(part.first_block, -(-len(lanes) // BLOCK_LANES))
            total = int(sum_blocks(lanes, LANE_WEIGHTS, weights))
            with lock:
                totals[part.buffer] += total

    threads: list[threading.Thread] = []
    for _ in range(min(_THREADS, len(parts), nbytes // _THREAD_BYTES + 1) - 1):
        thread = threading.Thread(target=work, name="headwater-digest")
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts none once the program ends, when the last save may still be staged
            break
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    return totals


_loading = threading.Lock()
_loaded: _InnerLoop | None = None


def _compiled() -> _InnerLoop:
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = _compile()
        return _loaded


def _compile() -> _InnerLoop:
    try:
        from headwater.checkpoint.compiled_digest import compile_sum_blocks

        compiled = compile_sum_blocks()
        # It may come from a file, and the writer reads the same one: both would agree on a wrong digest.
        arguments = LANE_WEIGHTS[:_PROBED_LANES], LANE_WEIGHTS, _FIRST_BLOCK_WEIGHTS[:1]
        if int(compiled(*arguments)) != _sum_by_numpy(*arguments):
            raise RuntimeError("the compiled loop computes another value")
        return compiled
    except Exception as error:
        _log.warning("digests are computed by numpy, which is four times slower: %s", error)
        return _sum_by_numpy


def warm_up() -> None:
    """Have the compiled loop ready, which takes a few tenths of a second once."""
    _compiled()


def _inner_loop(nbytes: int) -> _InnerLoop:
    """A few bytes are not worth loading a compiler for; where it is loaded, it is the fastest for them too."""
    if nbytes > _WORTH_COMPILING:
        return _compiled()
    return _loaded or _sum_by_numpy


def _sum_by_numpy(lanes: np.ndarray, lane_weights: np.ndarray, block_weights: np.ndarray) -> int:
    longest = min(len(lanes), len(lane_weights))
    mixed_space, shifted_space = np.empty(longest, np.uint64), np.empty(longest, np.uint64)
    total = 0
    for row, weight in enumerate(block_weights):
        block = lanes[row * len(lane_weights) : (row + 1) * len(lane_weights)]
        mixed, shifted = mixed_space[: len(block)], shifted_space[: len(block)]
        np.right_shift(block, np.uint64(32), out=shifted)
        np.bitwise_xor(block, shifted, out=mixed)
        np.multiply(mixed, lane_weights[: len(block)], out=mixed)
        np.right_shift(mixed, np.uint64(29), out=shifted)
        np.bitwise_xor(mixed, shifted, out=mixed)
        block_sum = int(mixed.sum(dtype=np.uint64))
        total += (block_sum ^ (block_sum >> 31)) * int(weight)
    return total & _MASK
