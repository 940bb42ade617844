import contextlib
import dataclasses
import json
import pickle
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from headwater.checkpoint.compare import check_freshness
from headwater.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"


@pytest.fixture
def save(save_dcp: Callable[..., Path]) -> Callable[..., Path]:
    """Megatron's files around its sharded tensors: `common` goes where the optimizer's groups and the iteration are."""

    def run(name: str, tensors: dict[str, torch.Tensor], common: Any, **options: Any) -> Path:
        folder = save_dcp(name, tensors, **options)
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "common_backend": "torch"}))
        torch.save(common, folder / "common.pt")
        return folder

    return run


def common(step: float | torch.Tensor, **others: Any) -> dict[str, Any]:
    groups = [{"lr": 1e-3, "step": step}, {"lr": 1e-3, "step": step}]
    return {
        "optimizer": {"optimizer": {"param_groups": groups}},
        "iteration": 7,
        "args": object_of_unknown_class(),
        **others,
    }


def object_of_unknown_class() -> Any:
    import argparse

    return argparse.Namespace(dtype=torch.bfloat16, size=torch.Size([2]))


def reshardable(training: Any, prefix: str = "optimizer.state") -> dict[str, torch.Tensor]:
    """The layout of `fully_reshardable`: moments of what was never touched are zeros, the step is the group's."""
    tensors = training.weights()
    for name, state in training.optimizer().items():
        zeros = torch.zeros_like(state["master_param"])
        tensors[f"{prefix}.param.{name}"] = state["master_param"]
        tensors[f"{prefix}.exp_avg.{name}"] = state.get("exp_avg", zeros)
        tensors[f"{prefix}.exp_avg_sq.{name}"] = state.get("exp_avg_sq", zeros)
    return tensors


def bucket(training: Any) -> dict[str, torch.Tensor]:
    """The layout of `dp_reshardable`: all parameters in flat buckets, padded."""
    tensors = training.weights()
    for state in ("param", "exp_avg", "exp_avg_sq"):
        key = "master_param" if state == "param" else state
        parts = [values[key].flatten() for values in training.optimizer().values() if key in values]
        tensors[f"{BUCKET}.{state}"] = torch.cat([*parts, torch.zeros(100)])
    return tensors


@pytest.mark.parametrize(
    "layout", [reshardable, bucket, lambda t: reshardable(t, "chained_0.optimizer.state")], ids=["full", "dp", "moe"]
)
def test_consecutive_saves_are_fresh_and_a_save_against_itself_is_stale(layout: Any, training: Any, save: Any):
    training.step()
    old = save("old", layout(training), common(1))
    training.step()
    new = save("new", layout(training), common(2))
    fresh = check_freshness(old, new)
    assert fresh.exit_code == 0, fresh.reasons
    assert fresh.components[0].new_steps == (2, 2)
    again = check_freshness(new, new)
    assert again.exit_code == 1
    assert {chunk.role for chunk in again.stale} == {"param", "exp_avg", "exp_avg_sq", "weight"}


@pytest.mark.parametrize("layout", [reshardable, bucket])
@pytest.mark.parametrize("state", ["param", "exp_avg", "exp_avg_sq"])
def test_one_stale_tensor_of_the_optimizer_is_found(layout: Any, state: str, training: Any, save: Any):
    training.step()
    old = layout(training)
    training.step()
    new = layout(training)
    key = next(key for key in new if key.endswith(f"{state}.first.weight") or key == f"{BUCKET}.{state}")
    new[key] = old[key]
    verdict = check_freshness(save("old", old, common(1)), save("new", new, common(2)))
    assert [(chunk.role, chunk.key) for chunk in verdict.stale] == [(state, key)]


def test_an_expert_that_no_token_met_is_idle(training: Any, save: Any):
    training.step()
    old = save("old", reshardable(training), common(1))
    training.step()
    verdict = check_freshness(old, save("new", reshardable(training), common(2)))
    assert verdict.exit_code == 0
    assert set(verdict.components[0].idle) == {"expert.weight", "expert.bias"}


def test_steps_stored_as_a_tensor_are_read_without_loading_it(training: Any, save: Any):
    folder = save("one", reshardable(training), common(torch.tensor(11, dtype=torch.int32)))
    assert check_freshness(folder, folder).components[0].new_steps == (11, 11)


def test_steps_of_groups_that_are_an_object_of_their_own_are_read(training: Any, save: Any):
    training.step()
    groups = [{"param_groups": [{"step": 4.0}, {"step": 4.0}]}]
    tensors = {**bucket(training), "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1": groups}
    folder = save("one", tensors, {"iteration": 9}, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert check_freshness(folder, folder).components[0].new_steps == (4, 4)


def test_the_plans_that_megatron_keeps_in_its_metadata_are_admitted(training: Any, save: Any):
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    training.step()
    folder = save("one", reshardable(training), common(1))
    metadata = FileSystemReader(folder).read_metadata()
    (index, tensor) = next((i, metadata.state_dict_metadata[i.fqn]) for i in metadata.storage_data if i.offset)
    write = TensorWriteData(tensor.chunks[0], tensor.properties, tensor.size)  # type: ignore[union-attr]
    metadata.all_local_plans = [SavePlan([WriteItem(index, WriteItemType.SHARD, tensor_data=write)])]  # type: ignore[attr-defined]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert check_freshness(folder, folder).exit_code == 1


def test_a_group_step_that_repeats_excuses_no_stale_moment_when_others_moved(training: Any, save: Any):
    training.step()
    old = reshardable(training)
    training.step()
    new = reshardable(training)
    key = "optimizer.state.exp_avg.first.weight"
    assert check_freshness(save("old", old, common(1)), save("new", new, common(1))).exit_code == 0
    verdict = check_freshness(save("old2", old, common(1)), save("new2", {**new, key: old[key]}, common(1)))
    assert [chunk.key for chunk in verdict.stale] == [key]


def test_without_the_common_file_an_advance_is_assumed_and_said(training: Any, save: Any):
    training.step()
    folder = save("one", reshardable(training), common(1))
    (folder / "common.pt").unlink()
    verdict = check_freshness(folder, folder)
    assert verdict.exit_code == 1
    assert "has no common.pt, so no step is known: advance is assumed" in verdict.notes[0]


@pytest.mark.parametrize("content", [b"nonsense", b"", None])
def test_a_damaged_common_file_is_named(content: bytes | None, training: Any, save: Any):
    folder = save("one", reshardable(training), common(1))
    if content is None:
        torch.save([1], folder / "common.pt")
    else:
        (folder / "common.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"common\.pt: damaged, not a torch.save archive of a dictionary"):
        check_freshness(folder, folder)


def test_flipped_bits_of_the_common_file_never_escape_as_another_error(training: Any, save: Any):
    training.step()
    folder = save("one", reshardable(training), common(torch.tensor(11, dtype=torch.int32)))
    intact = (folder / "common.pt").read_bytes()
    generator = random.Random(0)
    for _ in range(200):
        data = bytearray(intact)
        for _ in range(3):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        (folder / "common.pt").write_bytes(data)
        with contextlib.suppress(UserError):
            check_freshness(folder, folder)


def test_padding_between_the_parameters_of_a_bucket_is_no_evidence(training: Any, save: Any):
    """Boxes as Megatron lays them: a parameter of 24 elements at 0, nobody's 40 elements, one of 24 at 64."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    folders = []
    for step in (1, 2):
        parts = {
            (0, 24): torch.full((24,), 1.0 * step),
            (24, 40): torch.ones(40),
            (64, 24): torch.full((24,), step / 2),
        }
        tensors = {f"{begin}": part for (begin, _), part in parts.items()}
        folder = save(f"step-{step}", {**tensors, "w": torch.full((3,), step / 3)}, common(step))
        metadata = FileSystemReader(folder).read_metadata()
        whole = metadata.state_dict_metadata["0"]
        whole.chunks = [ChunkStorageMetadata(torch.Size([begin]), torch.Size([size])) for begin, size in parts]  # type: ignore[union-attr]
        metadata.state_dict_metadata[f"{BUCKET}.exp_avg"] = whole
        stored = metadata.storage_data
        for index in [index for index in stored if index.fqn in tensors]:
            place = MetadataIndex(f"{BUCKET}.exp_avg", torch.Size([int(index.fqn)]))
            stored[place] = stored.pop(index)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        folders.append(folder)
    verdict = check_freshness(*folders)
    assert (verdict.exit_code, verdict.components[0].compared, verdict.components[0].repeated) == (0, 3, 0)
    assert {chunk.offset for chunk in check_freshness(folders[1], folders[1]).stale if chunk.role == "exp_avg"} == {
        (0,),
        (64,),
    }


def test_a_bucket_names_no_parameter_so_no_weight_is_called_frozen(training: Any, save: Any):
    training.step()
    old = save("old", bucket(training), common(1))
    training.step()
    verdict = check_freshness(old, save("new", bucket(training), common(2)))
    assert verdict.components[0].repeated == 4  # the frozen layer and the expert
    assert verdict.components[0].frozen == ()


def test_metadata_and_names_of_megatron_core_0_15_are_understood(training: Any, save: Any, monkeypatch: Any):
    """Its `fully_sharded_model_space`: masters are called fp32_param, the metadata is a class of Megatron's own."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata

    name = "megatron.core.dist_checkpointing.strategies.torch"
    theirs = dataclasses.make_dataclass("MCoreMetadata", [("mcore_data", Any, None)], bases=(Metadata,))
    theirs.__module__ = name
    for part in ("megatron", "megatron.core", "megatron.core.dist_checkpointing", name.rpartition(".")[0], name):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    sys.modules[name].MCoreMetadata = theirs  # type: ignore[attr-defined]
    folders = []
    for step in (1, 2):
        training.step()
        tensors = {key.replace("state.param.", "state.fp32_param."): t for key, t in reshardable(training).items()}
        folder = save(f"step-{step}", tensors, common(step))
        metadata = theirs(**vars(FileSystemReader(folder).read_metadata()), mcore_data={"a": {"b": None}})
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert b"MCoreMetadata" in (folder / ".metadata").read_bytes()
        folders.append(folder)
    assert check_freshness(*folders).exit_code == 0
    assert {chunk.role for chunk in check_freshness(folders[1], folders[1]).stale} == {
        "param",
        "exp_avg",
        "exp_avg_sq",
        "weight",
    }
