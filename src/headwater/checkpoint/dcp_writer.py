"""`torch.distributed.checkpoint` writing Headwater's format.

    every rank:   plan ──────────────▶ write own file, digests ──┐
    coordinator:       └▶ new folder ─┘                          └▶ compare, complete?, manifest renamed = committed

Whatever fails on any rank, torch does not call `finish`, so there is no manifest and the folder is no checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
import uuid
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from headwater.checkpoint import preflight
from headwater.checkpoint.catalog import scan
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.commit import commit, committed, discard, new_folder
from headwater.checkpoint.json_values import encode
from headwater.checkpoint.manifest import ChunkEntry, FileEntry, Manifest, validate
from headwater.checkpoint.reader import TRAINER_NAME, file_problem
from headwater.checkpoint.snapshot import snapshot
from headwater.checkpoint.writer import PAGE, write_bytes, write_chunks
from headwater.errors import HeadwaterError, UserError

_COMPONENT = re.compile(r"[a-z][a-z0-9_]*")
_HEADER_BYTES_PER_CHUNK = 1024  # in safetensors header and manifest together, with room to spare


@dataclass(frozen=True)
class _Target:
    """Where a rank writes. file: relative to the folder."""

    folder: Path
    save_id: str
    file: str


@dataclass(frozen=True)
class _StoredTensor:
    """entry: with the digest of the live tensor. written: digest of the bytes that were written."""

    entry: ChunkEntry
    file: FileEntry
    written: int


@dataclass(frozen=True)
class _StoredValue:
    """A leaf that is no tensor, as JSON; it travels to the coordinator in the result itself."""

    json: Any


class _RootLock:
    """This process's hold on a run's checkpoint folder, shared by its writers while any of them is saving.

    Taking it removes what ended saves left without committing: nobody else can be writing there.
    """

    _held: ClassVar[weakref.WeakValueDictionary[Path, _RootLock]] = weakref.WeakValueDictionary()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, root: Path) -> None:
        weakref.finalize(self, preflight.prepare(root).close)
        for found in scan(root):
            if not found.committed and not found.folder.is_symlink():
                discard(found.folder)

    @classmethod
    def of(cls, root: Path) -> _RootLock:
        """Raises UserError where another process holds the folder, or it cannot be used."""
        root = root.absolute()
        with cls._guard:
            lock = cls._held.get(root)
            if lock is None:
                lock = cls._held[root] = cls(root)
            return lock


class HeadwaterWriter(StorageWriter):
    """Writes one save of `dcp.save` as a new, immutable folder `step_<step>-<id>` inside of `folder`.

    folder: a run's checkpoint folder, seen by all ranks under this path; made if need be.
    step: of this save. Saving a step again makes a new folder, which wins once it commits.
    component: name of the sub-folder that the tensors go to; lower case.
    run_id, model_identity: recorded in the manifest; one printable line each.
    After the save, `self.folder` is the new checkpoint on every rank, unless `async_save` used a process of its own.

    `dcp.save` raises CheckpointException, which holds the ranks' own errors: UserError for a value that needs pickle,
    a dtype that cannot be stored, or a file system that refuses; HeadwaterError where the written bytes are not the
    live tensors'. Nothing is committed then. Planners that cache plans are refused.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        step: int,
        *,
        component: str = "policy",
        run_id: str | None = None,
        model_identity: str = "unknown",
    ) -> None:
        if type(step) is not int or step < 0:
            raise UserError(f"step is a whole number of 0 or more, not {step!r}")
        if not _COMPONENT.fullmatch(component) or component == "tokenizer":
            raise UserError(f"{component!r} cannot name a component: use lower-case letters, digits and underscores")
        self.step = step
        self.folder: Path | None = None
        self._root = Path(folder).expanduser()
        self._component = component
        self._run_id = run_id or uuid.uuid4().hex
        self._model_identity = model_identity
        if not (self._run_id.isprintable() and model_identity.isprintable()):
            raise UserError("run_id and model_identity must be printable text on one line")
        self._target: _Target | None = None
        self._lock: _RootLock | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, str | os.PathLike)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self._root))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the previous save. checkpoint_id: another run's folder, in place of the constructor's."""
        if checkpoint_id is not None:
            self._root = Path(checkpoint_id).expanduser()
        self.folder = self._target = self._lock = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise UserError("use_collectives=False is not supported: one rank commits for all, so it must hear of all")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: lock the run's folder, see that there is room, make the save's folder."""
        self._lock = _RootLock.of(self._root)
        preflight.require_free(self._root, sum(map(_planned_bytes, plans)))
        try:
            folder, save_id = new_folder(self._root, self.step)
            (folder / self._component).mkdir()
        except OSError as error:
            raise self._refused(error) from None
        targets = [
            _Target(folder, save_id, f"{self._component}/rank-{rank:05d}.safetensors") for rank in range(len(plans))
        ]
        self._target = targets[0]
        return [replace(plan, storage_data=target) for plan, target in zip(plans, targets, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Digest and copy this rank's tensors, then write and sync them as one file of its own."""
        target = plan.storage_data
        # A cached plan would send this rank to the folder of an earlier save.
        if not isinstance(target, _Target) or getattr(planner, "_enable_plan_caching", False):
            raise UserError("a planner with enable_plan_caching=True cannot be used with HeadwaterWriter: turn it off")
        self.folder = target.folder
        results = [self._value(item, planner) for item in plan.items if item.type == WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO and not _is_empty_part(item)]
        try:
            results += self._write_tensors(target, tensors, planner)
        except OSError as error:
            raise self._refused(error) from None
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _value(self, item: WriteItem, planner: SavePlanner) -> WriteResult:
        lookup = getattr(planner, "lookup_object", None)
        if lookup is None:
            raise UserError(f"{type(planner).__name__} has no lookup_object: derive it from DefaultSavePlanner")
        stored = encode(lookup(item.index), item.index.fqn)
        return WriteResult(item.index, len(json.dumps(stored)), _StoredValue(stored))

    def _write_tensors(self, target: _Target, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if not items:
            return []
        chunks = [_chunk(item, planner.resolve_data(item)) for item in items]
        try:
            staged = snapshot(chunks)
        except ValueError as error:
            raise UserError(str(error)) from None
        whole, written = write_chunks(target.folder / target.file, staged)
        file = FileEntry(target.file, whole.size, whole.checksum)
        indices = {(item.index.fqn, chunk.offset): item.index for item, chunk in zip(items, chunks, strict=True)}
        results: list[WriteResult] = []
        for chunk in written:
            part = chunk.staged
            stored = _StoredTensor(chunk.entry(self._component, target.file), file, chunk.digest)
            results.append(WriteResult(indices[part.name, part.offset], chunk.end - chunk.begin, stored))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, with the results of all ranks: prove, then commit."""
        assert self._target is not None, "torch calls prepare_global_plan first"
        folder = self._target.folder
        try:
            stored = [result.storage_data for rank in results for result in rank]
            tensors = [item for item in stored if isinstance(item, _StoredTensor)]
            values = {
                result.index.fqn: result.storage_data.json
                for rank in results
                for result in rank
                if isinstance(result.storage_data, _StoredValue)
            }
            _require_equal(folder, tensors)
            _require_complete(folder, metadata, tensors, values)
            self._commit(self._target, metadata, tensors, values)
        except OSError as error:
            raise self._refused(error) from None
        finally:
            if not committed(folder):
                discard(folder)
            self._lock = None

    def _commit(
        self, target: _Target, metadata: Metadata, tensors: list[_StoredTensor], values: dict[str, Any]
    ) -> None:
        files = list(dict.fromkeys(item.file for item in tensors))
        for file in files:
            if problem := file_problem(target.folder, file):
                raise HeadwaterError(f"{problem} (do all ranks see the same {self._root}?)")
        paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
        state = {"step": self.step, "dcp": {self._component: {"values": values, "paths": paths}}}
        small = write_bytes(target.folder / TRAINER_NAME, (json.dumps(state, allow_nan=False) + "\n").encode())
        known = [found.manifest.saved_at_ns for found in scan(self._root) if found.manifest]
        manifest = Manifest(
            run_id=self._run_id,
            save_id=target.save_id,
            step=self.step,
            weight_version=self.step,
            model_identity=self._model_identity,
            saved_at_ns=max([time.time_ns(), *(value + 1 for value in known)]),
            chunks=tuple(item.entry for item in tensors),
            files=(*files, FileEntry(TRAINER_NAME, small.size, small.checksum)),
        )
        validate(manifest, str(target.folder))
        commit(target.folder, manifest)

    def _refused(self, error: OSError) -> UserError:
        return UserError(f"saving step {self.step} to {self._root} failed: {preflight.explain(error)}")


def _chunk(item: WriteItem, tensor: Any) -> Chunk:
    planned = item.tensor_data
    assert planned is not None, "an item that is no value is a tensor"
    name = item.index.fqn
    if not name.isprintable():
        raise UserError(f"a tensor's name must be printable: {name!r}")
    if tensor.layout != torch.strided:
        raise UserError(f"{name}: a {tensor.layout} tensor cannot be stored: make it dense")
    if tuple(tensor.shape) != tuple(planned.chunk.sizes):
        raise UserError(f"{name}: the tensor's shape {tuple(tensor.shape)} changed since the save was planned")
    return Chunk(name, tensor, tuple(planned.size), tuple(planned.chunk.offsets))


def _is_empty_part(item: WriteItem) -> bool:
    """A rank's share of nothing, where a dimension has fewer rows than there are ranks."""
    data = item.tensor_data
    return data is not None and math.prod(data.chunk.sizes) == 0 and math.prod(data.size) > 0


def _planned_bytes(plan: SavePlan) -> int:
    data = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    tensors = sum(math.prod(item.chunk.sizes) * item.properties.dtype.itemsize for item in data)
    return tensors + _HEADER_BYTES_PER_CHUNK * len(plan.items) + PAGE


def _require_equal(folder: Path, tensors: list[_StoredTensor]) -> None:
    differing = [f"{item.file.path} {item.entry.name}" for item in tensors if item.written != item.entry.digest]
    if differing:
        raise HeadwaterError(
            f"the checkpoint {folder.name} does not hold what the live tensors held, so it was removed: "
            f"{', '.join(differing[:5])}" + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        )


def _require_complete(folder: Path, metadata: Metadata, tensors: list[_StoredTensor], values: dict[str, Any]) -> None:
    """See that all that was planned came: each value, and for each tensor as many elements as it has."""
    volumes: dict[str, int] = {}
    for item in tensors:
        volumes[item.entry.name] = volumes.get(item.entry.name, 0) + math.prod(item.entry.shape)
    for name, planned in metadata.state_dict_metadata.items():
        is_tensor = isinstance(planned, TensorStorageMetadata)
        whole = volumes.get(name) == math.prod(planned.size) if is_tensor else name in values
        if not whole:
            raise HeadwaterError(f"the checkpoint {folder.name} lacks parts of {name}, so it was removed")
