"""Paths that a checkpoint's own files name are followed inside of its folder only."""

from __future__ import annotations

import stat
from pathlib import Path

from headwater.errors import UserError


def confined(folder: Path, relative: str, source: Path) -> Path:
    """The regular file `relative` of `folder`, as named in the file `source`.

    Raises UserError for anything else, a link out of the folder included.
    """
    parts = relative.split("/")
    if not relative.isprintable() or "\\" in relative or any(part in ("", ".", "..") for part in parts):
        raise UserError(f"{source}: names the file {relative!r}, which lies outside of the folder or is no plain path")
    path = folder / relative
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
        regular = stat.S_ISREG(path.stat().st_mode)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: listed in {source.name}, but it cannot be read ({reason})") from None
    if not inside:
        raise UserError(f"{path}: leads out of the checkpoint's folder")
    if not regular:
        raise UserError(f"{path}: not a regular file")
    return path
