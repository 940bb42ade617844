from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import digest, digest_bytes
from headwater.checkpoint.dtypes import DTYPES, ITEMSIZES
from headwater.checkpoint.snapshot import snapshot
from headwater.checkpoint.writer import write_chunks


def mixed_chunks() -> list[Chunk]:
    return [
        Chunk.whole("odd.bf16", torch.randn(3).bfloat16()),
        Chunk.whole("flag", torch.tensor([True, False, True])),
        Chunk.whole("master", torch.randn(2, 5)),
        Chunk.whole("step", torch.tensor(11)),
        Chunk.whole("none", torch.empty(0, 3)),
        Chunk.whole("fp8", torch.randn(7).to(torch.float8_e4m3fn)),
        Chunk("part", torch.randn(2, 3), (4, 6), (2, 3)),
    ]


def test_safetensors_reads_the_file(tmp_path: Path):
    chunks = mixed_chunks()
    write_chunks(tmp_path / "f.safetensors", snapshot(chunks))
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {"odd.bf16", "flag", "master", "step", "none", "fp8", "part@2,3"}
        for chunk in chunks:
            stored = file.get_tensor("part@2,3" if chunk.name == "part" else chunk.name)
            assert stored.dtype == chunk.tensor.dtype
            assert stored.shape == chunk.tensor.shape
            assert digest(stored) == digest(chunk.tensor)


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_survives_safetensors(name: str, tmp_path: Path):
    tensor = torch.tensor([0, 1, 1, 0]).to(DTYPES[name])
    write_chunks(tmp_path / "f.safetensors", snapshot([Chunk.whole("w", tensor)]))
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        stored = file.get_tensor("w")
    assert stored.dtype == tensor.dtype
    assert digest(stored) == digest(tensor)


def test_data_begins_on_a_page_without_holes_and_aligned(tmp_path: Path):
    file, written = write_chunks(tmp_path / "f.safetensors", snapshot(mixed_chunks()))
    assert written[0].begin == 4096
    assert [chunk.begin for chunk in written[1:]] == [chunk.end for chunk in written[:-1]]
    assert written[-1].end == file.size == (tmp_path / "f.safetensors").stat().st_size
    assert all(chunk.begin % ITEMSIZES[chunk.staged.dtype] == 0 for chunk in written)


def test_header_longer_than_a_page_still_ends_on_one(tmp_path: Path):
    chunks = [Chunk.whole(f"layer.{index}.weight", torch.ones(1)) for index in range(200)]
    _, written = write_chunks(tmp_path / "f.safetensors", snapshot(chunks))
    assert written[0].begin > 4096
    assert written[0].begin % 4096 == 0


def test_reported_ranges_digests_and_checksum_are_those_of_the_file(tmp_path: Path):
    file, written = write_chunks(tmp_path / "f.safetensors", snapshot(mixed_chunks()))
    data = (tmp_path / "f.safetensors").read_bytes()
    assert file.checksum == digest_bytes(data)
    for chunk in written:
        assert data[chunk.begin : chunk.end] == chunk.staged.data.tobytes()
        assert chunk.digest == digest_bytes(data[chunk.begin : chunk.end])


def test_digest_is_of_the_bytes_written_and_not_of_the_live_tensor(tmp_path: Path):
    (staged,) = snapshot([Chunk.whole("w", torch.ones(4))])
    staged.data[0] ^= 1
    _, (written,) = write_chunks(tmp_path / "f.safetensors", [staged])
    assert written.digest != staged.live_digest


def test_existing_file_is_not_overwritten(tmp_path: Path):
    (tmp_path / "f.safetensors").write_text("kept")
    with pytest.raises(FileExistsError):
        write_chunks(tmp_path / "f.safetensors", [])
    assert (tmp_path / "f.safetensors").read_text() == "kept"


def test_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    monkeypatch.setattr("headwater.checkpoint.writer.os.fsync", synced.append)
    write_chunks(tmp_path / "f.safetensors", [])
    assert len(synced) == 1
