"""`checkpointing.verify: readback`: what the disk gives back is compared before the commit."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.checkpoint import readback
from headwater.checkpoint.byte_digest import digest_bytes
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.manifest import ChunkEntry, FileEntry
from headwater.checkpoint.readback import read_back
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError

# A disk that alters a byte of a file once that was synced.
PLANT = """
import os
from pathlib import Path
here = Path(__file__).parent
real = os.fsync
def fsync(fd):
    real(fd)
    path, target = os.readlink(f"/proc/self/fd/{fd}"), here / "target"
    if target.exists() and path.endswith(target.read_text().split()[0]):
        position = int(target.read_text().split()[1])
        other = os.open(path, os.O_RDWR)
        byte = os.pread(other, 1, position)[0]
        os.pwrite(other, bytes([byte ^ 4]), position)
        real(other)
        os.close(other)
        (here / "altered").write_text(path)
os.fsync = fsync
"""
TENSORS = "policy/rank-00000.safetensors"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a sitecustomize that processes started from now on run first."""
    folder = tmp_path / "plant"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    return folder


def save(manager: CheckpointManager, step: int) -> None:
    chunks = [Chunk.whole(name, torch.full((1500,), float(step))) for name in ("a", "b")]
    manager.save(step, {"policy": chunks}, {"step": step}, "grpo: {}\n", None, step)
    manager.wait_committed(60)


def in_chunk_b(root: Path) -> int:
    (folder,) = root.glob("step_000001-*")
    (begin,) = (chunk.begin for chunk in Checkpoint.open(folder).manifest.chunks if chunk.name == "b")
    return begin + 10


@pytest.mark.parametrize("strategy", ["native", "sync"])
@pytest.mark.parametrize("file", [TENSORS, "header", "config.yaml"])
def test_a_file_that_changed_on_the_disk_is_not_committed(
    strategy: Any, file: str, root: Path, planted: Path, monkeypatch: pytest.MonkeyPatch
):
    if strategy == "sync":
        real = os.fsync
        code: dict[str, Any] = {"__file__": str(planted / "sitecustomize.py")}
        exec(PLANT, code)
        planted_fsync, os.fsync = os.fsync, real
        monkeypatch.setattr(os, "fsync", planted_fsync)
    config = CheckpointingConfig(checkpoint_dir=str(root), strategy=strategy, verify="readback")
    manager = CheckpointManager(config, "run", "model")
    try:
        save(manager, 1)
        position = {TENSORS: in_chunk_b(root), "header": 3000, "config.yaml": 2}[file]
        path = TENSORS if file == "header" else file
        (planted / "target").write_text(f"{path} {position}")
        with pytest.raises(HeadwaterError) as caught:
            save(manager, 2)
        altered = Path((planted / "altered").read_text())
        where = f"{path} chunk b" if file == TENSORS else path
        assert str(caught.value) == (
            f"the checkpoint {altered.relative_to(root).parts[0]} read back from the disk is not what was written, "
            f"so it was removed: {where}: check the disk and its memory"
        )
        assert not isinstance(caught.value, UserError)
        assert [path.name[:11] for path in root.glob("step_*")] == ["step_000001"]
        (planted / "target").unlink()
        save(manager, 3)
        assert [path.name[:11] for path in sorted(root.glob("step_*"))] == ["step_000001", "step_000003"]
        assert manager.take_news().metrics["checkpoint/readback_s"] > 0
    finally:
        manager.close()


def test_without_readback_it_is_committed_and_found_on_reading(root: Path, planted: Path):
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root)), "run", "model")
    try:
        save(manager, 1)
        (planted / "target").write_text(f"{TENSORS} {in_chunk_b(root)}")
        save(manager, 2)
        assert (planted / "altered").exists()
        (folder,) = root.glob("step_000002-*")
        assert "chunk b does not match" in "\n".join(verify(Checkpoint.open(folder)))
        assert manager.take_news().metrics["checkpoint/readback_s"] == 0
    finally:
        manager.close()


def write(folder: Path, data: bytes) -> FileEntry:
    with open(folder / "file", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry("file", len(data), digest_bytes(data))


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "refused"])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (8 << 20) - 1, (8 << 20) + 4097])
def test_files_and_ranges_of_any_size_are_read_whole(
    size: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not direct:
        monkeypatch.setattr(readback, "_open_direct", lambda path: None)
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        assert offset % 4096 == 0  # some file systems refuse others
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    entry = write(tmp_path, data)
    read_back(tmp_path, [entry], [])
    for begin, end in ((0, size), (size // 3, size // 2), (min(5000, size), size), (size, size)):
        chunk = ChunkEntry("policy", "w", (end - begin,), (0,), (end - begin,), "U8", "file", begin, end, 0)
        assert readback._digest(tmp_path / "file", begin, end) == digest_bytes(data[begin:end])
        with pytest.raises(HeadwaterError, match="file chunk w:"):
            read_back(tmp_path, [FileEntry("file", size, entry.checksum ^ 1)], [chunk])
    with pytest.raises(HeadwaterError, match="removed: file:"):
        read_back(tmp_path, [FileEntry("file", size, entry.checksum ^ 1)], [])


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real, data = os.preadv, np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8).tobytes()
    monkeypatch.setattr(os, "preadv", lambda *args: min(real(*args), 9000))
    read_back(tmp_path, [write(tmp_path, data)], [])
    assert readback._digest(tmp_path / "file", 30_001, 40_001) == digest_bytes(data[30_001:40_001])


def test_a_read_that_gives_nothing_is_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = write(tmp_path, bytes(50_000))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match=r"Input/output error.*file"):
        read_back(tmp_path, [entry], [])


def test_a_file_that_lost_its_end_is_refused(tmp_path: Path):
    entry = write(tmp_path, bytes(range(256)) * 40)
    os.truncate(tmp_path / "file", 10_000)
    with pytest.raises(HeadwaterError, match="read back from the disk is not what was written"):
        read_back(tmp_path, [entry], [])


def test_the_page_cache_is_passed_by_where_the_file_system_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, b"x" * 5000)
    dropped: list[tuple[Any, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: dropped.append(args[1:]))
    try:
        os.close(os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT))
        supported = True
    except OSError:
        supported = False
    with readback._opened(tmp_path / "file") as descriptor:
        assert bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT) == supported
    assert dropped == [(0, 0, os.POSIX_FADV_DONTNEED)]


@pytest.mark.parametrize("when", ["opening", "reading"])
def test_where_it_is_refused_the_file_is_read_through_an_emptied_cache(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry = write(tmp_path, b"x" * 5000)
    real_open, real_read, refused = os.open, os.preadv, []

    def open_(path: Any, flags: int, *rest: Any) -> int:
        if when == "opening" and flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest)

    def preadv(descriptor: int, *rest: Any) -> int:
        if when == "reading" and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_read(descriptor, *rest)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    read_back(tmp_path, [entry], [])
    assert refused
