import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headwater.checkpoint.compare import check_freshness
from headwater.errors import UserError


def save(folder: Path, name: str = "model.safetensors", **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def test_two_models_of_which_one_weight_changed_are_fresh(tmp_path: Path):
    a, b = torch.randn(3, 3), torch.randn(4).bfloat16()
    verdict = check_freshness(save(tmp_path / "old", a=a, b=b), save(tmp_path / "new", a=a + 1, b=b))
    assert verdict.exit_code == 0
    assert (verdict.components[0].compared, verdict.components[0].repeated) == (2, 1)


def test_a_copied_model_is_stale_and_its_weights_are_named(tmp_path: Path):
    old = save(tmp_path / "old", a=torch.randn(3), b=torch.randn(4))
    shutil.copytree(old, tmp_path / "new")
    verdict = check_freshness(old, tmp_path / "new")
    assert verdict.exit_code == 1
    assert {chunk.key for chunk in verdict.stale} == {"a", "b"}


def test_how_a_model_is_cut_into_files_makes_no_difference(tmp_path: Path):
    a, b = torch.randn(3), torch.randn(4)
    old = save(tmp_path / "old", a=a, b=b)
    save(tmp_path / "new", "model-00001-of-00002.safetensors", a=a)
    new = save(tmp_path / "new", "model-00002-of-00002.safetensors", b=b)
    assert check_freshness(old, new).exit_code == 1


def test_integer_buffers_are_no_evidence(tmp_path: Path):
    old = save(tmp_path / "old", positions=torch.arange(3))
    assert check_freshness(old, old).exit_code == 2


def test_one_name_in_several_files_is_compared_file_by_file(tmp_path: Path):
    for folder, shift in (("old", 0.0), ("new", 1.0)):
        for rank in range(2):
            save(tmp_path / folder, f"rank{rank}.safetensors", w=torch.ones(3) * rank + shift)
    verdict = check_freshness(tmp_path / "old", tmp_path / "new")
    assert (verdict.exit_code, verdict.components[0].compared) == (0, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abc", "not a safetensors file, or cut"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "not a safetensors file, or cut"),
        ((2).to_bytes(8, "little") + b"{!", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a list of tensors"),
    ],
)
def test_a_file_that_is_none_is_named(content: bytes, message: str, tmp_path: Path):
    old = save(tmp_path / "old", a=torch.ones(3))
    (old / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message):
        check_freshness(old, old)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 13]}, "it is cut"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 12]}, "the header is damaged"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [12, 0]}, "entry for 'a' is damaged"),
        ({"dtype": "F32", "shape": [-3], "data_offsets": [0, 12]}, "entry for 'a' is damaged"),
        ({"dtype": "F32"}, "entry for 'a' is damaged"),
        (3, "entry for 'a' is damaged"),
    ],
)
def test_a_header_that_lies_is_refused(entry: object, message: str, tmp_path: Path):
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    with pytest.raises(UserError, match=message):
        check_freshness(tmp_path, tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path):
    old = save(tmp_path / "old", a=torch.ones(3))
    os.remove(old / "model.safetensors")
    (old / "model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        check_freshness(old, old)
