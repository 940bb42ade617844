"""What a checkpoint folder of a run holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwater.checkpoint.commit import PIN_NAME, committed, parse_folder_name
from headwater.checkpoint.manifest import Manifest, read_manifest
from headwater.errors import UserError


@dataclass(frozen=True)
class Found:
    """A save's folder.

    step: of the manifest; of the folder's name where no manifest can be read.
    manifest: None where it is not committed or cannot be believed; `problem` then says why the latter.
    pinned: it holds a file PINNED, or is a link to a folder elsewhere; never pruned.
    """

    folder: Path
    step: int
    save_id: str
    committed: bool
    pinned: bool
    manifest: Manifest | None = None
    problem: UserError | None = None

    @property
    def order(self) -> tuple[int, float]:
        """Newest last: by step, then by time of saving; one that cannot be read counts as the newest of its step."""
        return self.step, self.manifest.saved_at_ns if self.manifest else float("inf")


def pinned(folder: Path) -> bool:
    """Whether a save's folder must never be pruned."""
    return (folder / PIN_NAME).exists() or folder.is_symlink()


def look_at(folder: Path) -> Found:
    """Describe one save's folder."""
    step, save_id = parse_folder_name(folder.name) or (0, "")
    if not committed(folder):
        return Found(folder, step, save_id, False, pinned(folder))
    try:
        manifest = read_manifest(folder)
    except UserError as problem:
        # Gone between the two looks: a running job pruned it.
        return Found(folder, step, save_id, committed(folder), pinned(folder), problem=problem)
    return Found(folder, manifest.step, manifest.save_id, True, pinned(folder), manifest)


def scan(root: Path) -> list[Found]:
    """All saves in a run's checkpoint folder, newest last; other entries are ignored.

    Raises UserError when the folder cannot be listed.
    """
    return sorted(map(look_at, save_folders(root)), key=lambda found: found.order)


def save_folders(root: Path) -> list[Path]:
    """The folders of all saves, in any order, committed or not. Raises UserError when `root` cannot be listed."""
    try:
        return [entry for entry in root.iterdir() if parse_folder_name(entry.name) and entry.is_dir()]
    except OSError as error:
        raise UserError(f"{root}: cannot be listed ({error.strerror})") from None


def newest(root: Path) -> Found | None:
    """The newest committed save in a run's checkpoint folder."""
    return max((found for found in scan(root) if found.committed), key=lambda found: found.order, default=None)
