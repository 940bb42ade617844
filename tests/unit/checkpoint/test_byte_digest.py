import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest

from headwater.checkpoint import byte_digest, compiled_digest
from headwater.checkpoint.byte_digest import (
    BLOCK_BYTES,
    LANE_WEIGHTS,
    Digester,
    block_weights,
    digest_bytes,
    digest_many,
)
from headwater.checkpoint.compiled_digest import compile_sum_blocks
from headwater.checkpoint.dtype_sizes import ITEMSIZES
from headwater.checkpoint.dtypes import DTYPES


def test_element_sizes_are_those_of_torch():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEMSIZES


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("blocks", [32, 33, 50])
def test_threads_do_not_change_the_value(threads: int, blocks: int, monkeypatch: pytest.MonkeyPatch):
    data = np.random.default_rng(0).integers(0, 256, blocks * BLOCK_BYTES + 1234, dtype=np.uint8)
    monkeypatch.setattr(byte_digest, "_THREADS", 1)
    expected = digest_bytes(data)
    monkeypatch.setattr(byte_digest, "_THREADS", threads)
    monkeypatch.setattr(byte_digest, "_PART_BLOCKS", 2)
    monkeypatch.setattr(byte_digest, "_THREAD_BYTES", BLOCK_BYTES)
    assert digest_bytes(data) == expected
    stream = Digester()
    for part in np.array_split(data, 7):
        stream.update(part)
    assert stream.value() == expected


@pytest.mark.parametrize("started", [0, 1])
def test_where_no_thread_can_be_started_the_value_is_the_same(started: int, monkeypatch: pytest.MonkeyPatch):
    data = np.random.default_rng(0).integers(0, 256, 32 * BLOCK_BYTES, dtype=np.uint8)
    monkeypatch.setattr(byte_digest, "_PART_BLOCKS", 2)
    monkeypatch.setattr(byte_digest, "_THREAD_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(byte_digest, "_THREADS", 1)
    expected = digest_bytes(data)
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if len(refused) < started:
            refused.append(False)
            return start(thread)
        refused.append(True)
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(byte_digest, "_THREADS", 4)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert digest_bytes(data) == expected
    assert refused == [False] * started + [True]


@pytest.mark.parametrize("offset", [0, 4, 1])
@pytest.mark.parametrize("lanes", [0, 1, 9, BLOCK_BYTES // 8 - 1, BLOCK_BYTES // 8, 2 * BLOCK_BYTES // 8 + 5])
def test_the_compiled_loop_equals_that_of_numpy(lanes: int, offset: int):
    data = np.random.default_rng(lanes).integers(0, 256, 8 * lanes + offset, dtype=np.uint8)[offset:].view("<u8")
    weights = block_weights(3, -(-8 * lanes // BLOCK_BYTES))
    compiled = byte_digest._compiled()
    assert compiled is not byte_digest._sum_by_numpy
    expected = byte_digest._sum_by_numpy(data, LANE_WEIGHTS, weights)
    assert int(compiled(data, LANE_WEIGHTS, weights)) == expected


def test_digests_of_many_buffers_are_those_of_each():
    generator = np.random.default_rng(5)
    buffers = [generator.integers(0, 256, size, dtype=np.uint8) for size in (0, 3, 20 * BLOCK_BYTES + 5, 8, 12_345)]
    assert digest_many(buffers) == [digest_bytes(buffer) for buffer in buffers]
    assert digest_many([]) == []


def test_blocks_beyond_the_known_weights_are_weighted_alike():
    known = len(byte_digest._FIRST_BLOCK_WEIGHTS)
    assert list(byte_digest._known_block_weights(known - 2, 4)) == list(block_weights(known - 2, 4))


def test_without_a_compiler_numpy_gives_the_same_value(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    data = np.random.default_rng(1).integers(0, 256, 20 * BLOCK_BYTES + 3, dtype=np.uint8)
    expected = digest_bytes(data)
    monkeypatch.setattr(byte_digest, "_loaded", None)
    monkeypatch.setitem(sys.modules, "headwater.checkpoint.compiled_digest", None)
    assert digest_bytes(data) == expected
    assert "numpy" in caplog.text


def test_a_damaged_cache_costs_a_compilation_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compile_sum_blocks()
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(index.read_bytes()[:100])
    data = np.arange(1000, dtype=np.uint64)
    expected = byte_digest._sum_by_numpy(data, LANE_WEIGHTS, block_weights(0, 1))
    assert int(compile_sum_blocks()(data, LANE_WEIGHTS, block_weights(0, 1))) == expected


def test_numpy_is_used_where_numba_is_told_not_to_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert byte_digest._compile() is byte_digest._sum_by_numpy
    assert "NUMBA_DISABLE_JIT is set" in caplog.text


def test_a_compiled_loop_that_computes_another_value_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(compiled_digest, "compile_sum_blocks", lambda: lambda *_: 0)
    assert byte_digest._compile() is byte_digest._sum_by_numpy
    assert "computes another value" in caplog.text


def test_what_the_writer_process_imports_does_not_import_torch():
    modules = "byte_digest, commit, dtype_sizes, layout, manifest, preflight"
    code = f"import sys; from headwater.checkpoint import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
