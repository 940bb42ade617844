"""DCP over Headwater's format: `dcp_ranks.py` runs once in a group of two processes, this one is a group of one."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from headwater.checkpoint import dcp_writer, preflight
from headwater.checkpoint.catalog import scan
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.dcp import HeadwaterReader, HeadwaterWriter
from headwater.checkpoint.dcp_reader import stored_values
from headwater.checkpoint.manifest import CorruptCheckpointError
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.checkpoint.writer import write_chunks
from headwater.cli.main import main
from headwater.errors import HeadwaterError, UserError

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs" / "dcp.md"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def run_ranks(script: Path, folder: Path, *arguments: str, **environment: str) -> list[subprocess.Popen[str]]:
    """Two processes of a script, ended, both in `folder` and with nothing of this process's set-up but its path."""
    source = str(Path(sys.modules["headwater"].__file__ or "").parents[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source, **environment}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments, *([str(rank)] if arguments else [])],
            cwd=folder,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.wait(timeout=150)
    finally:
        for rank in ranks:
            rank.kill()
    return ranks


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two ranks worked in."""
    folder = tmp_path_factory.mktemp("group")
    ranks = run_ranks(HERE / "dcp_ranks.py", folder, str(folder))
    output = "\n".join(rank.stdout.read() for rank in ranks if rank.stdout)
    assert [rank.returncode for rank in ranks] == [0, -9], output
    return folder


@pytest.fixture(scope="module")
def outcomes(group: Path) -> list[dict[str, Any]]:
    return [json.loads((group / f"outcome-{rank}.json").read_text()) for rank in range(2)]


def newest(root: Path) -> Checkpoint:
    return Checkpoint.open(scan(root)[-1].folder)


def test_fsdp2_saved_on_two_ranks_loads_bit_equal_on_one(group: Path):
    expected = load_file(group / "fsdp.safetensors")
    state: dict[str, Any] = {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=HeadwaterReader(group / "fsdp"))
    assert len(expected) == 4 * 4  # of each parameter: itself, two moments, step
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_each_rank_writes_its_own_file_with_boxes_of_the_global_tensors(group: Path, outcomes: list[dict[str, Any]]):
    checkpoint = newest(group / "fsdp")
    assert {rank["fsdp folder"] for rank in outcomes} == {str(checkpoint.folder)}
    boxes = {
        (chunk.file, chunk.shape, chunk.offset)
        for chunk in checkpoint.manifest.chunks
        if chunk.name == "model.0.weight"
    }
    assert boxes == {
        ("policy/rank-00000.safetensors", (2, 5), (0, 0)),
        ("policy/rank-00001.safetensors", (1, 5), (2, 0)),
    }
    assert [chunk.shape for chunk in checkpoint.manifest.chunks if chunk.name == "model.1.bias"] == [(1,)]


@pytest.mark.parametrize("placement", ["same", "columns", "replicated"])
def test_dtensors_load_bit_equal_on_two_ranks_at_any_placement(outcomes: list[dict[str, Any]], placement: str):
    assert [rank[f"load {placement}"] for rank in outcomes] == [True, True]


def test_values_come_back_with_their_types_where_nothing_is_known_of_the_state(group: Path):
    state = _load_state_dict_from_keys(storage_reader=HeadwaterReader(group / "dtensor"))
    assert state["betas"] == (0.9, 0.999)
    assert type(state["betas"]) is tuple
    assert state["best"] == float("-inf")
    assert [type(flag) for flag in state["flags"]] == [bool, int, float]
    assert state["none"] is None
    assert state["uneven"].dtype == torch.bfloat16
    nested = _load_state_dict_from_keys("model", storage_reader=HeadwaterReader(group / "fsdp"))
    assert set(nested["model"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_value_that_needs_pickle_is_refused_in_one_line(outcomes: list[dict[str, Any]]):
    for rank in outcomes:
        (problem,) = rank["pickle"]
        assert problem.startswith("UserError: optimizer.schedule: a builtins.slice cannot be stored without pickle")
        assert rank["committed pickle"] == 0


def test_nothing_is_pickled_into_the_folder(group: Path):
    folder = newest(group / "dtensor").folder
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == ["manifest.json", "policy/rank-00000.safetensors", "policy/rank-00001.safetensors", "trainer.json"]


def test_a_rank_that_fails_leaves_no_checkpoint_and_the_next_save_clears_what_it_left(outcomes: list[dict[str, Any]]):
    for rank in outcomes:
        assert ["No space left" in problem for problem in rank["rank fails"]] == [True]
        assert rank["committed rank-fails"] == 0
        assert rank["again"] == []
        assert rank["folders after again"] == 1


def test_bytes_that_differ_from_the_live_tensors_are_not_committed(outcomes: list[dict[str, Any]]):
    for rank in outcomes:
        (problem,) = rank["torn"]
        assert re.match(r"HeadwaterError: the checkpoint step_000001-\w+ does not hold what the live", problem)
        assert "policy/rank-00001.safetensors even" in problem
        assert rank["committed torn"] == 0


def test_a_planner_that_caches_plans_is_refused(outcomes: list[dict[str, Any]]):
    assert all("enable_plan_caching" in rank["cached plans"][0] for rank in outcomes)
    assert [rank["committed cached"] for rank in outcomes] == [0, 0]


def test_a_flipped_byte_is_refused_on_every_rank_naming_file_and_chunk(outcomes: list[dict[str, Any]]):
    for rank in outcomes:
        (problem,) = rank["flipped"]
        assert problem.startswith("CorruptCheckpointError: ")
        assert "/policy/rank-00001.safetensors: chunk uneven does not match its digest" in problem


def test_ranks_that_found_different_newest_checkpoints_do_not_mix_them(outcomes: list[dict[str, Any]]):
    assert all("ranks found different checkpoints" in rank["different newest"][0] for rank in outcomes)


def test_a_rank_killed_while_it_saves_leaves_no_checkpoint(group: Path):
    assert (group / "killed.txt").read_text()  # the other rank was told
    (found,) = scan(group / "killed")
    assert not found.committed


def test_verify_ls_and_diff_work_on_what_dcp_saved(group: Path, capsys: pytest.CaptureFixture[str]):
    assert verify(newest(group / "fsdp")) == []
    assert main(["ckpt", "ls", str(group / "fsdp")]) == 0
    first, second = (str(found.folder) for found in scan(group / "race"))
    assert main(["ckpt", "diff", first, first]) == 0
    assert main(["ckpt", "diff", first, second]) == 1
    out = capsys.readouterr().out
    assert "yes" in out
    assert "policy: 5 tensors identical" in out


def test_the_example_in_the_docs_runs_on_two_ranks(tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = run_ranks(script, tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    output = "\n".join(rank.stdout.read() for rank in ranks if rank.stdout)
    assert [rank.returncode for rank in ranks] == [0, 0], output
    assert verify(newest(tmp_path / "checkpoints")) == []


def save_dcp(root: Path, step: int = 1, **state: Any) -> Path:
    writer = HeadwaterWriter(root, step)
    dcp.save(state, storage_writer=writer)
    assert writer.folder is not None
    return writer.folder


def error_of(action: Any) -> HeadwaterError:
    with pytest.raises(CheckpointException) as caught:
        action()
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, HeadwaterError)
    assert "\n" not in str(error)
    return error


def test_the_same_step_saved_again_is_a_new_folder_that_wins(root: Path):
    first, second = save_dcp(root, w=torch.zeros(3)), save_dcp(root, w=torch.ones(3))
    assert first != second
    state = {"w": torch.empty(3)}
    dcp.load(state, storage_reader=HeadwaterReader(root))
    assert torch.equal(state["w"], torch.ones(3))


def test_one_checkpoint_of_many_is_loaded_by_its_folder(root: Path):
    first = save_dcp(root, w=torch.zeros(3))
    save_dcp(root, step=2, w=torch.ones(3))
    state = {"w": torch.empty(3)}
    dcp.load(state, storage_reader=HeadwaterReader(first))
    assert torch.equal(state["w"], torch.zeros(3))


def test_an_asynchronous_save_commits_what_it_was_given(root: Path):
    tensor = torch.ones(5)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}.rendezvous", rank=0, world_size=1)
    try:
        saving = dcp.async_save({"w": tensor}, storage_writer=HeadwaterWriter(root, 1))
        tensor.zero_()
        saving.result(timeout=60)
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(newest(root).component("policy").read("w"), torch.ones(5))


def test_floating_point_dtypes_convert_and_others_do_not(root: Path):
    save_dcp(root, w=torch.tensor([1.5, 2.5]), n=torch.tensor([1, 2]))
    state: dict[str, Any] = {"w": torch.empty(2, dtype=torch.bfloat16)}
    dcp.load(state, storage_reader=HeadwaterReader(root))
    assert state["w"].tolist() == [1.5, 2.5]
    error = error_of(lambda: dcp.load({"n": torch.empty(2)}, storage_reader=HeadwaterReader(root)))
    assert "chunk n is torch.int64, not convertible to torch.float32" in str(error)


def test_a_state_that_cannot_be_read_back_is_refused_before_anything_is_committed(root: Path):
    for state, message in (
        ({"a\nb": torch.ones(1)}, "must be printable"),
        ({"z": torch.ones(1, dtype=torch.complex64)}, "cannot be stored"),
        ({"s": torch.eye(2).to_sparse()}, "make it dense"),
        ({"o": object()}, "cannot be stored without pickle"),
        ({"d": ({1: 2},)}, "dict with such keys"),
    ):
        assert message in str(error_of(lambda state=state: save_dcp(root, **state)))
    assert not any(found.committed for found in scan(root))


class DropsOne(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return replace(new_plan, items=new_plan.items[1:])


@pytest.mark.parametrize("first", [torch.ones(2), "a value"])
def test_a_save_that_lacks_a_planned_part_is_not_committed(root: Path, first: Any):
    state = {"first": first, "second": torch.ones(3)}
    error = error_of(lambda: dcp.save(state, storage_writer=HeadwaterWriter(root, 1), planner=DropsOne()))
    assert "lacks parts of first" in str(error)
    assert scan(root) == []


def test_a_file_that_the_coordinator_does_not_see_is_not_committed(root: Path, monkeypatch: pytest.MonkeyPatch):
    def elsewhere(path: Path, chunks: Any) -> Any:
        result = write_chunks(path, chunks)
        path.unlink()
        return result

    monkeypatch.setattr(dcp_writer, "write_chunks", elsewhere)
    assert "do all ranks see the same" in str(error_of(lambda: save_dcp(root, w=torch.ones(1))))
    assert scan(root) == []


def test_another_process_that_holds_the_folder_is_respected(root: Path):
    held = preflight.prepare(root)
    assert "in use by another run" in str(error_of(lambda: save_dcp(root, w=torch.ones(1))))
    held.close()
    save_dcp(root, w=torch.ones(1))


def test_the_folder_is_free_again_after_a_save(root: Path):
    writer = HeadwaterWriter(root, 1)
    dcp.save({"w": torch.ones(1)}, storage_writer=writer)
    preflight.prepare(root).close()


def test_a_planner_that_hides_the_values_is_refused(root: Path):
    class Opaque(DefaultSavePlanner):
        lookup_object = None

    error = error_of(lambda: dcp.save({"step": 1}, storage_writer=HeadwaterWriter(root, 1), planner=Opaque()))
    assert "Opaque has no lookup_object" in str(error)


def test_a_save_with_too_little_space_is_refused_before_it_begins(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 4000)
    assert "4.0 kB is free" in str(error_of(lambda: save_dcp(root, w=torch.ones(1000))))


def test_a_reader_names_what_is_wrong_with_the_folder(root: Path, save_native: Path):
    for folder, component, message in (
        (root.parent / "absent", None, "no such folder"),
        (save_native, "critic", "no component critic"),
    ):
        with pytest.raises(UserError, match=message):
            HeadwaterReader(folder, component).read_metadata()


@pytest.fixture
def save_native(root: Path, save: Any) -> Path:
    return save(3)


def test_a_checkpoint_of_a_training_run_loads_through_dcp(save_native: Path, chunks: list[Chunk]):
    state: dict[str, Any] = {chunk.name: torch.zeros_like(chunk.tensor) for chunk in chunks}
    dcp.load(state, storage_reader=HeadwaterReader(save_native))
    assert all(torch.equal(state[chunk.name], chunk.tensor) for chunk in chunks)


@pytest.mark.parametrize(
    "dcp_state", [[], {"policy": []}, {"policy": {"values": {"a": {"$x": 1}}}}, {"policy": {"paths": {"a": [{}]}}}]
)
def test_values_that_headwater_did_not_write_are_refused(save: Any, dcp_state: Any):
    checkpoint = Checkpoint.open(save(3, state={"dcp": dcp_state}))
    with pytest.raises(CorruptCheckpointError, match=r"trainer\.json"):
        stored_values(checkpoint, "policy")


@pytest.mark.parametrize(("step", "options"), [(-1, {}), (1, {"component": "Policy"}), (1, {"run_id": "a\nb"})])
def test_arguments_that_the_format_cannot_hold_are_refused(root: Path, step: int, options: dict[str, str]):
    with pytest.raises(UserError):
        HeadwaterWriter(root, step, **options)
