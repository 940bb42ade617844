"""Every path on which an engine's storage changes or moves, for tests of what a save around it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from headwater.checkpoint.compare import check_freshness
from headwater.checkpoint.digest import digest
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.config.load import load_config
from headwater.config.schema import CheckpointingConfig
from headwater.data.types import TrainSequence
from headwater.engines.torch.engine import TorchEngine
from headwater.engines.torch.value import TorchValueEngine
from headwater.models.resolve import resolve

Engines = dict[str, TorchEngine]
MovingPath = Callable[[Engines, Sequence[TrainSequence], CheckpointManager], None]


def make_engines(precision: str, device: torch.device, *, moves_on_host: bool = False) -> Engines:
    config = load_config("ppo_tiny", [f"policy.precision={precision}"]).config
    assert config.value is not None
    model = resolve(config.policy.model_name)
    return {
        "policy": TorchEngine(config.policy, model, device, moves_on_host=moves_on_host),
        "value": TorchValueEngine(config.value, model, device, moves_on_host=moves_on_host),
    }


def train(engine: TorchEngine, rollout: Sequence[TrainSequence]) -> None:
    before = moments(engine)
    engine.forward_backward(rollout, lambda logprobs, _: (-logprobs.sum(), {}), 100.0)
    engine.optim_step()
    assert all(value != before.get(name) for name, value in moments(engine).items()), "nothing trained"


def moments(engine: TorchEngine) -> dict[str, int]:
    return {chunk.name: digest(chunk.tensor) for chunk in engine.state_chunks() if ".exp_avg" in chunk.name}


def optim_step(engines: Engines, rollout: Sequence[TrainSequence], manager: CheckpointManager) -> None:
    for engine in engines.values():
        train(engine, rollout)


def offload_and_onload(engines: Engines, rollout: Sequence[TrainSequence], manager: CheckpointManager) -> None:
    """As around a refit: to the host before it, or behind it."""
    for engine in engines.values():
        engine.offload()
    for engine in engines.values():
        engine.onload()


def offload_before_refit(engines: Engines, rollout: Sequence[TrainSequence], manager: CheckpointManager) -> None:
    """Weights are exported from where they are on the host."""
    engines["policy"].offload()
    exported = {name: tensor.clone() for name, tensor in engines["policy"].export_weights()}
    engines["policy"].onload()
    for name, tensor in engines["policy"].export_weights():
        assert torch.equal(tensor.cpu(), exported[name])


def optimizer_offload_for_logprob(
    engines: Engines, rollout: Sequence[TrainSequence], manager: CheckpointManager
) -> None:
    engine = engines["policy"]
    before = engine.logprobs(rollout)
    engine.offload_optimizer()
    during = engine.logprobs(rollout)
    engine.onload()
    assert all(map(torch.equal, before, during))


def policy_to_host_for_the_value_model(
    engines: Engines, rollout: Sequence[TrainSequence], manager: CheckpointManager
) -> None:
    engines["policy"].offload()
    train(engines["value"], rollout)
    engines["value"].offload()
    engines["policy"].onload()
    train(engines["policy"], rollout)
    engines["value"].onload()


def offload_between_gradients(engines: Engines, rollout: Sequence[TrainSequence], manager: CheckpointManager) -> None:
    engine = engines["policy"]
    engine.forward_backward(rollout[:8], lambda logprobs, _: (-logprobs.sum(), {}), 100.0)
    engine.offload()
    engine.onload()
    engine.forward_backward(rollout[8:], lambda logprobs, _: (-logprobs.sum(), {}), 100.0)
    assert engine.optim_step().grad_norm > 0


def load_in_place(engines: Engines, rollout: Sequence[TrainSequence], manager: CheckpointManager) -> None:
    manager.wait_committed()
    newest = manager.latest()
    assert newest is not None
    for name, engine in engines.items():
        engine.load_chunks(newest.component(name))


PATHS: list[MovingPath] = [
    optim_step,
    offload_and_onload,
    offload_before_refit,
    optimizer_offload_for_logprob,
    policy_to_host_for_the_value_model,
    offload_between_gradients,
    load_in_place,
]


def digests(engines: Engines) -> dict[tuple[str, str], int]:
    return {
        (name, chunk.name): digest(chunk.tensor) for name, engine in engines.items() for chunk in engine.state_chunks()
    }


def save(manager: CheckpointManager, step: int, engines: Engines) -> None:
    components = {name: engine.state_chunks() for name, engine in engines.items()}
    manager.save(step, components, {}, "", None, step, [engine.fence for engine in engines.values()])


def assert_saves_around(path: MovingPath, engines: Engines, rollout: Sequence[TrainSequence], folder: Path) -> None:
    """Three saves with the path and a step between them: each holds what was live, and is newer than the one before.

    The first one is committed before the path is taken, the others may still be staged or written.
    """
    config = CheckpointingConfig(checkpoint_dir=str(folder), keep_latest_k=None)
    manager = CheckpointManager(config, "run", "model")
    expected = {}
    try:
        for step in (1, 2, 3):
            for engine in engines.values():
                train(engine, rollout)
            expected[step] = digests(engines)
            save(manager, step, engines)
            if step == 1:
                manager.wait_committed()
            path(engines, rollout, manager)
        manager.wait_committed()
    finally:
        manager.close()
    found = {int(made.name[5:11]): made for made in folder.glob("step_*")}
    for step, values in expected.items():
        checkpoint = Checkpoint.open(found[step])
        assert verify(checkpoint) == []
        for name in engines:
            reader = checkpoint.component(name)
            stored = {(name, chunk): digest(reader.read(chunk)) for chunk in reader.names()}
            assert stored == {key: value for key, value in values.items() if key[0] == name}
    for step in (2, 3):
        assert check_freshness(found[step - 1], found[step]).outcome == "fresh"
