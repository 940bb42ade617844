"""The CUDA stream in which saves copy, next to training."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

_NON_BLOCKING = 1  # does not wait for the default stream, in which training runs


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The process's one stream for copies from this device; it lives as long as the process.

    Made by the driver, since the first `torch.cuda.Stream` of a program makes a pool of 32 and takes 70 MiB of the
    device with it (measured on an H200). Where the driver cannot be asked, it is one of the pool.
    """
    torch.cuda.mem_get_info(device)  # a new thread has no context yet
    stream = ctypes.c_void_p()
    try:
        with torch.cuda.device(device):
            failed = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING)
    except (OSError, AttributeError):
        failed = True
    if failed or stream.value is None:
        return torch.cuda.Stream(device)
    return torch.cuda.ExternalStream(stream.value, device)
