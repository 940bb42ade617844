import subprocess
import sys

import numpy as np
import pytest

from headwater.checkpoint import byte_digest
from headwater.checkpoint.byte_digest import BLOCK_BYTES, Digester, digest_bytes
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
    assert digest_bytes(data) == expected
    stream = Digester()
    for part in np.array_split(data, 7):
        stream.update(part)
    assert stream.value() == expected


def test_what_the_writer_process_imports_does_not_import_torch():
    modules = "byte_digest, commit, dtype_sizes, layout, manifest, preflight"
    code = f"import sys; from headwater.checkpoint import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
