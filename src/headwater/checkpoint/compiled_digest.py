"""The inner loop of `byte_digest`, compiled for this processor: as fast as memory, without the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import config

_LANES = types.Array(types.uint64, 1, "C", readonly=True, aligned=False)
_SIGNATURE = types.uint64(_LANES, _LANES, _LANES)


def _sum_blocks(lanes: np.ndarray, lane_weights: np.ndarray, block_weights: np.ndarray) -> Any:
    total = np.uint64(0)
    longest = len(lane_weights)
    for index in range(len(block_weights)):
        block = lanes[index * longest : (index + 1) * longest]  # a loop from 0 on is what gets vectorized
        block_sum = np.uint64(0)
        for lane in range(len(block)):
            mixed = block[lane]
            mixed = (mixed ^ (mixed >> np.uint64(32))) * lane_weights[lane]
            block_sum += mixed ^ (mixed >> np.uint64(29))
        total += (block_sum ^ (block_sum >> np.uint64(31))) * block_weights[index]
    return total


def compile_sum_blocks() -> Callable[[np.ndarray, np.ndarray, np.ndarray], int]:
    """The weighted sum of blocks of lanes modulo 2**64; uint64 arrays, aligned or not, of any number of lanes.

    lane_weights: of a whole block. block_weights: one for each block in lanes. Kept on disk from one process to the
    next where the package's folder or the user's cache can be written and what is there can be read. Raises
    RuntimeError where numba is told not to compile.
    """
    if getattr(config, "DISABLE_JIT", False):
        raise RuntimeError("NUMBA_DISABLE_JIT is set")
    try:
        return numba.njit(_SIGNATURE, nogil=True, cache=True)(_sum_blocks)
    except Exception:  # nowhere to keep it, no space there, or a damaged file
        return numba.njit(_SIGNATURE, nogil=True)(_sum_blocks)
