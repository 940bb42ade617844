"""The process that holds a local Ray: starts it, writes its address to standard output, and waits to be killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
