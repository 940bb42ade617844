"""What moves a Megatron model's memory has handles to it closed first, and a step does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwater.checkpoint.fence import Fence

pytest.importorskip("megatron.core", reason="needs the extra megatron, which make test-slow installs")
pytestmark = pytest.mark.slow


class ReachedError(Exception):
    pass


class Keeper:
    def let_go(self) -> None:
        raise ReachedError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without a model: all that is asked of it before the fence."""
    from headwater.engines.megatron import engine as module

    made: Any = object.__new__(module.MegatronEngine)
    made.fence, made._moves, made._chunks = Fence(), True, []
    made._weights = made._optimizer_state = SimpleNamespace(occupied=False)
    made.optimizer = SimpleNamespace(step=lambda: (1.0, 0.1))
    monkeypatch.setattr(module, "finalize_model_grads", lambda chunks: None)
    made.fence.keep_handles(Keeper())
    return made


@pytest.mark.parametrize("method", ["offload", "offload_optimizer", "load_chunks"])
def test_whatever_moves_storage_has_handles_closed_first(method: str, engine: Any):
    arguments: list[Any] = [None] if method == "load_chunks" else []
    with pytest.raises(ReachedError):
        getattr(engine, method)(*arguments)


def test_a_step_keeps_them(engine: Any):
    assert engine.optim_step().grad_norm == 1.0
