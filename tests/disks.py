"""Disks that fail under a save, each of its own size: full, read-only, with a limit on the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

MB = 1 << 20
ELSEWHERE = "or set checkpointing.checkpoint_dir to a folder that is writable and has room"


def mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is refused here: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own of that size."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, spare: int) -> Path:
    """Take all of a disk but `spare` bytes."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - spare)
    assert os.statvfs(disk).f_bavail * free.f_frsize <= spare
    return filler


@contextmanager
def full(disk: Path, writer: int) -> Iterator[None]:
    filler = fill(disk, spare=MB)
    yield
    filler.unlink()


@contextmanager
def read_only(disk: Path, writer: int) -> Iterator[None]:
    # The lock is open for writing, so that the mount itself stays; whoever comes by path finds the one above it.
    mount("--bind", str(disk), str(disk))
    try:
        mount("-o", "remount,bind,ro", str(disk))
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def small_files_only(disk: Path, writer: int) -> Iterator[None]:
    before = resource.prlimit(writer, resource.RLIMIT_FSIZE, (MB, resource.RLIM_INFINITY))
    yield
    resource.prlimit(writer, resource.RLIMIT_FSIZE, before)


Trouble = Callable[[Path, int], AbstractContextManager[None]]
TROUBLES: list[tuple[Trouble, str]] = [
    (full, "No space left on device: free space there, or lower checkpointing.keep_latest_k, "),
    (read_only, "Read-only file system: remount the file system for writing, "),
    (small_files_only, "File too large: raise the limit on file sizes (ulimit -f), "),
]
