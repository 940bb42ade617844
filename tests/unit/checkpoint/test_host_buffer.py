import errno
import os
from pathlib import Path

import numpy as np
import pytest

from headwater.checkpoint import host_buffer
from headwater.checkpoint.host_buffer import BufferPool, HostBuffer
from headwater.errors import HeadwaterError, UserError

SIZES = {"policy": 10_000}


def test_a_leased_set_is_not_lent_again_and_a_sealed_one_not_written(tmp_path: Path):
    pool = BufferPool(tmp_path)
    first = pool.acquire(SIZES, False, 0)
    second = pool.acquire(SIZES, False, 0)
    assert first is not None
    assert second is not None
    assert pool.acquire(SIZES, False, 0) is None
    first.writable("policy", 10)[:] = 1
    second.writable("policy", 10)[:] = 2
    assert os.pread(first.fd("policy"), 3, 0) == b"\1\1\1"
    first.seal()
    with pytest.raises(HeadwaterError, match="is not written"):
        first.writable("policy", 10)
    first.release()
    first.release()
    again = pool.acquire(SIZES, False, 0)
    assert again is not None
    assert pool.acquire(SIZES, False, 0) is None
    with pytest.raises(HeadwaterError):
        first.writable("policy", 10)
    for lease in (second, again):
        lease.release()
    pool.close()


def test_preparing_ahead_makes_both_sets(tmp_path: Path):
    pool = BufferPool(tmp_path)
    pool.prepare(SIZES, False)
    leases = [pool.acquire(SIZES, False, 60) for _ in range(2)]
    assert all(lease is not None for lease in leases)
    pool.close()
    for lease in leases:
        assert lease is not None
        lease.release()


def test_a_buffer_grows_and_keeps_its_descriptor(tmp_path: Path):
    buffer = HostBuffer(tmp_path)
    buffer.reserve(5000, False)
    fd = buffer.fd
    buffer.reserve(50_000, False)
    buffer.view(50_000)[:] = np.arange(50_000, dtype=np.uint8)
    assert buffer.fd == fd
    assert os.pread(fd, 4, 49_996) == bytes(np.arange(50_000, dtype=np.uint8)[-4:])
    buffer.close()


def test_without_memfd_an_unnamed_file_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(host_buffer.os, "memfd_create", refuse)
    buffer = HostBuffer(tmp_path)
    buffer.reserve(5000, False)
    buffer.view(3)[:] = 9
    assert os.pread(buffer.fd, 3, 0) == b"\t\t\t"
    assert list(tmp_path.iterdir()) == []
    buffer.close()


def test_short_of_memory_one_set_is_enough_and_none_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pool = BufferPool(tmp_path)
    first = pool.acquire(SIZES, False, 0)
    assert first is not None
    monkeypatch.setattr(host_buffer, "available_bytes", lambda: 0)
    assert pool.acquire(SIZES, False, 0) is None
    assert "one staged checkpoint only" in caplog.text
    first.release()
    again = pool.acquire(SIZES, False, 0)
    assert again is not None
    again.release()
    with pytest.raises(UserError, match=r"no host memory to stage a checkpoint of 99,000 bytes .*strategy=sync"):
        pool.acquire({"policy": 99_000}, False, 0)
    monkeypatch.undo()
    assert pool.acquire({"policy": 99_000}, False, 0) is not None


def test_short_of_memory_beside_a_set_that_is_kept_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody else gives a set back: whoever keeps it may be the very one who waits."""
    pool = BufferPool(tmp_path)
    lease = pool.acquire({"w": 4096}, pin=False, timeout=0)
    assert lease is not None
    assert lease.keep()
    lease.release()
    monkeypatch.setattr(host_buffer, "available_bytes", lambda: 100)
    with pytest.raises(UserError, match="no host memory to stage a checkpoint"):
        pool.acquire({"w": 1 << 20}, pin=False, timeout=0.1)
    lease.let_go()
    assert pool.acquire({"w": 4096}, pin=False, timeout=0) is not None
    pool.close()
