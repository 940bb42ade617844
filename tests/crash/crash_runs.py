"""Runs of real training programs that are to be killed, and what must hold of them afterwards."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import train_loop

from headwater.checkpoint.catalog import scan
from headwater.checkpoint.manifest import Manifest
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.cli.main import main
from headwater.metrics.sinks import read_jsonl

HERE = Path(__file__).parent
_COMMITTED = re.compile(r"^committed .*/(step_(\d+)-[0-9a-f]+)\b", re.MULTILINE)
_RESUMED = re.compile(r"^resumed from .*/(step_\d+-[0-9a-f]+)", re.MULTILINE)
_GONE_S = 5.0
_REFERENCE_STEPS = 16
_TOKEN = "CRASH_RUN"


@dataclass(frozen=True)
class Plan:
    """Whom to kill where; see inject/crash_points.py. saves: of each step, in train_loop.py."""

    role: str
    point: str
    step: int = 2
    victim: str = ""
    occurrence: int = 1
    kills: int = 1
    strategy: str = "native"
    saves: int = 1
    cli: bool = False

    @property
    def name(self) -> str:
        """Of the point, whatever the strategy and the program."""
        words = [self.role, self.point, *(["same step again"] if self.saves > 1 else [])]
        words += [f"ends the {self.victim}"] if self.victim else []
        return ", ".join(words + (["at every attempt"] if self.kills > 1 else []))

    def __str__(self) -> str:
        return f"{'headwater train' if self.cli else 'train_loop'}, {self.strategy}: {self.name}"

    def environment(self, checkpoints: Path, marks: Path) -> dict[str, str]:
        """What makes a run follow the plan."""
        keys = ("role", "point", "step", "occurrence", "kills")
        plan = {key: getattr(self, key) for key in keys} | {"victim": self.victim or self.role}
        return {"CRASH_PLAN": json.dumps(plan | {"checkpoints": str(checkpoints), "marks": str(marks)})}


@dataclass
class Matrix:
    """Counts for the summary: a run is killed when its end was seen, and resumed when all was checked."""

    points: set[str] = field(default_factory=set)
    runs: int = 0
    moments: int = 0
    killed: int = 0
    resumed: int = 0

    def add_point(self, plan: Plan) -> None:
        """A run was killed as planned."""
        self.points.add(plan.name)
        self.runs += 1
        self.killed += 1

    def summary(self) -> str:
        return (
            f"crash matrix: {len(self.points)} named points in {self.runs} runs and {self.moments} random moments, "
            f"{self.killed} killed, {self.resumed} resumed from a checkpoint that verifies"
        )


class KilledRun:
    """A training program in a process of its own. What it says is read as it comes."""

    def __init__(self, words: list[str], folder: Path, plan: Plan | None = None) -> None:
        self.folder = folder
        self.said = ""
        self._token = uuid.uuid4().hex
        self._names_before = set(os.listdir("/dev/shm"))
        self._marks = folder / "marks"
        self._marks.mkdir()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", _TOKEN: self._token}
        environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # results depend on it, in the last bits
        if plan is not None:
            path = [str(HERE / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {
                "PYTHONPATH": os.pathsep.join(path),
                **plan.environment(folder / "checkpoints", self._marks),
            }
        self._errors = open(folder / "stderr", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )

    def read_until(self, *texts: str) -> None:
        """Return when all of them were said."""
        assert self.process.stdout is not None
        while not all(text in self.said for text in texts):
            line = self.process.stdout.readline()
            assert line, f"{self.said}\n{self.errors}"
            self.said += line

    def end(self) -> int:
        """Wait for the end; returns the exit code, or minus the signal's number."""
        try:
            self.said += self.process.communicate(timeout=120)[0]
        finally:
            self.process.kill()
        return self.process.returncode

    @property
    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    @property
    def committed(self) -> list[str]:
        """Names of the folders that the run reported committed, in their order."""
        return [name for name, _ in _COMMITTED.findall(self.said)]

    @property
    def committed_steps(self) -> list[int]:
        return [int(step) for _, step in _COMMITTED.findall(self.said)]

    @property
    def marks(self) -> list[dict[str, Any]]:
        """What was killed where, in its order."""
        return [json.loads(path.read_text()) for path in sorted(self._marks.iterdir())]

    def writer_pid(self) -> int | None:
        """Of the live writer process."""
        found = [pid for pid in self._processes() if b"headwater.checkpoint.writer_process" in _read(pid, "cmdline")]
        return found[0] if found else None

    def assert_nothing_is_left(self) -> None:
        """Within five seconds no process of the run lives, and nothing named in shared memory was left by it."""
        deadline = time.monotonic() + _GONE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left

    def _left(self) -> list[object]:
        names = set(os.listdir("/dev/shm")) - self._names_before
        return [*(_read(pid, "cmdline") for pid in self._processes()), *_abandoned(names)]

    def _processes(self) -> list[int]:
        mark = f"{_TOKEN}={self._token}".encode()
        return [int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if mark in _read(int(pid), "environ")]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return b""


def _abandoned(names: set[str]) -> set[str]:
    """Those that no live process has: what others on this machine use meanwhile is theirs."""
    pids = [int(pid) for pid in filter(str.isdigit, os.listdir("/proc"))] if names else []
    maps = b"".join(_read(pid, "maps") for pid in pids)
    return {name for name in names if f"/dev/shm/{name}".encode() not in maps and Path("/dev/shm", name).exists()}


def words_of(cli: bool, folder: Path, strategy: str, steps: int, saves: int = 1) -> list[str]:
    """Of a Python that trains: `headwater train`, or train_loop.py, which starts sooner."""
    if not cli:
        return [str(HERE / "train_loop.py"), str(folder / "checkpoints"), strategy, str(steps), str(saves)]
    assert saves == 1
    return ["-m", "headwater.cli.main", *_cli_words(folder, strategy, steps, "logs")]


def _cli_words(folder: Path, strategy: str, steps: int, logs: str) -> list[str]:
    places = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/{logs}"]
    quiet = ["grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "data.validation=null"]
    saving = ["checkpointing.save_period=1", f"checkpointing.strategy={strategy}"]
    return ["train", "grpo_tiny", *places, *quiet, *saving, f"grpo.max_num_steps={steps}"]


def train_here(cli: bool, folder: Path, strategy: str, steps: int) -> tuple[str, dict[int, Any]]:
    """Train in this process.

    Returns the name of the checkpoint that it resumed from, and of each step all that must be equal bit for bit.
    """
    said = io.StringIO()
    if cli:
        with redirect_stdout(said):
            assert main(_cli_words(folder, strategy, steps, "logs_here")) == 0
        series = read_jsonl(folder / "logs_here" / "metrics.jsonl")
        tags = [tag for tag in series if tag.startswith("train/")]
        assert {"train/loss", "train/grad_norm", "train/reward"} <= set(tags)
        trained = {step: {tag: series[tag].get(step) for tag in tags} for step in series["train/loss"]}
    else:
        say = partial(print, file=said)
        train_loop.train(str(folder / "checkpoints"), strategy, steps, 1, say)
        lines = [line for line in said.getvalue().splitlines() if line.startswith("step ")]
        trained = {int(line.split()[1]): line for line in lines}
    resumed = _RESUMED.search(said.getvalue())
    return resumed[1] if resumed else "", trained


class Unkilled:
    """What a run does that nobody kills. folders: makes an empty folder."""

    def __init__(self, folders: Callable[[], Path]) -> None:
        self._folders = folders
        self._known: dict[bool, dict[int, Any]] = {False: {}, True: {}}

    def steps(self, cli: bool, first: int, last: int) -> dict[int, Any]:
        """As `train_here` of these steps."""
        if last not in self._known[cli]:
            _, self._known[cli] = train_here(cli, self._folders(), "sync", max(last, _REFERENCE_STEPS))
        return {step: self._known[cli][step] for step in range(first, last + 1)}


def assert_resumes(run: KilledRun, cli: bool, strategy: str, unkilled: Unkilled) -> None:
    """What is committed verifies, and a restart goes on from the newest of it as if nothing had happened."""
    checkpoints = run.folder / "checkpoints"
    newest = _newest_survivor(checkpoints, run)
    last = newest.step + 2
    resumed, trained = train_here(cli, run.folder, strategy, last)
    assert resumed == f"step_{newest.step:06d}-{newest.save_id}"
    assert trained == unkilled.steps(cli, newest.step + 1, last)
    assert [(item.step, item.committed) for item in scan(checkpoints)] == [(last - 1, True), (last, True)]
    shutil.rmtree(run.folder)


def _newest_survivor(checkpoints: Path, run: KilledRun) -> Manifest:
    """What to resume from. All that is committed verifies, and it is not older than what was reported last."""
    found = [Checkpoint.open(path.parent) for path in checkpoints.glob("step_*/manifest.json")]
    assert found, run.said
    for checkpoint in found:
        assert verify(checkpoint) == []
    newest = max((checkpoint.manifest for checkpoint in found), key=lambda m: (m.step, m.saved_at_ns))
    assert newest.step >= max(run.committed_steps, default=0)
    assert f"step_{newest.step:06d}-{newest.save_id}" not in run.committed[:-1]
    return newest
