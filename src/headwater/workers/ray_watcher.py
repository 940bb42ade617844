"""The process between a run and its local Ray: when the run ends, it kills all that descends from it and tidies up.

Run as `python -m headwater.workers.ray_watcher PID FOLDER FD`; FD is where to say that Ray has ended by itself. Light:
neither torch nor Ray is imported here.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SET_CHILD_SUBREAPER = 36
_GONE_S = 15.0
_NOTICED_S = 0.5


def main() -> None:
    """Wait for a word on standard input or its end, the end of the process PID or of Ray; then end what is left."""
    parent, folder = int(sys.argv[1]), sys.argv[2]
    # Orphans become children of this process instead of init's, so that none can leave the tree.
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    pidfd = os.pidfd_open(parent) if os.getppid() == parent else -1
    if pidfd >= 0:
        # Standard input closes as a rule, but a fork of the trainer would hold it open: hence the pidfd.
        node = subprocess.Popen(
            [sys.executable, "-m", "headwater.workers.ray_node", str(os.getpid()), folder], stdin=subprocess.DEVNULL
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        stdin, of_node = sys.stdin.fileno(), os.pidfd_open(node.pid)
        ready = select.select([stdin, pidfd, of_node], [], [])[0]
        asked = stdin in ready and os.read(stdin, 1) != b""
        # Ray may end the trainer, on the loss of the very part that the node is about to notice.
        if not asked and select.select([of_node], [], [], _NOTICED_S)[0]:
            os.write(int(sys.argv[3]), b"headwater: error: the local Ray ended by itself: it was killed, or crashed\n")
    _kill_descendants()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _kill_descendants() -> None:
    deadline = time.monotonic() + _GONE_S
    while (left := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _descendants(root: int) -> list[int]:
    """Processes below `root`, those that ended but were not waited for included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # Field 4; the second field, the name in parentheses, may hold spaces.
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    main()
