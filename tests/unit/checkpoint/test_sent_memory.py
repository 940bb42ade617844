"""Counters of what another process has open of a device's memory; a device and another process are in tests/gpu."""

from __future__ import annotations

import struct
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from headwater.checkpoint.strategies import nvrx_sent
from headwater.checkpoint.strategies.nvrx_agent import StageOnce
from headwater.checkpoint.strategies.nvrx_sent import SentMemory

PLACES = 6


class Counters:
    """A file as torch makes it: what it notes of the file, then numbers without a sign."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "counters"
        self.path.write_bytes(bytes(64 + 8 * PLACES))
        self.sent = 0
        self.at_first = 1

    def read(self) -> list[int]:
        return list(struct.unpack_from(f"<{PLACES}Q", self.path.read_bytes(), 64))[: self.sent]

    def add(self, place: int, number: int) -> None:
        numbers = list(struct.unpack_from(f"<{PLACES}Q", self.path.read_bytes(), 64))
        numbers[place] = (numbers[place] + number) % 2**64
        self.path.write_bytes(bytes(64) + struct.pack(f"<{PLACES}Q", *numbers))

    def reduce(self, tensor: torch.Tensor) -> Any:
        """As torch does for a tensor on a device."""
        named = dict.fromkeys(nvrx_sent._ARGUMENTS)
        named |= {"ref_counter_handle": b"/counters", "ref_counter_offset": self.sent}
        self.add(self.sent, self.at_first)
        self.sent += 1
        return reductions.rebuild_cuda_tensor, tuple(named.values())

    def release(self, handle: bytes, place: int) -> None:
        assert handle == b"/counters"
        self.add(place, -1)


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counters:
    made = Counters(tmp_path)
    reduce = made.reduce
    monkeypatch.setattr(nvrx_sent, "_SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(reductions, "reduce_tensor", reduce)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", made.release)
    for kind in (torch.Tensor, torch.nn.Parameter):
        monkeypatch.setitem(ForkingPickler._extra_reducers, kind, reduce)  # pyright: ignore[reportAttributeAccessIssue]
    return made


@pytest.fixture
def sent(counters: Counters) -> SentMemory:
    made = SentMemory()
    ForkingPickler.dumps(StageOnce(partial(list, [torch.ones(1), torch.nn.Parameter(torch.ones(1))]), made))
    assert counters.read() == [1, 1]
    return made


def test_what_a_killed_process_had_open_is_taken_back_once(sent: SentMemory, counters: Counters) -> None:
    for _ in range(2):
        sent.take_back()
        assert counters.read() == [0, 0]


def test_what_the_process_closed_itself_is_not_taken_off_again(sent: SentMemory, counters: Counters) -> None:
    counters.add(0, -1)
    sent.take_back()
    assert counters.read() == [0, 0]


def test_what_the_process_closed_is_not_kept_in_mind(sent: SentMemory, counters: Counters) -> None:
    counters.add(1, -1)
    sent.pickled(torch.ones(1))
    assert [counter.place for counter in sent._open] == [0, 2]
    sent.take_back()
    assert counters.read() == [0, 0, 0]


def test_what_is_pickled_for_a_process_that_is_gone_is_taken_back_at_once(sent: SentMemory, counters: Counters) -> None:
    sent.take_back()
    sent.pickled(torch.ones(1))
    assert counters.read() == [0, 0, 0]


def test_a_torch_that_counts_elsewhere_is_left_alone(counters: Counters) -> None:
    counters.at_first = 5
    sent = SentMemory()
    sent.pickled(torch.ones(1))
    sent.take_back()
    assert counters.read() == [5]


def test_a_torch_that_names_its_counters_otherwise_is_left_alone(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrx_sent, "_ARGUMENTS", tuple(f"argument_{index}" for index in range(30)))
    sent = SentMemory()
    sent.pickled(torch.ones(1))
    sent.take_back()
    assert counters.sent == 1


def test_a_file_of_counters_that_is_gone_is_no_error(sent: SentMemory, counters: Counters) -> None:
    counters.path.unlink()
    sent.take_back()
    assert not counters.path.exists()


def test_tensors_of_the_host_are_sent_as_torch_sends_them() -> None:
    sent = SentMemory()
    received = ForkingPickler.loads(ForkingPickler.dumps(StageOnce(partial(list, [torch.arange(3.0)]), sent)))
    assert torch.equal(received()[0], torch.arange(3.0))
    assert sent._open == []
