import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.checkpoint import image_file
from headwater.checkpoint.host_buffer import HostBuffer
from headwater.checkpoint.image_file import ImageFile

PIECE = 1 << 16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_file, "_PIECE", PIECE)


def write(path: Path, size: int) -> np.ndarray:
    """A file of `size` random bytes, from a buffer that holds other bytes behind them; returns them."""
    counts: list[int] = []
    buffer = HostBuffer(path.parent)
    buffer.reserve(size + 4096, pin=False)
    whole = -(-size // 4096) * 4096
    content = np.random.default_rng(size).integers(0, 256, whole, dtype=np.uint8)
    buffer.view(whole)[:] = content
    with ThreadPoolExecutor(4) as workers:
        file = ImageFile(path, buffer.view(whole), size, counts.append)
        try:
            for piece in file.write(workers):
                piece.result()
        finally:
            file.close()
    assert sum(counts) >= size
    buffer.close()
    return content[:size]


@pytest.mark.parametrize("size", [1, 4096, PIECE, PIECE + 1, 5 * PIECE - 7])
def test_a_file_holds_the_image_and_nothing_behind_it(tmp_path: Path, size: int):
    assert write(tmp_path / "file", size).tobytes() == (tmp_path / "file").read_bytes()


def refuse_flag(path: Path, flags: int, mode: int = 0o777) -> int:
    if flags & os.O_DIRECT:
        path.touch()
        raise OSError(errno.EINVAL, "no direct writes")
    return REAL_OPEN(path, flags, mode)


def refuse_write(descriptor: int, data: Any, offset: int) -> int:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no direct writes")
    return REAL_PWRITE(descriptor, data, offset)


REAL_OPEN, REAL_PWRITE = os.open, os.pwrite


@pytest.mark.parametrize(("call", "instead"), [("open", refuse_flag), ("pwrite", refuse_write)])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, instead: Callable[..., int]
):
    monkeypatch.setattr(image_file.os, call, instead)
    expected = write(tmp_path / "file", 3 * PIECE + 100)
    monkeypatch.undo()
    assert expected.tobytes() == (tmp_path / "file").read_bytes()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(image_file.os, "pwrite", lambda fd, data, at: REAL_PWRITE(fd, data[:8192], at))
    expected = write(tmp_path / "file", 3 * PIECE + 100)
    monkeypatch.undo()
    assert expected.tobytes() == (tmp_path / "file").read_bytes()


@pytest.mark.parametrize("direct", [True, False], ids=["direct writes", "all writes"])
def test_a_write_that_takes_nothing_is_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool):
    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        ordinary = not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return REAL_PWRITE(descriptor, data, offset) if direct and ordinary else 0

    monkeypatch.setattr(image_file.os, "pwrite", pwrite)
    if direct:
        assert write(tmp_path / "file", PIECE + 100).tobytes() == (tmp_path / "file").read_bytes()
    else:
        with pytest.raises(OSError, match="Input/output error"):
            write(tmp_path / "file", PIECE + 100)


def test_each_file_is_synced_once_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    real = os.fsync
    monkeypatch.setattr(image_file.os, "fsync", lambda fd: (sizes.append(os.fstat(fd).st_size), real(fd)))
    write(tmp_path / "file", 3 * PIECE + 100)
    assert sizes == [3 * PIECE + 100]


def test_an_error_of_a_write_is_the_pieces_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(image_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "file", 2 * PIECE)


def test_a_file_that_exists_is_not_written(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(FileExistsError):
        write(tmp_path / "file", 100)
    assert (tmp_path / "file").read_bytes() == b"kept"
