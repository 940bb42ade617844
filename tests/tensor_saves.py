"""Tensors saved as a checkpoint by a manager, and read from it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint, verify

Tensors = dict[str, torch.Tensor]


def save(manager: CheckpointManager, step: int, tensors: Tensors, *fences: Fence, **options: Any) -> None:
    chunks = [Chunk.whole(name, tensor) for name, tensor in tensors.items()]
    manager.save(step, {"policy": chunks}, {"step": step}, "", None, step, fences, **options)


def stored(root: Path, step: int) -> Tensors:
    (folder,) = root.glob(f"step_{step:06d}-*")
    checkpoint = Checkpoint.open_to_load(folder)
    assert verify(checkpoint) == []
    reader = checkpoint.component("policy")
    return {name: reader.read(name) for name in reader.names()}


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def copy_of(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}
