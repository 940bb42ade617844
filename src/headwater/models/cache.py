"""The user cache: where built-in models are kept, and how a folder appears there all at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.errors import UserError


def cache_dir() -> Path:
    """`HEADWATER_CACHE`, else `headwater` under `XDG_CACHE_HOME`, else under `~/.cache`. May not exist."""
    own = os.environ.get("HEADWATER_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "headwater"


def make_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`, filled by `build(folder)` if it does not exist yet.

    `build` fills a temporary sibling that is renamed when it is done, so `target` exists whole or not at
    all. Several processes may call this at once: one builds, the others wait and take its result.

    Raises UserError where the cache cannot be written; whatever `build` raises passes through.
    """
    if target.is_dir():
        return target
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target) as alone:
            if target.is_dir():
                return target
            if alone:
                _remove_leftovers(target)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            try:
                build(temporary)
                _sync(temporary)
                _publish(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write under `folder` into one line with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise UserError(
            f"cannot write the model cache {folder}: {error.strerror}; free space there or set HEADWATER_CACHE to "
            "another folder"
        ) from error


@contextmanager
def _lock(target: Path) -> Iterator[bool]:
    """Hold the lock of `target`; yields False where the file system has no locks."""
    with open(target.parent / f"{target.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _remove_leftovers(target: Path) -> None:
    """Remove what killed builders of `target` left; only the holder of the lock may."""
    for leftover in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Flush files to the disk before the rename: a power cut must not leave a named folder of empty files."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _publish(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError:
        # Without a lock another process may have been first; its folder is as good.
        if not target.is_dir():
            raise
