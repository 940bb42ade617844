"""A Ray that a run starts ends with it, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from process_tree import below, is_alive, state, wait_until

HERE = Path(__file__).parent


def _shared_memory() -> set[str]:
    """Ray's alone: others on this machine may come and go."""
    return {name for name in os.listdir("/dev/shm") if "plasma" in name or "ray" in name}


@pytest.mark.parametrize(
    "end", ["kill", *(pytest.param(end, marks=pytest.mark.soak) for end in ("close", "raylet", "gcs_server"))]
)
def test_nothing_is_left_of_a_local_ray(end: str, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    shared_memory = _shared_memory()
    with errors.open("w") as stderr:
        trainer = subprocess.Popen(
            [sys.executable, str(HERE / "trainer_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    fork = 0
    try:
        told = json.loads(trainer.stdout.readline())
        started = below(trainer.pid)
        fork = told["fork"]
        assert "trainer_process" in started.pop(fork)
        assert set(told["pids"]) < set(started)
        for part in ("gcs_server", "raylet", "ray_watcher", "ray_node"):
            assert any(part in name for name in started.values()), part
        assert Path(told["folder"]).is_dir()
        assert told["handler_kept"]
        assert "no room for wide: 1 x 4096 workers with 1 CPU each need 4096 CPU" in told["refusal"]
        # A stopped process ends with SIGKILL alone, whatever it would do on the loss of its parent.
        os.kill(told["pids"][1], signal.SIGSTOP)
        wait_until(lambda: state(told["pids"][1]) == "T", "the worker is stopped")

        if end == "kill":
            trainer.kill()
            assert trainer.wait(30) == -signal.SIGKILL
        elif end in ("raylet", "gcs_server"):
            os.kill(next(pid for pid, name in started.items() if name.split()[0].endswith(end)), signal.SIGKILL)
            trainer.stdin.write("call\n")
            trainer.stdin.flush()
            assert trainer.wait(120) == 1
            assert "headwater: error: the local Ray ended by itself" in errors.read_text()
        else:
            trainer.stdin.close()
            assert trainer.wait(60) == 0

        wait_until(lambda: not any(is_alive(pid) for pid in started), "all processes are ended", 30.0)
        wait_until(lambda: not Path(told["folder"]).exists(), "the folder is removed", 30.0)
        assert _shared_memory() <= shared_memory
        assert is_alive(fork)
    finally:
        trainer.kill()
        trainer.wait()
        if fork:
            os.kill(fork, signal.SIGKILL)
