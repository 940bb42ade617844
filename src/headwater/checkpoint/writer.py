"""The second state of a save: bytes on disk, synced, with digests of what was written.

The format is safetensors. The header is padded so that the data begins on a page, and chunks go by falling
element size, so that all are aligned and there are no holes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.checkpoint.digest import Digester, digest_bytes
from headwater.checkpoint.dtypes import ITEMSIZES
from headwater.checkpoint.snapshot import StagedChunk

PAGE = 4096


@dataclass(frozen=True)
class WrittenFile:
    """size: in bytes. checksum: digest of the whole file."""

    size: int
    checksum: int


@dataclass(frozen=True)
class WrittenChunk:
    """begin, end: byte range in the file. digest: of the bytes that were written there."""

    staged: StagedChunk
    begin: int
    end: int
    digest: int


def tensor_name(chunk: StagedChunk) -> str:
    """The chunk's name inside of the file: its own, with the offset behind it if it is a part."""
    return chunk.name if chunk.is_whole else f"{chunk.name}@{','.join(map(str, chunk.offset))}"


def write_chunks(path: Path, chunks: Sequence[StagedChunk]) -> tuple[WrittenFile, list[WrittenChunk]]:
    """Write one new safetensors file and sync it.

    Returns the file's size and checksum, and each chunk's place and digest in the order they were written.
    Raises OSError as the file system does, FileExistsError included.
    """
    ordered = sorted(chunks, key=lambda chunk: -ITEMSIZES[chunk.dtype])
    header = _header(ordered)
    checksum = Digester()
    written: list[WrittenChunk] = []
    position = len(header)
    with open(path, "xb") as file:
        file.write(header)
        checksum.update(header)
        for chunk in ordered:
            file.write(chunk.data.data)
            checksum.update(chunk.data)
            end = position + chunk.data.nbytes
            written.append(WrittenChunk(chunk, position, end, digest_bytes(chunk.data)))
            position = end
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(position, checksum.value()), written


def write_bytes(path: Path, data: bytes) -> WrittenFile:
    """Write one new file and sync it. Raises OSError as the file system does."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(len(data), digest_bytes(data))


def sync_existing(path: Path) -> WrittenFile:
    """Sync a file that someone else wrote, and describe it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        data = file.read()
    return WrittenFile(len(data), digest_bytes(data))


def _header(ordered: Sequence[StagedChunk]) -> bytes:
    """Length (8 bytes, little-endian) and JSON, padded with spaces so that the data begins on a page."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for chunk in ordered:
        name = tensor_name(chunk)
        if name in entries:
            raise ValueError(f"two chunks would be called {name} in one file")
        end = position + chunk.data.nbytes
        entries[name] = {"dtype": chunk.dtype, "shape": list(chunk.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text
