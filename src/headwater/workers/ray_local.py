"""A Ray of this run's own on this machine, of which nothing is left when the run ends, however it ends.

    this process -> watcher (ray_watcher.py) -> node (ray_node.py) -> Ray's processes -> workers

The watcher outlives this process by a moment and ends all that came after it.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import headwater
from headwater.errors import HeadwaterError

_END_S = 20.0
_LONGEST_FOLDER = 40  # Ray puts sockets below it, whose paths must not exceed 107 bytes


def authenticate() -> None:
    """Make a secret that this process and its children know: who reaches a Ray's ports may run code without one.

    A way that the user has chosen stays.
    """
    if not any(os.environ.get(key) for key in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        if "ray" in sys.modules:
            from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

            Config.initialize("")  # what Ray itself does where it changes the mode after the import


class LocalRay:
    """Started on return; `address` is HOST:PORT. Raises HeadwaterError where it does not start in time."""

    def __init__(self, timeout_s: float) -> None:
        base = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="hw-ray-", dir=base if len(base) < _LONGEST_FOLDER else "/tmp"))
        with open(self.folder / "start.log", "wb") as log, os.fdopen(os.dup(2), "wb") as ours:
            fd = ours.fileno()  # Ray ends this process when it ends itself, so another one has to say it
            self._watcher = subprocess.Popen(
                [sys.executable, "-m", "headwater.workers.ray_watcher", str(os.getpid()), str(self.folder), str(fd)],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the trainer, which may want one more save
                env=_environment(),
            )
        try:
            self.address = self._read_address(timeout_s)
        except BaseException:
            self.close()
            raise

    def _read_address(self, timeout_s: float) -> str:
        assert self._watcher.stdout is not None
        deadline, text = time.monotonic() + timeout_s, b""
        while not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready = select.select([self._watcher.stdout], [], [], max(left, 0))[0]
            part = os.read(self._watcher.stdout.fileno(), 200) if ready else b""
            if not part:
                why = "ended" if ready else f"took longer than {timeout_s:.0f} s (cluster.start_timeout_s)"
                log = " ".join((self.folder / "start.log").read_text(errors="replace").split())
                raise HeadwaterError(f"starting a local Ray {why}; the end of its log: {log[-500:] or 'empty'}")
            text += part
        return text.decode().strip()

    def close(self) -> None:
        """End it, and return once nothing is left. May be called again."""
        assert self._watcher.stdin is not None
        with suppress(OSError):
            if not self._watcher.stdin.closed:
                self._watcher.stdin.write(b"end\n")  # a fork of this process may hold the pipe open for longer
            self._watcher.stdin.close()
        try:
            self._watcher.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._watcher.kill()  # and with it the node and Ray, by their parent-death signals
            self._watcher.wait(_END_S)
        shutil.rmtree(self.folder, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Ray of its own, whatever cluster the user's shell points to, and workers that import this very package."""
    package_parent = str(Path(headwater.__file__).resolve().parent.parent)
    path = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "RAY_USAGE_STATS_ENABLED": "0"}
