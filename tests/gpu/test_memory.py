"""What saves leave on a device that its training has left: nothing that the same loop without saves would not have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig
from headwater.engines.torch.offload import Parking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
MIB = 2**20
ROUNDS = 6


def loop(folder: str, prepared: bool, saves: bool) -> None:
    """Prints the bytes in use on the device after each offload, as the device itself counts them."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, device="cuda") for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    fence, parking = Fence(), Parking("the test's state")
    manager = None
    used, losses = [], []
    for step in range(1, ROUNDS + 1):
        inputs = torch.ones(64, 4096, device="cuda")
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        fence.wait()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        state = {"weight." + name: parameter for name, parameter in model.named_parameters()}
        state |= {
            f"{key}.{name}": value
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state[parameter].items()
        }
        if prepared and manager is None:
            config = CheckpointingConfig(checkpoint_dir=folder, keep_latest_k=1)
            manager = CheckpointManager(config, "run", "model")
            size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
            manager.prepare({"policy": size}, True, None)
        if manager and saves:
            chunks = [Chunk.whole(*item) for item in state.items()]
            manager.save(step, {"policy": chunks}, {}, "", None, step, [fence])
        del inputs, loss, state
        parking.park([*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())], fence.wait())
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
        parking.bring_back()
    if manager:
        if saves:
            manager.wait_committed()
            newest = manager.latest()
            assert newest is not None
            assert newest.manifest.step == ROUNDS
            maps = Path(f"/proc/{manager.writer_pid}/maps").read_text()
            assert "libcuda" not in maps, "the writer holds CUDA"
        manager.close()
    assert losses[-1] < losses[0], "nothing trained"
    sys.stdout.write(json.dumps(used) + "\n")


def used_by(folder: Path, prepared: bool, saves: bool) -> list[int]:
    words = [sys.executable, __file__, str(folder), str(int(prepared)), str(int(saves))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_saves_keep_nothing_on_the_device(tmp_path: Path) -> None:
    saves, idle, without = (
        used_by(tmp_path / f"{prepared}{saves}", prepared, saves)
        for prepared, saves in ((True, True), (True, False), (False, False))
    )
    more_than_idle = [(a - b) / MIB for a, b in zip(saves[2:], idle[2:], strict=True)]
    more_than_without = [(a - b) / MIB for a, b in zip(saves[2:], without[2:], strict=True)]
    assert max(more_than_idle) <= 2
    # The device's page tables of two page-locked buffers of 600 MB, and one stream.
    assert max(more_than_without) <= 8


if __name__ == "__main__":
    loop(sys.argv[1], sys.argv[2] == "1", sys.argv[3] == "1")
