"""Many saves in one process: memory, descriptors, threads and folders stay as they are after the first ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.config.schema import CheckpointingConfig

MB = 1 << 20
GROWTH_MB = 4.0  # of a process's own memory between the warm-up and the end: the allocator's slack, in 20 MB a save
COMPONENTS = {"policy": 8, "value": 4, "extra": 1}


def state() -> dict[str, dict[str, torch.Tensor]]:
    """Some 20 MB in three components and four dtypes."""
    made: dict[str, dict[str, torch.Tensor]] = {}
    for name, layers in COMPONENTS.items():
        tensors = made[name] = {"step": torch.zeros((), dtype=torch.int64), "mask": torch.zeros(1001, dtype=torch.bool)}
        for layer in range(layers):
            tensors[f"layers.{layer}.weight"] = torch.zeros(300, 1000)
            tensors[f"layers.{layer}.bias"] = torch.zeros(100_001, dtype=torch.bfloat16)
    return made


def change(tensors: dict[str, dict[str, torch.Tensor]], step: int) -> None:
    for part in tensors.values():
        for tensor in part.values():
            tensor.fill_(step % 2 if tensor.dtype == torch.bool else step)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def children(pid: int) -> dict[int, str]:
    """The state letter of each child."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_bytes().rpartition(b")")[2].split()
        except OSError:  # it ended
            continue
        if int(after_name[1]) == pid:
            found[int(path.parent.name)] = after_name[0].decode()
    return found


def shared_mb(pid: int) -> float:
    """Memory of the unnamed files that a process holds open."""
    held = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{number}"
        if os.path.lexists(link) and "memfd:" in os.readlink(link):  # that of the listing itself is gone
            found = os.stat(link)
            held[found.st_ino] = found.st_blocks * 512
    return sum(held.values()) / MB


def measure(pid: int) -> dict[str, float]:
    fields = status(pid)
    return {
        "own MB": int(fields["RssAnon"].split()[0]) / 1024,
        "mapped shared MB": int(fields["RssShmem"].split()[0]) / 1024,
        "held shared MB": shared_mb(pid),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


def run(root: Path, saves: int, kill_at: int, warm_up: int) -> dict[str, Any]:
    """Save that often, killing the writer once in mid-save; what was measured after each `warm_up` and at the end."""
    config = CheckpointingConfig(checkpoint_dir=str(root), strategy="native", keep_latest_k=2)
    manager, fence, tensors = CheckpointManager(config, "run", "model"), Fence(), state()
    sizes = {name: sum(t.numel() * t.element_size() for t in part.values()) for name, part in tensors.items()}
    manager.prepare(sizes, pin=False, tokenizer=None)  # both sets of buffers, whether or not two saves ever overlap
    at = sorted({warm_up, kill_at - 1, kill_at + warm_up, saves})
    samples: list[dict[str, Any]] = []
    killed = None
    for step in range(1, saves + 1):
        if step == kill_at:
            manager.wait_committed(120)
            manager.wait_pruned()
            killed = manager.writer_pid
            assert killed is not None
            os.kill(killed, signal.SIGSTOP)
        fence.wait()
        change(tensors, step)
        chunks = {name: [Chunk.whole(key, t) for key, t in part.items()] for name, part in tensors.items()}
        manager.save(step, chunks, {"step": step}, "grpo: {}\n", None, step, [fence])
        if step == kill_at and killed is not None:
            fence.wait()
            os.kill(killed, signal.SIGKILL)
        manager.take_news()
        if step in at:
            manager.wait_committed(120)
            manager.wait_pruned()
            pid = manager.writer_pid
            assert pid is not None
            folders = sorted(int(path.name[5:11]) for path in root.iterdir() if path.name.startswith("step_"))
            samples.append(
                {
                    "step": step,
                    "trainer": measure(os.getpid()),
                    "writer": measure(pid),
                    "writer pid": pid,
                    "folders": folders,
                    "children": children(os.getpid()),
                }
            )
    restarts = manager.take_news().metrics["checkpoint/writer_restarts"]
    manager.close()
    deadline = time.monotonic() + 10
    while children(os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"samples": samples, "restarts": restarts, "killed": killed, "left": children(os.getpid()), "sizes": sizes}


@pytest.mark.parametrize(
    ("saves", "kill_at", "warm_up"),
    [pytest.param(200, 100, 20, marks=pytest.mark.soak), (30, 13, 9)],
    ids=["200 saves", "30 saves"],
)
def test_nothing_grows(
    saves: int, kill_at: int, warm_up: int, tmp_path: Path, record_property: Callable[[str, object], None]
):
    root = tmp_path / "checkpoints"
    words = [sys.executable, __file__, str(root), str(saves), str(kill_at), str(warm_up)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    first, before, again, last = result["samples"]
    for sample in result["samples"]:
        figures = {who: {key: round(value, 1) for key, value in sample[who].items()} for who in ("trainer", "writer")}
        record_property("figure", f"{saves} saves, after {sample['step']}: {figures}")

    assert sum(result["sizes"].values()) > 18e6
    assert result["restarts"] == 1
    assert first["writer pid"] == before["writer pid"] == result["killed"]
    assert again["writer pid"] == last["writer pid"] != result["killed"]
    for early, late in ((first, before), (first, last), (again, last)):
        sides = ["trainer"] if early["writer pid"] != late["writer pid"] else ["trainer", "writer"]
        for side in sides:
            grown = {key: late[side][key] - early[side][key] for key in early[side]}
            assert grown["descriptors"] == 0, (side, grown)
            assert grown["threads"] == 0, (side, grown)
            assert grown["held shared MB"] == 0, (side, grown)
            assert grown["own MB"] < GROWTH_MB, (side, grown)
            assert grown["mapped shared MB"] < 1, (side, grown)
    for sample in result["samples"]:
        assert sample["folders"] == [sample["step"] - 1, sample["step"]]
        assert list(sample["children"]) == [str(sample["writer pid"])]
        assert "Z" not in sample["children"].values()
        assert sample["writer"]["held shared MB"] == 0
        assert 2 * 18 < sample["trainer"]["held shared MB"] < 2 * 40
    assert result["left"] == {}

    expected = state()
    for step in (saves - 1, saves):
        (folder,) = root.glob(f"step_{step:06d}-*")
        checkpoint = Checkpoint.open(folder)
        assert verify(checkpoint) == []
        change(expected, step)
        for component, tensors in expected.items():
            reader = checkpoint.component(component)
            assert reader.names() == sorted(tensors)
            assert all(torch.equal(reader.read(name), tensor) for name, tensor in tensors.items())
    assert sorted(path.name[:5] for path in root.iterdir()) == [".lock", "step_", "step_"]


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), *map(int, sys.argv[2:]))))  # noqa: T201
