"""The `sync` strategy: training waits for the whole of a save. It is what the native one is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.checkpoint import preflight
from headwater.checkpoint.commit import commit, committed, discard, new_folder
from headwater.checkpoint.manifest import ChunkEntry, FileEntry, Manifest, validate
from headwater.checkpoint.readback import read_back
from headwater.checkpoint.save_order import SaveOrder, SaveResult
from headwater.checkpoint.small_files import write_tokenizer
from headwater.checkpoint.snapshot import StagedChunk, snapshot
from headwater.checkpoint.write_request import difference_text
from headwater.checkpoint.writer import WrittenFile, sync_existing, write_bytes, write_chunks
from headwater.errors import HeadwaterError, UserError


def save_now(root: Path, order: SaveOrder, tokenizer: Callable[[Path], object] | None) -> SaveResult:
    """Stage, write, prove and commit.

    Raises UserError when the file system refuses, HeadwaterError when the proof does; then nothing is left behind.
    """
    started = time.perf_counter()
    staged = {name: snapshot(parts) for name, parts in order.chunks.items()}
    staged_at = time.perf_counter()
    with _attempt(root, order.step) as (folder, save_id):
        entries, files = _write_components(folder, staged)
        files += _write_small_files(folder, order.small_files, tokenizer)
        written_at = time.perf_counter()
        readback_s = read_back(folder, files, entries) if order.readback else 0.0
        manifest = Manifest(
            run_id=order.run_id,
            save_id=save_id,
            step=order.step,
            weight_version=order.weight_version,
            model_identity=order.model_identity,
            saved_at_ns=order.saved_at_ns,
            chunks=tuple(entries),
            files=tuple(files),
        )
        validate(manifest, str(folder))
        commit(folder, manifest)
    measured = {
        "stage_s": staged_at - started,
        "write_s": written_at - staged_at,
        "readback_s": readback_s,
        "commit_s": time.perf_counter() - written_at - readback_s,
        "bytes": float(sum(file.size for file in files)),
    }
    digests = {(entry.component, entry.name, entry.offset): entry.digest for entry in entries}
    return SaveResult(order.step, order.saved_at_ns, folder, digests, measured)


@contextmanager
def _attempt(root: Path, step: int) -> Iterator[tuple[Path, str]]:
    """A new folder and its save id; the folder is removed again if the save ends before its commit point."""
    folder = None
    try:
        folder, save_id = new_folder(root, step)
        yield folder, save_id
    except BaseException as error:
        if folder is not None and not committed(folder):
            discard(folder)
        if isinstance(error, OSError):
            raise UserError(f"saving step {step} to {root} failed: {preflight.explain(error)}") from error
        raise


def _write_components(
    folder: Path, staged: Mapping[str, Sequence[StagedChunk]]
) -> tuple[list[ChunkEntry], list[FileEntry]]:
    entries: list[ChunkEntry] = []
    files: list[FileEntry] = []
    differing: list[str] = []
    for component, chunks in staged.items():
        (folder / component).mkdir()
        path = f"{component}/rank-00000.safetensors"
        file, written = write_chunks(folder / path, chunks)
        files.append(_file_entry(path, file))
        entries += [chunk.entry(component, path) for chunk in written]
        differing += [
            f"{component} {chunk.staged.name}" for chunk in written if chunk.digest != chunk.staged.live_digest
        ]
    if differing:
        raise HeadwaterError(difference_text(folder, differing))
    return entries, files


def _write_small_files(
    folder: Path, contents: Mapping[str, bytes], tokenizer: Callable[[Path], object] | None
) -> list[FileEntry]:
    files = [_file_entry(path, write_bytes(folder / path, data)) for path, data in contents.items()]
    if tokenizer is not None:
        target = folder / "tokenizer"
        target.mkdir()
        write_tokenizer(tokenizer, target)
        for path in sorted(item for item in target.rglob("*") if item.is_file()):
            files.append(_file_entry(path.relative_to(folder).as_posix(), sync_existing(path)))
    return files


def _file_entry(path: str, file: WrittenFile) -> FileEntry:
    return FileEntry(path, file.size, file.checksum)
