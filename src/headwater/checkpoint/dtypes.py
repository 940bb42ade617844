"""The dtypes that a checkpoint can hold, under the names of the safetensors format."""

from __future__ import annotations

import torch

from headwater.checkpoint.dtype_sizes import ITEMSIZES

__all__ = ["DTYPES", "ITEMSIZES", "dtype_name"]

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype. Raises ValueError for one that cannot be stored."""
    if dtype not in _NAMES:
        raise ValueError(f"{dtype} cannot be stored in a checkpoint; one of {', '.join(map(str, _NAMES))} can")
    return _NAMES[dtype]
