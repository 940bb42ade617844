import threading
from dataclasses import replace
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


def moment(*parts: np.ndarray) -> bytes:
    return np.concatenate(parts).astype("<f4").tobytes()


@pytest.mark.parametrize("at", [0, 100, PIECE // 4 * 3 - 50, 33 * PIECE // 4])
def test_a_run_of_a_moment_that_repeats_is_seen_wherever_it_is(at: int, tmp_path: Path):
    old = np.random.default_rng(0).random(40 * PIECE // 4, "<f4") + 1
    new = old * np.float32(0.9)
    new[at : at + 127] = old[at : at + 127]
    (found,) = find_repeats([pair(tmp_path, moment(old), moment(new))]).values()
    assert (found.repeated, found.in_part) == (False, True)
    new[at : at + 127] *= np.float32(0.9)
    (found,) = find_repeats([pair(tmp_path, moment(old), moment(new))]).values()
    assert (found.repeated, found.in_part) == (False, False)


def test_a_run_that_could_repeat_by_chance_or_is_no_moment_does_not_count(tmp_path: Path):
    old = np.random.default_rng(0).random(1024, "<f4") + 1
    new = old * np.float32(0.9)
    sparse_old, sparse_new = old.copy(), new.copy()
    for values in (sparse_old, sparse_new):
        values[128:256] = 0
        values[128:143] = values[192:207] = 1.5  # 15 in each 64: what is left of a row without gradients, say
    (found,) = find_repeats([pair(tmp_path, moment(sparse_old), moment(sparse_new))]).values()
    assert not found.in_part
    new[128:256] = old[128:256]
    found = pair(tmp_path, moment(old), moment(new))
    for role in ("weight", "param"):
        chunks = Pair(replace(found.old, role=role), replace(found.new, role=role))
        assert not next(iter(find_repeats([chunks]).values())).in_part
    assert next(iter(find_repeats([found]).values())).in_part


def test_a_pair_that_is_no_moment_is_given_up_at_its_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    judge = compare._judge_piece
    monkeypatch.setattr(compare, "_judge_piece", lambda *args: (looked.append(1), judge(*args)))
    found = pair(tmp_path, bytes(20 * PIECE), b"x" + bytes(20 * PIECE - 1))
    for role, pieces in (("weight", 1), ("exp_avg", 20)):
        looked.clear()
        find_repeats([Pair(replace(found.old, role=role), replace(found.new, role=role))])
        assert len(looked) == pieces


def test_what_one_thread_found_alive_another_does_not_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The zeros of the second segment are judged while the first, which is alive, is."""
    both_begun, first_done = threading.Barrier(2), threading.Event()
    true_is_live = compare.is_live

    def is_live(data: np.ndarray, dtype: str) -> bool:
        both_begun.wait(10)
        live = true_is_live(data, dtype)
        if not live:
            first_done.wait(10)
        return live

    class Result(compare._Comparison):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "live" and value:
                first_done.set()

    monkeypatch.setattr(compare, "PIECE", compare._SEGMENT)
    monkeypatch.setattr(compare, "is_live", is_live)
    monkeypatch.setattr(compare, "_Comparison", Result)
    data = moment(np.ones(compare._SEGMENT // 4), np.zeros(compare._SEGMENT // 4))
    (found,) = find_repeats([pair(tmp_path, data, data)]).values()
    assert (found.repeated, found.live) == (True, True)


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
