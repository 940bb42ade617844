"""AsyncCheckpointer: state dicts of any torch program."""

import math
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headwater import AsyncCheckpointer
from headwater.checkpoint import preflight
from headwater.checkpoint.background import Job
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.manifest import CorruptCheckpointError
from headwater.checkpoint.tree import flatten, freeze, unflatten
from headwater.errors import HeadwaterError, UserError


@pytest.fixture
def checkpointer(root: Path) -> Iterator[AsyncCheckpointer]:
    with AsyncCheckpointer(root) as made:
        yield made


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second) or isinstance(first, dict)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_same(one, other)
    else:
        assert first == second


def test_model_and_optimizer_come_back(checkpointer: AsyncCheckpointer):
    state = state_of(*trained(0))
    checkpointer.save(7, state)
    checkpointer.wait_staged()
    checkpointer.wait_committed()
    assert checkpointer.steps() == [7]
    assert checkpointer.pending == 0
    assert_same(checkpointer.load(), state)
    other_model, other_optimizer = trained(1)
    loaded = checkpointer.load(state_of(other_model, other_optimizer))
    other_optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["epoch"] == 3
    assert_same(state_of(other_model, other_optimizer), state)


def test_leaves_keys_and_ties_survive(checkpointer: AsyncCheckpointer):
    tensor = torch.arange(6.0).reshape(2, 3)
    state = {
        "a.b": tensor,
        "a": {"b": tensor + 1, 3: (1, [2.5, None, True, "x"]), None: -math.inf},
        "tied": tensor,
        "view": tensor.t(),
        "empty": {},
    }
    checkpointer.save(1, state)
    checkpointer.wait_committed()
    loaded = checkpointer.load()
    assert_same(loaded, state)
    assert loaded["tied"] is loaded["a.b"]


def test_nan_is_kept():
    tensors, tree = flatten({"loss": math.nan})
    assert math.isnan(unflatten(tree, tensors.__getitem__)["loss"])


@pytest.mark.parametrize("odd", [object(), {1, 2}, torch.eye(2).to_sparse()], ids=["object", "set", "sparse"])
def test_what_a_checkpoint_does_not_hold_is_refused_by_name(odd: Any, checkpointer: AsyncCheckpointer):
    with pytest.raises(UserError, match=r"state_dict entry model\.odd is a "):
        checkpointer.save(1, {"model": {"odd": odd}})


def test_a_dtype_that_cannot_be_stored_is_refused_by_name(checkpointer: AsyncCheckpointer):
    with pytest.raises(UserError, match=r"state_dict entry model\.odd: torch\.complex64 cannot be stored"):
        checkpointer.save(1, {"model": {"odd": torch.ones(2, dtype=torch.complex64)}})


def test_a_device_whose_memory_cannot_be_read_is_refused_by_name(checkpointer: AsyncCheckpointer):
    with pytest.raises(UserError, match=r"state_dict entry odd is on meta: save a copy of it on the CPU"):
        checkpointer.save(1, {"odd": torch.ones(2, device="meta")})


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None, torch.tensor(1.0)])
def test_a_step_that_names_no_checkpoint_is_refused_and_the_next_save_works(step: Any, checkpointer: AsyncCheckpointer):
    with pytest.raises(UserError, match=r"^step=.* cannot name a checkpoint: give an integer, 0 or more$"):
        checkpointer.save(step, {"w": torch.ones(2)})
    checkpointer.save(np.int64(4), {"w": torch.ones(2)})
    checkpointer.wait_committed()
    assert checkpointer.steps() == [4]


def test_nothing_is_saved_after_close(root: Path):
    checkpointer = AsyncCheckpointer(root)
    checkpointer.close()
    with pytest.raises(UserError, match="this checkpointer is closed"):
        checkpointer.save(1, {"w": torch.ones(2)})
    assert checkpointer.steps() == []


def test_another_default_device_changes_nothing(checkpointer: AsyncCheckpointer):
    state = {"w": torch.ones(3, 2).t(), "empty": torch.empty(0)}
    with torch.device("meta"):
        checkpointer.save(1, state)
        checkpointer.wait_committed()
        loaded = checkpointer.load()
    assert_same(loaded, state)


def test_what_is_not_there_or_other_is_refused(checkpointer: AsyncCheckpointer):
    with pytest.raises(UserError, match=r"no committed checkpoint$"):
        checkpointer.load()
    checkpointer.save(1, {"w": torch.ones(2)})
    checkpointer.wait_committed()
    with pytest.raises(UserError, match="no committed checkpoint of step 2"):
        checkpointer.load(step=2)
    with pytest.raises(UserError, match="holds other tensors than the state dict given: v, w"):
        checkpointer.load({"v": torch.ones(2)})


def test_a_flipped_byte_is_refused_on_load(checkpointer: AsyncCheckpointer, root: Path):
    checkpointer.save(1, {"w": torch.ones(2000)})
    checkpointer.wait_committed()
    (file,) = root.glob("step_*/state/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="chunk w does not match its digest"):
        checkpointer.load()


def test_an_unguarded_script_commits_before_it_ends_and_another_continues(root: Path, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, headwater\n"
        "checkpointer = headwater.AsyncCheckpointer(sys.argv[1])\n"
        "first = checkpointer.load()['step'] + 1 if checkpointer.steps() else 1\n"
        "weight = torch.zeros(100_000)\n"
        "for step in range(first, first + 3):\n"
        "    checkpointer.wait_staged()\n"
        "    weight += 1\n"
        "    checkpointer.save(step, {'weight': weight, 'step': step})\n"
    )
    (tmp_path / "numpy.py").write_text("raise SystemExit('a module beside the script is not what the writer imports')")
    for last in (3, 6):
        done = subprocess.run(
            [sys.executable, "-P", str(script), str(root)], capture_output=True, text=True, timeout=120, cwd=tmp_path
        )
        assert (done.returncode, done.stderr) == (0, "")
        with AsyncCheckpointer(root) as checkpointer:
            assert checkpointer.load()["step"] == last
            assert torch.equal(checkpointer.load()["weight"], torch.full((100_000,), 3.0))


def nested(value: float) -> dict[str, Any]:
    tensors = {name: torch.full((4, 3), float(value + index)) for index, name in enumerate("abc")}
    return {
        "model": OrderedDict(tensors),
        "lists": [torch.ones(2) * value, (1, 2.5, None)],
        "step": int(value),
        "n": {},
    }


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The background thread of each save waits until the event is set."""
    go = threading.Event()
    real = Job.run
    monkeypatch.setattr(Job, "run", lambda job: (go.wait(60), real(job))[1])
    return go


def test_what_is_saved_are_the_values_of_the_call_whatever_becomes_of_the_dicts(
    checkpointer: AsyncCheckpointer, held: threading.Event
):
    checkpointer.save(1, nested(1))
    state = nested(2)
    checkpointer.save(2, state)
    assert checkpointer.steps() in ([], [1])
    state["model"]["a"] = torch.zeros(9)
    state["lists"].clear()
    state["step"] = 77
    del state["model"]["b"]
    held.set()
    checkpointer.wait_staged()
    checkpointer.wait_committed()
    assert_same(checkpointer.load(step=1), nested(1))
    assert_same(checkpointer.load(step=2), nested(2))


def test_a_tensor_that_changes_before_the_background_comes_to_it_is_refused(
    checkpointer: AsyncCheckpointer, held: threading.Event
):
    checkpointer.save(1, nested(1))
    state = nested(2)
    checkpointer.save(2, state)
    state["model"]["b"].add_(1)
    held.set()
    with pytest.raises(HeadwaterError, match=r"state model\.b changed while step 2 was still being copied"):
        checkpointer.wait_committed()
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize("change", ["moved", "replaced_in_place"])
def test_a_tensor_that_moves_before_the_background_comes_to_it_is_refused(
    change: str, checkpointer: AsyncCheckpointer, held: threading.Event
):
    checkpointer.save(1, nested(1))
    state = nested(2)
    checkpointer.save(2, state)
    if change == "moved":
        state["model"]["b"].data = torch.zeros(4, 3)
    else:
        state["model"]["b"].set_(torch.zeros(4, 3))
    held.set()
    with pytest.raises(HeadwaterError, match=r"state model\.b changed while step 2"):
        checkpointer.wait_committed()


def test_the_fence_waits_for_a_save_that_only_begins(checkpointer: AsyncCheckpointer, held: threading.Event):
    checkpointer.save(1, nested(1))
    checkpointer.wait_staged()
    state = nested(2)
    checkpointer.save(2, state)
    threading.Timer(0.2, held.set).start()
    checkpointer.wait_staged()
    assert held.is_set()
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in state["model"].values()]
    for tensor in state["model"].values():
        tensor.add_(1)
    state.clear()
    del tensor
    assert all(storage.expired() for storage in storages), "memory that is given up behind the fence is free"
    checkpointer.wait_committed()
    assert_same(checkpointer.load(), nested(2))


def test_what_fails_in_the_background_is_raised_once_by_a_later_call(
    checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
):
    def fail(self: CheckpointManager, tensor_bytes: int) -> None:
        raise UserError("the disk is gone")

    checkpointer.save(1, nested(1))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "require_space", fail)
        checkpointer.save(2, nested(2))
        checkpointer.wait_staged()
        with pytest.raises(UserError, match="the disk is gone"):
            checkpointer.save(3, nested(3))
    checkpointer.save(4, nested(4))
    checkpointer.wait_committed()
    assert_same(checkpointer.load(), nested(4))
    assert checkpointer.steps() == [1, 4]


def test_a_disk_too_full_for_another_one_is_told_by_the_call(
    checkpointer: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch
):
    checkpointer.save(1, nested(1))
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "free_bytes", lambda root: 10)
        with pytest.raises(UserError, match=r"needs .*, 10 B is free"):
            checkpointer.save(2, nested(2))
    checkpointer.save(3, nested(3))
    checkpointer.wait_committed()
    assert checkpointer.steps() == [1, 3]


def test_what_a_later_state_dict_holds_for_the_first_time_is_refused_by_the_call(checkpointer: AsyncCheckpointer):
    checkpointer.save(1, nested(1))
    with pytest.raises(UserError, match=r"state_dict entry model\.a is a set"):
        checkpointer.save(2, nested(2) | {"model": {"a": {1, 2}}})
    checkpointer.save(3, nested(3))
    checkpointer.wait_committed()
    assert_same(checkpointer.load(), nested(3))


def test_tensors_of_inference_mode_are_saved(checkpointer: AsyncCheckpointer):
    with torch.inference_mode():
        states = [nested(1), nested(2)]
    for step, state in enumerate(states, 1):
        checkpointer.save(step, state)
    checkpointer.wait_committed()
    assert_same(checkpointer.load(step=2), nested(2))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1, "b": {"c": 1}}, {"a": {"c": 1}, "b": 1}),
        ({"a": [1, 2]}, {"a": (1, 2)}),
        ({"a": [[1], 2]}, {"a": [1, [2]]}),
        ({"a": {}, "b": []}, {"a": [], "b": {}}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": [1], "b": [2, 3]}, {"a": [1, 2], "b": [3]}),
        ({"a": {"b": 1}}, {"a": {"c": 1}}),
    ],
)
def test_other_structures_are_told_apart(first: Any, second: Any):
    one, other = freeze(first), freeze(second)
    assert one is not None
    assert other is not None
    assert one.structure != other.structure
    assert one.structure == freeze(first).structure  # pyright: ignore[reportOptionalMemberAccess]
    assert one.state == first


def test_a_forked_child_ends_while_its_parent_saves(root: Path):
    script = (
        "import os, signal, sys, torch, headwater\n"
        "checkpointer = headwater.AsyncCheckpointer(sys.argv[1])\n"
        "checkpointer.save(0, {'w': torch.ones(10)})\n"
        "checkpointer.wait_committed()\n"
        "os.kill(checkpointer._manager.writer_pid, signal.SIGSTOP)\n"  # so that the save stays pending
        "checkpointer.save(1, {'w': torch.ones(10)})\n"
        "child = os.fork()\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    assert checkpointer.pending == 1\n"
        "    os.kill(checkpointer._manager.writer_pid, signal.SIGCONT)\n"
        "    checkpointer.wait_committed()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(root.glob("step_000001-*/manifest.json"))) == 1
