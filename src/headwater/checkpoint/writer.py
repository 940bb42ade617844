"""The second state of a save: bytes on disk, synced, with digests of what was written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.checkpoint.byte_digest import Digester, digest_bytes
from headwater.checkpoint.layout import PAGE, Box, lay_out
from headwater.checkpoint.manifest import ChunkEntry
from headwater.checkpoint.snapshot import StagedChunk

__all__ = ["PAGE", "WrittenChunk", "WrittenFile", "sync_existing", "write_bytes", "write_chunks"]


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

    def entry(self, component: str, file: str) -> ChunkEntry:
        """As a manifest lists it, with its live digest."""
        return ChunkEntry(
            component=component,
            name=self.staged.name,
            global_shape=self.staged.global_shape,
            offset=self.staged.offset,
            shape=self.staged.shape,
            dtype=self.staged.dtype,
            file=file,
            begin=self.begin,
            end=self.end,
            digest=self.staged.live_digest,
        )


def write_chunks(path: Path, chunks: Sequence[StagedChunk]) -> tuple[WrittenFile, list[WrittenChunk]]:
    """Write one new safetensors file and sync it.

    Returns the file's size and checksum, and each chunk's place and digest in the order they were written.
    Raises OSError as the file system does, FileExistsError included.
    """
    layout = lay_out([Box(c.name, c.dtype, c.shape, c.global_shape, c.offset) for c in chunks])
    checksum = Digester()
    written: list[WrittenChunk] = []
    with open(path, "xb") as file:
        file.write(layout.header)
        checksum.update(layout.header)
        for index in layout.order:
            chunk = chunks[index]
            file.write(chunk.data.data)
            checksum.update(chunk.data)
            written.append(WrittenChunk(chunk, *layout.ranges[index], digest_bytes(chunk.data)))
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(layout.size, checksum.value()), written


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
