import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.manifest import read_manifest
from headwater.cli import ckpt
from headwater.config.schema import CheckpointingConfig
from headwater.errors import UserError

TENSORS = Path("policy") / "rank-00000.safetensors"


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    ckpt.add_parser(parser.add_subparsers())
    args = parser.parse_args(["ckpt", *map(str, arguments)])
    return args.run(args)


def save(root: Path, steps: list[int], value: float = 1.0, **state: Any) -> list[Path]:
    manager = CheckpointManager(
        CheckpointingConfig(checkpoint_dir=str(root), keep_latest_k=None, strategy="sync"), "run-1", "model-a"
    )
    chunks = [Chunk.whole("w", torch.full((300,), value)), Chunk.whole("b", torch.ones(2).bfloat16())]
    folders = [manager.save(step, {"policy": chunks}, {"step": step, **state}, "", None, step) for step in steps]
    manager.close()
    return folders


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_ls_lists_all_saves_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second, third = save(tmp_path, [10, 20, 30])
    (first / "PINNED").touch()
    (second / "manifest.json").unlink()
    (third / "manifest.json").write_text("{")
    assert run("ls", tmp_path) == 0
    out, err = capsys.readouterr()
    rows = {
        cells[1]: cells for line in out.splitlines() if len(cells := [c.strip() for c in line.split("│")[1:-1]]) == 7
    }
    ids = [folder.name.split("-")[1] for folder in (first, second, third)]
    assert rows[ids[0]][:6] == ["10", ids[0], "yes", "yes", "5.3 kB", "2"]
    assert rows[ids[1]][:4] == ["20", ids[1], "no", ""]
    assert rows[ids[2]][:4] == ["30", ids[2], "corrupt", ""]
    assert f"{third.name}/manifest.json: not valid JSON" in err


def test_ls_of_an_empty_folder_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("ls", tmp_path) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"


def test_show_tells_what_is_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (folder,) = save(tmp_path, [10])
    assert run("show", folder) == 0
    out = capsys.readouterr().out
    assert "step 10, weight version 10" in out
    assert "model model-a" in out
    assert "1.2 kB" in out
    assert str(TENSORS) in out


def test_show_json_is_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (folder,) = save(tmp_path, [10])
    assert run("show", folder, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(read_manifest(folder).to_json())


def test_folder_of_a_run_stands_for_its_newest_committed_one_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, second, third = save(tmp_path, [10, 20, 30])
    (third / "manifest.json").unlink()
    assert run("show", tmp_path, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["step"] == 20
    assert err == f"newest committed checkpoint of {tmp_path}: {second.name}\n"


def test_verify_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (folder,) = save(tmp_path, [10])
    assert run("verify", folder) == 0
    assert capsys.readouterr().out == f"{folder}: holds (3 files, 2 chunks)\n"


def test_verify_names_file_and_chunk_of_a_flipped_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (folder,) = save(tmp_path, [10])
    flip(folder / TENSORS, 4096)
    assert run("verify", folder) == 1
    assert f"{folder / TENSORS}: chunk w does not match" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut file", "missing file", "altered manifest"])
def test_verify_of_a_damaged_folder_does_not_hold(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (folder,) = save(tmp_path, [10])
    if damage == "cut file":
        (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-1])
    elif damage == "missing file":
        (folder / TENSORS).unlink()
    else:
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"step": 10', '"step": 11'))
    assert run("verify", folder) == 1
    out = capsys.readouterr().out
    assert str(TENSORS) in out or "manifest.json" in out


def test_verify_of_a_future_format_cannot_tell(tmp_path: Path):
    (folder,) = save(tmp_path, [10])
    (folder / "manifest.json").write_text('{"format_version": 2}')
    with pytest.raises(UserError, match="format version 2") as caught:
        run("verify", folder)
    assert caught.value.exit_code == 2


def test_diff_of_one_state_is_identical(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (a,), (b,) = save(tmp_path / "a", [4]), save(tmp_path / "b", [4])
    assert run("diff", a, b) == 0
    assert capsys.readouterr().out == "identical\n"


def test_diff_sums_up_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (a,), (b,) = save(tmp_path / "a", [4], rng=[1]), save(tmp_path / "b", [4], value=1.5, rng=[2])
    assert run("diff", a, b) == 1
    assert capsys.readouterr().out.splitlines() == [
        "policy: 1 of 2 tensors differ by up to 0.5: w",
        "trainer.rng: [1] and [2]",
    ]


def test_diff_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (a,), (b,) = save(tmp_path / "a", [4]), save(tmp_path / "b", [4], value=float("nan"))
    assert run("diff", a, a, "--json") == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True
    assert run("diff", a, b, "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["identical"] is False
    assert result["components"][0]["changed"] == ["w"]
    assert result["components"][0]["max_abs_difference"] is None


def test_diff_with_a_corrupt_side_cannot_tell(tmp_path: Path):
    (a,), (b,) = save(tmp_path / "a", [4]), save(tmp_path / "b", [4])
    flip(b / TENSORS, 4096)
    with pytest.raises(UserError, match="chunk w does not match") as caught:
        run("diff", a, b)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("command", [["ls"], ["show"], ["verify"], ["diff"]])
@pytest.mark.parametrize("kind", ["absent", "file"])
def test_bad_path_is_one_line_and_exit_2(command: list[str], kind: str, tmp_path: Path):
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    arguments = [*command, path, path] if command == ["diff"] else [*command, path]
    with pytest.raises(UserError, match=f"{path}: no(t a| such) folder") as caught:
        run(*arguments)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("command", ["show", "verify"])
def test_folder_without_a_checkpoint_is_bad_input(command: str, tmp_path: Path):
    with pytest.raises(UserError, match="neither a checkpoint nor a folder with a committed one"):
        run(command, tmp_path)


@pytest.mark.parametrize("command", ["show", "verify"])
def test_uncommitted_checkpoint_is_bad_input(command: str, tmp_path: Path):
    (folder,) = save(tmp_path, [10])
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="not a committed checkpoint"):
        run(command, folder)


def test_copied_and_renamed_checkpoint_is_accepted(tmp_path: Path):
    (folder,) = save(tmp_path / "run", [10])
    shutil.copytree(folder, tmp_path / "copy")
    assert run("verify", tmp_path / "copy") == 0


def test_parser_imports_neither_torch_nor_rich():
    script = (
        "import argparse, sys; from headwater.cli import ckpt\n"
        "ckpt.add_parser(argparse.ArgumentParser().add_subparsers())\n"
        "sys.exit(bool({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
