"""The files of a save read again from the disk, before they become a checkpoint. Needs no torch.

A file system may take bytes and a sync and still not hold them. The page cache would answer with what was written, so
it is passed by where the file system lets it be.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from headwater.checkpoint.byte_digest import Digester
from headwater.checkpoint.layout import PAGE
from headwater.checkpoint.manifest import ChunkEntry, FileEntry
from headwater.errors import HeadwaterError

_PIECE = 8 << 20
_NAMED = 5


def read_back(folder: Path, files: Iterable[FileEntry], chunks: Sequence[ChunkEntry]) -> float:
    """Compare synced files with what they are to hold; returns the seconds it took.

    files: with the checksums of the bytes that were handed to the disk. chunks: with their live digests; they say
        where a file differs.
    Raises HeadwaterError naming file and chunks, and OSError as the file system does.
    """
    started = time.perf_counter()
    differing = [
        place
        for file in files
        if _digest(folder / file.path, 0, None) != file.checksum
        for place in _places(folder, file, chunks)
    ]
    if differing:
        more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise HeadwaterError(
            f"the checkpoint {folder.name} read back from the disk is not what was written, so it was removed: "
            f"{', '.join(differing[:_NAMED])}{more}: check the disk and its memory"
        )
    return time.perf_counter() - started


def _places(folder: Path, file: FileEntry, chunks: Iterable[ChunkEntry]) -> list[str]:
    """The chunks of a file that differ; the file itself where none does, as its header is no chunk."""
    own = (chunk for chunk in chunks if chunk.file == file.path)
    found = [
        f"{file.path} chunk {chunk.name}"
        for chunk in own
        if _digest(folder / file.path, chunk.begin, chunk.end) != chunk.digest
    ]
    return found or [file.path]


def _digest(path: Path, begin: int, end: int | None) -> int:
    """Of the bytes of a range, up to the end of the file at most."""
    digester = Digester()
    for piece in _pieces(path, begin, end):
        digester.update(piece)
    return digester.value()


def _pieces(path: Path, begin: int, end: int | None) -> Iterator[np.ndarray]:
    """The range's bytes in order, each piece valid until the next one is asked for."""
    buffer = np.frombuffer(mmap.mmap(-1, _PIECE), np.uint8)
    with _opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        end = size if end is None else min(end, size)
        position = begin - begin % PAGE  # what passes the page cache by has to lie on pages
        while position < end:
            count = os.preadv(descriptor, [buffer.data], position)
            if position + count < end:
                count -= count % PAGE
                if count == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            yield buffer[max(begin - position, 0) : min(count, end - position)]
            position += count


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor whose reads come from the disk, or through an emptied page cache where that is refused."""
    descriptor = _open_direct(path)
    if descriptor is None:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_direct(path: Path) -> int | None:
    """None where the file system does not read past the page cache; some say so only when asked to read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(descriptor, [page], 0)
        return descriptor
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EINVAL:
            return None
        raise
