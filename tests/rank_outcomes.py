"""Starts a script as four ranks, which are jobs of several sizes in turn, and reads what each wrote down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from headwater.checkpoint.reader import Checkpoint

RANKS = 4


class Outcomes:
    """What four ranks saw: of[rank][scenario]."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of: list[dict[str, Any]] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]

    def every(self, scenario: str) -> list[dict[str, Any]]:
        """Of each rank that took part."""
        return [of_rank[scenario] for of_rank in self.of if scenario in of_rank]

    def checkpoint(self, name: str) -> Checkpoint:
        """The one that a scenario saved into the folder of that name."""
        (folder,) = (self.folder / name).glob("step_*")
        return Checkpoint.open_to_load(folder)


def ranks_of(layouts: Mapping[int, Container[str]], layout: str) -> int:
    """How many ranks a layout takes. layouts: by that number."""
    return next(world for world, names in layouts.items() if layout in names)


def run_ranks(script: Path, folder: Path, *arguments: str) -> None:
    """Run `script FOLDER RANK ARGUMENTS` for each rank at once; a rank that fails ends all, with its log."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            with open(folder / f"log-{rank}", "wb") as log:
                command = [sys.executable, "-W", "ignore", str(script), str(folder), str(rank), *arguments]
                ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    logs = [(folder / f"log-{rank}").read_text()[-3000:] for rank in range(RANKS)]
    assert not any(rank.returncode for rank in ranks), "\n".join(logs)
