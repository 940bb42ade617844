"""Reading a committed checkpoint, into any cut of its tensors, with a proof for each byte used."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.commit import committed
from headwater.checkpoint.digest import Digester, digest_bytes
from headwater.checkpoint.dtypes import DTYPES
from headwater.checkpoint.layout import Box, lay_out
from headwater.checkpoint.manifest import (
    MANIFEST_NAME,
    ChunkEntry,
    CorruptCheckpointError,
    FileEntry,
    Manifest,
    read_manifest,
)
from headwater.errors import UserError

TRAINER_NAME = "trainer.json"
_PIECE = 1 << 23
OnBytes = Callable[[int], None]


class Checkpoint:
    """A committed checkpoint. Opened through `Checkpoint.open`; holds no file open."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the manifest and see that each file is there, inside of the folder, with its size.

        Raises UserError for a folder that is no committed checkpoint, CorruptCheckpointError naming file or chunk
        for one that contradicts its manifest. Content is checked when it is read, or by `verify`.
        """
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder")
        if not committed(folder):
            raise UserError(f"{folder}: not a committed checkpoint (it has no manifest.json)")
        if not _is_inside(folder / MANIFEST_NAME, folder):
            raise CorruptCheckpointError(f"{folder / MANIFEST_NAME}: leads out of the checkpoint's folder")
        manifest = read_manifest(folder)
        for file in manifest.files:
            problem = file_problem(folder, file)
            if problem:
                raise CorruptCheckpointError(problem)
        return cls(folder, manifest)

    @classmethod
    def open_to_load(cls, folder: Path) -> Checkpoint:
        """`open`, and check every byte that is no tensor's; a tensor's are checked as they are read.

        A load that begins here refuses what `verify` would tell of, without reading a tensor twice.
        Raises as `open` does.
        """
        checkpoint = cls.open(folder)
        chunks: dict[str, list[ChunkEntry]] = {}
        for chunk in checkpoint.manifest.chunks:
            chunks.setdefault(chunk.file, []).append(chunk)
        for file in checkpoint.manifest.files:
            if file.path in chunks:
                if file.path.endswith(".safetensors"):  # others have no header that anyone reads
                    _check_header(folder / file.path, chunks[file.path])
            else:
                checkpoint.read_file(file)
        return checkpoint

    def components(self) -> list[str]:
        """Names of the components, sorted."""
        return sorted({chunk.component for chunk in self.manifest.chunks})

    def component(self, name: str) -> ComponentReader:
        """The tensors of one component. Raises UserError if the checkpoint has none of this name."""
        if name not in self.components():
            raise UserError(f"{self.folder}: no component {name}; it has {', '.join(self.components()) or 'none'}")
        return ComponentReader(self.folder, [chunk for chunk in self.manifest.chunks if chunk.component == name])

    def trainer_state(self) -> dict[str, Any]:
        """What the trainer saved beside its tensors. Raises CorruptCheckpointError if the file was altered."""
        path = self.folder / TRAINER_NAME
        entry = next((file for file in self.manifest.files if file.path == TRAINER_NAME), None)
        if entry is None:
            raise CorruptCheckpointError(f"{path}: not listed in the manifest")
        state = json.loads(self.read_file(entry))
        if not isinstance(state, dict):
            raise CorruptCheckpointError(f"{path}: an object is expected")
        return state

    def read_file(self, entry: FileEntry) -> bytes:
        """A small file of the manifest, whole. Raises CorruptCheckpointError if it does not match its checksum."""
        path = self.folder / entry.path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        if digest_bytes(data) != entry.checksum:
            raise CorruptCheckpointError(f"{path}: does not match its checksum in the manifest: it was altered")
        return data


class ComponentReader:
    """The tensors of one component; each read checks the digest of every stored box that it uses."""

    def __init__(self, folder: Path, chunks: list[ChunkEntry]) -> None:
        self._folder = folder
        self._boxes: dict[str, list[ChunkEntry]] = {}
        for chunk in chunks:
            self._boxes.setdefault(chunk.name, []).append(chunk)

    def names(self) -> list[str]:
        """Names of the global tensors, sorted."""
        return sorted(self._boxes)

    def boxes(self, name: str) -> list[ChunkEntry]:
        """The stored boxes of a tensor. Raises UserError for a name that is not stored."""
        if name not in self._boxes:
            raise UserError(f"{self._folder}: chunk {name} is not in this checkpoint")
        return self._boxes[name]

    def read(self, name: str) -> torch.Tensor:
        """The whole global tensor, in its stored dtype, on the CPU. Raises as `read_into` does."""
        first = self.boxes(name)[0]
        if sum(math.prod(box.shape) for box in self.boxes(name)) < math.prod(first.global_shape):
            raise UserError(f"{self._folder}: chunk {name}: the stored boxes do not cover shape {first.global_shape}")
        chunk = Chunk.whole(name, torch.empty(first.global_shape, dtype=DTYPES[first.dtype], device="cpu"))
        self.read_into(chunk)
        return chunk.tensor

    def read_into(self, chunk: Chunk) -> None:
        """Fill `chunk.tensor` in place, on its device and with its strides, from the stored boxes that cover it.

        Floating-point dtypes are converted, any other dtype has to be the stored one.
        Raises UserError naming the chunk if it is missing, not covered, of another global shape or of a dtype that
        does not convert, and CorruptCheckpointError naming file and chunk if stored bytes do not match their digest.
        """
        boxes = self.boxes(chunk.name)
        where = f"{self._folder}: chunk {chunk.name}"
        stored = boxes[0]
        if stored.global_shape != chunk.global_shape:
            raise UserError(f"{where} has global shape {stored.global_shape}, {chunk.global_shape} is asked for")
        stored_dtype, dtype = DTYPES[stored.dtype], chunk.tensor.dtype
        if stored_dtype != dtype and not (stored_dtype.is_floating_point and dtype.is_floating_point):
            raise UserError(f"{where} is {stored_dtype} and does not convert to {dtype}")
        needed = [(box, overlap) for box in boxes if (overlap := _overlap(chunk, box)) is not None]
        if not _covered(chunk, [target for _, (target, _) in needed]):
            raise UserError(f"{where}: the stored boxes do not cover {_box_text(chunk)}")
        destination = chunk.tensor.detach()
        for box, (target, source) in needed:
            destination[target] = self.read_box(box)[source].to(destination.device)

    def read_box(self, box: ChunkEntry) -> torch.Tensor:
        """One stored box, on the CPU. Raises CorruptCheckpointError if it does not match its digest."""
        tensor = torch.empty(box.shape, dtype=DTYPES[box.dtype], device="cpu")
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        path = self._folder / box.file
        try:
            with open(path, "rb", buffering=0) as file:
                _fill(file.fileno(), raw, box.begin)
        except OSError as error:
            raise UserError(f"{path}: chunk {box.name} cannot be read ({error.strerror or error})") from None
        if digest_bytes(raw) != box.digest:
            raise CorruptCheckpointError(_chunk_problem(path, box))
        return tensor


_Index = tuple[slice, ...]


def _overlap(chunk: Chunk, box: ChunkEntry) -> tuple[_Index, _Index] | None:
    """Where the two meet, as an index into the chunk and one into the box; None if nowhere."""
    target: list[slice] = []
    source: list[slice] = []
    for want, size, have, have_size in zip(chunk.offset, chunk.tensor.shape, box.offset, box.shape, strict=True):
        begin, end = max(want, have), min(want + size, have + have_size)
        if begin >= end:
            return None
        target.append(slice(begin - want, end - want))
        source.append(slice(begin - have, end - have))
    return tuple(target), tuple(source)


def _covered(chunk: Chunk, targets: list[_Index]) -> bool:
    """Whether every element is in one of the targets. Boxes may overlap, so their sizes do not tell."""
    shape = chunk.tensor.shape
    if chunk.tensor.numel() == 0 or any(
        all(part == slice(0, size) for part, size in zip(target, shape, strict=True)) for target in targets
    ):
        return True
    filled = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for target in targets:
        filled[target] = True
    return bool(filled.all())


def _box_text(chunk: Chunk) -> str:
    return f"shape {tuple(chunk.tensor.shape)} at offset {chunk.offset}"


def _check_header(path: Path, chunks: list[ChunkEntry]) -> None:
    """See that the file begins with the very header of these chunks, since no chunk's digest tells of it."""
    boxes = [Box(chunk.name, chunk.dtype, chunk.shape, chunk.global_shape, chunk.offset) for chunk in chunks]
    try:
        layout = lay_out(boxes)
        header = np.empty(len(layout.header), np.uint8)
        with open(path, "rb", buffering=0) as opened:
            _fill(opened.fileno(), header, 0)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from None
    if header.tobytes() != layout.header:
        raise CorruptCheckpointError(f"{path}: its header is not that of the chunks in the manifest: it was altered")


def _fill(descriptor: int, raw: np.ndarray, offset: int) -> None:
    view = raw.data
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError("the file ends early")
        done += count


def _chunk_problem(path: Path, box: ChunkEntry) -> str:
    return f"{path}: chunk {box.name} does not match its digest in the manifest: the file is corrupt"


def file_problem(folder: Path, file: FileEntry) -> str | None:
    """What is wrong with a listed file without reading it; a link out of the folder is."""
    path = folder / file.path
    try:
        if not _is_inside(path, folder):
            return f"{path}: leads out of the checkpoint's folder"
        found = path.stat()
    except (OSError, RuntimeError) as error:
        return f"{path}: listed in the manifest, but it cannot be read ({getattr(error, 'strerror', None) or error})"
    if not stat.S_ISREG(found.st_mode):
        return f"{path}: not a regular file"
    if found.st_size != file.size:
        return f"{path}: {found.st_size} bytes, the manifest says {file.size}: it is cut or altered"
    return None


def _is_inside(path: Path, folder: Path) -> bool:
    """Whether no link leads from it out of the folder."""
    return path.resolve().is_relative_to(folder.resolve())


def bytes_to_verify(checkpoint: Checkpoint) -> int:
    """How many bytes `verify` reads."""
    return sum(file.size for file in checkpoint.manifest.files) + sum(
        chunk.end - chunk.begin for chunk in checkpoint.manifest.chunks
    )


def verify(checkpoint: Checkpoint, on_bytes: OnBytes | None = None) -> list[str]:
    """Hash every file and every chunk again; returns one line for each that the manifest contradicts.

    on_bytes: called with the number of bytes read since the last call.
    """
    problems: list[str] = []
    readers = {name: checkpoint.component(name) for name in checkpoint.components()}
    for file in checkpoint.manifest.files:
        problem = file_problem(checkpoint.folder, file)
        if problem:
            problems.append(problem)
            continue
        path = checkpoint.folder / file.path
        chunk_problems: list[str] = []
        for box in (chunk for chunk in checkpoint.manifest.chunks if chunk.file == file.path):
            try:
                readers[box.component].read_box(box)
            except UserError as error:
                chunk_problems.append(str(error))
            if on_bytes:
                on_bytes(box.end - box.begin)
        try:
            holds = _hash_file(path, on_bytes) == file.checksum
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror})")
            continue
        problems += chunk_problems
        if not holds and not chunk_problems:
            problems.append(f"{path}: does not match its checksum in the manifest: the file is corrupt")
    return problems


def _hash_file(path: Path, on_bytes: OnBytes | None) -> int:
    digester = Digester()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digester.update(piece)
            if on_bytes:
                on_bytes(len(piece))
    return digester.value()
