"""The tensor's bytes inside of a `torch.save` archive, found without unpickling anything.

Such an archive is a zip file with stored (not compressed) entries: `data.pkl` says what the object is, `data/0`,
`data/1` .. are the bytes of its storages.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")


class BadArchiveError(ValueError):
    """A byte range that is not a `torch.save` archive."""


class _Window(io.RawIOBase):
    """A range of an open file as a file of its own; the file's own position stays, so threads may share it."""

    def __init__(self, descriptor: int, begin: int, end: int) -> None:
        self._descriptor, self._begin, self._size, self._at = descriptor, begin, end - begin, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = max(0, min(len(buffer), self._size - self._at))
        data = os.pread(self._descriptor, wanted, self._begin + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@contextmanager
def open_archive(descriptor: int, begin: int, end: int) -> Iterator[zipfile.ZipFile]:
    """The archive in bytes begin..end of an open file. Raises BadArchiveError, OSError."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(descriptor, begin, end))) as archive:
            yield archive
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error) as error:
        raise BadArchiveError(f"not a torch.save archive: {error}") from None


def storage_range(descriptor: int, begin: int, end: int) -> tuple[int, int]:
    """Where in the file the bytes of the archive's only tensor begin and end; an empty range for an empty tensor.

    Raises BadArchiveError, also for an object of several storages, OSError.
    """
    with open_archive(descriptor, begin, end) as archive:
        found = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(found) > 1:
        raise BadArchiveError(f"an archive of {len(found)} tensors where one was expected")
    if not found:
        return begin, begin
    first, last = entry_range(descriptor, begin, found[0])
    if not begin <= first <= last <= end:
        raise BadArchiveError(f"its entry {found[0].filename} leads out of it")
    return first, last


def entry_range(descriptor: int, begin: int, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Where in the file a stored entry's bytes begin and end. Raises BadArchiveError, OSError."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise BadArchiveError(f"its entry {entry.filename} is compressed")
    raw = os.pread(descriptor, _LOCAL_HEADER.size, begin + entry.header_offset)
    if len(raw) < _LOCAL_HEADER.size or not raw.startswith(b"PK\x03\x04"):
        raise BadArchiveError(f"its entry {entry.filename} has no header")
    *_, name_size, extra_size = _LOCAL_HEADER.unpack(raw)
    first = begin + entry.header_offset + _LOCAL_HEADER.size + name_size + extra_size
    return first, first + entry.file_size
