"""The fourth state of a save: what retention does not keep is removed, in the background where nobody has to wait."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from headwater.checkpoint.catalog import look_at, pinned, save_folders
from headwater.checkpoint.commit import remove
from headwater.checkpoint.manifest import MANIFEST_NAME
from headwater.checkpoint.retention import Saved, keys_to_keep
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError

_log = logging.getLogger(__name__)
_TIMEOUT_S = 3600.0


class Pruner:
    """Removes checkpoints of `root` as `config` says. background: in a thread of its own, not in the caller's.

    active: False where another rank prunes; then metrics are recorded alone.
    """

    def __init__(self, root: Path, config: CheckpointingConfig, background: bool, active: bool = True) -> None:
        self._root = root
        self._active = active
        self._config = config
        self._lock = threading.Lock()
        self._metrics: dict[int, float] = {}
        self._readable: dict[str, tuple[object, Saved]] = {}
        self._changed = threading.Condition()
        self._asked = self._done = 0
        self._closing = False
        self._thread = (
            threading.Thread(target=self._run, name="headwater-prune", daemon=True) if background and active else None
        )
        if self._thread is not None:
            self._thread.start()

    @property
    def metric_history(self) -> dict[str, float]:
        """The metric's value at each step, as JSON wants it."""
        with self._lock:
            return {str(step): value for step, value in sorted(self._metrics.items())}

    def restore_metric_history(self, history: Mapping[str, float]) -> None:
        """Take over what an earlier process of this run recorded."""
        with self._lock:
            self._metrics = {int(step): float(value) for step, value in history.items()}

    def record_metric(self, step: int, value: float) -> None:
        """Note how good a step is, then prune. A value that is not finite ranks no checkpoint and is not kept."""
        with self._lock:
            if math.isfinite(value):
                self._metrics[step] = float(value)
            else:
                self._metrics.pop(step, None)
        self.prune()

    def committed(self, folder: Path, step: int, saved_at_ns: int) -> None:
        """Take note of a checkpoint that this process committed, then prune.

        Its manifest is as it was written, so that nobody has to read thousands of entries for these two numbers.
        """
        if self._active:
            with suppress(OSError):
                self._readable[folder.name] = (_version(folder), Saved(folder.name, step, saved_at_ns))
        self.prune()

    def prune(self) -> None:
        """Remove what is not kept, or begin to; after `close`, do not begin."""
        if not self._active:
            return
        if self._thread is None:
            self._prune()
            return
        with self._changed:
            if not self._closing:
                self._asked += 1
                self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Whether something is still being removed."""
        return self._thread is not None and self._done < self._asked

    def wait(self, timeout: float = _TIMEOUT_S) -> None:
        """Return when all that was begun is done. Raises HeadwaterError after `timeout` seconds."""
        with self._changed:
            asked = self._asked
            if not self._changed.wait_for(lambda: self._done >= asked, timeout):
                raise HeadwaterError(f"old checkpoints in {self._root} are not removed after {timeout:g} s")

    def close(self, timeout: float = _TIMEOUT_S) -> None:
        """Finish what was begun, as far as that takes `timeout` seconds; safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.warning("old checkpoints in %s are not removed after %g s", self._root, timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._closing)
                asked = self._asked
                if asked == self._done:
                    return
            try:
                self._prune()
            except Exception as error:
                _log.warning("checkpoints in %s could not be pruned: %s", self._root, error)
            with self._changed:
                self._done = asked
                self._changed.notify_all()

    def _prune(self) -> None:
        """A folder with an unreadable manifest is neither counted nor removed."""
        saved = list(filter(None, map(self._saved_in, save_folders(self._root))))
        config = self._config
        with self._lock:
            metrics = dict(self._metrics)
        keep = keys_to_keep(saved, config.keep_latest_k, config.keep_top_k, metrics, config.higher_is_better)
        for name in {item.key for item in saved} - keep:
            try:
                remove(self._root / name)
                self._readable.pop(name, None)
            except OSError as error:
                _log.warning("could not prune %s: %s", self._root / name, error)

    def _saved_in(self, folder: Path) -> Saved | None:
        """A committed, readable checkpoint; its manifest is read again only where the file was touched."""
        try:
            version = _version(folder)
        except OSError:
            return None
        known, saved = self._readable.get(folder.name, (None, None))
        if known != version or saved is None:
            found = look_at(folder)
            if found.manifest is None:
                return None
            saved = Saved(folder.name, found.step, found.manifest.saved_at_ns)
            self._readable[folder.name] = (version, saved)
        return replace(saved, pinned=pinned(folder))


def _version(folder: Path) -> tuple[int, int, int]:
    """Another one where the manifest was written or replaced. Raises OSError where there is none."""
    status = (folder / MANIFEST_NAME).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
