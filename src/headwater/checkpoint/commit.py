"""The third state of a save: one rename makes a folder a checkpoint.

A folder is unique, `step_000010-<save id>`, and is never changed after its manifest has its final name. Whatever
happens before that rename, the folder is not a checkpoint; whatever happens after it, the folder is a whole one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from pathlib import Path

from headwater.checkpoint.manifest import MANIFEST_NAME, Manifest

PIN_NAME = "PINNED"
_FOLDER = re.compile(r"step_(\d{6,})-([0-9a-f]{8})")
_log = logging.getLogger(__name__)


def new_folder(root: Path, step: int) -> tuple[Path, str]:
    """Make the folder of one save; returns it and its save id. Raises OSError."""
    while True:
        save_id = secrets.token_hex(4)
        folder = root / f"step_{step:06d}-{save_id}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder, save_id


def parse_folder_name(name: str) -> tuple[int, str] | None:
    """(step, save id) of a checkpoint folder's name, None for any other name."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def committed(folder: Path) -> bool:
    """Whether the folder's save reached its commit point."""
    return (folder / MANIFEST_NAME).is_file()


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a fully written folder a checkpoint. All files inside must be synced already. Raises OSError.

    Everything that the manifest speaks of is durable before the rename, the names of files and folders included.
    """
    temporary = folder / f"{MANIFEST_NAME}.tmp"
    with open(temporary, "xb") as file:
        file.write(manifest.to_json().encode())
        file.flush()
        os.fsync(file.fileno())
    for inner, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(inner))
    sync_folder(folder.parent)
    os.rename(temporary, folder / MANIFEST_NAME)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a save's folder, the manifest first, so that half a deletion is no checkpoint. Raises OSError."""
    manifest = folder / MANIFEST_NAME
    if manifest.exists():
        manifest.unlink()
        sync_folder(folder)
    shutil.rmtree(folder)


def discard(folder: Path) -> None:
    """Delete a folder that never became a checkpoint; where that fails it stays, and is ignored."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("could not remove the unfinished checkpoint %s: %s", folder, error)
