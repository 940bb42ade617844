"""Every path on which Megatron's state moves, saved by one way of saving: what is fresh, what stays on the device.

`python freshness_matrix.py --arm nvrx --folder FOLDER` prints `ROW {...}` for each row as it ends, then a table. Arms:
native and nvrx are Headwater's strategies; control is NVRx as stacks use it, without a lifecycle; proof-alone is nvrx
that never lets go of handles, where a commit's proof has to refuse what is stale. On a CPU without a GPU, with storage
that moves as on a GPU; memory is 0 then. The version of NVRx is the one that imports.

NVRx's writer process imports this file again, so that what takes long is imported in `main`.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROW_SECONDS = 120.0
HUNG = 3


class Watchdog:
    """Ends the process where a row takes too long, and says in which stage."""

    def __init__(self) -> None:
        self._run: Any = None
        self._deadline = float("inf")
        threading.Thread(target=self._watch, daemon=True).start()

    def follow(self, run: Any) -> None:
        """None for none."""
        self._run = run
        self._deadline = time.monotonic() + ROW_SECONDS if run is not None else float("inf")

    def _watch(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(0.5)
        from freshness_rows import as_line

        told = dict(self._run.told, error=f"hung after {ROW_SECONDS:g} s: {self._run.stage}", hung=True)
        sys.stdout.write(as_line(told))
        sys.stdout.flush()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(HUNG)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", required=True, choices=["native", "nvrx", "control", "proof-alone"])
    parser.add_argument("--rows", default="", help="names with commas; all where none is given")
    parser.add_argument("--saves", type=int, default=6, help="of each row")
    parser.add_argument("--megabytes", type=float, default=700.0, help="of the policy's state in a checkpoint")
    parser.add_argument("--folder", type=Path, required=True, help="for models and checkpoints")
    given = parser.parse_args()

    sys.path.insert(0, str(Path(__file__).parent))
    import torch

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    else:
        from headwater.engines.megatron import cpu

        cpu.enable()
        torch.set_num_threads(1)
    from freshness_rows import ROWS, Models, Run, Savers, as_line, table, warm_up

    names = given.rows.split(",") if given.rows else list(ROWS)
    if unknown := set(names) - set(ROWS):
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    models = Models(given.folder, given.megabytes, device)
    warm_up(models)
    gc.freeze()  # or each measure looks through all that libraries made
    watchdog, rows, savers = Watchdog(), [], Savers(given.arm, given.folder / given.arm, device)
    for name in names:
        started = time.perf_counter()
        run = Run(name, models, given.saves, savers)
        watchdog.follow(run)
        try:
            ROWS[name](run)
        except Exception as error:
            run.told["error"] = f"{run.stage}: {type(error).__name__}: {error}"
            sys.stderr.write(traceback.format_exc())
        try:
            run.finish()
        except Exception as error:
            run.told["error"] = run.told["error"] or f"{run.stage}: {type(error).__name__}: {error}"
            sys.stderr.write(traceback.format_exc())
        watchdog.follow(None)
        run.told["row_seconds"] = round(time.perf_counter() - started, 1)
        rows.append(run.told)
        sys.stdout.write(as_line(run.told))
        sys.stdout.flush()
    savers.close()
    sys.stdout.write(f"{table(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
