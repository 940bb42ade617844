"""What keeps a run that calls other people's code from hanging, and from leaving things behind."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError

CALL_LIMIT_S = 300.0


def one_line(error: BaseException) -> str:
    """The last line that says something, which in a traceback of another process is the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__


def limited(action: Callable[[], Any], seconds: float = CALL_LIMIT_S) -> Any:
    """Call, and raise HeadwaterError where that takes longer; without a limit outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return action()

    def ring(*_: object) -> None:
        raise HeadwaterError(f"no answer in {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return action()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # whoever calls this program may have one running


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM leaves by the same way as Ctrl-C, which removes what was written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        raise SystemExit(143)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def single_process_group(root: Path) -> Iterator[None]:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    if dist.is_initialized():
        yield
        return
    address = os.environ.get("MASTER_ADDR")
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # for the process that torch's own saver starts
    try:
        dist.init_process_group("gloo", store=FileStore(str(root / "store"), 1), rank=0, world_size=1)
        yield
    finally:
        _restore("MASTER_ADDR", address)
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """No warnings of the peers' imports and calls, here and in the processes that they start."""
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = "ignore"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _restore("PYTHONWARNINGS", before)


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Processes that are started meanwhile write their standard error nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
