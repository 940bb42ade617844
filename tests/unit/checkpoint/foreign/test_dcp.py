import contextlib
import io
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from headwater.checkpoint.compare import check_freshness
from headwater.checkpoint.freshness import Verdict
from headwater.errors import UserError

SaveDcp = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore")


def stale_roles(verdict: Verdict) -> set[str]:
    return {chunk.role for chunk in verdict.stale}


def edit(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Rewrite the metadata as torch would write it."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))


@pytest.fixture
def pair(training: Any, save_dcp: SaveDcp) -> tuple[Path, Path]:
    training.step()
    old = save_dcp("old", training.state())
    training.step()
    return old, save_dcp("new", training.state())


def test_consecutive_saves_are_fresh_with_frozen_and_untouched_parameters_reported(pair: tuple[Path, Path]):
    verdict = check_freshness(*pair)
    assert (verdict.outcome, verdict.exit_code) == ("fresh", 0)
    (report,) = verdict.components
    assert (report.state, report.old_steps, report.new_steps) == ("advanced", (1, 1), (2, 2))
    assert report.idle == ("expert.weight", "expert.bias")
    assert report.frozen == ("model.frozen.weight", "model.frozen.bias")


def test_a_checkpoint_against_itself_is_stale_and_every_kind_of_evidence_is_named(pair: tuple[Path, Path]):
    verdict = check_freshness(pair[1], pair[1])
    assert verdict.exit_code == 1
    assert stale_roles(verdict) == {"exp_avg", "exp_avg_sq", "param", "weight"}
    text = "\n".join(verdict.reasons)
    assert "nothing advanced" in text
    assert all(name in text for name in ("exp_avg ", "exp_avg_sq ", "param ", "weight "))


def test_a_copy_of_the_old_bytes_under_a_new_step_names_all_that_repeats(training: Any, save_dcp: SaveDcp):
    training.step()
    old = training.state()
    training.step()
    new = training.state()
    for name, state in new["optim"]["state"].items():
        for key in state.keys() - {"step"}:
            state[key] = old["optim"]["state"][name][key]
    new["model"] = old["model"]
    verdict = check_freshness(save_dcp("old", old), save_dcp("new", new))
    assert verdict.exit_code == 1
    assert stale_roles(verdict) == {"exp_avg", "exp_avg_sq", "param", "weight"}
    assert "although its step went from 1 to 2" in "\n".join(verdict.reasons)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_one_stale_moment_is_found_and_named(moment: str, training: Any, save_dcp: SaveDcp):
    training.step()
    old = training.state()
    training.step()
    new = training.state()
    new["optim"]["state"]["second.weight"][moment] = old["optim"]["state"]["second.weight"][moment]
    verdict = check_freshness(save_dcp("old", old), save_dcp("new", new))
    assert verdict.exit_code == 1
    assert [(chunk.role, chunk.key) for chunk in verdict.stale] == [(moment, f"optim.state.second.weight.{moment}")]


def test_a_stale_master_weight_is_found(training: Any, save_dcp: SaveDcp):
    training.step()
    old = training.state()
    training.step()
    new = training.state()
    new["optim"]["state"]["first.bias"]["master_param"] = old["optim"]["state"]["first.bias"]["master_param"]
    verdict = check_freshness(save_dcp("old", old), save_dcp("new", new))
    assert [(chunk.role, chunk.key) for chunk in verdict.stale] == [("param", "optim.state.first.bias.master_param")]


def test_one_unchanged_bf16_weight_is_no_fault(training: Any, save_dcp: SaveDcp):
    training.step()
    old = training.state()
    training.step()
    new = training.state()
    new["model"]["first.weight"] = old["model"]["first.weight"]
    assert check_freshness(save_dcp("old", old), save_dcp("new", new)).exit_code == 0


def test_all_weights_repeating_under_moving_moments_are_stale(training: Any, save_dcp: SaveDcp):
    training.step()
    old = training.state()
    training.step()
    new = {**training.state(), "model": old["model"]}
    verdict = check_freshness(save_dcp("old", old), save_dcp("new", new))
    assert verdict.exit_code == 1
    assert stale_roles(verdict) == {"weight"}


def two_models(policy: Any, value: Any) -> dict:
    return {
        name: {"model": training.weights(), "optim": {"state": training.optimizer()}}
        for name, training in (("policy", policy), ("value", value))
    }


def test_a_model_whose_step_did_not_advance_is_idle_while_another_trains(training: Any, save_dcp: SaveDcp):
    value = type(training)()
    training.step()
    value.step()
    old = save_dcp("old", two_models(training, value))
    value.step()
    verdict = check_freshness(old, save_dcp("new", two_models(training, value)))
    assert verdict.exit_code == 0
    assert {report.component: report.state for report in verdict.components} == {"policy": "idle", "value": "advanced"}


def test_moments_frozen_with_their_step_are_found_by_the_weight_that_moved(training: Any, save_dcp: SaveDcp):
    training.step()
    old = training.state()
    training.step()
    new = training.state()
    for key in ("step", "exp_avg", "exp_avg_sq"):
        new["optim"]["state"]["first.weight"][key] = old["optim"]["state"]["first.weight"][key]
    verdict = check_freshness(save_dcp("old", old), save_dcp("new", new))
    assert verdict.exit_code == 1
    assert {chunk.key for chunk in verdict.stale} == {
        "optim.state.first.weight.exp_avg",
        "optim.state.first.weight.exp_avg_sq",
    }


def test_state_of_torchs_own_state_dict_is_understood(save_dcp: SaveDcp):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    adam = torch.optim.AdamW(model.parameters())
    saved: list[Path] = []
    for number in range(2):
        model(torch.randn(2, 8)).square().sum().backward()
        adam.step()
        for flat in (False, True):
            weights, state = get_state_dict(model, adam, options=StateDictOptions(flatten_optimizer_state_dict=flat))
            saved.append(save_dcp(f"{number}-{flat}", {"model": weights, "optim": state}))
    assert check_freshness(saved[0], saved[2]).exit_code == 0
    assert check_freshness(saved[1], saved[3]).exit_code == 0
    assert check_freshness(saved[2], saved[2]).exit_code == 1


def test_steps_stored_as_numbers_are_read(save_dcp: SaveDcp):
    def state(step: int, moment: float) -> dict:
        return {"optim": {"state": {"w": {"step": step, "exp_avg": torch.full((4,), moment)}}}}

    verdict = check_freshness(save_dcp("old", state(3, 1.0)), save_dcp("new", state(5, 2.0)))
    assert verdict.components[0].new_steps == (5, 5)


def test_folders_swapped_are_not_fresh(pair: tuple[Path, Path]):
    verdict = check_freshness(pair[1], pair[0])
    assert verdict.exit_code == 1
    assert "goes back from 2 to 1" in verdict.reasons[0]


def test_unrelated_folders_cannot_be_told(pair: tuple[Path, Path], save_dcp: SaveDcp):
    verdict = check_freshness(pair[0], save_dcp("other", {"net": {"w": torch.ones(3)}}))
    assert verdict.exit_code == 2
    assert "no tensor in common" in verdict.reasons[0]


def test_a_tensor_that_is_lost_cannot_be_told(training: Any, save_dcp: SaveDcp):
    training.step()
    old = save_dcp("old", training.state())
    training.step()
    new = training.state()
    del new["optim"]["state"]["first.weight"]["exp_avg"]
    verdict = check_freshness(old, save_dcp("new", new))
    assert verdict.exit_code == 2
    assert "optim.state.first.weight.exp_avg" in verdict.reasons[0]


def test_missing_metadata_is_named(pair: tuple[Path, Path]):
    (pair[1] / ".metadata").unlink()
    with pytest.raises(UserError, match=r"has no \.metadata: its save never finished"):
        check_freshness(*pair)


class Evil:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.target}",)


def test_a_metadata_pickle_that_runs_a_command_is_refused_and_nothing_runs(pair: tuple[Path, Path], tmp_path: Path):
    marker = tmp_path / "ran"
    (pair[1] / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    with pytest.raises(UserError, match=r"refused: it names (posix|nt)\.system, which no metadata needs") as caught:
        check_freshness(*pair)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


def test_a_stored_object_that_runs_a_command_is_refused_and_not_run(tmp_path: Path, save_dcp: SaveDcp):
    marker = tmp_path / "ran"
    state = {"optim": {"state": {"w": {"step": Evil(marker), "exp_avg": torch.ones(4)}}}}
    folder = save_dcp("evil", state)
    with pytest.raises(UserError, match=r"__0_0\.distcp: refused: it names (posix|nt)\.system, which could run code"):
        check_freshness(folder, folder)
    assert not marker.exists()


@pytest.mark.parametrize("escape", ["../old/__0_0.distcp", "/etc/hostname", "a\\..\\b", "", "."])
def test_a_path_out_of_the_folder_is_refused(escape: str, pair: tuple[Path, Path]):
    def change(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = escape

    edit(pair[1], change)
    with pytest.raises(UserError, match="outside of the folder or is no plain path"):
        check_freshness(*pair)


def test_a_link_out_of_the_folder_is_refused(pair: tuple[Path, Path], tmp_path: Path):
    data = pair[1] / "__0_0.distcp"
    shutil.move(data, tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads out of the checkpoint's folder"):
        check_freshness(*pair)


def test_a_cut_file_is_named(pair: tuple[Path, Path]):
    data = pair[1] / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 1)
    with pytest.raises(UserError, match=r"__0_0\.distcp: \d+ bytes, \.metadata says .* it is cut"):
        check_freshness(*pair)


@pytest.mark.parametrize("field", ["fqn", "offset", "chunks", "sizes", "line break", "index"])
def test_damaged_metadata_is_one_line(field: str, pair: tuple[Path, Path]):
    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == "model.first.weight")
        tensor = metadata.state_dict_metadata[index.fqn]
        if field == "chunks":
            tensor.chunks = 3  # type: ignore[union-attr, assignment]
        elif field == "sizes":
            tensor.chunks[0].sizes = (((),),)  # type: ignore[union-attr, assignment]
        elif field == "line break":
            metadata.state_dict_metadata["a\nb"] = tensor
            object.__setattr__(index, "fqn", "a\nb")
        else:
            object.__setattr__(index, field, ("x",))

    edit(pair[1], change)
    if field == "index":
        assert check_freshness(*pair).exit_code == 0
    else:
        with pytest.raises(UserError, match="damaged"):
            check_freshness(*pair)


def test_flipped_bits_of_the_metadata_never_escape_as_another_error(pair: tuple[Path, Path]):
    path = pair[1] / ".metadata"
    intact = path.read_bytes()
    generator = random.Random(0)
    for _ in range(200):
        data = bytearray(intact)
        for _ in range(3):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(UserError):
            check_freshness(*pair)


@pytest.mark.parametrize(
    "bomb",
    [b"\x80\x04Nr\xff\xff\xff\x7f.", b"\x80\x05\x96" + (1 << 36).to_bytes(8, "little") + b"."],
    ids=["memo", "bytes"],
)
def test_a_pickle_that_names_a_huge_size_allocates_nothing(bomb: bytes, pair: tuple[Path, Path]):
    (pair[1] / ".metadata").write_bytes(bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"\.metadata: "):
        check_freshness(*pair)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)


def test_what_is_no_pickle_of_metadata_is_refused(pair: tuple[Path, Path]):
    for content in (b"", b"nonsense", pickle.dumps({"a": 1}), pickle.dumps(io.BytesIO)):
        (pair[1] / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match=r"\.metadata: "):
            check_freshness(*pair)
