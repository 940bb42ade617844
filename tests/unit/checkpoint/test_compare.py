from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.checkpoint import compare
from headwater.checkpoint.compare import PIECE, find_repeats, is_live
from headwater.checkpoint.foreign.record import ByteRange, StoredChunk
from headwater.checkpoint.freshness import Pair
from headwater.errors import UserError


def pair(tmp_path: Path, old: bytes, new: bytes, dtype: str = "F32", lead: int = 3) -> Pair:
    chunks = []
    for name, data in (("old", old), ("new", new)):
        path = tmp_path / name
        path.write_bytes(b"x" * lead + data + name.encode())
        stored = ByteRange(path, lead, lead + len(data))
        chunks.append(StoredChunk("", "exp_avg", "w", "w", (0,), (len(data),), dtype, stored))
    return Pair(*chunks)


def repeated(found: Pair) -> bool:
    (repeat,) = find_repeats([found]).values()
    return repeat.repeated


@pytest.mark.parametrize("size", [0, 1, 7, 8, 1000, PIECE - 1, PIECE, PIECE + 5, 40 * PIECE + 3])
def test_equal_ranges_repeat_and_a_flip_at_either_end_does_not(size: int, tmp_path: Path):
    data = np.random.default_rng(0).bytes(size)
    assert repeated(pair(tmp_path, data, data))
    for position in {0, size // 2, size - 1} if size else ():
        flipped = bytearray(data)
        flipped[position] ^= 1
        assert not repeated(pair(tmp_path, data, bytes(flipped)))


def test_ranges_of_other_length_do_not_repeat(tmp_path: Path):
    assert not repeated(pair(tmp_path, b"abcd", b"abc"))


def test_every_byte_is_counted(tmp_path: Path):
    counted: list[int] = []
    data = bytes(33 * PIECE)
    find_repeats([pair(tmp_path, data, data)], counted.append)
    assert sum(counted) == compare.bytes_to_compare([pair(tmp_path, data, data)]) == 2 * len(data)


def test_a_file_that_ends_early_is_an_error_of_one_line(tmp_path: Path):
    found = pair(tmp_path, b"abcd", b"abcd")
    found.new.bytes.path.write_bytes(b"x")
    with pytest.raises(UserError, match=r"w: cannot be read from .* \(the file ends early\)"):
        find_repeats([found])


def test_a_disk_that_never_answers_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import threading

    release = threading.Event()
    monkeypatch.setattr(compare, "_STALL_SECONDS", 0.05)
    monkeypatch.setattr(compare, "_compare", lambda segment: release.wait(60))
    with pytest.raises(UserError, match="comparing tensors: nothing was read"):
        find_repeats([pair(tmp_path, b"abcd", b"abcd")])
    release.set()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("F32", torch.float32), ("F64", torch.float64), ("BF16", torch.bfloat16), ("F16", torch.float16)],
)
def test_only_normal_finite_numbers_are_live(name: str, dtype: torch.dtype):
    def live(*values: float, times: int = 1) -> bool:
        data = torch.tensor(values, dtype=torch.float64).to(dtype).repeat(times)
        return is_live(data.view(torch.uint8).numpy(), name)

    info = torch.finfo(dtype)
    assert not live(0.0, -0.0, float("inf"), float("-inf"), float("nan"), info.smallest_normal / 2, times=2000)
    assert live(0.0, info.smallest_normal)
    assert live(-1.0)
    assert live(*[0.0] * 9000, 1.0)


def test_decay_of_a_subnormal_number_stands_still():
    value = torch.tensor([3e-44])
    assert torch.equal(value * 0.999, value)
    assert not is_live(value.view(torch.uint8).numpy(), "F32")


def test_bytes_of_a_quantized_moment_are_live_if_not_zero():
    assert is_live(np.array([0, 1], np.uint8), "U8")
    assert not is_live(np.zeros(5, np.uint8), "U8")
