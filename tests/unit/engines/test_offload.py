"""State that leaves its device and comes back, and what saves around that hold."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import moving_paths
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint
from headwater.config.schema import CheckpointingConfig
from headwater.data.types import TrainSequence
from headwater.engines.torch.engine import TorchEngine
from headwater.engines.torch.offload import Parking
from headwater.errors import HeadwaterError, UserError

MakeEngine = Callable[..., TorchEngine]
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        "w": torch.nn.Parameter(torch.randn(64, 48, generator=generator)),
        "half": torch.randn(333, generator=generator).bfloat16(),
        "turned": torch.empty_strided((50, 30), (1, 50)).normal_(generator=generator),
        "step": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    made = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(tmp_path), keep_latest_k=None), "run", "model")
    yield made
    made.close()


def save(manager: CheckpointManager, step: int, tensors: Tensors, fence: Fence) -> None:
    chunks = [Chunk.whole(*item) for item in tensors.items()]
    manager.save(step, {"policy": chunks}, {}, "", None, step, [fence])


def stored(manager: CheckpointManager, step: int) -> Tensors:
    manager.wait_committed()
    (folder,) = manager.root.glob(f"step_{step:06d}-*")
    reader = Checkpoint.open_to_load(folder).component("policy")
    return {name: reader.read(name) for name in reader.names()}


def copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def storages(tensors: Tensors) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors.values() if tensor.numel()]


def test_tensors_leave_their_memory_and_come_back_as_they_were(tensors: Tensors) -> None:
    parking, before, strides = Parking("state"), copies(tensors), [tensor.stride() for tensor in tensors.values()]
    left = storages(tensors)
    copied = parking.park([*tensors.values(), tensors["w"]])
    assert copied == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    assert all(storage.expired() for storage in left)
    assert_equal(tensors, before)
    assert parking.occupied
    parked = storages(tensors)
    parking.bring_back()
    assert all(storage.expired() for storage in parked)
    assert not parking.occupied
    assert_equal(tensors, before)
    assert [tensor.stride() for tensor in tensors.values()] == strides
    assert isinstance(tensors["w"], torch.nn.Parameter)


def test_parking_twice_moves_nothing_the_second_time(tensors: Tensors) -> None:
    parking = Parking("state")
    assert parking.park(tensors.values()) > 0
    where = [tensor.data_ptr() for tensor in tensors.values()]
    assert parking.park(tensors.values()) == 0
    assert [tensor.data_ptr() for tensor in tensors.values()] == where
    parking.bring_back()
    parking.bring_back()


def test_what_a_save_has_staged_is_not_copied_again(tensors: Tensors, manager: CheckpointManager) -> None:
    fence, parking, before = Fence(), Parking("state"), copies(tensors)
    save(manager, 1, tensors, fence)
    copied = parking.park(tensors.values(), fence.wait())
    assert copied == tensors["turned"].numel() * 4  # stored in another order than it has in memory
    assert_equal(tensors, before)
    for step in (2, 3):  # the memory that they are in is not that of a later save
        save(manager, step, {"w": torch.full((64, 48), float(step))}, fence)
        manager.wait_committed()
    assert_equal(tensors, before)
    assert_equal(stored(manager, 1), before)
    assert manager._saver is not None
    assert manager._saver._pool._kept == 1
    parking.bring_back()
    assert manager._saver._pool._kept == 0
    assert len(manager._saver._pool._free) == 2
    assert_equal(tensors, before)


def test_parked_state_is_saved_from_where_it_is(tensors: Tensors, manager: CheckpointManager) -> None:
    fence, parking, before = Fence(), Parking("state"), copies(tensors)
    save(manager, 1, tensors, fence)
    parking.park(tensors.values(), fence.wait())
    save(manager, 2, tensors, fence)
    fence.wait()
    parking.bring_back()
    with torch.no_grad():
        tensors["w"].add_(1)
    save(manager, 3, tensors, fence)
    for step in (1, 2):
        assert_equal(stored(manager, step), before)
    assert torch.equal(stored(manager, 3)["w"], before["w"] + 1)


def written(tensors: Tensors) -> None:
    with torch.no_grad():
        tensors["w"].add_(1)


def moved(tensors: Tensors) -> None:
    tensors["w"].data = tensors["w"].data + 1


@pytest.mark.parametrize("change", [written, moved])
def test_a_tensor_that_changed_since_the_save_is_copied(
    change: Callable[[Tensors], None], tensors: Tensors, manager: CheckpointManager
) -> None:
    fence, parking, before = Fence(), Parking("state"), copies(tensors)
    save(manager, 1, tensors, fence)
    passed = fence.wait()
    change(tensors)
    parking.park(tensors.values(), passed)
    assert torch.equal(tensors["w"], before["w"] + 1)
    assert_equal(stored(manager, 1), before)


def test_a_gradient_is_copied_whatever_was_saved_at_its_address(manager: CheckpointManager) -> None:
    """It is allocated without the fence, maybe where a tensor was that has left since."""
    fence, parking, tensors = Fence(), Parking("state"), {"w": torch.ones(1000)}
    save(manager, 1, tensors, fence)
    assert parking.park([], fence.wait(), gradients=tensors.values()) == 4000
    parking.bring_back()
    assert tensors["w"].sum() == 1000


def test_an_owner_that_goes_while_parked_keeps_no_memory_of_a_save(manager: CheckpointManager) -> None:
    fence, parking, tensors = Fence(), Parking("state"), {"w": torch.ones(1000)}
    save(manager, 1, tensors, fence)
    assert parking.park(tensors.values(), fence.wait()) == 0
    assert manager._saver is not None
    assert manager._saver._pool._kept == 1
    del parking
    assert manager._saver._pool._kept == 0


def test_without_room_on_the_device_all_stay_on_the_host(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    parking, before, real = Parking("state"), copies(tensors), torch.empty_strided
    parking.park(tensors.values())
    made: list[object] = []

    def short(*args: object, **kwargs: object) -> torch.Tensor:
        made.append(args)
        if len(made) == 3:
            raise torch.OutOfMemoryError("no room")
        return real(*args, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_strided", short)
        where = [tensor.data_ptr() for tensor in tensors.values()]
        with pytest.raises(torch.OutOfMemoryError):
            parking.bring_back()
    assert parking.occupied
    assert [tensor.data_ptr() for tensor in tensors.values()] == where
    parking.bring_back()
    assert_equal(tensors, before)


def test_a_save_that_serves_no_tensor_keeps_no_memory(manager: CheckpointManager) -> None:
    fence, parking, tensors = Fence(), Parking("state"), {"w": torch.ones(1000)}
    save(manager, 1, tensors, fence)
    passed = fence.wait()
    tensors["w"].add_(1)
    assert parking.park(tensors.values(), passed) == 4000
    assert manager._saver is not None
    assert manager._saver._pool._kept == 0


def test_what_passed_the_fence_before_is_not_taken_for_what_is_live(manager: CheckpointManager) -> None:
    fence, tensors = Fence(), {"w": torch.ones(1000)}
    save(manager, 1, tensors, fence)
    assert len(fence.wait()) == 1
    assert fence.wait() == []


def test_an_ended_save_whose_memory_may_be_used_again_is_not_taken(
    tensors: Tensors, manager: CheckpointManager
) -> None:
    fence, parking = Fence(), Parking("state")
    save(manager, 1, tensors, fence)
    manager.wait_committed()
    passed = fence.wait()
    assert parking.park(tensors.values(), passed) == sum(t.numel() * t.element_size() for t in tensors.values())


def test_one_set_of_staging_memory_is_left_for_saves(manager: CheckpointManager) -> None:
    """Two owners, each parked in what a save of its own staged: the second is copied, or no save could follow."""
    fence, parkings = Fence(), (Parking("a"), Parking("b"))
    states = [{"w": torch.full((100_000,), value)} for value in (1.0, 2.0)]
    copied = []
    for step, (parking, state) in enumerate(zip(parkings, states, strict=True), 1):
        save(manager, step, state, fence)
        copied.append(parking.park(state.values(), fence.wait()))
    assert copied == [0, 400_000]
    save(manager, 3, {"w": torch.full((100_000,), 3.0)}, fence)
    assert stored(manager, 3)["w"].eq(3).all()
    for parking, state, value in zip(parkings, states, (1, 2), strict=True):
        parking.bring_back()
        assert state["w"].eq(value).all()


def test_no_memory_for_an_offload_is_one_line_and_changes_nothing(
    tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.checkpoint.host_buffer.available_bytes", lambda: 100)
    before = copies(tensors)
    parking = Parking("optimizer state")
    with pytest.raises(UserError, match=r"no host memory to offload optimizer state, [\d,]+ bytes"):
        parking.park(tensors.values())
    assert not parking.occupied
    assert_equal(tensors, before)


def test_an_offload_that_fails_gives_the_memory_of_the_save_back(
    tensors: Tensors, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence, parking, before = Fence(), Parking("state"), copies(tensors)
    save(manager, 1, tensors, fence)
    passed = fence.wait()
    with monkeypatch.context() as patched:
        patched.setattr("headwater.checkpoint.host_buffer.available_bytes", lambda: 100)
        with pytest.raises(UserError, match="no host memory to offload"):
            parking.park(tensors.values(), passed)
    for step in (2, 3, 4):
        save(manager, step, tensors, fence)
        fence.wait()
    manager.wait_committed(60)
    assert_equal(tensors, before)
    assert manager._saver is not None
    assert manager._saver._pool._kept == 0


def test_its_memory_goes_with_its_owner() -> None:
    parking, state = Parking("state"), [torch.ones(10)]
    parking.park(state)
    descriptor = parking._buffer.fd
    os.fstat(descriptor)
    del parking
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert state[0].sum() == 10


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", moving_paths.PATHS, ids=lambda path: path.__name__)
def test_saves_around_each_path_hold_what_was_live(
    path: moving_paths.MovingPath,
    precision: str,
    recorded_rollout: list[TrainSequence],
    tmp_path: Path,
) -> None:
    engines = moving_paths.make_engines(precision, torch.device("cpu"), moves_on_host=True)
    moving_paths.assert_saves_around(path, engines, recorded_rollout, tmp_path)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_all_that_an_engine_has_leaves_its_memory(
    precision: str, make_engine: MakeEngine, recorded_rollout: list[TrainSequence]
) -> None:
    engine = make_engine(f"policy.precision={precision}", moves_on_host=True)
    assert engine.optimizer is not None
    moving_paths.train(engine, recorded_rollout)
    engine.forward_backward(recorded_rollout, lambda logprobs, _: (-logprobs.sum(), {}), 1.0)
    gradients = engine.optimizer.gradients()
    state = {chunk.name: chunk.tensor for chunk in engine.state_chunks()}
    left = storages(state) + storages(gradients)
    assert len(gradients) > 5
    assert len(state) > 3 * len(gradients)
    del state
    engine.offload()
    assert all(storage.expired() for storage in left)
    engine.onload()
    assert engine.optim_step().grad_norm > 0


@pytest.mark.parametrize("what", ["logprobs", "forward_backward", "optim_step", "load_chunks"])
def test_an_offloaded_engine_is_not_used_or_written(
    what: str, make_engine: MakeEngine, recorded_rollout: list[TrainSequence]
) -> None:
    engine = make_engine(moves_on_host=True)
    engine.forward_backward(recorded_rollout, lambda logprobs, _: (-logprobs.sum(), {}), 1.0)
    engine.offload()
    arguments = {
        "logprobs": [recorded_rollout],
        "forward_backward": [recorded_rollout, lambda logprobs, _: (-logprobs.sum(), {}), 1.0],
        "optim_step": [],
        "load_chunks": [None],
    }[what]
    with pytest.raises(HeadwaterError, match="offloaded: onload it"):
        getattr(engine, what)(*arguments)
    engine.onload()
    assert engine.optim_step().grad_norm > 0


def test_no_gradient_is_added_up_while_the_optimizer_is_away(
    make_engine: MakeEngine, recorded_rollout: list[TrainSequence]
) -> None:
    engine = make_engine(moves_on_host=True)
    engine.forward_backward(recorded_rollout, lambda logprobs, _: (-logprobs.sum(), {}), 1.0)
    engine.optim_step()
    engine.offload_optimizer()
    engine.logprobs(recorded_rollout)
    with pytest.raises(HeadwaterError, match="offloaded: onload it"):
        engine.forward_backward(recorded_rollout, lambda logprobs, _: (-logprobs.sum(), {}), 1.0)


def test_an_offload_does_nothing_where_the_device_is_the_host(make_engine: MakeEngine) -> None:
    engine = make_engine()
    where = [tensor.data_ptr() for _, tensor in engine.export_weights()]
    engine.offload()
    engine.offload_optimizer()
    assert [tensor.data_ptr() for _, tensor in engine.export_weights()] == where
    engine.onload()
