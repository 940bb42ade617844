"""Writes a staged image to a file: pieces in parallel, past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from headwater.checkpoint.layout import PAGE

_PIECE = 16 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


class ImageFile:
    """One new file that is being written.

    image: uint8 [whole pages], page-aligned; its first `size` bytes are the file's content. wrote: called with the
    count of bytes just written, from several threads. Raises OSError where the file cannot be made.
    """

    def __init__(self, path: Path, image: np.ndarray, size: int, wrote: Callable[[int], None]) -> None:
        self._image = image
        self._size = size
        self._wrote = wrote
        self._direct = _open_direct(path)
        self._buffered = os.open(
            path, os.O_WRONLY if self._direct >= 0 else os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666
        )
        self._left = -(-size // _PIECE)
        self._lock = threading.Lock()

    def write(self, workers: ThreadPoolExecutor) -> list[Future[None]]:
        """Begin; whoever writes the last piece syncs the file, so all is on the disk when all of these are done."""
        return [workers.submit(self._write_piece, begin) for begin in range(0, self._size, _PIECE)]

    def _write_piece(self, begin: int) -> None:
        end = min(begin + _PIECE, self._size)
        begin = self._write_direct(begin, -(-end // PAGE) * PAGE)
        while begin < end:
            count = os.pwrite(self._buffered, self._image[begin:end].data, begin)
            if count == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            begin += count
            self._wrote(count)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            os.ftruncate(self._buffered, self._size)  # what fills the last page is no part of the file
            os.fsync(self._buffered)

    def _write_direct(self, begin: int, end: int) -> int:
        """Returns up to where it came: not to the end where the file system takes no such write."""
        while begin < end and self._direct >= 0:
            try:
                count = os.pwrite(self._direct, self._image[begin:end].data, begin)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return begin
            if count == 0:
                return begin
            self._wrote(count)
            begin += count
        return begin

    def close(self) -> None:
        """Nobody may be writing any more."""
        os.close(self._buffered)
        if self._direct >= 0:
            os.close(self._direct)


def _open_direct(path: Path) -> int:
    """A descriptor of the new file; -1 where its file system has no direct writes, and then maybe no file."""
    if not _DIRECT:
        return -1
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some make the file before they refuse the flag
        return -1
