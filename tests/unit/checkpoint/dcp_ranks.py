"""One rank of a two-process gloo group: saves and loads through DCP, and writes down what happened.

`python dcp_ranks.py FOLDER RANK`; the tests in test_dcp.py start two and read FOLDER/outcome-RANK.json.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headwater.checkpoint import dcp_writer
from headwater.checkpoint.catalog import scan
from headwater.checkpoint.dcp import HeadwaterReader, HeadwaterWriter

VALUES = {
    "step": 7,
    "betas": (0.9, 0.999),
    "best": float("-inf"),
    "note": "naïve",
    "none": None,
    "flags": [True, 1, 1.0],
}


def tensors() -> dict[str, torch.Tensor]:
    """Whole tensors of several dtypes; 5 rows and 1 row do not divide by two ranks."""
    generator = torch.Generator().manual_seed(1)
    return {
        "even": torch.randn(6, 4, generator=generator),
        "uneven": torch.randn(5, 3, generator=generator).bfloat16(),
        "one_row": torch.randn(1, 8, generator=generator),
        "whole": torch.randint(0, 99, (7,), generator=generator),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }


def placed(mesh: Any, placement: Any, fill: bool = True) -> dict[str, torch.Tensor]:
    whole = {name: tensor if fill else torch.zeros_like(tensor) for name, tensor in tensors().items()}
    sharded = {name: distribute_tensor(whole[name], mesh, [placement]) for name in ("even", "uneven", "one_row")}
    return {**whole, **sharded}


def equal(state: dict[str, Any]) -> bool:
    """Whether every tensor holds the bits of `tensors()`."""
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    return all(torch.equal(full[name], tensor) for name, tensor in tensors().items())


def failure(action: Callable[[], Any]) -> list[str]:
    """The type and text of each rank's error."""
    try:
        action()
    except CheckpointException as error:
        return [f"{type(inner).__name__}: {inner}" for inner, _ in error.failures.values()]
    return []


def committed(root: Path) -> int:
    return sum(found.committed for found in scan(root)) if root.is_dir() else 0


def train_fsdp() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_fsdp(root: Path) -> str:
    model, optimizer = train_fsdp()
    weights, moments = get_state_dict(model, optimizer)
    writer = HeadwaterWriter(root / "fsdp", 2)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=writer)
    full = {f"model.{name}": value.full_tensor() for name, value in weights.items()}
    for name, state in moments["state"].items():
        full |= {
            f"optimizer.state.{name}.{key}": value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in state.items()
        }
    if dist.get_rank() == 0:
        save_file(full, root / "fsdp.safetensors")
    return str(writer.folder)


def save_broken(root: Path, planner: DefaultSavePlanner | None = None, **extra: Any) -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    state = {**placed(mesh, Shard(0)), **extra}
    return failure(lambda: dcp.save(state, storage_writer=HeadwaterWriter(root, 1), planner=planner))


class FailsOnRank1(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return super().resolve_data(write_item)


class DiesOnRank1(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


def save_torn(root: Path) -> list[str]:
    """Rank 1's copy is not what its live tensors hold."""
    snapshot = dcp_writer.snapshot

    def torn(chunks: Any) -> Any:
        staged = snapshot(chunks)
        staged[0].data[0] ^= 1
        return staged

    if dist.get_rank() == 1:
        dcp_writer.snapshot = torn
    try:
        return save_broken(root)
    finally:
        dcp_writer.snapshot = snapshot


def load_flipped(root: Path, mesh: Any) -> list[str]:
    writer = HeadwaterWriter(root, 1)
    dcp.save({**placed(mesh, Shard(0)), **VALUES}, storage_writer=writer)
    if dist.get_rank() == 0:
        assert writer.folder is not None
        file = writer.folder / "policy" / "rank-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    return failure(lambda: dcp.load(placed(mesh, Shard(0), fill=False), storage_reader=HeadwaterReader(root)))


def load_different_newest(root: Path, mesh: Any) -> list[str]:
    """A newer checkpoint commits between the looks of the two ranks."""
    for step in (1, 2):
        dcp.save(placed(mesh, Shard(0)), storage_writer=HeadwaterWriter(root, step))
    mine = next(found.folder for found in scan(root) if found.step == dist.get_rank() + 1)
    return failure(lambda: dcp.load(placed(mesh, Shard(0), fill=False), storage_reader=HeadwaterReader(mine)))


def main(root: Path, rank: int) -> None:
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2, timeout=timeout)
    mesh = init_device_mesh("cpu", (2,))
    outcome: dict[str, Any] = {"fsdp folder": save_fsdp(root)}

    dcp.save({**placed(mesh, Shard(0)), **VALUES}, storage_writer=HeadwaterWriter(root / "dtensor", 7))
    for name, placement in (("same", Shard(0)), ("columns", Shard(1)), ("replicated", Replicate())):
        state = {**placed(mesh, placement, fill=False), **dict.fromkeys(VALUES)}
        dcp.load(state, storage_reader=HeadwaterReader(root / "dtensor"))
        outcome[f"load {name}"] = equal(state) and all(state[key] == value for key, value in VALUES.items())

    outcome["pickle"] = save_broken(root / "pickle", optimizer={"schedule": slice(3)})
    outcome["rank fails"] = save_broken(root / "rank-fails", FailsOnRank1())
    outcome["torn"] = save_torn(root / "torn")
    outcome["cached plans"] = save_broken(root / "cached", DefaultSavePlanner(enable_plan_caching=True))
    for name in ("pickle", "rank-fails", "torn", "cached"):
        outcome[f"committed {name}"] = committed(root / name)
    outcome["again"] = save_broken(root / "rank-fails")
    outcome["folders after again"] = len(scan(root / "rank-fails"))
    outcome["flipped"] = load_flipped(root / "flipped", mesh)
    outcome["different newest"] = load_different_newest(root / "race", mesh)
    (root / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    dist.barrier()
    try:
        save_broken(root / "killed", DiesOnRank1())
    except Exception as error:
        (root / "killed.txt").write_text(type(error).__name__)
    os._exit(0)  # the group is broken: nothing to shut down in order


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
