"""The paths on which storage moves, on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import moving_paths
import pytest
import torch

from headwater.data.types import TrainSequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", moving_paths.PATHS, ids=lambda path: path.__name__)
def test_saves_around_each_path_hold_what_was_live(
    path: moving_paths.MovingPath,
    precision: str,
    recorded_rollout: list[TrainSequence],
    tmp_path: Path,
) -> None:
    engines = moving_paths.make_engines(precision, torch.device("cuda", 0))
    moving_paths.assert_saves_around(path, engines, recorded_rollout, tmp_path)
