import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.diff import diff
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.manifest import CorruptCheckpointError
from headwater.checkpoint.reader import Checkpoint

Save = Callable[..., Checkpoint]


@pytest.fixture
def saved(make_manager: Callable[..., CheckpointManager]) -> Save:
    manager = make_manager(keep_latest_k=None)
    steps = itertools.count(1)

    def run(chunks: list[Chunk], state: dict | None = None, tokenizer: str = "t", **others: list[Chunk]) -> Checkpoint:
        """Saved at ever higher steps so that none is pruned; the step field is part of each difference."""

        def write_tokenizer(folder: Path) -> None:
            (folder / "tokenizer.json").write_text(tokenizer)

        folder = manager.save(
            step=next(steps),
            components={"policy": chunks, **others},
            trainer_state=state or {},
            config_yaml=f"run: {len(list(manager.root.iterdir()))}\n",
            tokenizer=write_tokenizer,
            weight_version=0,
        )
        return Checkpoint.open(folder)

    return run


def whole(**tensors: torch.Tensor) -> list[Chunk]:
    return [Chunk.whole(name, tensor) for name, tensor in tensors.items()]


def test_one_state_saved_by_two_runs_is_identical(save: Callable[..., Path], tmp_path: Path, root: Path):
    save(4)
    root.rename(tmp_path / "first")
    save(4)
    (first,), (second,) = (tmp_path / "first").glob("step_*"), root.glob("step_*")
    result = diff(Checkpoint.open(first), Checkpoint.open(second))
    assert result.identical
    assert [(component.component, component.compared) for component in result.components] == [("policy", 4)]


def test_changed_tensors_are_named_with_the_largest_difference(saved: Save):
    first = saved(whole(a=torch.tensor([1.0, 2.0]), b=torch.ones(2), c=torch.ones(3)))
    second = saved(whole(a=torch.tensor([1.0, 2.5]), b=torch.ones(2), c=torch.tensor([1.0, 1.0, 4.0])))
    (component,) = diff(first, second).components
    assert component.changed == ("a", "c")
    assert component.compared == 3
    assert component.max_abs_difference == 3.0


def test_a_zero_that_changes_its_sign_is_a_difference(saved: Save):
    (component,) = diff(saved(whole(a=torch.tensor([0.0]))), saved(whole(a=torch.tensor([-0.0])))).components
    assert component.changed == ("a",)


def test_the_same_nan_is_no_difference_and_a_new_one_is(saved: Save):
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert diff(saved(whole(a=nan)), saved(whole(a=nan))).components[0].identical
    (component,) = diff(saved(whole(a=one, b=one)), saved(whole(a=nan, b=one + 1))).components
    assert component.changed == ("a", "b")
    assert math.isnan(component.max_abs_difference)


def test_other_dtype_and_shape_are_differences(saved: Save):
    first = saved(whole(a=torch.ones(2), b=torch.ones(2)))
    second = saved(whole(a=torch.ones(2).bfloat16(), b=torch.ones(3)))
    assert diff(first, second).components[0].changed == ("a", "b")


def test_tensors_and_components_of_one_side_only_are_named(saved: Save):
    first = saved(whole(a=torch.ones(2), b=torch.ones(2)), value=whole(v=torch.ones(1)))
    second = saved(whole(a=torch.ones(2), c=torch.ones(2)))
    policy, value = diff(first, second).components
    assert (policy.only_in_first, policy.only_in_second) == (("b",), ("c",))
    assert (value.component, value.only_in_first) == ("value", ("v",))
    assert not policy.identical
    assert not value.identical


def test_how_a_tensor_is_cut_makes_no_difference(saved: Save):
    tensor = torch.randn(4, 2)
    halves = [Chunk("a", tensor[:2], (4, 2), (0, 0)), Chunk("a", tensor[2:], (4, 2), (2, 0))]
    assert diff(saved(whole(a=tensor)), saved(halves)).components[0].identical


def test_trainer_state_fields_that_differ_are_named(saved: Save):
    first = saved([], {"rng": {"torch": [1, 2], "python": 1}, "same": [1], "gone": None})
    second = saved([], {"rng": {"torch": [1, 3], "python": True}, "same": [1]})
    fields = {field.path: (field.first, field.second) for field in diff(first, second).fields}
    assert fields == {
        "step": (1, 2),
        "trainer.rng.torch": ([1, 2], [1, 3]),
        "trainer.rng.python": (1, True),
        "trainer.gone": (None, "(missing)"),
    }


def test_tokenizer_files_are_compared(saved: Save):
    assert diff(saved([], tokenizer="a"), saved([], tokenizer="b")).files == ("tokenizer/tokenizer.json",)


def test_corrupt_bytes_are_never_called_identical(saved: Save):
    first, second = saved(whole(a=torch.ones(2))), saved(whole(a=torch.ones(2)))
    path = second.folder / "policy" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="chunk a does not match"):
        diff(first, second)
