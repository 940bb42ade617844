"""One run's checkpoints: save, resume lookup, retention.

live tensors -> snapshot -> write -> compare digests -> commit -> prune
                (staged)    (written)                   (committed)

With `strategy: sync` all of it happens in `save`; with `native` a part of the first arrow alone, with `nvrx` the whole
of it (strategies/).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.checkpoint import preflight, votes
from headwater.checkpoint.catalog import Found, newest, scan
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.collector import collector_paused, collector_running
from headwater.checkpoint.commit import discard
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.layout import PAGE
from headwater.checkpoint.pruner import Pruner
from headwater.checkpoint.ranks import Ranks
from headwater.checkpoint.reader import TRAINER_NAME, Checkpoint
from headwater.checkpoint.save_order import SaveOrder, SaveResult
from headwater.checkpoint.small_files import TokenizerFiles, trainer_json
from headwater.checkpoint.strategies.saver import Saver, make_saver
from headwater.checkpoint.strategies.sync import save_now
from headwater.checkpoint.watch import Watch
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError

_log = logging.getLogger(__name__)
_COMPONENT = re.compile(r"[a-z][a-z0-9_]*")
_HEADER_BYTES_PER_CHUNK = 1024  # in safetensors header and manifest together, with room to spare
_COMMIT_TIMEOUT_S = 3600.0
_ALONE = Ranks.alone()


@dataclass
class News:
    """What happened to saves since it was asked last. notes: lines for people. metrics: by tag."""

    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class CheckpointManager:
    """The checkpoints of one run, in one folder that this object holds a lock on.

    config: `checkpoint_dir` is created if need be. model_identity: what the weights belong to. ranks: who saves
    together with this process, each its own chunks; every rank makes every save. Rank 0 alone locks, cleans and prunes
    the folder and saves what is no tensor.
    Folders that an ended run left without committing are removed.
    Raises UserError with the remedy when the folder cannot be written, measured or locked, and for a configuration that
    does not hold for several ranks.
    """

    def __init__(self, config: CheckpointingConfig, run_id: str, model_identity: str, ranks: Ranks = _ALONE) -> None:
        if ranks.world > 1:
            _check_for_many(config, ranks.world)
        self._is_first = ranks.rank == 0
        self._world = ranks.world
        self.root = Path(config.checkpoint_dir).expanduser()
        self._news = News()
        self._nbytes = self._skipped = 0
        self._room_wait_s = 0.0
        self._errors: list[HeadwaterError] = []
        self._changing = threading.RLock()  # news, metrics and retention are touched by a strategy's threads too
        self._closed = False
        self._last_time = 0
        self._newest: Path | None = None
        self._tokenizer_files = TokenizerFiles()
        self._config = config
        self._run_id = run_id
        self._model_identity = model_identity
        self._previous: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._lock = preflight.prepare(self.root) if self._is_first else None
        if self._is_first:
            votes.clear(self.root)
            self._last_time = self._look_around()
        else:
            preflight.make(self.root)
        lock_fd = self._lock.fileno() if self._lock is not None else None
        try:
            self._saver: Saver | None = make_saver(config, self.root, lock_fd, self._saved, ranks)
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise
        self._pruner = Pruner(self.root, config, background=self._saver is not None, active=self._is_first)

    def _look_around(self) -> int:
        """Remove what never committed; when the last checkpoint here was saved, in ns of the epoch, 0 if none was."""
        saves = scan(self.root)
        for found in saves:
            if not found.committed and not found.folder.is_symlink():
                _log.warning("removing %s: its save never committed", found.folder)
                discard(found.folder)
        return max((found.manifest.saved_at_ns for found in saves if found.manifest), default=0)

    def close(self) -> None:
        """Wait for what is being written, then let another run use the folder; nothing can be saved any more."""
        self._closed = True
        if self._saver is not None:
            try:
                self._saver.wait_committed(_COMMIT_TIMEOUT_S)
            except HeadwaterError as error:
                _log.error("%s", error)
            for error in self._errors:
                _log.error("%s", error)
        self._pruner.close()
        if self._saver is not None:
            self._saver.close()
            self._saver = None
        if self._lock is not None and not self._lock.closed:
            votes.clear(self.root)
            self._lock.close()

    def prepare(self, sizes: Mapping[str, int], pin: bool, tokenizer: Callable[[Path], object] | None) -> None:
        """Make the first save as fast as the others: staging buffers, in the background, and the tokenizer's files.

        sizes: bytes of each component's tensors. pin: whether they live on a CUDA device.
        """
        if self._saver is not None:
            self._saver.prepare(sizes, pin)
            if self._is_first:
                self._tokenizer_files.of(tokenizer)

    @property
    def pending(self) -> int:
        """Saves that are neither committed nor failed."""
        return self._saver.pending if self._saver is not None else 0

    @property
    def has_room(self) -> bool:
        """Whether a save as large as the last one would not have to wait for one before it, in memory or on the disk.

        Raises UserError where free space of the disk cannot be known.
        """
        return self._saver is None or (self._saver.has_room and self._fits)

    @property
    def _fits(self) -> bool:
        return preflight.free_bytes(self.root) >= self._nbytes

    @property
    def writer_pid(self) -> int | None:
        """Process id of the process that writes."""
        return self._saver.writer_pid if self._saver is not None else None

    def wait_staged(self, timeout: float = 600.0) -> None:
        """Return when no live tensor is read any more. Raises HeadwaterError after `timeout` seconds."""
        if self._saver is not None:
            self._saver.wait_staged(timeout)

    def wait_committed(self, timeout: float = _COMMIT_TIMEOUT_S) -> None:
        """Return when every save so far is committed.

        Raises the error of one that failed, unless `on_save_error` is continue, and HeadwaterError after `timeout`
        seconds.
        """
        if self._saver is not None:
            self._saver.wait_committed(timeout)
        self.raise_error()

    def wait_pruned(self) -> None:
        """Return when what retention does not keep of the saves so far is removed."""
        self._pruner.wait()

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
        if self._saver is not None:
            news.metrics["checkpoint/pending"] = float(self._saver.pending)
            news.metrics["checkpoint/writer_restarts"] = float(self._saver.writer_restarts)
            news.metrics["checkpoint/skipped"] = float(self._skipped)
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
        """Raise UserError unless a checkpoint whose tensors take this many bytes fits on the disk now.

        Where it does not fit, that is known once the saves that are being written have ended: one that fails gives
        room back, and its error, unless `on_save_error` is continue, is raised as the first cause; one that commits has
        older checkpoints removed. Raises HeadwaterError where they do not end. Of several ranks the first one alone
        looks: it counts for all, and it is the one that removes. The others' files begin after its own with `native`;
        with `nvrx` they may find the disk still full.
        """
        if not self._is_first:
            return
        try:
            preflight.require_free(self.root, tensor_bytes)
        except preflight.NoRoomError:
            started = time.perf_counter()
            with collector_running():
                self.wait_committed()
                self._pruner.wait()
            self._room_wait_s = time.perf_counter() - started
            preflight.require_free(self.root, tensor_bytes)

    def _older(self, corrupt: Found) -> str:
        older = [found.folder for found in scan(self.root) if found.manifest and found.folder != corrupt.folder]
        if not older:
            return f"Move it out of {self.root} to start anew"
        return f"Move it out of {self.root} to resume from {older[-1].name}"

    @collector_paused()
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
        watch: Watch | None = None,
    ) -> Path | None:
        """Save, prove, commit and prune; with `native` and `nvrx`, return as soon as training may go on.

        components: chunks of each component, such as {"policy": [...]}. trainer_state: JSON values, without NaN.
        tokenizer: called with a folder to write the tokenizer's files into; once, except with `sync`.
        Several ranks each give their own chunks; what else they give is not saved, except rank 0's.
        fences: of the engines that the chunks belong to. may_skip: whether `when_busy: skip` holds for this save.
        watch: made of the chunks' tensors when they held what is to be saved, where that was before this call.
        Returns the new checkpoint's folder if it is committed already, which it is with `sync` or without `async_save`
        unless the save failed and `on_save_error` is continue; `take_news` tells of what comes later.
        Raises UserError when the file system refuses, HeadwaterError when what was written is not what the live
        tensors hold or `trainer_state` is not JSON; in each case nothing is left behind and the previous checkpoint
        stays the newest. What fails after the return is raised by a later call of `save`,
        `take_news` or `wait_committed`.
        """
        self.raise_error()
        started = time.perf_counter()
        self._room_wait_s = 0.0
        token = self._saver.new_save(step) if self._saver is not None else ""
        try:
            if self._closed:
                raise HeadwaterError(f"step {step} cannot be saved: the checkpoints in {self.root} are closed")
            if type(step) is not int or step < 0:
                raise ValueError(f"a step is a whole number of 0 or more, not {step!r}")
            chunks = {name: list(parts) for name, parts in components.items()}
            for name in chunks:
                if not _COMPONENT.fullmatch(name) or name == "tokenizer":
                    raise ValueError(f"{name!r} cannot name a component")
            small_files: dict[str, bytes] = {}
            if self._is_first:
                small_files |= {TRAINER_NAME: trainer_json(trainer_state), "config.yaml": config_yaml.encode()}
            self._nbytes = _bytes_needed(chunks, small_files) * self._world  # ranks' parts are about as large
            may_skip = may_skip and self._config.when_busy == "skip"
            saved = not (may_skip and (self.pending or self._pruner.is_busy) and not self._fits)
            if saved:
                self.require_space(self._nbytes)
            if self._saver is not None and self._is_first:
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
                watch=watch,
            )
            folder = None
            if self._saver is None:
                with collector_running():
                    result = save_now(self.root, order, tokenizer)
                self._saved(result)
                folder = result.folder
            elif saved:
                saved = self._saver.save(token, order, fences, skip_when_busy=may_skip)
        except Exception as error:
            if self._saver is not None:
                self._saver.refuse(token, step, str(error))
            if not isinstance(error, HeadwaterError) or self._config.on_save_error == "stop":
                raise
            self._report(error)
            return None
        waits = self._saver is not None and saved and not self._config.async_save
        if waits:
            with collector_running():
                self.wait_committed()
            folder = self._newest
        self._skipped += not saved
        with self._changing:
            self._news.metrics["checkpoint/stall_s"] = time.perf_counter() - started
            if self._saver is not None and not waits:
                self._news.metrics["checkpoint/busy_wait_s"] = self._saver.take_busy_s() + self._room_wait_s
                text = "staged step {}, writing" if saved else "skipped the save of step {}: the writer is busy"
                self._news.notes.append(text.format(step))
        return folder

    def _saved(self, result: SaveResult) -> None:
        """Take note of a save that ended, perhaps in another thread."""
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
            written_s = result.measured.get("write_s", 0.0)
            self._news.notes.append(f"committed {result.folder} (written in {written_s:.1f} s)")
            assert result.folder is not None
            self._newest = result.folder
            self._pruner.committed(result.folder, result.step, result.saved_at_ns)

    def _report(self, error: HeadwaterError) -> None:
        with self._changing:
            self._news.notes.append(f"not saved, training goes on: {error}")
        _log.warning("%s", error)

    @property
    def metric_history(self) -> dict[str, float]:
        """The value of `metric_name` at each step, as JSON wants it; save it in `trainer_state`."""
        return self._pruner.metric_history

    def restore_metric_history(self, history: Mapping[str, float]) -> None:
        """Take over what an earlier process of this run recorded."""
        self._pruner.restore_metric_history(history)

    def record_metric(self, step: int, value: float) -> None:
        """Note how good a step is, then prune. A value that is not finite ranks no checkpoint and is not kept."""
        self._pruner.record_metric(step, value)

    def _next_time(self) -> int:
        """Now, but later than every checkpoint here, also when the clock was set back."""
        self._last_time = max(time.time_ns(), self._last_time + 1)
        return self._last_time


def _check_for_many(config: CheckpointingConfig, world: int) -> None:
    """Raises UserError for what several ranks cannot do together."""
    if config.strategy == "sync":
        raise UserError(
            f"checkpointing.strategy=sync saves one rank alone, here are {world}: set checkpointing.strategy=native"
        )
    if config.when_busy == "skip":
        raise UserError(
            f"checkpointing.when_busy=skip would let {world} ranks skip different saves: "
            "set checkpointing.when_busy=wait"
        )


def _bytes_needed(chunks: Mapping[str, Sequence[Chunk]], small_files: Mapping[str, bytes]) -> int:
    per_chunk = (chunk.tensor.nbytes + _HEADER_BYTES_PER_CHUNK for parts in chunks.values() for chunk in parts)
    return sum(per_chunk) + sum(map(len, small_files.values())) + PAGE * (len(chunks) + len(small_files) + 1)
