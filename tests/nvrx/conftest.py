"""The modules beside this one are importable here; a process group of one rank, which NVRx asks for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from nvrx_saves import Hold

from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place = tmp_path_factory.mktemp("group") / "file"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def make(root: Path) -> Iterator[Any]:
    """Makes a manager of `root` that saves through NVRx; the one made before ends."""
    made: list[CheckpointManager] = []

    def run(**config: Any) -> CheckpointManager:
        for manager in made:
            manager.close()
        options = {"checkpoint_dir": str(root), "strategy": "nvrx", "keep_latest_k": None, **config}
        made.append(CheckpointManager(CheckpointingConfig(**options), "run", "model"))
        return made[-1]

    yield run
    for manager in made:
        manager.close()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """float32 [300, 70] and bfloat16 [50]"""
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(300, 70, generator=generator), "b": torch.randn(50, generator=generator).bfloat16()}


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """For processes that are started after it."""
    made = Hold(tmp_path / "hold")
    monkeypatch.setenv("PYTHONPATH", made.python_path)
    yield made
    made.off()
