"""What NVRx's own process writes for Headwater: the bytes that were live at the call, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from nvrx_saves import Hold, MakeManager, entries, failure, restarts, save_and_go_on, tree, writer_of
from process_tree import wait_until
from tensor_saves import Tensors, copy_of, same, save, stored
from torch.multiprocessing.reductions import StorageWeakRef

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.fence import Fence
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.checkpoint.strategies import nvrx as nvrx_module
from headwater.checkpoint.strategies import nvrx_items
from headwater.cli.main import main
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def kinds() -> Tensors:
    """Every kind of tensor that a trainer has."""
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(40, 30, generator=generator)
    return {
        "bf16": whole.bfloat16(),
        "int64": torch.arange(7) * 10**12,
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "step": torch.tensor(11),
        "empty": torch.empty(0, 4),
        "transposed": whole.clone().t(),
        "strided": whole.clone()[::2, ::3],
        "inside of another": whole.clone()[5:9],
        "one": torch.ones(1, dtype=torch.uint8),
    }


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("block", [None, 600])
def test_a_save_holds_what_was_live_at_the_call(
    block: int | None, make: MakeManager, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """In one block of shared memory, and in several."""
    if block is not None:
        monkeypatch.setattr(nvrx_items, "_BLOCK_BYTES", block)
    manager, tensors, live = make(), kinds(), dict[int, Tensors]()
    for step in (1, 2, 3):
        live[step] = copy_of(tensors)
        save(manager, step, tensors)
        for tensor in tensors.values():
            tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)
    manager.wait_committed(60)
    for step in (1, 2, 3):
        assert same(stored(root, step), live[step])
    assert manager.take_news().metrics["checkpoint/chunks_repeated"] == 1  # the empty one
    (folder,) = root.glob("step_000003-*")
    checkpoint = Checkpoint.open(folder)
    for chunk in checkpoint.manifest.chunks:
        written = (folder / chunk.file).read_bytes()[chunk.begin : chunk.end]
        assert written == bytes_of(live[3][chunk.name])
    files = sorted(file.path for file in checkpoint.manifest.files if file.path.startswith("nvrx/"))
    assert files == ["nvrx/__0_0.distcp"] + (["nvrx/__0_1.distcp"] if block else [])
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "manifest.json", "nvrx", "trainer.json"]


def test_boxes_of_a_larger_tensor_lie_at_their_offsets(make: MakeManager, root: Path):
    manager = make()
    whole = torch.arange(60.0).view(6, 10)
    boxes = [Chunk("w", whole[row : row + 2], (6, 10), (row, 0)) for row in (0, 4)]
    chunks = [*boxes, Chunk("w", whole[2:4, :5], (6, 10), (2, 0)), Chunk("w", whole[2:4, 5:], (6, 10), (2, 5))]
    manager.save(1, {"policy": chunks, "value": [Chunk.whole("w", whole + 1)]}, {}, "", None, 1)
    manager.wait_committed(60)
    newest = manager.latest()
    assert newest is not None
    assert verify(newest) == []
    assert torch.equal(newest.component("policy").read("w"), whole)
    assert torch.equal(newest.component("value").read("w"), whole + 1)
    part = Chunk("w", torch.empty(2, 3), (6, 10), (3, 4))
    newest.component("policy").read_into(part)
    assert torch.equal(part.tensor, whole[3:5, 4:7])


def test_a_save_without_any_tensor_commits(make: MakeManager, root: Path):
    manager = make()
    manager.save(1, {"policy": []}, {"step": 1}, "", None, 1)
    manager.wait_committed(60)
    (folder,) = root.glob("step_000001-*")
    checkpoint = Checkpoint.open_to_load(folder)
    assert verify(checkpoint) == []
    assert checkpoint.trainer_state() == {"step": 1}


def test_saves_hold_no_descriptor_nor_shared_memory_once_they_are_committed(make: MakeManager, tensors: Tensors):
    manager = make()

    def held() -> tuple[int, int]:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # that of the folder itself
                links.append(os.readlink(entry))
        return len(links), sum("/torch_" in link for link in links)

    _, blocks = held()  # of processes that other tests killed before they took them
    for step in (1, 2):
        save(manager, step, tensors)
        manager.wait_committed(60)
    before, _ = held()
    for step in (3, 4, 5):
        save(manager, step, tensors)
        manager.wait_committed(60)
    wait_until(lambda: held()[0] <= before and held()[1] <= blocks, "threads that have ended let go", 20)


def test_the_command_line_reads_these_checkpoints_as_any(
    make: MakeManager, root: Path, tensors: Tensors, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    manager = make(verify="readback")
    chunks = {"policy": [Chunk.whole(name, tensor) for name, tensor in tensors.items()]}
    manager.save(1, chunks, {"step": 1}, "", None, 1)
    manager.wait_committed(60)
    tensors["a"].add_(1)
    manager.save(2, chunks, {"step": 2}, "", None, 2)
    manager.wait_committed(60)
    config = CheckpointingConfig(checkpoint_dir=str(tmp_path / "native"), strategy="native")
    native = CheckpointManager(config, "run", "model")
    native.save(2, chunks, {"step": 2}, "", None, 2)
    native.close()
    first, second = (str(next(root.glob(f"step_00000{step}-*"))) for step in (1, 2))
    (by_native,) = map(str, (tmp_path / "native").glob("step_*"))
    for words in (["verify", second], ["show", second], ["freshness", first, second]):
        assert main(["ckpt", *words]) == 0, words
    assert main(["ckpt", "diff", second, by_native]) == 0
    assert main(["ckpt", "diff", first, by_native]) == 1
    manager.close()
    (flipped,) = root.glob("step_000002-*/nvrx/__0_0.distcp")
    data = bytearray(flipped.read_bytes())
    chunk = next(c for c in Checkpoint.open(Path(second)).manifest.chunks if c.name == "a")
    data[chunk.begin + 5] ^= 1
    flipped.write_bytes(data)
    capsys.readouterr()
    assert main(["ckpt", "verify", second]) == 1
    assert "chunk a does not match its digest" in capsys.readouterr().out


def test_a_save_without_async_save_is_committed_at_the_return(make: MakeManager, root: Path, tensors: Tensors):
    manager = make(async_save=False)
    save(manager, 1, tensors)
    assert manager.pending == 0
    assert same(stored(root, 1), tensors)


def test_a_save_that_finds_the_one_before_unwritten_waits_or_is_skipped(
    make: MakeManager, root: Path, tensors: Tensors, hold: Hold
):
    manager = make(when_busy="skip")
    hold.on()
    save(manager, 1, tensors)
    assert not manager.has_room
    save(manager, 2, tensors)
    assert manager.take_news().metrics["checkpoint/skipped"] == 1
    hold.off()
    save(manager, 3, tensors, may_skip=False)
    manager.wait_committed(60)
    assert manager.has_room
    assert entries(root) == [".lock", ".nvrx", "step_000001", "step_000003"]


def alter(found: dict[str, Any]) -> None:
    item = found["items"][0]
    item[4][0] ^= 1


def tell_of_others(found: dict[str, Any]) -> None:
    found["items"][0][0] = "another"


def tell_of_fewer(found: dict[str, Any]) -> None:
    found["items"].pop()


def tell_less_of_one(found: dict[str, Any]) -> None:
    found["items"][0][4].pop()


OTHER = "saving step 2 failed: NVRx tells of other tensors than it was given"
REPORTS = [
    (alter, "of step 2 does not hold what the live tensors held, so it was removed: policy a"),
    (tell_of_others, OTHER),
    (tell_of_fewer, OTHER),
    (tell_less_of_one, OTHER),
]


def test_a_report_that_is_not_of_the_live_tensors_is_refused(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    manager, real = make(), nvrx_module.read_report
    save(manager, 1, tensors)
    manager.wait_committed(60)
    for forge, said in REPORTS:

        def forged(folder: Path, forge: Callable[[dict[str, Any]], None] = forge) -> dict[str, Any]:
            found = real(folder)
            forge(found)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(nvrx_module, "read_report", forged)
            save(manager, 2, tensors)
            assert said in str(failure(manager))
        assert entries(root) == [".lock", ".nvrx", "step_000001"]
        assert not list((root / ".nvrx").iterdir())
    save(manager, 3, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 3), tensors)
    assert restarts(manager) == 0


def test_what_changes_before_nvrx_reads_it_is_refused(
    make: MakeManager, root: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
):
    """The live digests are taken first, so that a copy of anything later is not what they tell of."""
    manager, real = make(), nvrx_items._copy_to_blocks

    def late(items: Any, chunks: Any) -> None:
        chunks[1][1].tensor.add_(1)
        real(items, chunks)

    monkeypatch.setattr(nvrx_items, "_copy_to_blocks", late)
    save(manager, 1, tensors)
    assert str(failure(manager)).endswith("does not hold what the live tensors held, so it was removed: policy b")
    assert entries(root) == [".lock", ".nvrx"]


# In NVRx's process: what it tells of its write, or what lies in the file, is not what it was given.
PLANT = """
import sys
from pathlib import Path
if "from multiprocessing.spawn import spawn_main" in " ".join(sys.orig_argv):
    import headwater.checkpoint.strategies.nvrx_agent as agent
    def what():
        return Path(__file__).with_name("what").read_text()
    def put(self, results, real=agent._Results.put):
        (name, first), *rest = results.items()
        if what() == "fewer":
            results = {name: first[:-1], **dict(rest)}
        elif what() == "none":
            results = {}
        elif what() == "twice":
            results = {name: [*first, *first], **dict(rest)}
        elif what() == "error":
            results = RuntimeError("the disk is on fire")
        real(self, results)
    agent._Results.put = put
    def prove(path, places, parts, real=agent._prove_file):
        if what() == "bytes":
            data = bytearray(path.read_bytes())
            data[places[0][1] + 4096 - places[0][1] % 64] ^= 1
            path.write_bytes(data)
        return real(path, places, parts)
    agent._prove_file = prove
"""
FORGERIES = [
    ("fewer", "NVRx tells of 0 tensors written, it was given 1"),
    ("none", "NVRx tells of 0 tensors written, it was given 1"),
    ("twice", "NVRx tells of 2 tensors written, it was given 1"),
    ("error", "the disk is on fire"),
    ("bytes", "does not hold what the live tensors held, so it was removed: policy a"),
]


def test_what_nvrx_wrote_is_read_again_and_compared(
    make: MakeManager, root: Path, tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plant = tmp_path / "plant"
    plant.mkdir()
    (plant / "sitecustomize.py").write_text(PLANT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(plant), os.environ.get("PYTHONPATH")])))
    manager = make()
    for what, said in FORGERIES:
        (plant / "what").write_text(what)
        save(manager, 1, tensors)
        assert said in str(failure(manager))
        assert entries(root) == [".lock", ".nvrx"]
    (plant / "what").write_text("")
    save(manager, 1, tensors)
    manager.wait_committed(60)
    assert same(stored(root, 1), tensors)


def test_nvrx_starts_one_process_and_no_other(make: MakeManager, tensors: Tensors):
    """Its queue for results would have one of its own, which lives on when the trainer is killed."""
    before = set(tree(os.getpid()))
    manager = make()
    save(manager, 1, tensors)
    manager.wait_committed(60)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in set(tree(os.getpid())) - before}
    others = {pid for pid, name in names.items() if "resource_tracker" not in name}
    assert others == {manager.writer_pid}


def test_no_tensor_is_kept_alive_behind_a_commit(make: MakeManager, tensors: Tensors):
    manager, fence = make(), Fence()
    save(manager, 1, tensors, fence)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors.values()]
    tensors.clear()
    assert [storage.expired() for storage in storages] == [True, True]
    assert len(fence.wait()) == 1
    manager.wait_committed(60)


def has_cache() -> bool:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

    return hasattr(FileSystemWriterAsync, "cleanup_tensor_caches")


@pytest.mark.skipif("not has_cache()", reason="NVRx before 0.6 has no cache")
def test_copies_in_shared_memory_are_written_anew_at_each_save(make: MakeManager, root: Path, tensors: Tensors):
    manager = make(async_ckpt_use_cpu_shm=True)
    live = {step: save_and_go_on(manager, step, tensors) for step in (1, 2, 3)}
    live[4] = save_and_go_on(manager, 4, {"a": tensors["a"]})  # another structure
    manager.wait_committed(60)
    for step, expected in live.items():
        assert same(stored(root, step), expected)
    assert restarts(manager) == 0


def test_a_process_that_is_there_already_serves_the_first_save(make: MakeManager, tensors: Tensors):
    manager = make()
    manager.prepare({}, False, None)
    pid = writer_of(manager)
    save(manager, 1, tensors)
    manager.wait_committed(60)
    assert manager.writer_pid == pid


def test_a_closed_manager_saves_no_more(make: MakeManager, tensors: Tensors):
    manager = make()
    manager.close()
    with pytest.raises(HeadwaterError, match="are closed"):
        save(manager, 1, tensors)
