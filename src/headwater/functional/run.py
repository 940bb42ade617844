"""Run a named job as a command of its own, and judge what it left."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from headwater.config.load import load_config
from headwater.config.schema import Config
from headwater.errors import HeadwaterError, UserError
from headwater.functional.jobs import Job

RUN_LOG, METRICS = "run.log", "metrics.json"
_PLACES = {"checkpointing.checkpoint_dir": "checkpoints", "logger.log_dir": "logs"}
_OWN = (RUN_LOG, METRICS, *_PLACES.values())
_FIRST_LINE = "$ headwater train "


def run_job(job: Job, overrides: Sequence[str], folder: Path, show: Callable[[str], None]) -> int:
    """Train in `folder`, with `run.log` and `metrics.json` in it, and show a verdict for each thing that must hold.

    What an earlier run of a job left in the folder is removed: resumed from it, nothing would train. Returns the exit
    code: that of the training where it is not 0, else 0, 1 where something does not hold, 2 where one cannot tell.
    Raises UserError for a configuration that is refused, or a folder that is not of a job.
    """
    for key in _PLACES:
        if any(override.partition("=")[0].strip() == key for override in overrides):
            raise UserError(f"{key} is the job's own: give --output")
    places = [f"{key}={json.dumps(str(folder / name))}" for key, name in _PLACES.items()]
    words = [job.recipe, *job.settings, *overrides, *places]
    config = load_config(words[0], words[1:]).config
    _clear(folder)
    with (folder / RUN_LOG).open("w", buffering=1) as log:

        def tell(line: str) -> None:
            try:
                log.write(line + "\n")
            except OSError as error:
                raise UserError(f"cannot write {folder / RUN_LOG}: {error.strerror or error}") from error
            with suppress(BrokenPipeError):  # its reader went away, as `head` does; the verdict is in the log
                show(line)

        tell(f"{_FIRST_LINE}{shlex.join(words)}")
        code = _train(words, tell)
        if code != 0:
            tell(f"{job.recipe}: FAILED, the training ended with exit code {code}; see {folder / RUN_LOG}")
            return code
        verdicts = [*_of_metrics(job, config, folder), *_of_checkpoints(job, config)]
        for code, line in verdicts:
            tell(f"{'pass' if code == 0 else 'FAIL'}  {line}")
        worst = max(code for code, _ in verdicts)
        tell(f"{job.recipe}: {'passed' if worst == 0 else 'FAILED'}, in {folder}")
    return worst


def _clear(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir())
        others = [name for name in found if name not in _OWN]
        if others or (found and not _is_a_job_s(folder / RUN_LOG)):
            raise UserError(f"{folder} holds {(others or found)[0]}, which is no job's: give another --output")
        for name in _OWN:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot use {folder}: {error.strerror or error}; give another --output") from error


def _is_a_job_s(log: Path) -> bool:
    """A run that is not a job's has checkpoints and logs by the same names."""
    return log.is_file() and log.open(errors="replace").read(len(_FIRST_LINE)) == _FIRST_LINE


def _train(words: Sequence[str], tell: Callable[[str], None]) -> int:
    """In a process of its own: what Megatron needs on a CPU changes torch for good. What it says is shown and kept."""
    command = [sys.executable, "-m", "headwater.cli.main", "train", *words]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as child,
        _passing_on(child),
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                tell(line.rstrip("\n"))
        except BaseException:
            child.kill()  # nobody reads what it says any more
            raise
    code = child.returncode
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_on(child: subprocess.Popen[str]) -> Iterator[None]:
    """A signal to end is the training's, which saves first. Ctrl-C reaches it without us."""

    def terminate(*_: Any) -> None:
        child.terminate()

    kept = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate)}
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        child.wait()
        for number, handler in kept.items():
            signal.signal(number, handler)


def _of_metrics(job: Job, config: Config, folder: Path) -> list[tuple[int, str]]:
    from headwater.metrics.dump import encode_dump, read_series
    from headwater.metrics.expressions import check

    data = dict(sorted(read_series(Path(config.logger.log_dir) / "metrics.jsonl").items()))
    (folder / METRICS).write_text(encode_dump(data))
    found = []
    for expression in job.checks(config):
        try:
            result = check(expression, data)
            found.append((0 if result.holds else 1, f"{expression}  ({result.reason})"))
        except UserError as error:
            found.append((error.exit_code, f"{expression}  ({error})"))
    return found


def _of_checkpoints(job: Job, config: Config) -> list[tuple[int, str]]:
    """Each one is whole and fresh against the one before it."""
    from headwater.checkpoint.catalog import scan
    from headwater.checkpoint.compare import check_freshness
    from headwater.checkpoint.reader import Checkpoint

    if not config.checkpointing.enabled:
        return []
    saved = [one for one in scan(Path(config.checkpointing.checkpoint_dir)) if one.committed]
    steps = [one.step for one in saved]
    last = config.algorithm.max_num_steps
    is_every_step = config.checkpointing.save_period == 1 and config.checkpointing.keep_latest_k is None
    holds = steps == list(range(1, last + 1)) if is_every_step else steps[-1:] == [last]
    found = [(0 if holds else 1, f"checkpoints at steps {steps}")]
    for one in saved:
        components = Checkpoint.open(one.folder).components()
        found.append((0 if components == sorted(job.components) else 1, f"{one.folder.name} holds {components}"))
    for old, new in pairwise(saved):
        what = f"step {old.step} -> {new.step}"
        try:
            verdict = check_freshness(old.folder, new.folder)
        except HeadwaterError as error:
            found.append((error.exit_code, f"{what}: {error}"))
            continue
        states = ", ".join(f"{one.component} {one.state}" for one in verdict.components)
        found.append((verdict.exit_code, f"{what}: {verdict.outcome} ({states})"))
    return found
