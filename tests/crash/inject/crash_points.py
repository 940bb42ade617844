"""Named points of a save at which a process of the run is killed, without a hook in the product.

The plan is JSON: role and point where to kill, at the save of which step, the how-many-eth time the process gets
there, whom (victim), how many processes at most (kills), and two folders: of the run's `checkpoints`, and of `marks`,
where each kill says first what is killed where. A trainer is killed when anything is committed, so that there is
something to resume from.
"""

from __future__ import annotations

import builtins
import glob
import io
import json
import os
import shutil  # noqa: F401  looks at os.unlink when it is imported, and must find the real one
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_MANIFEST = "/manifest.json"
_UNCOMMITTED = "/manifest.json.tmp"
_TENSORS = ".safetensors"
_BLOCK = 4096

Matches = Callable[..., str | bool]  # whether a call is at the point, as the path that it is about where it has one


class Crash:
    """Kills the plan's victim when `at` was called often enough for the plan's step."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._times = 0
        self._lock = threading.Lock()

    def of_step(self, path: str, ending: str = "") -> str:
        """The path itself if it is in a folder of the plan's step, and ends so; else an empty one."""
        return path if f"/step_{self._plan['step']:06d}-" in path and path.endswith(ending) else ""

    def is_step(self, step: int) -> bool:
        """Whether it is the plan's."""
        return step == self._plan["step"]

    def is_due(self) -> bool:
        """Count one more arrival at the point; whether it is the one to kill at."""
        with self._lock:
            self._times += 1
            return self._times == self._plan["occurrence"] and len(self._marks()) < self._plan["kills"]

    def _marks(self) -> list[str]:
        return os.listdir(self._plan["marks"])

    def kill(self, **details: Any) -> None:
        """Leave a mark, then kill the victim. Does not return."""
        victim = os.getpid() if self._plan["victim"] == self._plan["role"] else os.getppid()
        if self._plan["victim"] == "trainer":
            self._wait_for_a_commit()
        mark = {key: self._plan[key] for key in ("role", "point", "victim")}
        mark |= {"at_pid": os.getpid(), "victim_pid": victim, "writers": _writers_of(victim), **details}
        fd = os.open(f"{self._plan['marks']}/{len(self._marks())}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, json.dumps(mark).encode())
        os.close(fd)
        os.kill(victim, signal.SIGKILL)
        time.sleep(600)  # whoever's trainer was killed is to be ended by the system, not by itself

    def _wait_for_a_commit(self) -> None:
        deadline = time.monotonic() + 60
        while not glob.glob(f"{self._plan['checkpoints']}/step_*/manifest.json"):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def at(self, **details: Any) -> None:
        """A point was reached."""
        if self.is_due():
            self.kill(**details)


def _writers_of(pid: int) -> list[int]:
    """Writer processes that a trainer has now."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read()
        except OSError:  # it ended meanwhile
            continue
        if b"headwater.checkpoint.writer_process" in words and f"--parent\0{pid}\0".encode() in words:
            found.append(int(name))
    return found


Point = Callable[[Crash], None]


def install(text: str) -> None:
    """Put the plan's point into this process, if it has the plan's role."""
    plan = json.loads(text)
    if _role() == plan["role"]:
        _POINTS[plan["point"]](Crash(plan))


def _role() -> str | None:
    words = sys.orig_argv
    if "headwater.checkpoint.writer_process" in words:
        return "writer"
    return "trainer" if "headwater.cli.main" in words or any(word.endswith("train_loop.py") for word in words) else None


def _path(target: Any) -> str:
    """Of a descriptor, or the path given."""
    return os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)


def _wrap(crash: Crash, owner: Any, name: str, matches: Matches, *, after: bool = False) -> None:
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = matches(*args, **kwargs)
        if found and not after:
            crash.at(path=found)
        result = real(*args, **kwargs)
        if found and after:
            crash.at(path=found)
        return result

    setattr(owner, name, wrapped)


def _at_call(crash: Crash) -> None:
    from headwater.checkpoint.manager import CheckpointManager

    _wrap(crash, CheckpointManager, "save", lambda _, step, *__, **___: crash.is_step(step))


def _at_copy(which: int) -> Point:
    """Before the which-th copy of a live tensor; digests of all of them are taken by then."""

    def point(crash: Crash) -> None:
        import torch

        from headwater.checkpoint.manager import CheckpointManager

        copies: list[str] = []
        saving = -1
        save = CheckpointManager.save

        def note_step(self: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            nonlocal saving
            saving = step
            return save(self, step, *args, **kwargs)

        def matches(*_: Any, **__: Any) -> bool:
            caller = sys._getframe(2).f_globals["__name__"]
            if crash.is_step(saving) and caller in ("headwater.checkpoint.staging", "headwater.checkpoint.snapshot"):
                copies.append(caller)
                return len(copies) == which
            return False

        CheckpointManager.save = note_step
        _wrap(crash, torch.Tensor, "copy_", matches)

    return point


def _staged(crash: Crash) -> None:
    from headwater.checkpoint.supervisor import Supervisor

    _wrap(crash, Supervisor, "submit", lambda _, job: crash.is_step(job.request.step))


def _before_handover(crash: Crash) -> None:
    def matches(channel: socket.socket, buffers: list[bytes], *_: Any) -> str | bool:
        message = json.loads(buffers[0])
        return message["kind"] == "save" and crash.of_step(message["folder"])

    _wrap(crash, socket, "send_fds", matches)


def _file_call(owner: Any, name: str, ending: str = "", *, argument: int = 0, after: bool = False) -> Point:
    """Before or after a call about a path, or descriptor, of the plan's step. argument: which one of the call it is."""

    def point(crash: Crash) -> None:
        def matches(*args: Any, dir_fd: int | None = None, **_: Any) -> str:
            path = _path(args[argument])
            return crash.of_step(path if dir_fd is None else f"{_path(dir_fd)}/{path}", ending)

        _wrap(crash, owner, name, matches, after=after)

    return point


def _mid_file(crash: Crash) -> None:
    """Half of what one call is to write has been written."""
    pwrite, pwritev, real_open = os.pwrite, os.pwritev, builtins.open

    def write_half(fd: int, data: Any, offset: int) -> None:
        path = crash.of_step(_path(fd), _TENSORS)
        if path and crash.is_due():
            whole = memoryview(data).cast("B")
            half = pwrite(fd, whole[: len(whole) // 2 // _BLOCK * _BLOCK], offset)
            crash.kill(path=path, written=half, of=len(whole))

    def half_pwrite(fd: int, data: Any, offset: int) -> int:
        write_half(fd, data, offset)
        return pwrite(fd, data, offset)

    def half_pwritev(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        write_half(fd, buffers[0], offset)
        return pwritev(fd, buffers, offset, flags)

    class HalfFile(io.FileIO):
        def write(self, data: Any) -> int:
            whole = memoryview(data).cast("B")
            if len(whole) >= 2 * _BLOCK and crash.is_due():
                crash.kill(path=self.name, written=super().write(whole[: len(whole) // 2]), of=len(whole))
            return super().write(data)

    def half_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "xb" and crash.of_step(_path(file), _TENSORS):
            return io.BufferedWriter(HalfFile(_path(file), mode))
        return real_open(file, mode, *args, **kwargs)

    os.pwrite, os.pwritev, builtins.open = half_pwrite, half_pwritev, half_open


_POINTS: dict[str, Point] = {
    "call": _at_call,
    "digested": _at_copy(1),
    "mid_copy": _at_copy(3),
    "staged": _staged,
    "before_handover": _before_handover,
    "folder_made": _file_call(os, "mkdir", after=True),
    "mid_file": _mid_file,
    "before_file_fsync": _file_call(os, "fsync", _TENSORS),
    "before_manifest": _file_call(builtins, "open", _UNCOMMITTED),
    "before_manifest_fsync": _file_call(os, "fsync", _UNCOMMITTED),
    "before_rename": _file_call(os, "rename", _MANIFEST, argument=1),
    "after_rename": _file_call(os, "rename", _MANIFEST, argument=1, after=True),
    "before_prune": _file_call(os, "unlink", _MANIFEST),
    "manifest_pruned": _file_call(os, "unlink", _MANIFEST, after=True),
    "in_rmtree": _file_call(os, "unlink", _TENSORS, after=True),  # its folder is still there
}
