"""Folders of safetensors files: usually a model alone, as the Hugging Face libraries save it."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.checkpoint.dtypes import ITEMSIZES
from headwater.checkpoint.foreign.names import assign_weights, classify
from headwater.checkpoint.foreign.record import ByteRange, Contents, Role, StoredChunk
from headwater.errors import UserError

_LARGEST_HEADER = 100_000_000  # the limit of the format itself
_SHARDING = "DCP_SHARDING_INFO"  # where torch's own writer puts each box in its tensor


def read_safetensors(folder: Path) -> Contents:
    """What the `*.safetensors` files of a folder hold; reads their headers only. Raises UserError in one line."""
    chunks = [chunk for path in sorted(folder.glob("*.safetensors")) for chunk in _file(path)]
    times = Counter((chunk.key, chunk.offset) for chunk in chunks)
    marked = [chunk if times[chunk.key, chunk.offset] == 1 else _of_its_file(chunk) for chunk in chunks]
    return Contents(folder, "safetensors", assign_weights(marked))


def _of_its_file(chunk: StoredChunk) -> StoredChunk:
    """A name that several files use can be compared with that of the same file only."""
    return replace(chunk, part=chunk.bytes.path.name)


def _file(path: Path) -> list[StoredChunk]:
    header, data, size = _header(path)
    offsets = _offsets(header.pop("__metadata__", None))
    chunks: list[StoredChunk] = []
    for key, entry in header.items():
        if not _is_entry(entry):
            raise UserError(f"{path}: the header's entry for {key[:80]!r} is damaged")
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if data + end > size:
            raise UserError(f"{path}: {size} bytes, its header says that {key} ends at {data + end}: it is cut")
        if dtype in ITEMSIZES and end - begin != math.prod(shape) * ITEMSIZES[dtype]:
            raise UserError(f"{path}: {end - begin} bytes for {key}, shape {shape} of {dtype}: the header is damaged")
        meaning = classify(key, dtype)
        role: Role = "other" if meaning.role == "step" else meaning.role
        stored = ByteRange(path, data + begin, data + end)
        offset = offsets.get(key, (0,) * len(shape))
        chunks.append(StoredChunk(meaning.component, role, meaning.parameter, key, offset, shape, dtype, stored))
    return chunks


def _is_entry(entry: Any) -> bool:
    try:
        begin, end = entry["data_offsets"]
        numbers = (*entry["shape"], begin, end)
        return isinstance(entry["dtype"], str) and all(type(n) is int and n >= 0 for n in numbers) and begin <= end
    except (KeyError, TypeError, ValueError):
        return False


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the tensors' bytes begin, and the file's size."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise UserError(f"{path}: not a safetensors file, or cut")
            header = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: its header is not valid JSON") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: its header is not a list of tensors")
    return header, 8 + length, size


def _offsets(metadata: Any) -> dict[str, tuple[int, ...]]:
    """Where each box begins in its tensor, of a file that torch.distributed.checkpoint wrote as one shard of many."""
    try:
        info = json.loads(metadata[_SHARDING])
        return {key: tuple(map(int, entry["saved_offsets"])) for key, entry in info.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}
