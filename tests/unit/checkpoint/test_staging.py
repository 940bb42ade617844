"""What staging promises whoever leases its memory and waits for it."""

import threading
from pathlib import Path

import pytest
import torch

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.host_buffer import BufferPool
from headwater.checkpoint.plan import Planner
from headwater.checkpoint.staging import Stager, Staging


@pytest.mark.parametrize("name", ["w", "é" * 900, "😀" * 900, "\n" * 900], ids=["short", "umlauts", "emoji", "escapes"])
@pytest.mark.parametrize("shape", [(), (1,) * 20, (10**6, 3)])
def test_no_file_exceeds_the_bound_that_its_memory_is_leased_by(name: str, shape: tuple[int, ...]):
    tensor = torch.zeros(()).expand(shape)
    chunks = [Chunk(f"{name}{n}", tensor, (*(2 * size for size in shape),), shape) for n in range(50)]
    plan = Planner().plan("policy", chunks)
    assert plan.layout.size <= plan.size_bound


def test_a_failure_of_what_follows_a_save_leaves_the_next_one_unharmed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stager, pool, planner = Stager(), BufferPool(tmp_path), Planner()
    ended = threading.Event()

    def stage(then: object) -> Staging:
        chunks = {"policy": [Chunk.whole("w", torch.ones(3))]}
        plans = {"policy": planner.plan("policy", chunks["policy"])}
        lease = pool.acquire({"policy": plans["policy"].size_bound}, pin=False, timeout=0)
        assert lease is not None
        return stager.stage("step 1", chunks, plans, lease, then)  # pyright: ignore[reportArgumentType]

    def fail(_: Staging) -> None:
        raise OSError("nobody to tell")

    stage(fail).wait(10)
    stage(lambda _: ended.set()).wait(10)
    assert ended.wait(10)
    assert "nobody to tell" in caplog.text
    stager.close()
    pool.close()
