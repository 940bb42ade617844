"""What can be known before a save, and how a failed one is explained."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import IO

from headwater.errors import UserError

LOCK_NAME = ".lock"
_WRITER_ENDS_S = 10.0
_ELSEWHERE = "set checkpointing.checkpoint_dir to a folder that is writable and has room"
_REMEDIES = {
    errno.ENOSPC: "free space there, or lower checkpointing.keep_latest_k",
    errno.EDQUOT: "free some of the quota, or lower checkpointing.keep_latest_k",
    errno.EROFS: "remount the file system for writing",
    errno.EACCES: "change its permissions",
    errno.EPERM: "change its permissions",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
}


class NoRoomError(UserError):
    """The disk has too little room now."""


def explain(error: OSError) -> str:
    """The cause and the remedy of a file system's error, in one line."""
    cause = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{cause}: {remedy + ', or ' if remedy else ''}{_ELSEWHERE}"


def make(root: Path) -> None:
    """Create the folder if need be. Raises UserError with the remedy."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"checkpoint folder {root} cannot be used: {explain(error)}") from None


def prepare(root: Path) -> IO[str]:
    """Create the folder, see that it can be written and measured, and lock it for this process.

    Returns the lock's open file; the lock ends when it is closed or the process ends, however that ends.
    Raises UserError with the remedy, also where another live process holds the lock.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
        lock = open(root / LOCK_NAME, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"checkpoint folder {root} cannot be used: {explain(error)}") from None
    try:
        _lock(root, lock)
        free_bytes(root)
    except UserError:
        lock.close()
        raise
    return lock


def _lock(root: Path, lock: IO[str]) -> None:
    try:
        _take(lock)
    except BlockingIOError:
        holder = _holder(lock)
        raise UserError(
            f"checkpoint folder {root} is in use by another run (process {holder or 'unknown'}): "
            "wait for it to end, or set checkpointing.checkpoint_dir to another folder"
        ) from None
    except OSError as error:
        raise UserError(f"checkpoint folder {root} cannot be locked: {explain(error)}") from None
    try:
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    except OSError as error:
        raise UserError(f"checkpoint folder {root} cannot be written: {explain(error)}") from None


def _take(lock: IO[str]) -> None:
    """Take the lock; where its holder has ended, its writer process, which holds it too, is about to."""
    deadline = time.monotonic() + _WRITER_ENDS_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = _holder(lock)
            if not holder.isdecimal() or Path(f"/proc/{holder}").exists() or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read(20).strip()


def free_bytes(root: Path) -> int:
    """Bytes that this user may still write on the folder's file system. Raises UserError if that is not known."""
    try:
        system = os.statvfs(root)
    except OSError as error:
        raise UserError(f"free space of {root} cannot be known: {explain(error)}") from None
    if system.f_blocks == 0:
        raise UserError(f"the file system of {root} does not tell its free space: {_ELSEWHERE}")
    return system.f_bavail * system.f_frsize


def require_free(root: Path, needed: int) -> None:
    """Raise NoRoomError unless `needed` bytes are free, UserError where that is not known."""
    free = free_bytes(root)
    if free < needed:
        raise NoRoomError(
            f"a checkpoint in {root} needs {size_text(needed)}, {size_text(free)} is free: "
            f"{_REMEDIES[errno.ENOSPC]}, or {_ELSEWHERE}"
        )


def size_text(nbytes: float) -> str:
    """A size for people: 1.5 GB; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
