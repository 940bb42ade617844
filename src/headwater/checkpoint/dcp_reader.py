"""`torch.distributed.checkpoint` reading Headwater's format."""

from __future__ import annotations

import io
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from headwater.checkpoint.catalog import newest
from headwater.checkpoint.commit import committed, parse_folder_name
from headwater.checkpoint.dtypes import DTYPES
from headwater.checkpoint.json_values import decode
from headwater.checkpoint.manifest import CorruptCheckpointError
from headwater.checkpoint.reader import TRAINER_NAME, Checkpoint, ComponentReader
from headwater.errors import UserError


class HeadwaterReader(StorageReader):
    """Reads a committed checkpoint for `dcp.load`, at any world size and placement; every box used is checked.

    folder: a checkpoint's folder, or a run's checkpoint folder for its newest committed one.
    component: which part of it; may be left out where there is one only.

    `dcp.load` raises CheckpointException, which holds the ranks' own errors: UserError for a folder, component or dtype
    that does not fit, CorruptCheckpointError naming file and chunk for bytes that do not match their digest.
    """

    def __init__(self, folder: str | os.PathLike[str], component: str | None = None) -> None:
        self._path = Path(folder).expanduser()
        self._wanted = component
        self._checkpoint: Checkpoint | None = None
        self._reader: ComponentReader | None = None
        self._values: dict[str, Any] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous load. checkpoint_id: another folder, in place of the constructor's."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).expanduser()
        self._checkpoint = self._reader = None
        self._values = {}

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """What the checkpoint holds. Raises UserError where it is none, or a tensor is not whole."""
        self._checkpoint = checkpoint = _open(self._path)
        component = self._wanted
        if component is None:
            names = checkpoint.components()
            if len(names) != 1:
                raise UserError(f"{checkpoint.folder} has components {', '.join(names)}: give component=")
            component = names[0]
        self._reader = checkpoint.component(component)
        self._values, paths = stored_values(checkpoint, component)
        entries: dict[str, Any] = {name: BytesStorageMetadata() for name in self._values}
        for name in self._reader.names():
            boxes = self._reader.boxes(name)
            shape = boxes[0].global_shape
            if sum(math.prod(box.shape) for box in boxes) < math.prod(shape):
                raise CorruptCheckpointError(f"{checkpoint.folder}: chunk {name}: its boxes do not cover shape {shape}")
            chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in boxes]
            properties = TensorProperties(dtype=DTYPES[boxes[0].dtype])
            entries[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
        return Metadata(entries, planner_data={name: paths.get(name, (name,)) for name in entries})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._checkpoint is not None, "torch calls read_metadata first"
        return replace(plan, storage_data=self._checkpoint.folder.name)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See that all ranks found the same checkpoint: a run may commit a newer one in between."""
        folders = sorted({plan.storage_data for plan in plans})
        if len(folders) > 1:
            raise UserError(f"{self._path}: ranks found different checkpoints ({', '.join(folders)}): load one by name")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each stored box that is needed once, check it, and copy what is asked for."""
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                # The planner unpickles what it is given: these bytes are made here, from plain values.
                data = io.BytesIO()
                torch.save(self._values[item.storage_index.fqn], data)
                planner.load_bytes(item, io.BytesIO(data.getvalue()))
            else:
                wanted.setdefault(item.storage_index, []).append(item)
        for index, items in wanted.items():
            self._read_box(index, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_box(self, index: MetadataIndex, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._reader is not None, "torch calls read_metadata first"
        box = next(box for box in self._reader.boxes(index.fqn) if box.offset == tuple(index.offset or ()))
        stored = self._reader.read_box(box)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            if target.dtype != stored.dtype and not (target.is_floating_point() and stored.is_floating_point()):
                raise UserError(f"{self._path}: chunk {box.name} is {stored.dtype}, not convertible to {target.dtype}")
            ranges = zip(item.storage_offsets, item.lengths, strict=True)
            target.copy_(stored[tuple(slice(first, first + length) for first, length in ranges)])
            planner.commit_tensor(item, target)


def stored_values(checkpoint: Checkpoint, component: str) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """The leaves that are no tensors, and where each name sits in the nested state dict; empty if not saved by DCP.

    Raises CorruptCheckpointError for values that Headwater did not write.
    """
    where = f"{checkpoint.folder / TRAINER_NAME}"
    saved = checkpoint.trainer_state().get("dcp", {})
    part = saved.get(component, {}) if isinstance(saved, dict) else None
    values, paths = (part.get("values", {}), part.get("paths", {})) if isinstance(part, dict) else (None, None)
    if not isinstance(values, dict) or not isinstance(paths, dict):
        raise CorruptCheckpointError(f"{where}: not what Headwater writes under dcp")
    for path in paths.values():
        if not isinstance(path, list) or not path or not all(type(key) in (str, int) for key in path):
            raise CorruptCheckpointError(f"{where}: not what Headwater writes under dcp")
    decoded = {name: decode(value, f"{where}: {name}") for name, value in values.items()}
    return decoded, {name: tuple(path) for name, path in paths.items()}


def _open(path: Path) -> Checkpoint:
    if committed(path) or parse_folder_name(path.absolute().name):
        return Checkpoint.open_to_load(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    found = newest(path)
    if found is None:
        raise UserError(f"{path}: neither a checkpoint nor a folder with a committed one")
    return Checkpoint.open_to_load(found.folder)
