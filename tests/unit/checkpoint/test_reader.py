import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.commit import commit, new_folder
from headwater.checkpoint.manifest import ChunkEntry, CorruptCheckpointError, FileEntry, Manifest, read_manifest
from headwater.checkpoint.reader import Checkpoint, bytes_to_verify, verify
from headwater.checkpoint.snapshot import snapshot
from headwater.checkpoint.writer import write_chunks
from headwater.errors import UserError

FILE = "policy/rank-00000.safetensors"


def store(root: Path, chunks: list[Chunk]) -> Checkpoint:
    """A committed checkpoint with one component, however its tensors are cut."""
    folder, save_id = new_folder(root, 1)
    (folder / "policy").mkdir()
    file, written = write_chunks(folder / FILE, snapshot(chunks))
    entries = tuple(
        ChunkEntry(
            "policy",
            chunk.staged.name,
            chunk.staged.global_shape,
            chunk.staged.offset,
            chunk.staged.shape,
            chunk.staged.dtype,
            FILE,
            chunk.begin,
            chunk.end,
            chunk.digest,
        )
        for chunk in written
    )
    files = (FileEntry(FILE, file.size, file.checksum),)
    commit(folder, Manifest("run-1", save_id, 1, 1, "model-a", 1, entries, files))
    return Checkpoint.open(folder)


def flip(path: Path, position: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def boxes_of(tensor: torch.Tensor, rows: list[int], columns: list[int]) -> list[Chunk]:
    """Cut a matrix at the given rows and columns."""
    chunks = []
    for top, bottom in zip([0, *rows], [*rows, tensor.shape[0]], strict=True):
        for left, right in zip([0, *columns], [*columns, tensor.shape[1]], strict=True):
            box = tensor[top:bottom, left:right]
            chunks.append(Chunk("w", box, tuple(tensor.shape), (top, left)))
    return chunks


def test_each_tensor_comes_back_bit_for_bit(save: Callable[..., Path], chunks: list[Chunk]):
    policy = Checkpoint.open(save(3)).component("policy")
    assert policy.names() == sorted(chunk.name for chunk in chunks)
    for chunk in chunks:
        empty = Chunk.whole(chunk.name, torch.zeros_like(chunk.tensor))
        policy.read_into(empty)
        assert torch.equal(empty.tensor, chunk.tensor)


def test_trainer_state_comes_back(save: Callable[..., Path]):
    state = {"step": 3, "rng": [2**63, 2**127], "lr": 0.1, "none": None, "text": "ä"}
    assert Checkpoint.open(save(3, state=state)).trainer_state() == state


@pytest.mark.parametrize("stored", [([], []), ([2], []), ([], [3]), ([1, 4], [2, 5]), ([1, 2, 3, 4, 5], [])])
@pytest.mark.parametrize("wanted", [([], []), ([3], []), ([], [1, 4]), ([2, 5], [3])])
def test_any_cut_is_read_from_any_other_cut(stored: tuple, wanted: tuple, tmp_path: Path):
    live = torch.randn(6, 7)
    policy = store(tmp_path, boxes_of(live, *stored)).component("policy")
    for chunk in boxes_of(live.clone(), *wanted):
        expected = chunk.tensor.clone()
        chunk.tensor.zero_()
        policy.read_into(chunk)
        assert torch.equal(chunk.tensor, expected)


def test_whole_tensor_is_put_together(tmp_path: Path):
    live = torch.randn(6, 7).bfloat16()
    read = store(tmp_path, boxes_of(live, [2], [3])).component("policy").read("w")
    assert torch.equal(read, live)


def test_live_parameter_with_strides_is_filled_in_place(tmp_path: Path):
    live = torch.randn(4, 6)
    policy = store(tmp_path, [Chunk.whole("w", live)]).component("policy")
    parameter = torch.nn.Parameter(torch.zeros(6, 4).T)
    pointer = parameter.data_ptr()
    policy.read_into(Chunk.whole("w", parameter))
    assert torch.equal(parameter.detach(), live)
    assert parameter.data_ptr() == pointer


def test_scalars_and_empty_tensors_are_read(tmp_path: Path):
    stored = [Chunk.whole("s", torch.tensor(7.5)), Chunk.whole("e", torch.empty(0, 3))]
    policy = store(tmp_path, stored).component("policy")
    assert policy.read("s").item() == 7.5
    assert policy.read("e").shape == (0, 3)


def test_overlapping_stored_boxes_do_not_pass_for_coverage(tmp_path: Path):
    live = torch.arange(4.0)
    stored = [Chunk("w", live[0:2], (4,), (0,)), Chunk("w", live[1:3], (4,), (1,))]
    policy = store(tmp_path, stored).component("policy")
    target = torch.zeros(3)
    policy.read_into(Chunk("w", target, (4,), (0,)))
    assert target.tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"chunk w: the stored boxes do not cover shape \(4,\) at offset \(0,\)"):
        policy.read_into(Chunk.whole("w", torch.zeros(4)))


def test_box_that_is_not_covered_is_refused_before_anything_is_filled(tmp_path: Path):
    policy = store(tmp_path, [Chunk("w", torch.ones(2, 3), (4, 3), (0, 0))]).component("policy")
    target = torch.zeros(4, 3)
    with pytest.raises(UserError, match="chunk w: the stored boxes do not cover"):
        policy.read_into(Chunk.whole("w", target))
    assert target.abs().sum() == 0
    with pytest.raises(UserError, match="do not cover"):
        policy.read("w")


def test_missing_chunk_and_component_are_named(save: Callable[..., Path]):
    checkpoint = Checkpoint.open(save(1))
    with pytest.raises(UserError, match=r"chunk lm_head\.weight is not in this checkpoint"):
        checkpoint.component("policy").read_into(Chunk.whole("lm_head.weight", torch.ones(1)))
    with pytest.raises(UserError, match="no component value; it has policy"):
        checkpoint.component("value")


def test_wrong_global_shape_names_the_chunk_and_both_shapes(save: Callable[..., Path]):
    policy = Checkpoint.open(save(1)).component("policy")
    with pytest.raises(UserError, match=r"chunk layer\.weight has global shape \(6, 4\), \(4, 6\) is asked for"):
        policy.read_into(Chunk.whole("layer.weight", torch.zeros(4, 6)))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [(torch.int64, torch.float32), (torch.float32, torch.int64), (torch.int64, torch.int32), (torch.bool, torch.uint8)],
)
def test_dtype_that_does_not_convert_names_the_chunk(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path):
    policy = store(tmp_path, [Chunk.whole("w", torch.ones(2, dtype=stored))]).component("policy")
    with pytest.raises(UserError, match=r"chunk w is torch\.\w+ and does not convert to"):
        policy.read_into(Chunk.whole("w", torch.ones(2, dtype=wanted)))


def test_floating_point_dtypes_convert(tmp_path: Path):
    policy = store(tmp_path, [Chunk.whole("w", torch.tensor([1.5, -2.0]).bfloat16())]).component("policy")
    target = torch.zeros(2)
    policy.read_into(Chunk.whole("w", target))
    assert target.tolist() == [1.5, -2.0]


def test_flipped_byte_is_seen_on_load_and_names_file_and_chunk(save: Callable[..., Path], chunks: list[Chunk]):
    folder = save(1)
    entry = next(chunk for chunk in read_manifest(folder).chunks if chunk.name == "layer.weight")
    flip(folder / FILE, entry.begin + 5)
    policy = Checkpoint.open(folder).component("policy")
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors: chunk layer\.weight does not match"):
        policy.read_into(Chunk.whole("layer.weight", torch.zeros(6, 4)))
    policy.read_into(Chunk.whole("norm.weight", torch.zeros(5)))


def test_altered_trainer_state_is_seen(save: Callable[..., Path]):
    folder = save(1)
    path = folder / "trainer.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))
    with pytest.raises(CorruptCheckpointError, match=r"trainer\.json: does not match its checksum"):
        Checkpoint.open(folder).trainer_state()


def test_verify_of_a_sound_checkpoint_finds_nothing_and_reports_all_bytes(save: Callable[..., Path]):
    checkpoint = Checkpoint.open(save(1))
    read: list[int] = []
    assert verify(checkpoint, read.append) == []
    assert sum(read) == bytes_to_verify(checkpoint) > 0


@pytest.mark.parametrize("file", ["trainer.json", "config.yaml", "tokenizer/tokenizer.json", FILE])
def test_verify_finds_a_flipped_byte_in_every_file(file: str, save: Callable[..., Path]):
    folder = save(1)
    flip(folder / file, 1)
    (problem,) = verify(Checkpoint.open(folder))
    assert f"{file}: does not match its checksum" in problem


def test_verify_names_the_chunk_of_each_flipped_byte(save: Callable[..., Path]):
    folder = save(1)
    entries = [chunk for chunk in read_manifest(folder).chunks if chunk.name in ("layer.weight", "mask")]
    for entry in entries:
        flip(folder / FILE, entry.begin)
    problems = verify(Checkpoint.open(folder))
    assert len(problems) == 2
    assert all(f"{FILE}: chunk {entry.name} " in problem for entry, problem in zip(entries, problems, strict=True))


@pytest.mark.parametrize("file", [FILE, "trainer.json", "tokenizer/tokenizer.json"])
def test_cut_and_missing_files_are_refused_on_opening(file: str, save: Callable[..., Path]):
    folder = save(1)
    path = folder / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=f"{file}: .* bytes, the manifest says"):
        Checkpoint.open(folder)
    path.unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{file}: listed in the manifest, but it cannot be read"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("link_folder", [False, True], ids=["file", "folder"])
def test_link_out_of_the_folder_is_refused(link_folder: bool, save: Callable[..., Path], tmp_path: Path):
    folder = save(1)
    inside = folder / "policy" if link_folder else folder / "trainer.json"
    inside.rename(tmp_path / "outside")
    inside.symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptCheckpointError, match="leads out of the checkpoint's folder"):
        Checkpoint.open(folder)


def test_pipe_in_place_of_a_file_is_refused_without_waiting(save: Callable[..., Path]):
    folder = save(1)
    (folder / "trainer.json").unlink()
    os.mkfifo(folder / "trainer.json")
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        Checkpoint.open(folder)


def test_copy_under_another_name_opens(save: Callable[..., Path], tmp_path: Path):
    renamed = save(1).rename(tmp_path / "my copy")
    assert Checkpoint.open(renamed).manifest.step == 1


def test_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(UserError, match="not a committed checkpoint"):
        Checkpoint.open(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        Checkpoint.open(tmp_path / "absent")


def test_manifest_that_lists_no_trainer_state_says_so(tmp_path: Path):
    with pytest.raises(CorruptCheckpointError, match="not listed"):
        store(tmp_path, []).trainer_state()


def test_huge_shape_in_a_manifest_does_not_allocate(tmp_path: Path):
    checkpoint = store(tmp_path, [Chunk.whole("w", torch.ones(2))])
    (chunk,) = checkpoint.manifest.chunks
    huge = replace(checkpoint.manifest, chunks=(replace(chunk, global_shape=(1 << 60,)),))
    (checkpoint.folder / "manifest.json").write_text(huge.to_json())
    with pytest.raises(UserError, match="do not cover"):
        Checkpoint.open(checkpoint.folder).component("policy").read("w")
