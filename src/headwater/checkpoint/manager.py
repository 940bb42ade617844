"""One run's checkpoints: save, resume lookup, retention.

live tensors -> snapshot -> write -> compare digests -> commit -> prune
                (staged)    (written)                   (committed)
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.checkpoint import preflight
from headwater.checkpoint.catalog import Found, newest, scan
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.commit import commit, committed, discard, new_folder, remove
from headwater.checkpoint.manifest import ChunkEntry, FileEntry, Manifest, validate
from headwater.checkpoint.reader import TRAINER_NAME, Checkpoint
from headwater.checkpoint.retention import Saved, keys_to_keep
from headwater.checkpoint.snapshot import StagedChunk, snapshot
from headwater.checkpoint.writer import PAGE, WrittenChunk, WrittenFile, sync_existing, write_bytes, write_chunks
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError

_log = logging.getLogger(__name__)
_COMPONENT = re.compile(r"[a-z][a-z0-9_]*")
_HEADER_BYTES_PER_CHUNK = 1024  # in safetensors header and manifest together, with room to spare
_NAMED_CHUNKS = 5


class CheckpointManager:
    """The checkpoints of one run, in one folder that this object holds a lock on.

    config: `checkpoint_dir` is created if need be. model_identity: what the weights belong to.
    Folders that an ended run left without committing are removed.
    Raises UserError with the remedy when the folder cannot be written, measured or locked.
    """

    def __init__(self, config: CheckpointingConfig, run_id: str, model_identity: str) -> None:
        self.root = Path(config.checkpoint_dir).expanduser()
        self.last_timings: dict[str, float] = {}
        self._config = config
        self._run_id = run_id
        self._model_identity = model_identity
        self._metrics: dict[int, float] = {}
        self._previous: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._lock = preflight.prepare(self.root)
        for found in scan(self.root):
            if not found.committed and not found.folder.is_symlink():
                _log.warning("removing %s: its save never committed", found.folder)
                discard(found.folder)

    def close(self) -> None:
        """Let another run use the folder."""
        self._lock.close()

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint: by step, then by time of saving. None if there is none.

        Raises UserError if it is corrupt, with no fallback to an older one, or if it is another model's.
        """
        found = newest(self.root)
        if found is None:
            return None
        try:
            checkpoint = Checkpoint.open(found.folder)
        except UserError as error:
            raise UserError(f"the newest checkpoint cannot be resumed from: {error}. {self._older(found)}") from None
        identity = checkpoint.manifest.model_identity
        if identity != self._model_identity:
            raise UserError(
                f"{found.folder} is a checkpoint of {identity}, this run trains {self._model_identity}: "
                "set policy.model_name to that model, or checkpointing.checkpoint_dir to another folder"
            )
        self._run_id = checkpoint.manifest.run_id  # a resumed run is the same run
        return checkpoint

    def require_space(self, tensor_bytes: int) -> None:
        """Raise UserError unless a checkpoint whose tensors take this many bytes fits on the disk now."""
        preflight.require_free(self.root, tensor_bytes)

    def _older(self, corrupt: Found) -> str:
        older = [found.folder for found in scan(self.root) if found.manifest and found.folder != corrupt.folder]
        if not older:
            return f"Move it out of {self.root} to start anew"
        return f"Move it out of {self.root} to resume from {older[-1].name}"

    def save(
        self,
        step: int,
        components: Mapping[str, Iterable[Chunk]],
        trainer_state: Mapping[str, Any],
        config_yaml: str,
        tokenizer: Callable[[Path], object] | None,
        weight_version: int,
    ) -> Path:
        """Save, prove, commit and prune; returns the new checkpoint's folder.

        components: chunks of each component, such as {"policy": [...]}. trainer_state: JSON values, without NaN.
        tokenizer: called with a folder to write the tokenizer's files into.
        Raises UserError when the file system refuses, HeadwaterError when what was written is not what the live
        tensors hold or `trainer_state` is not JSON; in each case nothing is left behind and the previous checkpoint
        stays the newest.
        """
        started = time.perf_counter()
        chunks = {name: list(parts) for name, parts in components.items()}
        small_files = {TRAINER_NAME: _trainer_json(trainer_state), "config.yaml": config_yaml.encode()}
        preflight.require_free(self.root, _bytes_needed(chunks, small_files))
        staged = {name: snapshot(parts) for name, parts in chunks.items()}
        staged_at = time.perf_counter()
        with self._attempt(step) as (folder, save_id):
            entries, files = _write_components(folder, staged)
            files += _write_small_files(folder, small_files, tokenizer)
            written_at = time.perf_counter()
            manifest = Manifest(
                run_id=self._run_id,
                save_id=save_id,
                step=step,
                weight_version=weight_version,
                model_identity=self._model_identity,
                saved_at_ns=self._next_time(),
                chunks=tuple(entries),
                files=tuple(files),
            )
            validate(manifest, str(folder))
            commit(folder, manifest)
        committed_at = time.perf_counter()
        repeated = self._count_repeated(entries)
        self._prune()
        self.last_timings = {
            "checkpoint/stall_s": time.perf_counter() - started,
            "checkpoint/stage_s": staged_at - started,
            "checkpoint/write_s": written_at - staged_at,
            "checkpoint/commit_s": committed_at - written_at,
            "checkpoint/bytes": float(sum(file.size for file in files)),
            "checkpoint/chunks_advanced": float(len(entries) - repeated),
            "checkpoint/chunks_repeated": float(repeated),
        }
        return folder

    @contextmanager
    def _attempt(self, step: int) -> Iterator[tuple[Path, str]]:
        """A new folder and its save id; the folder is removed again if the save ends before its commit point."""
        folder = None
        try:
            folder, save_id = new_folder(self.root, step)
            yield folder, save_id
        except BaseException as error:
            if folder is not None and not committed(folder):
                discard(folder)
            if isinstance(error, OSError):
                raise UserError(f"saving step {step} to {self.root} failed: {preflight.explain(error)}") from error
            raise

    def _count_repeated(self, entries: Sequence[ChunkEntry]) -> int:
        """Chunks whose live digest is that of this manager's previous save."""
        digests = {(entry.component, entry.name, entry.offset): entry.digest for entry in entries}
        previous, self._previous = self._previous, digests
        return sum(previous.get(key) == digest for key, digest in digests.items())

    @property
    def metric_history(self) -> dict[str, float]:
        """The value of `metric_name` at each step, as JSON wants it; save it in `trainer_state`."""
        return {str(step): value for step, value in sorted(self._metrics.items())}

    def restore_metric_history(self, history: Mapping[str, float]) -> None:
        """Take over what an earlier process of this run recorded."""
        self._metrics = {int(step): float(value) for step, value in history.items()}

    def record_metric(self, step: int, value: float) -> None:
        """Note how good a step is, then prune. A value that is not finite ranks no checkpoint and is not kept."""
        if math.isfinite(value):
            self._metrics[step] = float(value)
        else:
            self._metrics.pop(step, None)
        self._prune()

    def _next_time(self) -> int:
        """Now, but later than every checkpoint here, also when the clock was set back."""
        known = [found.manifest.saved_at_ns for found in scan(self.root) if found.manifest]
        return max([time.time_ns(), *(value + 1 for value in known)])

    def _prune(self) -> None:
        """Remove what retention does not keep; a folder with an unreadable manifest is neither counted nor removed."""
        readable = {found.folder.name: found for found in scan(self.root) if found.manifest}
        saved = [
            Saved(name, found.step, found.manifest.saved_at_ns, found.pinned)
            for name, found in readable.items()
            if found.manifest
        ]
        config = self._config
        keep = keys_to_keep(saved, config.keep_latest_k, config.keep_top_k, self._metrics, config.higher_is_better)
        for name in readable.keys() - keep:
            try:
                remove(readable[name].folder)
            except OSError as error:
                _log.warning("could not prune %s: %s", readable[name].folder, error)


def _trainer_json(state: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(state, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise HeadwaterError(f"the trainer's state cannot be saved as JSON: {error}") from None


def _bytes_needed(chunks: Mapping[str, Sequence[Chunk]], small_files: Mapping[str, bytes]) -> int:
    per_chunk = (
        chunk.tensor.numel() * chunk.tensor.element_size() + _HEADER_BYTES_PER_CHUNK
        for parts in chunks.values()
        for chunk in parts
    )
    return sum(per_chunk) + sum(map(len, small_files.values())) + PAGE * (len(chunks) + len(small_files) + 1)


def _write_components(
    folder: Path, staged: Mapping[str, Sequence[StagedChunk]]
) -> tuple[list[ChunkEntry], list[FileEntry]]:
    entries: list[ChunkEntry] = []
    files: list[FileEntry] = []
    differing: list[str] = []
    for component, chunks in staged.items():
        if not _COMPONENT.fullmatch(component) or component == "tokenizer":
            raise ValueError(f"{component!r} cannot name a component")
        (folder / component).mkdir()
        path = f"{component}/rank-00000.safetensors"
        file, written = write_chunks(folder / path, chunks)
        files.append(_file_entry(path, file))
        entries += [_chunk_entry(component, path, chunk) for chunk in written]
        differing += [
            f"{component} {chunk.staged.name}" for chunk in written if chunk.digest != chunk.staged.live_digest
        ]
    if differing:
        more = f" and {len(differing) - _NAMED_CHUNKS} more" if len(differing) > _NAMED_CHUNKS else ""
        raise HeadwaterError(
            f"the checkpoint {folder.name} does not hold what the live tensors held, so it was removed: "
            f"{', '.join(differing[:_NAMED_CHUNKS])}{more}"
        )
    return entries, files


def _write_small_files(
    folder: Path, contents: Mapping[str, bytes], tokenizer: Callable[[Path], object] | None
) -> list[FileEntry]:
    files = [_file_entry(path, write_bytes(folder / path, data)) for path, data in contents.items()]
    if tokenizer is not None:
        target = folder / "tokenizer"
        target.mkdir()
        try:
            tokenizer(target)
        except OSError:
            raise
        except Exception as error:  # the tokenizers library raises a bare Exception where the disk is full
            raise UserError(f"the tokenizer's files cannot be written to {target}: {error}") from error
        for path in sorted(item for item in target.rglob("*") if item.is_file()):
            files.append(_file_entry(path.relative_to(folder).as_posix(), sync_existing(path)))
    return files


def _file_entry(path: str, file: WrittenFile) -> FileEntry:
    return FileEntry(path, file.size, file.checksum)


def _chunk_entry(component: str, path: str, chunk: WrittenChunk) -> ChunkEntry:
    staged = chunk.staged
    return ChunkEntry(
        component=component,
        name=staged.name,
        global_shape=staged.global_shape,
        offset=staged.offset,
        shape=staged.shape,
        dtype=staged.dtype,
        file=path,
        begin=chunk.begin,
        end=chunk.end,
        digest=staged.live_digest,
    )
