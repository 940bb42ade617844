from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig


@pytest.fixture
def chunks() -> list[Chunk]:
    generator = torch.Generator().manual_seed(0)
    return [
        Chunk.whole("norm.weight", torch.randn(5, generator=generator).bfloat16()),
        Chunk.whole("layer.weight", torch.randn(6, 4, generator=generator)),
        Chunk.whole("optimizer.state.step.layer.weight", torch.tensor(7, dtype=torch.int64)),
        Chunk.whole("mask", torch.tensor([True, False, True])),
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def make_manager(root: Path) -> Iterator[Callable[..., CheckpointManager]]:
    """Makes a manager of `root`; the one made before gives up its lock, as an ended run would."""
    made: list[CheckpointManager] = []

    def make(model_identity: str = "model-a", **config: Any) -> CheckpointManager:
        for manager in made:
            manager.close()
        config.setdefault("strategy", "sync")
        made.append(CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), **config), "run-1", model_identity))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.fixture
def save(make_manager: Callable[..., CheckpointManager], chunks: list[Chunk]) -> Callable[..., Path]:
    """Saves `chunks` at a step through a manager, one made for the call if none is given."""

    def run(step: int, manager: CheckpointManager | None = None, state: dict[str, Any] | None = None) -> Path:
        return (manager or make_manager()).save(
            step=step,
            components={"policy": chunks},
            trainer_state=state if state is not None else {"step": step, "rng": {"torch": [1, 2, 3]}},
            config_yaml="grpo: {}\n",
            tokenizer=write_tokenizer,
            weight_version=step + 100,
        )

    return run
