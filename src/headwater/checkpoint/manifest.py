"""What a committed checkpoint holds: typed, and believed only after strict validation.

A manifest may come from anywhere, so nothing in it is used as a path or a range before it was checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.checkpoint.byte_digest import digest_bytes
from headwater.checkpoint.dtype_sizes import ITEMSIZES
from headwater.errors import UserError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_COMPONENT = re.compile(r"[a-z][a-z0-9_]*")
_SAVE_ID = re.compile(r"[0-9a-f]{8}")
_HEX64 = re.compile(r"[0-9a-f]{16}")


class CorruptCheckpointError(UserError):
    """A checkpoint whose content contradicts itself or its manifest."""


@dataclass(frozen=True)
class FileEntry:
    """path: relative to the folder, with forward slashes. size: bytes. checksum: digest of the whole file."""

    path: str
    size: int
    checksum: int


@dataclass(frozen=True)
class ChunkEntry:
    """A stored box of a named global tensor.

    shape, offset: of the box in the tensor of `global_shape`. dtype: safetensors name.
    begin, end: its bytes in `file`. digest: of the live tensor when it was saved.
    """

    component: str
    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    file: str
    begin: int
    end: int
    digest: int


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    saved_at_ns: nanoseconds since the epoch; later saves of one run have larger ones, whatever the clock does.
    model_identity: what the weights belong to; a run of another identity refuses the checkpoint.
    """

    run_id: str
    save_id: str
    step: int
    weight_version: int
    model_identity: str
    saved_at_ns: int
    chunks: tuple[ChunkEntry, ...]
    files: tuple[FileEntry, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; digests and checksums as 16 hex digits, since JSON readers round large numbers."""
        content = {"format_version": FORMAT_VERSION, **vars(self)}
        content["chunks"] = [{**vars(chunk), "digest": f"{chunk.digest:016x}"} for chunk in self.chunks]
        content["files"] = [{**vars(file), "checksum": f"{file.checksum:016x}"} for file in self.files]
        return content | {"checksum": _checksum(content)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> Manifest:
        """Parse and validate; `source` names the manifest in errors.

        Raises CorruptCheckpointError for anything that cannot be believed, a single character that `to_json` would not
        have written included, and UserError for a format version that this Headwater does not read.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{source}: not valid JSON ({error})") from None
        version = document.get("format_version") if isinstance(document, dict) else None
        if type(version) is int and version != FORMAT_VERSION:
            raise UserError(f"{source}: format version {version}, this Headwater reads {FORMAT_VERSION}: upgrade it")
        fields = _fields(document, _MANIFEST_FIELDS, source)
        chunks = tuple(_chunk(item, index, source) for index, item in enumerate(fields.pop("chunks")))
        files = tuple(_file(item, index, source) for index, item in enumerate(fields.pop("files")))
        del fields["format_version"]
        del fields["checksum"]
        manifest = cls(**fields, chunks=chunks, files=files)
        validate(manifest, source)
        if text != manifest.to_json():  # which has the checksum of its content, so that no change of it goes unseen
            raise CorruptCheckpointError(f"{source}: its content does not match its own checksum: it was altered")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read, parse and validate the manifest of a committed folder. Raises UserError."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes().decode()  # as it is: reading as text would make one line end of another
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CorruptCheckpointError(f"{path}: not valid UTF-8") from None
    return Manifest.from_json(text, str(path))


def validate(manifest: Manifest, source: str) -> None:
    """Check what the fields say about each other. Raises CorruptCheckpointError naming file and chunk."""
    sizes: dict[str, int] = {}
    for file in manifest.files:
        if not _inside(file.path):
            raise CorruptCheckpointError(f"{source}: file {file.path!r} lies outside of the checkpoint's folder")
        if file.path in sizes:
            raise CorruptCheckpointError(f"{source}: file {file.path!r} is listed twice")
        sizes[file.path] = file.size
    whole: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    boxes: set[tuple[str, str, tuple[int, ...]]] = set()
    for chunk in manifest.chunks:
        where = _where(source, chunk)
        if chunk.file not in sizes:
            raise CorruptCheckpointError(f"{where}: its file is not listed in the manifest")
        _check_chunk(chunk, sizes[chunk.file], where)
        identity = (chunk.component, chunk.name)
        if whole.setdefault(identity, (chunk.global_shape, chunk.dtype)) != (chunk.global_shape, chunk.dtype):
            raise CorruptCheckpointError(f"{where}: another box of the same tensor has a different shape or dtype")
        if (*identity, chunk.offset) in boxes:
            raise CorruptCheckpointError(f"{where}: offset {chunk.offset} is listed twice")
        boxes.add((*identity, chunk.offset))
    _check_overlaps(manifest, source)


def _check_chunk(chunk: ChunkEntry, file_size: int, where: str) -> None:
    if chunk.dtype not in ITEMSIZES:
        raise CorruptCheckpointError(f"{where}: unknown dtype {chunk.dtype!r}")
    if not len(chunk.shape) == len(chunk.offset) == len(chunk.global_shape):
        raise CorruptCheckpointError(f"{where}: shape, offset and global_shape differ in length")
    box = zip(chunk.offset, chunk.shape, chunk.global_shape, strict=True)
    if any(first + size > whole for first, size, whole in box):
        raise CorruptCheckpointError(f"{where}: the box reaches outside of its global shape {chunk.global_shape}")
    if not chunk.begin <= chunk.end <= file_size:
        raise CorruptCheckpointError(
            f"{where}: bytes {chunk.begin} to {chunk.end} lie outside of the file, which has {file_size}"
        )
    needed = math.prod(chunk.shape) * ITEMSIZES[chunk.dtype]
    if chunk.end - chunk.begin != needed:
        raise CorruptCheckpointError(
            f"{where}: {chunk.end - chunk.begin} bytes for shape {chunk.shape} of {chunk.dtype}, which needs {needed}"
        )


def _check_overlaps(manifest: Manifest, source: str) -> None:
    ends: dict[str, tuple[int, str]] = {}
    for chunk in sorted(manifest.chunks, key=lambda chunk: (chunk.file, chunk.begin, chunk.end)):
        if chunk.begin == chunk.end:
            continue
        end, other = ends.get(chunk.file, (0, ""))
        if chunk.begin < end:
            raise CorruptCheckpointError(f"{_where(source, chunk)}: its bytes overlap those of chunk {other}")
        ends[chunk.file] = (chunk.end, chunk.name)


def _where(source: str, chunk: ChunkEntry) -> str:
    return f"{source}: file {chunk.file}, chunk {chunk.name}"


def _inside(path: str) -> bool:
    return "\\" not in path and all(part not in ("", ".", "..") for part in path.split("/"))


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return f"{digest_bytes(canonical):016x}"


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _matches(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


_Checks = Mapping[str, tuple[Callable[[Any], bool], str]]
_COUNT = (_is_count, "a whole number of 0 or more")
_TEXT = (_is_text, "a string of printable characters")
_LIST = (_is_list, "a list")
_COUNTS = (_is_counts, "a list of whole numbers of 0 or more")
_DIGEST = (_matches(_HEX64), "16 hex digits")

_MANIFEST_FIELDS: _Checks = {
    "format_version": _COUNT,
    "run_id": _TEXT,
    "save_id": (_matches(_SAVE_ID), "8 hex digits"),
    "step": _COUNT,
    "weight_version": _COUNT,
    "model_identity": _TEXT,
    "saved_at_ns": _COUNT,
    "chunks": _LIST,
    "files": _LIST,
    "checksum": _DIGEST,
}
_FILE_FIELDS: _Checks = {"path": _TEXT, "size": _COUNT, "checksum": _DIGEST}
_CHUNK_FIELDS: _Checks = {
    "component": (_matches(_COMPONENT), "a lower-case name"),
    "name": _TEXT,
    "global_shape": _COUNTS,
    "offset": _COUNTS,
    "shape": _COUNTS,
    "dtype": _TEXT,
    "file": _TEXT,
    "begin": _COUNT,
    "end": _COUNT,
    "digest": _DIGEST,
}


def _fields(document: Any, checks: _Checks, where: str) -> dict[str, Any]:
    """A copy of `document` if it has exactly these fields, each as it must be."""
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"{where}: an object is expected here, not {type(document).__name__}")
    for key in document:
        if key not in checks:
            raise CorruptCheckpointError(f"{where}: unknown field {key!r}")
    for key, (holds, expected) in checks.items():
        if key not in document:
            raise CorruptCheckpointError(f"{where}: field {key!r} is missing")
        if not holds(document[key]):
            raise CorruptCheckpointError(f"{where}: field {key!r} must be {expected}, not {str(document[key])[:80]!r}")
    return dict(document)


def _label(item: Any, keys: tuple[str, ...]) -> str:
    named = [f"{key} {item[key]!r}" for key in keys if isinstance(item, dict) and isinstance(item.get(key), str)]
    return f" ({', '.join(named)})" if named else ""


def _file(item: Any, index: int, source: str) -> FileEntry:
    fields = _fields(item, _FILE_FIELDS, f"{source}: file number {index}{_label(item, ('path',))}")
    fields["checksum"] = int(fields["checksum"], 16)
    return FileEntry(**fields)


def _chunk(item: Any, index: int, source: str) -> ChunkEntry:
    fields = _fields(item, _CHUNK_FIELDS, f"{source}: chunk number {index}{_label(item, ('file', 'name'))}")
    for key in ("global_shape", "offset", "shape"):
        fields[key] = tuple(fields[key])
    fields["digest"] = int(fields["digest"], 16)
    return ChunkEntry(**fields)
