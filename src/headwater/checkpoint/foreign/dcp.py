"""Folders of torch.distributed.checkpoint: `.metadata` and files of `torch.save` archives, one a stored box."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from headwater.checkpoint.foreign.archive import BadArchiveError, storage_range
from headwater.checkpoint.foreign.confine import confined
from headwater.checkpoint.foreign.names import assign_weights, classify, is_padding
from headwater.checkpoint.foreign.pickles import Record, RefusedPickleError, load_metadata, load_values
from headwater.checkpoint.foreign.record import ByteRange, Contents, StoredChunk
from headwater.errors import UserError

METADATA_NAME = ".metadata"
_GROUP_STEP = re.compile(r"(.*?)param_groups\..*\bstep")
# Megatron's dp_reshardable keeps the optimizer's groups in an object of this name.
_GROUPS = re.compile(r"(.*?)optimizer/shard_[\d_.]+")
_NUMBERS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "<u1"}


@dataclass(frozen=True)
class _Entry:
    """One item of the metadata. dtype and shape are None for an object that is no tensor."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    bytes: ByteRange


def read_dcp(folder: Path) -> Contents:
    """What a folder of torch.distributed.checkpoint holds; reads the metadata and the optimizer's steps, no tensor.

    Raises UserError, in one line, where the metadata is missing, damaged, refused, or contradicts the files.
    """
    chunks: list[StoredChunk] = []
    steps: dict[tuple[str, str], float] = {}
    groups: dict[str, set[float]] = {}
    for entry in _entries(folder, load_metadata(folder / METADATA_NAME)):
        meaning = classify(entry.key, entry.dtype or "")
        all_groups = _GROUPS.fullmatch(entry.key)
        if all_groups and entry.dtype is None:
            found = group_steps(load_values(entry.bytes.path, entry.bytes.begin, entry.bytes.end))
            groups.setdefault(_component_of(all_groups[1]), set()).update(found)
            continue
        of_group = _GROUP_STEP.fullmatch(entry.key)
        if of_group or meaning.role == "step":
            step = _step(entry)
            if step is not None and of_group:
                groups.setdefault(_component_of(of_group[1]), set()).add(step)
            elif step is not None:
                steps[meaning.component, meaning.parameter] = step
            continue
        if entry.dtype is None or entry.shape is None:
            continue
        chunks.append(
            StoredChunk(
                meaning.component,
                "other" if is_padding(entry.key, entry.offset, entry.shape) else meaning.role,
                meaning.parameter,
                entry.key,
                entry.offset,
                entry.shape,
                entry.dtype,
                entry.bytes,
            )
        )
    by_component = {component: tuple(sorted(found)) for component, found in groups.items() if found}
    return Contents(folder, "torch.distributed.checkpoint", assign_weights(chunks), steps, by_component)


def _entries(folder: Path, metadata: Record) -> Iterator[_Entry]:
    described = getattr(metadata, "state_dict_metadata", None)
    stored = getattr(metadata, "storage_data", None)
    where = folder / METADATA_NAME
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise RefusedPickleError(f"{where}: lists no tensors")
    sizes: dict[Path, int] = {}
    tensors: dict[str, _Tensor | None] = {}
    for index, info in stored.items():
        if not _is_box(index, info, described):
            raise RefusedPickleError(f"{where}: its list of stored boxes is damaged")
        key, offset, begin, length = index.fqn, tuple(getattr(index, "offset", None) or ()), info.offset, info.length
        if getattr(info, "transform_descriptors", None):
            raise UserError(f"{where}: {key} is stored compressed; freshness reads plain archives only")
        file = confined(folder, info.relative_path, where)
        size = sizes.setdefault(file, _size(file, where))
        if begin + length > size:
            raise UserError(
                f"{file}: {size} bytes, {METADATA_NAME} says that {key} ends at {begin + length}: it is cut"
            )
        if key not in tensors:
            tensors[key] = _tensor(described[key], where, key)
        tensor = tensors[key]
        if tensor and offset not in tensor.boxes:
            raise RefusedPickleError(f"{where}: the description of {key} is damaged")
        dtype, shape = (tensor.dtype, tensor.boxes[offset]) if tensor else (None, None)
        yield _Entry(key, offset, shape, dtype, ByteRange(file, begin, begin + length, archive=True))


def _is_box(index: Any, info: Any, described: dict[Any, Any]) -> bool:
    key, offset = getattr(index, "fqn", None), getattr(index, "offset", None)
    return (
        isinstance(key, str)
        and key.isprintable()  # messages name it
        and key in described
        and isinstance(getattr(info, "relative_path", None), str)
        and (offset is None or _are_sizes(offset))
        and _are_sizes((getattr(info, "offset", None), getattr(info, "length", None)))
    )


@dataclass(frozen=True)
class _Tensor:
    """How a tensor is stored. boxes: their shapes by offset."""

    dtype: str
    boxes: dict[tuple[int, ...], tuple[int, ...]]


def _tensor(properties: Any, where: Path, key: str) -> _Tensor | None:
    """The description of a tensor, None for an object that is none."""
    if getattr(properties, "kind", "") != "TensorStorageMetadata":
        return None
    record = getattr(properties, "properties", None)
    state = getattr(record, "state", None)  # a tuple, dtype first; older versions pickled a dictionary
    dtype = state[0] if isinstance(state, tuple) and state else getattr(record, "dtype", None)
    listed = getattr(properties, "chunks", None)
    boxes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for box in listed if isinstance(listed, list) else ():
        offset, shape = getattr(box, "offsets", None), getattr(box, "sizes", None)
        if _are_sizes(offset) and _are_sizes(shape):
            boxes[offset] = shape
    if not isinstance(dtype, str) or not boxes:
        raise RefusedPickleError(f"{where}: the description of {key} is damaged")
    return _Tensor(dtype, boxes)


def _are_sizes(values: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple) and all(type(value) is int and value >= 0 for value in values)


def _component_of(prefix: str) -> str:
    """The component of an optimizer, from what comes before its groups: as for its state."""
    return classify(f"{prefix}state.any.step", "").component


def as_number(value: Any) -> float | None:
    """A step as a number, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _step(entry: _Entry) -> float | None:
    """A step that was stored as a tensor, or as an object: a number, or a tensor of one."""
    if entry.dtype is None:
        return as_number(load_values(entry.bytes.path, entry.bytes.begin, entry.bytes.end))
    dtype = np.dtype(_NUMBERS[entry.dtype]) if entry.dtype in _NUMBERS else None
    if dtype is None:
        return None
    try:
        descriptor = os.open(entry.bytes.path, os.O_RDONLY)
    except OSError:
        return None
    try:
        first, last = storage_range(descriptor, entry.bytes.begin, entry.bytes.end)
        raw = os.pread(descriptor, dtype.itemsize, first) if last - first == dtype.itemsize else b""
    except (BadArchiveError, OSError):
        return None
    finally:
        os.close(descriptor)
    return float(np.frombuffer(raw, dtype)[0]) if len(raw) == dtype.itemsize else None


def _size(file: Path, where: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}: listed in {where.name}, but it cannot be read ({error.strerror})") from None


def group_steps(value: Any, depth: int = 0) -> Iterator[float]:
    """The `step` of every parameter group, wherever the optimizers (chained ones too) keep their groups."""
    if depth > 8:
        return
    if isinstance(value, dict):
        groups = value.get("param_groups")
        for group in groups.values() if isinstance(groups, dict) else groups if isinstance(groups, list) else ():
            step = as_number(group.get("step")) if isinstance(group, dict) else None
            if step is not None:
                yield step
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, dict | list | tuple):
                yield from group_steps(item, depth + 1)
