"""A run with a Ray of its own, in a process that its test can kill: tells the pids of its workers and waits.

A fork of it, as a data loader may be, outlives it and holds all that it had open.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sample_worker import SampleWorker

from headwater.config.schema import ClusterConfig
from headwater.errors import UserError
from headwater.workers.group import Resources, launch


def main() -> None:
    signal.signal(signal.SIGTERM, _ours)
    with launch(ClusterConfig(launcher="ray", workers_per_node=2, cpus_per_worker=0.5)) as cluster:
        refusal = ""
        try:
            cluster.start("wide", SampleWorker, "x", resources=Resources(workers_per_node=4096))
        except UserError as error:
            refusal = str(error)
        group = cluster.start("policy", SampleWorker, "ours")
        fork = os.fork()
        if fork == 0:
            time.sleep(600)
            os._exit(0)
        told = {
            "fork": fork,
            "pids": [identity[3] for identity in group.call(SampleWorker.identity)],
            "folder": str(cluster._local.folder),  # type: ignore[attr-defined]
            "refusal": refusal,
            "handler_kept": signal.getsignal(signal.SIGTERM) is _ours,
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        if sys.stdin.readline():
            group.call(SampleWorker.all_reduce, 1.0)


def _ours(*_: object) -> None:
    pass


if __name__ == "__main__":
    main()
