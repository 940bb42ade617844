"""A checkpoint in a format of others: the new folder it goes to, and torch DCP.

Digests are checked while reading. The output appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from headwater.checkpoint import preflight
from headwater.checkpoint.commit import sync_folder
from headwater.checkpoint.dcp_reader import stored_values
from headwater.checkpoint.dtypes import DTYPES
from headwater.checkpoint.reader import Checkpoint, ComponentReader, OnBytes
from headwater.errors import HeadwaterError, UserError


@contextmanager
def new_output(output: Path, source: Path, needed: int) -> Iterator[Path]:
    """A temporary folder beside `output` that takes its name at the end of the block, synced.

    source: the checkpoint's folder. needed: bytes that will be written. Raises UserError if `output` holds something,
    lies in the source, or cannot be written; then, and when the block raises, nothing is left behind.
    """
    target = output.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if os.path.lexists(output) and not (output.is_dir() and not any(output.iterdir())):
            raise UserError(f"{output}: exists already and is not an empty folder: give a new one")
        if target.is_relative_to(source.resolve()):
            raise UserError(f"{output}: lies in the checkpoint, which must not change: give another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_free(target.parent, needed)
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        os.rename(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_dcp(checkpoint: Checkpoint, component: str, output: Path, on_bytes: OnBytes | None = None) -> int:
    """Write a component as a torch DCP folder for `FileSystemReader`; returns the number of tensors.

    Every tensor goes under its own name, whole and as stored, optimizer state included; what `HeadwaterWriter` stored
    beside them goes too, and a nested state dict keeps its nesting. One tensor at a time is in memory.
    on_bytes: called with the number of tensor bytes read since the last call.
    Raises UserError where `new_output` does, or where the checkpoint is corrupt.
    """
    reader = checkpoint.component(component)
    values, paths = stored_values(checkpoint, component)
    planner = _ReadingPlanner(reader, values, paths, on_bytes)
    needed = stored_bytes(reader, reader.names())
    with new_output(output, checkpoint.folder, needed) as folder:
        write_dcp(planner, folder, output)
    return len(reader.names())


def write_dcp(planner: DefaultSavePlanner, folder: Path, output: Path) -> None:
    """What a planner gives, as torch DCP's files. Raises UserError, of `output`, where that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        try:
            save({}, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
        except CheckpointException as error:
            inner = next(iter(error.failures.values()))[0]
            if isinstance(inner, HeadwaterError):
                raise inner from None
            raise UserError(f"{output}: cannot be written: {' '.join(str(inner).split())}") from inner


def stored_bytes(reader: ComponentReader, names: list[str]) -> int:
    """What the boxes of these tensors take."""
    return sum(box.end - box.begin for name in names for box in reader.boxes(name))


class _ReadingPlanner(DefaultSavePlanner):
    """Plans with tensors that have no storage, and reads each from the checkpoint when it is to be written."""

    def __init__(
        self,
        reader: ComponentReader,
        values: Mapping[str, Any],
        paths: Mapping[str, tuple[str | int, ...]],
        on_bytes: OnBytes | None,
    ) -> None:
        super().__init__()
        self._reader = reader
        self._content = {**values, **{name: self._outline(name) for name in reader.names()}}
        self._paths = {name: paths.get(name, (name,)) for name in self._content}
        self._on_bytes = on_bytes

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({}, storage_meta, is_coordinator)
        self.state_dict, self.mappings = self._content, self._paths

    def lookup_object(self, index: MetadataIndex) -> Any:
        if not isinstance(self._content[index.fqn], torch.Tensor):
            return self._content[index.fqn]
        tensor = self._reader.read(index.fqn)
        if self._on_bytes:
            self._on_bytes(tensor.nbytes)
        return tensor

    def _outline(self, name: str) -> torch.Tensor:
        box = self._reader.boxes(name)[0]
        return torch.empty(box.global_shape, dtype=DTYPES[box.dtype], device="meta")


def _require_free(folder: Path, needed: int) -> None:
    free = preflight.free_bytes(folder)
    if free < needed:
        sizes = f"{preflight.size_text(needed)} are needed, {preflight.size_text(free)} free"
        raise UserError(f"{folder}: {sizes}: free space there, or choose another output")


def _sync(folder: Path) -> None:
    for inner, _, files in os.walk(folder, topdown=False):
        for name in files:
            with open(Path(inner) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(inner))
