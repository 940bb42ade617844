"""The nvrx strategy on a CUDA device, where NVRx's process holds handles to the tensors.

What is lost is repaired, or told of; each test writes how long that took (`pytest -s`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.compare import check_freshness
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import verify
from headwater.checkpoint.strategies import nvrx_items
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(90),
]
TENSORS, NUMBERS = 16, 8_000_000
TROUBLE = ("killed", "stopped", "cache miss", "aborted")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """NVRx asks torch.distributed for the rank."""
    made = not dist.is_initialized()
    if made:
        store = tmp_path_factory.mktemp("group") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    if made:
        dist.destroy_process_group()


class Training:
    """Moments that decay, and a manager that saves them through NVRx."""

    def __init__(self, folder: Path, **config: bool) -> None:
        self.state = {f"exp_avg.w{index}": torch.full((NUMBERS,), 1.0, device="cuda") for index in range(TENSORS)}
        self.state |= {f"step.w{index}": torch.tensor(0.0) for index in range(TENSORS)}
        self.fence = Fence()
        self.folder = folder
        settings = CheckpointingConfig(
            checkpoint_dir=str(folder), strategy="nvrx", keep_latest_k=None, writer_silence_s=1.0, **config
        )
        self.steps = 0
        self.bare = self.move()  # with no process of NVRx yet
        self.context = 0.0  # of NVRx's process
        self.manager = CheckpointManager(settings, "run", "model")
        self.manager.prepare({"policy": TENSORS * NUMBERS * 4}, True, None)

    @property
    def saver(self) -> Any:
        return self.manager._saver

    def step(self) -> None:
        self.fence.wait()
        self.steps += 1
        for name, tensor in self.state.items():
            tensor.add_(1.0) if name.startswith("step") else tensor.mul_(0.9)

    def save(self) -> None:
        chunks = [Chunk.whole(f"optimizer.state.{name}", tensor) for name, tensor in self.state.items()]
        self.manager.save(self.steps, {"policy": chunks}, {}, "", None, self.steps, [self.fence])

    def move(self) -> float:
        """To the host and back. Returns bytes that the device holds in between."""
        self.fence.vacate()
        on_device = [tensor for tensor in self.state.values() if tensor.is_cuda]
        copies = [tensor.cpu() for tensor in on_device]
        for tensor in on_device:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        for tensor, copy in zip(on_device, copies, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy)
        return float(total - free)

    def assert_newest_is_live(self) -> None:
        self.manager.wait_committed()
        newest = self.manager.latest()
        assert newest is not None
        assert newest.manifest.step == self.steps
        assert verify(newest) == []
        reader = newest.component("policy")
        for name, tensor in self.state.items():
            assert torch.equal(reader.read(f"optimizer.state.{name}"), tensor.cpu()), name


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    made: list[Training] = []

    def run(**config: bool) -> Training:
        made.append(Training(tmp_path / f"checkpoints-{len(made)}", **config))
        return made[-1]

    yield run
    for training in made:
        training.manager.close()


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def writer_of(training: Training) -> Any:
    """NVRx's process, once it has started and has its context on the device."""
    writer = _process_of(training, "_writer")
    writer.wait_ready(0)
    return writer


def spare_of(training: Training) -> Any:
    """The process that stands by, once it does; a while after the first save, or after it was last needed."""
    spare = _process_of(training, "_spare")
    spare.wait_ready(None)
    return spare


def _process_of(training: Training, name: str) -> Any:
    deadline = time.monotonic() + 60
    while (process := getattr(training.saver, name)) is None:
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.05)
    return process


def disturb(training: Training, what: str) -> None:
    """Once another process stands by."""
    spare_of(training)
    writer = training.saver._writer
    if what == "killed":
        os.kill(writer.pid, signal.SIGKILL)
    elif what == "stopped":
        os.kill(writer.pid, signal.SIGSTOP)
    elif what == "cache miss":
        if not hasattr(_files(), "_cached_identifiers"):
            pytest.skip("this NVRx has no cache")
        writer._ask("let go", 5.0)  # and nobody told the trainer's side
    else:
        if "abort" not in writer._caller.close.__code__.co_varnames:
            pytest.skip("this NVRx cannot abort")
        writer._caller.close(abort=True)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """One for all kinds of trouble, with a save behind it."""
    made = Training(tmp_path_factory.mktemp("trouble") / "checkpoints")
    writer_of(made)
    made.step()
    made.save()
    made.assert_newest_is_live()
    made.context = made.move() - made.bare
    yield made
    made.manager.close()


@pytest.mark.parametrize("what", TROUBLE)
def test_a_writer_lost_between_saves_is_replaced_and_the_save_is_fresh(what: str, training: Training) -> None:
    restarts = training.saver.writer_restarts
    away = training.move()  # with the context of the process that is lost
    for _ in range(2):
        training.step()
        training.save()
        training.manager.wait_committed()
    spare = spare_of(training)
    disturb(training, what)
    training.step()
    started = time.perf_counter()
    training.save()
    staged = time.perf_counter()
    training.manager.wait_committed()
    tell(
        f"{what} between saves: staged after {staged - started:.1f} s, committed {time.perf_counter() - started:.1f} s"
    )
    training.assert_newest_is_live()
    assert training.saver.writer_restarts == restarts + 1
    assert training.saver._writer is spare
    kept = training.move() - away
    tell(f"{what} between saves: {kept / 2**20:.0f} MiB kept, with another process's context in place of the one's")
    training.step()
    training.save()
    training.assert_newest_is_live()
    assert training.saver.writer_restarts == restarts + 1
    assert kept < 64 << 20, "memory that the lost process had open is kept"


def test_a_second_loss_before_another_process_stands_by_is_repaired_too(training: Training) -> None:
    training.step()
    training.save()
    training.manager.wait_committed()
    started = time.perf_counter()
    for _ in range(2):
        training.step()
        os.kill(training.saver._writer.pid, signal.SIGKILL)
        training.save()
        training.manager.wait_committed()
    tell(f"killed twice, one right after the other: committed {time.perf_counter() - started:.1f} s")
    training.assert_newest_is_live()


def _files() -> object:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

    return FileSystemWriterAsync


@pytest.mark.parametrize("what", ["killed", "stopped", "aborted"])
@pytest.mark.parametrize("moved", [False, True])
def test_a_writer_lost_while_it_writes_has_its_save_repeated_or_told_of(
    what: str, moved: bool, training: Training
) -> None:
    """Repeated from the live tensors where nobody has passed the fence; else one clear error, and the next holds."""
    spare_of(training)
    kept, alone = 0.0, training.move() - training.context
    training.step()
    training.save()
    started = time.perf_counter()
    disturb(training, what)
    if moved:
        kept = training.move() - alone  # the process that stands by has no context
        tell(f"{what} while writing, moved since: {kept / 2**20:.0f} MiB kept")
        with pytest.raises(HeadwaterError, match=r"step \d+ is lost: [^\n]*; the next save begins with another one"):
            training.manager.wait_committed()
        tell(f"{what} while writing, moved since: told in {time.perf_counter() - started:.1f} s")
        training.step()
        training.save()
    training.manager.wait_committed()
    took = time.perf_counter() - started
    tell(f"{what} while writing, {'the next save committed' if moved else 'repeated and committed'}: {took:.1f} s")
    training.assert_newest_is_live()
    assert kept < 64 << 20, "memory that the lost process had open is kept"


@pytest.mark.parametrize("shm", [False, True])
def test_six_saves_around_moves_keep_no_memory_and_are_fresh(
    shm: bool, make: Callable[..., Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(nvrx_items, "_require_shared_memory", needed.append)
    if shm and not hasattr(_files(), "_shm_tensor_cache"):
        pytest.skip("this NVRx has no shared-memory mode")
    training = make(async_ckpt_use_cpu_shm=True) if shm else make()
    writer_of(training)
    before, pid = training.move(), training.manager.writer_pid
    for _ in range(6):
        training.step()
        training.save()
        assert training.move() - before < 64 << 20
        training.assert_newest_is_live()
    found = sorted(training.folder.glob("step_*"))
    assert [check_freshness(old, new).outcome for old, new in pairwise(found)] == ["fresh"] * 5
    assert training.manager.writer_pid == pid
    if shm:  # what NVRx has for its copies serves again
        assert needed[0] >= TENSORS * NUMBERS * 4 > needed[-1]


def test_without_letting_go_the_proof_refuses_what_a_stale_handle_gave(make: Callable[..., Training]) -> None:
    """On versions that know of their tensors by structure alone; others send them again by themselves."""
    training = make()
    training.saver.remove_for_test()
    refused = []
    for _ in range(4):
        training.step()
        training.save()
        try:
            training.assert_newest_is_live()
        except HeadwaterError as error:
            refused.append(str(error))
        training.move()
    tells_by_pointer = hasattr(_files(), "_cached_tensor_data_ptrs")
    caches = hasattr(_files(), "_cached_identifiers")
    assert len(refused) == (3 if caches and not tells_by_pointer else 0)
    assert all("does not hold what the live tensors held" in text for text in refused)


def test_a_process_forked_for_each_save(make: Callable[..., Training]) -> None:
    training = make(use_persistent_ckpt_worker=False)
    before = training.move()
    for _ in range(3):
        training.step()
        training.save()
        assert training.move() - before < 64 << 20
        training.assert_newest_is_live()
    assert training.manager.take_news().metrics["checkpoint/writer_restarts"] == 0
