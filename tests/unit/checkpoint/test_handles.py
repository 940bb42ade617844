"""Whoever moves memory has handles to it closed first; a save keeps those to memory that has not moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import digest, digest_all
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.ranks import Ranks, is_file_of
from headwater.checkpoint.save_order import SaveOrder
from headwater.checkpoint.strategies import nvrx as nvrx_module
from headwater.checkpoint.strategies import nvrx_save
from headwater.checkpoint.strategies.nvrx import NvrxSaver
from headwater.checkpoint.strategies.nvrx_items import Items
from headwater.checkpoint.strategies.nvrx_writer import Writer
from headwater.checkpoint.votes import Refusal, error_of
from headwater.engines.torch.engine import TorchEngine
from headwater.errors import HeadwaterError, UserError


class Log:
    """A reader of tensors and a keeper of handles."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def wait(self, timeout: float) -> None:
        self.calls.append("wait")

    def let_go(self) -> None:
        self.calls.append("let go")


def test_handles_are_closed_once_and_after_the_readers_are_done():
    fence, log = Fence(), Log()
    for _ in range(2):
        fence.register(log)
        fence.keep_handles(log)
    fence.wait()
    assert log.calls == ["wait", "wait"]
    fence.register(log)
    assert fence.vacate() == [log]
    assert log.calls[2:] == ["wait", "let go"]
    fence.vacate()
    assert log.calls[4:] == []
    fence.keep_handles(log)
    fence.vacate()
    assert log.calls[4:] == ["let go"]


def test_a_fence_that_is_removed_closes_nothing():
    fence, log = Fence(), Log()
    fence.keep_handles(log)
    fence.remove_for_test()
    fence.vacate()
    assert log.calls == []


class ReachedError(Exception):
    pass


class Keeper:
    def let_go(self) -> None:
        raise ReachedError


@pytest.mark.parametrize("method", ["offload", "offload_optimizer", "load_chunks"])
def test_whatever_moves_storage_has_handles_closed_first(method: str, make_engine: Callable[..., TorchEngine]):
    engine = make_engine(moves_on_host=True)
    engine.fence.keep_handles(Keeper())
    arguments: list[Any] = [None] if method == "load_chunks" else []
    with pytest.raises(ReachedError):
        getattr(engine, method)(*arguments)


def test_a_step_keeps_them(make_engine: Callable[..., TorchEngine], recorded_rollout: Any):
    engine = make_engine()
    engine.fence.keep_handles(Keeper())
    engine.forward_backward(recorded_rollout, lambda logprobs, _: (-logprobs.sum(), {}), 100.0)
    engine.optim_step()


def test_the_digests_of_several_are_those_of_each():
    tensors = [torch.arange(9.0).view(3, 3).t(), torch.empty(0), torch.tensor(3), torch.ones(7).bfloat16()]
    assert digest_all(tensors) == [digest(tensor) for tensor in tensors]
    assert digest_all([]) == []


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("policy/rank-00003.safetensors", 3),
        ("nvrx/__3_0.distcp", 3),
        ("nvrx/__3_12.distcp", 3),
        ("nvrx/__13_2.distcp", 13),
        ("nvrx/__3_0.distcp/x", None),
        ("other/__3_0.distcp", None),
        ("nvrx/__3_.distcp", None),
        ("nvrx/__3_0_distcp", None),
        ("../nvrx/__3_0.distcp", None),
        ("trainer.json", None),
    ],
)
def test_a_file_belongs_to_the_rank_in_its_name(path: str, rank: int | None):
    assert [number for number in range(20) if is_file_of(path, number)] == ([] if rank is None else [rank])


def test_a_refusal_names_the_rank_and_the_remedy():
    plain = error_of(Refusal(2, None, "it gave up"), 7, Path("/c"))
    assert (type(plain), str(plain)) == (HeadwaterError, "rank 2: it gave up")
    full = error_of(Refusal(None, 28, "No space left on device"), 7, Path("/c"))
    assert isinstance(full, UserError)
    assert str(full).startswith("saving step 7 to /c failed: No space left on device: free space there")


class FakeWriter:
    """holds_device_memory: as of a process that has handles."""

    pid, calls, is_starting, sent = 1, list[str](), False, None

    def __init__(self, *_: Any) -> None:
        self.holds_device_memory = False

    def wait_ready(self, device: Any = None) -> None:
        pass

    def stage(self, request: str, device: Any = None) -> None:
        self.calls.append(request)
        self.holds_device_memory = True

    def is_done(self) -> bool:
        return False

    def let_go(self) -> None:
        self.calls.append("let go")
        self.holds_device_memory = False

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


class FakeLibrary:
    persistent, cpu_shm = True, False

    def kept_on_host(self) -> int:
        return 0

    def request(self, call: int, folder: Path, items: Any, sent: Any) -> str:
        return "request"


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvrxSaver]:
    monkeypatch.setattr(nvrx_module, "Writer", FakeWriter)
    monkeypatch.setattr(FakeWriter, "calls", [])
    monkeypatch.setattr(NvrxSaver, "_finish", lambda self, save: self._end(save, None))
    made = NvrxSaver(tmp_path, FakeLibrary(), 1.0, lambda result: None, Ranks.alone(), 1.0)  # pyright: ignore
    yield made
    made.close()


def save(saver: NvrxSaver, monkeypatch: pytest.MonkeyPatch, identity: Any, names: str = "ab") -> list[str]:
    """What the writer was asked for, where the tensors lie in this memory."""
    items = Items({(name, (0,)): torch.ones(1) for name in names}, [], identity)
    monkeypatch.setattr(nvrx_module, "make_items", lambda chunks, **_: items)
    del FakeWriter.calls[:]
    saver.save(saver.new_save(1), SaveOrder(1, {"policy": list[Chunk]()}, {}, "", 0, "", 0, False), [], False)
    saver.wait_committed(10)
    return list(FakeWriter.calls)


def test_handles_stay_while_nothing_moves_and_go_before_a_save_of_other_memory(
    saver: NvrxSaver, monkeypatch: pytest.MonkeyPatch
):
    here, there = ((1,), (2,)), ((1,), (3,))
    assert save(saver, monkeypatch, here) == ["request"]
    assert save(saver, monkeypatch, here) == ["request"]
    assert save(saver, monkeypatch, there) == ["let go", "request"]
    assert save(saver, monkeypatch, there) == ["request"]
    assert save(saver, monkeypatch, there, "abc") == ["let go", "request"]
    saver.let_go()
    assert save(saver, monkeypatch, here, "abc") == ["request"]


def test_the_control_arm_never_lets_go(saver: NvrxSaver, monkeypatch: pytest.MonkeyPatch):
    saver.remove_for_test()
    save(saver, monkeypatch, ((1,),))
    assert save(saver, monkeypatch, ((2,),)) == ["request"]
    saver.let_go()
    assert FakeWriter.calls == ["request"]


class OneSaveCaller:
    """As NVRx's, which forks a process for each save."""

    process: Any = None

    def schedule_async_call(self, request: Any) -> None:
        import time

        time.sleep(0.1)
        self.process = Ended()

    def is_current_async_call_done(self, no_dist: bool) -> bool:
        return True


class Ended:
    pid, exitcode = 1 << 30, 0

    def is_alive(self) -> bool:
        return False

    def kill(self) -> None:
        pass

    def join(self, timeout: float) -> None:
        pass


def test_a_process_that_ended_with_its_save_is_no_loss_at_the_next():
    class OneSaveLibrary(FakeLibrary):
        persistent = False

        def new_caller(self) -> Any:
            return OneSaveCaller()

        def forget(self) -> None:
            pass

    writer = Writer(OneSaveLibrary(), 0, 1.0)  # pyright: ignore
    for _ in range(2):
        writer.stage("request", None)
        assert writer.is_done()
    writer.kill()


def test_a_tensor_without_storage_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch):
    """What a digest reads of one is undefined, and may end the process."""
    read = []
    monkeypatch.setattr(nvrx_save, "digest_all", read.append)
    freed = Chunk.whole("freed", torch.ones(4))
    freed.tensor.untyped_storage().resize_(0)
    with pytest.raises(HeadwaterError, match="chunk freed has no storage to save"):
        nvrx_save.parts_of({"policy": [freed]})
    assert read == []
