"""The process that holds a local Ray: starts it, writes its address to standard output, and ends when one part does."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from pathlib import Path

_SET_PDEATHSIG = 1
_OBJECT_STORE_BYTES = 512 << 20  # what is sent is small; more spills to disk


def main() -> None:
    """`python -m headwater.workers.ray_node WATCHER FOLDER`."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        return
    address, sys.stdout = sys.stdout, sys.stderr
    import ray

    # Started from the main thread: what Ray starts gets a signal when the thread that started it ends.
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        configure_logging=False,
        log_to_driver=False,
        _temp_dir=sys.argv[2],
    )
    print(ray.get_runtime_context().gcs_address, file=address, flush=True)
    # Without one of these Ray would try to go on for a minute, and then end everybody without a word.
    select.select([os.pidfd_open(pid) for pid in _children() if _name(pid) in ("gcs_server", "raylet")], [], [])
    os._exit(1)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


if __name__ == "__main__":
    main()
