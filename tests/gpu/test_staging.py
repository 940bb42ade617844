"""Saves that overlap with training, of tensors on a CUDA device."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.host_buffer import HostBuffer
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.config.schema import CheckpointingConfig
from headwater.engines.megatron.offload import StorageParking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    config = CheckpointingConfig(checkpoint_dir=str(tmp_path), strategy="native", keep_latest_k=None)
    made = CheckpointManager(config, "run", "model")
    yield made
    made.close()


@pytest.fixture
def tensors() -> Tensors:
    big = torch.randn(4096, 4096, device="cuda")
    return {"big": big, "view": torch.randn(300, 500, device="cuda").t(), "step": torch.tensor(3.0)}


def save(manager: CheckpointManager, step: int, tensors: Tensors, fence: Fence) -> None:
    manager.save(step, {"policy": [Chunk.whole(*item) for item in tensors.items()]}, {}, "", None, step, [fence])


def copy_of(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def assert_stored(manager: CheckpointManager, step: int, expected: Tensors) -> None:
    (folder,) = manager.root.glob(f"step_{step:06d}-*")
    checkpoint = Checkpoint.open(folder)
    assert verify(checkpoint) == []
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.component("policy").read(name), tensor)


def overwrite(tensors: Tensors) -> None:
    for tensor in tensors.values():
        tensor.add_(1)


def move_off_and_back(tensors: Tensors) -> None:
    for tensor in tensors.values():
        device = tensor.device
        tensor.data = (tensor * 2).cpu()
        torch.cuda.empty_cache()
        tensor.data = tensor.data.to(device)


def resize_to_zero_and_back(tensors: Tensors) -> None:
    tensor = tensors["big"]
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    torch.full((4096, 4096), 7.0, device="cuda")  # may be given the very memory
    tensor.untyped_storage().resize_(size)
    tensor.fill_(5)


@pytest.mark.parametrize("mutate", [overwrite, move_off_and_back, resize_to_zero_and_back])
def test_both_checkpoints_hold_the_values_of_their_step(
    manager: CheckpointManager, tensors: Tensors, mutate: Callable[[Tensors], None]
) -> None:
    fence = Fence()
    for step in (1, 2, 3):
        expected = copy_of(tensors)
        save(manager, step, tensors, fence)
        fence.wait()
        mutate(tensors)
        manager.wait_committed(120)
        assert_stored(manager, step, expected)


def test_a_host_buffer_is_page_locked_also_after_it_grew(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    buffer = HostBuffer(tmp_path)
    try:
        for nbytes in (1 << 20, 1 << 22):
            buffer.reserve(nbytes, pin=True)
            assert buffer.pinned
    finally:
        buffer.close()


def test_the_writer_holds_no_device_memory(manager: CheckpointManager, tensors: Tensors) -> None:
    save(manager, 1, tensors, Fence())
    manager.wait_committed(120)
    assert "libcuda" not in Path(f"/proc/{manager.writer_pid}/maps").read_text()


def test_memory_that_is_page_locked_already_is_used_as_it_is(tmp_path: Path) -> None:
    first, second = HostBuffer(tmp_path), HostBuffer(tmp_path)
    first.reserve(1 << 20, pin=True)
    second._array, second.fd = first._array, os.dup(first.fd)
    second.reserve(1 << 20, pin=True)
    assert first.pinned
    assert not second.pinned
    assert float(torch.ones(3, device="cuda").sum()) == 3.0  # the refusal is nobody else's error
    second.close()
    first.close()


def test_what_left_for_page_locked_memory_leaves_none_of_it_behind() -> None:
    gc.collect()
    tensor = torch.ones(1 << 20, device="cuda")
    parking = StorageParking("the test's state")
    parking.park([tensor])
    kept = parking._buffer._array  # so that its address is not given to others
    pointer = kept.ctypes.data
    parking.bring_back()
    del parking
    gc.collect()
    runtime = torch.cuda.cudart()
    assert runtime.cudaHostRegister(pointer, kept.nbytes, 0) == runtime.cudaError.success
    runtime.cudaHostUnregister(pointer)
    assert float(tensor.sum()) == 1 << 20
