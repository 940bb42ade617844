"""Which format a folder is, and what it holds."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from headwater.checkpoint.catalog import newest
from headwater.checkpoint.commit import committed, parse_folder_name
from headwater.checkpoint.foreign.dcp import METADATA_NAME, read_dcp
from headwater.checkpoint.foreign.megatron import COMMON_NAME, read_megatron
from headwater.checkpoint.foreign.names import assign_weights, classify
from headwater.checkpoint.foreign.record import ByteRange, Contents, StoredChunk
from headwater.checkpoint.foreign.safetensors import read_safetensors
from headwater.checkpoint.reader import Checkpoint
from headwater.errors import UserError

_NUMBERS = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4"}
_TRACKER = "latest_checkpointed_iteration.txt"


def read_folder(folder: Path) -> Contents:
    """What a checkpoint folder of any known format holds, without reading a tensor's bytes.

    A Headwater run's folder stands for its newest committed checkpoint.
    Raises UserError, in one line with the remedy where there is one, for a folder of no known format or a damaged one.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: not a folder")
    if committed(folder) or parse_folder_name(folder.resolve().name):
        return read_headwater(folder)
    if (folder / METADATA_NAME).exists():
        return read_megatron(folder) if _is_megatron(folder) else read_dcp(folder)
    if any(folder.glob("*.distcp")):
        raise UserError(
            f"{folder}: has no {METADATA_NAME}: its save never finished, or it was copied without hidden files"
        )
    if any(folder.glob("*.safetensors")):
        return read_safetensors(folder)
    found = newest(folder)
    if found:
        note = f"{folder}: its newest committed checkpoint is {found.folder.name}"
        return replace(read_headwater(found.folder), notes=(note,))
    if (folder / _TRACKER).exists():
        raise UserError(f"{folder}: a Megatron run's folder; name one of its iter_* folders")
    raise UserError(
        f"{folder}: no known checkpoint; one holds manifest.json (Headwater), {METADATA_NAME} "
        "(torch.distributed.checkpoint, Megatron torch_dist) or *.safetensors"
    )


def _is_megatron(folder: Path) -> bool:
    settings_file = folder / "metadata.json"
    if not settings_file.is_file():
        return (folder / COMMON_NAME).exists()
    try:
        settings = json.loads(settings_file.read_bytes())
        return isinstance(settings, dict) and settings.get("sharded_backend") == "torch_dist"
    except (OSError, ValueError, RecursionError):
        return (folder / COMMON_NAME).exists()


def read_headwater(folder: Path) -> Contents:
    """What one of our own checkpoints holds. Raises UserError for one that is not committed or not to be believed."""
    checkpoint = Checkpoint.open(folder)
    chunks: list[StoredChunk] = []
    steps: dict[tuple[str, str], float] = {}
    for entry in checkpoint.manifest.chunks:
        meaning = classify(entry.name, entry.dtype)
        stored = ByteRange(folder / entry.file, entry.begin, entry.end)
        if meaning.role == "step":
            step = _number(stored, entry.dtype)
            if step is not None:
                steps[entry.component, meaning.parameter] = step
            continue
        chunks.append(
            StoredChunk(
                entry.component,
                meaning.role,
                meaning.parameter,
                entry.name,
                entry.offset,
                entry.shape,
                entry.dtype,
                stored,
            )
        )
    placed = [
        replace(chunk, component=component)
        for component in checkpoint.components()
        for chunk in assign_weights(chunk for chunk in chunks if chunk.component == component)
    ]
    return Contents(folder, "Headwater", tuple(placed), steps, identity=checkpoint.manifest.model_identity)


def _number(stored: ByteRange, dtype: str) -> float | None:
    kind = np.dtype(_NUMBERS[dtype]) if dtype in _NUMBERS else None
    if kind is None or stored.end - stored.begin != kind.itemsize:
        return None
    descriptor = os.open(stored.path, os.O_RDONLY)
    try:
        raw = os.pread(descriptor, kind.itemsize, stored.begin)
    finally:
        os.close(descriptor)
    return float(np.frombuffer(raw, kind)[0]) if len(raw) == kind.itemsize else None
