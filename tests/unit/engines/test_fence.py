from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headwater.engines.torch.engine import TorchEngine


class ReachedError(Exception):
    pass


class Reader:
    def wait(self, timeout: float) -> None:
        raise ReachedError


@pytest.mark.parametrize("method", ["optim_step", "offload", "offload_optimizer", "onload", "load_chunks"])
def test_whatever_changes_or_moves_storage_passes_the_fence_first(method: str, make_engine: Callable[..., TorchEngine]):
    engine = make_engine(moves_on_host=True)
    if method == "onload":
        engine.offload()
    engine.fence.register(Reader())
    arguments: list[Any] = [None] if method == "load_chunks" else []
    with pytest.raises(ReachedError):
        getattr(engine, method)(*arguments)


def test_only_what_is_no_parameter_changes_in_a_forward_pass(make_engine: Callable[..., TorchEngine]):
    engine = make_engine()
    parameters = {name for name, _ in engine.model.named_parameters(remove_duplicate=False)}
    chunks = {chunk.name: chunk.changes_in_forward for chunk in engine.state_chunks()}
    assert chunks
    assert all(
        changes == (not name.startswith("optimizer.") and name not in parameters) for name, changes in chunks.items()
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_not_offloaded_waits_for_no_reader_on_its_way_back(
    ranks: int, make_engine: Callable[..., TorchEngine]
):
    """It is called before every training pass, which overlaps with the staging of a save."""
    engine = make_engine(moves_on_host=True)
    engine._layout = replace(engine._layout, data_size=ranks)
    engine.fence.register(Reader())
    engine.onload()
