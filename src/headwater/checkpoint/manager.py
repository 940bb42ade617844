"""One run's checkpoints: save, resume lookup, retention.

live tensors -> snapshot -> write -> compare digests -> commit -> prune
                (staged)    (written)                   (committed)

With `strategy: sync` all of it happens in `save`; with `native` (native.py) the first arrow alone.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwater.checkpoint import preflight
from headwater.checkpoint.catalog import Found, look_at, newest, pinned, save_folders, scan
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.commit import commit, committed, discard, new_folder, remove
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manifest import MANIFEST_NAME, ChunkEntry, FileEntry, Manifest, validate
from headwater.checkpoint.native import NativeSaver, SaveOrder, SaveResult
from headwater.checkpoint.readback import read_back
from headwater.checkpoint.reader import TRAINER_NAME, Checkpoint
from headwater.checkpoint.retention import Saved, keys_to_keep
from headwater.checkpoint.small_files import TokenizerFiles, trainer_json, write_tokenizer
from headwater.checkpoint.snapshot import StagedChunk, snapshot
from headwater.checkpoint.write_request import difference_text
from headwater.checkpoint.writer import PAGE, WrittenChunk, WrittenFile, sync_existing, write_bytes, write_chunks
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError

_log = logging.getLogger(__name__)
_COMPONENT = re.compile(r"[a-z][a-z0-9_]*")
_HEADER_BYTES_PER_CHUNK = 1024  # in safetensors header and manifest together, with room to spare
_COMMIT_TIMEOUT_S = 3600.0


@dataclass
class News:
    """What happened to saves since it was asked last. notes: lines for people. metrics: by tag."""

    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class CheckpointManager:
    """The checkpoints of one run, in one folder that this object holds a lock on.

    config: `checkpoint_dir` is created if need be. model_identity: what the weights belong to.
    Folders that an ended run left without committing are removed.
    Raises UserError with the remedy when the folder cannot be written, measured or locked.
    """

    def __init__(self, config: CheckpointingConfig, run_id: str, model_identity: str) -> None:
        self.root = Path(config.checkpoint_dir).expanduser()
        self._news = News()
        self._errors: list[HeadwaterError] = []
        self._changing = threading.RLock()  # news, metrics and retention are touched by native's threads too
        self._last_time = 0
        self._tokenizer_files = TokenizerFiles()
        self._config = config
        self._run_id = run_id
        self._model_identity = model_identity
        self._metrics: dict[int, float] = {}
        self._previous: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._readable: dict[str, tuple[object, Saved]] = {}
        self._lock = preflight.prepare(self.root)
        for found in scan(self.root):
            if not found.committed and not found.folder.is_symlink():
                _log.warning("removing %s: its save never committed", found.folder)
                discard(found.folder)
        self._native = None
        if config.strategy == "native":
            self._native = NativeSaver(self.root, self._lock.fileno(), config.writer_silence_s, self._saved)

    def close(self) -> None:
        """Wait for what is being written, then let another run use the folder."""
        if self._native is not None:
            try:
                self._native.wait_committed(_COMMIT_TIMEOUT_S)
            except HeadwaterError as error:
                _log.error("%s", error)
            for error in self._errors:
                _log.error("%s", error)
            self._native.close()
            self._native = None
        self._lock.close()

    def prepare(self, sizes: Mapping[str, int], pin: bool, tokenizer: Callable[[Path], object] | None) -> None:
        """Make the first save as fast as the others: staging buffers, in the background, and the tokenizer's files.

        sizes: bytes of each component's tensors. pin: whether they live on a CUDA device.
        """
        if self._native is not None:
            self._native.prepare(sizes, pin)
            self._tokenizer_files.of(tokenizer)

    @property
    def pending(self) -> int:
        """Saves that are neither committed nor failed."""
        return self._native.pending if self._native is not None else 0

    @property
    def writer_pid(self) -> int | None:
        """Process id of native's writer."""
        return self._native.writer_pid if self._native is not None else None

    def wait_staged(self, timeout: float = 600.0) -> None:
        """Return when no live tensor is read any more. Raises HeadwaterError after `timeout` seconds."""
        if self._native is not None:
            self._native.wait_staged(timeout)

    def wait_committed(self, timeout: float = _COMMIT_TIMEOUT_S) -> None:
        """Return when every save so far is committed.

        Raises the error of one that failed, unless `on_save_error` is continue, and HeadwaterError after `timeout`
        seconds.
        """
        if self._native is not None:
            self._native.wait_committed(timeout)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of a save that failed in the background, once."""
        with self._changing:
            if self._errors:
                raise self._errors.pop(0)

    def take_news(self) -> News:
        """What happened since the last call: lines and metrics of saves that were staged or committed or failed.

        Raises as `raise_error` does.
        """
        self.raise_error()
        with self._changing:
            news, self._news = self._news, News()
        if self._native is not None:
            news.metrics["checkpoint/pending"] = float(self._native.pending)
            news.metrics["checkpoint/writer_restarts"] = float(self._native.writer_restarts)
            news.metrics["checkpoint/skipped"] = float(self._native.skipped)
        return news

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint: by step, then by time of saving. None if there is none.

        Raises UserError if it is corrupt, with no fallback to an older one, or if it is another model's.
        """
        found = newest(self.root)
        if found is None:
            return None
        try:
            checkpoint = Checkpoint.open_to_load(found.folder)
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
        fences: Iterable[Fence] = (),
        may_skip: bool = True,
    ) -> Path | None:
        """Save, prove, commit and prune; with `native`, return as soon as training may go on.

        components: chunks of each component, such as {"policy": [...]}. trainer_state: JSON values, without NaN.
        tokenizer: called with a folder to write the tokenizer's files into; with `native`, once.
        fences: of the engines that the chunks belong to. may_skip: whether `when_busy: skip` holds for this save.
        Returns the new checkpoint's folder if it is committed already, which it is with `sync` unless the save failed
        and `on_save_error` is continue; `take_news` tells of what comes later.
        Raises UserError when the file system refuses, HeadwaterError when what was written is not what the live
        tensors hold or `trainer_state` is not JSON; in each case nothing is left behind and the previous checkpoint
        stays the newest. With `native`, what fails after the return is raised by a later call of `save`,
        `take_news` or `wait_committed`.
        """
        self.raise_error()
        started = time.perf_counter()
        try:
            chunks = {name: list(parts) for name, parts in components.items()}
            for name in chunks:
                if not _COMPONENT.fullmatch(name) or name == "tokenizer":
                    raise ValueError(f"{name!r} cannot name a component")
            small_files = {TRAINER_NAME: trainer_json(trainer_state), "config.yaml": config_yaml.encode()}
            preflight.require_free(self.root, _bytes_needed(chunks, small_files))
            if self._native is not None:
                small_files |= self._tokenizer_files.of(tokenizer)
            order = SaveOrder(
                step=step,
                chunks=chunks,
                small_files=small_files,
                run_id=self._run_id,
                weight_version=weight_version,
                model_identity=self._model_identity,
                saved_at_ns=self._next_time(),
                readback=self._config.verify == "readback",
            )
            folder, saved = None, True
            if self._native is None:
                folder = self._save_now(order, tokenizer)
            else:
                saved = self._native.save(order, fences, skip_when_busy=may_skip and self._config.when_busy == "skip")
        except HeadwaterError as error:
            if self._config.on_save_error == "stop":
                raise
            self._report(error)
            return None
        with self._changing:
            self._news.metrics["checkpoint/stall_s"] = time.perf_counter() - started
            if self._native is not None:
                self._news.metrics["checkpoint/busy_wait_s"] = self._native.take_busy_s()
                text = "staged step {}, writing" if saved else "skipped the save of step {}: the writer is busy"
                self._news.notes.append(text.format(step))
        return folder

    def _save_now(self, order: SaveOrder, tokenizer: Callable[[Path], object] | None) -> Path:
        started = time.perf_counter()
        staged = {name: snapshot(parts) for name, parts in order.chunks.items()}
        staged_at = time.perf_counter()
        with self._attempt(order.step) as (folder, save_id):
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
        self._saved(SaveResult(order.step, folder, digests, measured))
        return folder

    def _saved(self, result: SaveResult) -> None:
        """Take note of a save that ended; with `native`, in a thread of its own."""
        with self._changing:
            if result.error is not None:
                if self._config.on_save_error == "stop":
                    self._errors.append(result.error)
                else:
                    self._report(result.error)
                return
            repeated = sum(self._previous.get(key) == digest for key, digest in result.digests.items())
            self._previous = result.digests
            self._news.metrics |= {f"checkpoint/{name}": value for name, value in result.measured.items()}
            self._news.metrics["checkpoint/chunks_advanced"] = float(len(result.digests) - repeated)
            self._news.metrics["checkpoint/chunks_repeated"] = float(repeated)
            self._news.notes.append(f"committed {result.folder}")
            self._prune()

    def _report(self, error: HeadwaterError) -> None:
        with self._changing:
            self._news.notes.append(f"not saved, training goes on: {error}")
        _log.warning("%s", error)

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

    @property
    def metric_history(self) -> dict[str, float]:
        """The value of `metric_name` at each step, as JSON wants it; save it in `trainer_state`."""
        return {str(step): value for step, value in sorted(self._metrics.items())}

    def restore_metric_history(self, history: Mapping[str, float]) -> None:
        """Take over what an earlier process of this run recorded."""
        self._metrics = {int(step): float(value) for step, value in history.items()}

    def record_metric(self, step: int, value: float) -> None:
        """Note how good a step is, then prune. A value that is not finite ranks no checkpoint and is not kept."""
        with self._changing:
            if math.isfinite(value):
                self._metrics[step] = float(value)
            else:
                self._metrics.pop(step, None)
            self._prune()

    def _next_time(self) -> int:
        """Now, but later than every checkpoint here, also when the clock was set back."""
        if not self._last_time:
            self._last_time = max(
                (found.manifest.saved_at_ns for found in scan(self.root) if found.manifest), default=0
            )
        self._last_time = max(time.time_ns(), self._last_time + 1)
        return self._last_time

    def _prune(self) -> None:
        """Remove what retention does not keep; a folder with an unreadable manifest is neither counted nor removed."""
        saved = list(filter(None, map(self._saved_in, save_folders(self.root))))
        config = self._config
        keep = keys_to_keep(saved, config.keep_latest_k, config.keep_top_k, self._metrics, config.higher_is_better)
        for name in {item.key for item in saved} - keep:
            try:
                remove(self.root / name)
            except OSError as error:
                _log.warning("could not prune %s: %s", self.root / name, error)

    def _saved_in(self, folder: Path) -> Saved | None:
        """A committed, readable checkpoint; its manifest is read again only where the file was touched."""
        try:
            status = (folder / MANIFEST_NAME).stat()
        except OSError:
            return None
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        known, saved = self._readable.get(folder.name, (None, None))
        if known != version or saved is None:
            found = look_at(folder)
            if found.manifest is None:
                return None
            saved = Saved(folder.name, found.step, found.manifest.saved_at_ns)
            self._readable[folder.name] = (version, saved)
        return replace(saved, pinned=pinned(folder))


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
        (folder / component).mkdir()
        path = f"{component}/rank-00000.safetensors"
        file, written = write_chunks(folder / path, chunks)
        files.append(_file_entry(path, file))
        entries += [_chunk_entry(component, path, chunk) for chunk in written]
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
