"""Several ranks save one checkpoint: it commits when all have voted, whoever is killed meanwhile, or not at all."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.checkpoint.ballot import Ballot
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.commit import committed
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.manifest import CorruptCheckpointError, Manifest, read_manifest
from headwater.checkpoint.ranks import Ranks
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.checkpoint.staging import Stager
from headwater.checkpoint.votes import Refusal, RefusedError, Vote
from headwater.checkpoint.write_request import WriteRequest
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError, UserError

MakeRank = Callable[..., CheckpointManager]
ROWS = 300_000

# Something that happens to a writer, once or at each attempt, at one call about a path that has `place` in it.
PLANT = """
import errno, json, os, signal, sys
from pathlib import Path
plan = json.loads(os.environ.get("PLANT", "{}"))
marks = Path(__file__).with_name("marks")
def happen():
    marks.mkdir(exist_ok=True)
    (marks / str(os.getpid())).touch()
    if plan["what"] == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if plan["what"] == "stop":
        return os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
def due(path):
    return plan["place"] in str(path) and (plan["always"] or not marks.exists())
def rename(source, target, real=os.rename):
    hit = due(target)
    if hit and plan["when"] == "before":
        happen()
    real(source, target)
    if hit and plan["when"] == "after":
        happen()
def mkdir(path, *args, real=os.mkdir, **options):
    if due(path):
        happen()
    real(path, *args, **options)
def rmdir(path, *args, real=os.rmdir, **options):
    if due(path):
        happen()
    real(path, *args, **options)
def pwrite(fd, data, offset, real=os.pwrite):
    if due(os.readlink(f"/proc/self/fd/{fd}")):
        real(fd, memoryview(data)[:4096], offset)
        happen()
    return real(fd, data, offset)
if plan and "headwater.checkpoint.writer_process" in sys.orig_argv:
    if plan["when"] == "in":
        os.pwrite = pwrite
    elif plan["when"] == "mkdir":
        os.mkdir = mkdir
    elif plan["when"] == "rmdir":
        os.rmdir = rmdir
    else:
        os.rename = rename
"""


@pytest.fixture
def rank(root: Path) -> Iterator[MakeRank]:
    """Makes the manager of one of two ranks, whose writer runs when it is returned."""
    made: list[CheckpointManager] = []

    def make(number: int, session: str = "first start", **options: Any) -> CheckpointManager:
        config = {"keep_latest_k": None, "vote_timeout_s": 60.0, **options}
        config = CheckpointingConfig(checkpoint_dir=str(root), **config)
        manager = CheckpointManager(config, f"run of {number}", "model", Ranks(number, 2, session))
        made.append(manager)
        writer_of(manager)
        return manager

    yield make
    closing = [threading.Thread(target=manager.close) for manager in made]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writers that start from now on have this happen to them; returns where each leaves a file as it does."""
    folder = tmp_path / "plant"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(PLANT)

    def put(when: str, place: str, what: str = "kill", always: bool = False) -> Path:
        plan = {"when": when, "place": place, "what": what, "always": always}
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        monkeypatch.setenv("PLANT", json.dumps(plan))
        return folder / "marks"

    return put


def writer_of(manager: CheckpointManager) -> int:
    wait_for(lambda: manager.writer_pid is not None)
    assert manager.writer_pid is not None
    return manager.writer_pid


def go_on(stopped: int) -> None:
    """Not before it really stands still: a process leaves its mark a moment earlier."""
    wait_for(lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    os.kill(stopped, signal.SIGCONT)


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def whole(step: int) -> torch.Tensor:
    """float32 [ROWS, 2]: what the two ranks hold halves of."""
    return torch.arange(2 * ROWS, dtype=torch.float32).view(ROWS, 2) * step


def chunks_of(number: int, step: int) -> list[Chunk]:
    """Half of a tensor, and one of the rank's own, which has the same name in neither."""
    half = ROWS // 2
    rows = whole(step)[number * half : (number + 1) * half].clone()
    return [Chunk("w", rows, (ROWS, 2), (number * half, 0)), Chunk.whole(f"own{number}", torch.full((5,), 10.0 + step))]


def save(manager: CheckpointManager, number: int, step: int, chunks: list[Chunk] | None = None) -> None:
    components = {"policy": chunks or chunks_of(number, step)}
    if number:
        components["value"] = [Chunk.whole("critic", torch.full((3,), float(step)))]
    manager.save(step, components, {"step": step, "of": number}, f"rank: {number}\n", None, step)


def assert_stored(root: Path, step: int) -> Path:
    """One checkpoint of this step, with all that both ranks held."""
    (folder,) = root.glob(f"step_{step:06d}-*")
    checkpoint = Checkpoint.open_to_load(folder)
    assert verify(checkpoint) == []
    policy = checkpoint.component("policy")
    assert torch.equal(policy.read("w"), whole(step))
    assert torch.equal(policy.read("own0"), torch.full((5,), 10.0 + step))
    assert torch.equal(policy.read("own1"), torch.full((5,), 10.0 + step))
    assert torch.equal(checkpoint.component("value").read("critic"), torch.full((3,), float(step)))
    assert checkpoint.trainer_state() == {"step": step, "of": 0}
    assert (folder / "config.yaml").read_text() == "rank: 0\n"
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert paths == sorted(["manifest.json", *(file.path for file in checkpoint.manifest.files)])
    return folder


def steps(root: Path) -> list[int]:
    """Of all folders, committed or not."""
    return sorted(int(folder.name[5:11]) for folder in root.glob("step_*"))


def vote_of(root: Path, number: int, step: int) -> Path | None:
    return next(iter(root.glob(f".votes/step_{step:06d}-*/rank-{number:05d}.json")), None)


def failure(manager: CheckpointManager) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as caught:
        manager.wait_committed(60)
    assert "\n" not in str(caught.value)
    return caught.value


def free_sets(manager: CheckpointManager) -> int:
    assert manager._saver is not None
    return len(manager._saver._pool._free)


def test_ranks_name_a_save_alike_and_no_two_saves():
    first, second = Ranks(0, 2, "a"), Ranks(1, 2, "a")
    names = [(session, step, time) for session in ("a", "b") for step in (1, 11) for time in (0, 1, 11)]
    tokens = [Ranks(0, 2, session).save_token(step, time) for session, step, time in names]
    assert len(set(tokens)) == len(names)
    assert [first.save_token(3, 0), first.save_token(3, 1)] == [second.save_token(3, 0), second.save_token(3, 1)]


@pytest.mark.parametrize("wrong", [(2, 2, "a"), (-1, 2, "a"), (0, 0, "a"), (0, 2, "")])
def test_ranks_that_cannot_be_are_refused(wrong: tuple[int, int, str]):
    with pytest.raises(ValueError, match="rank"):
        Ranks(*wrong)


@pytest.mark.parametrize("option", [{"strategy": "sync"}, {"when_busy": "skip"}])
def test_what_several_ranks_cannot_do_is_one_line(option: dict[str, Any], root: Path):
    ((key, value),) = option.items()
    config = CheckpointingConfig(checkpoint_dir=str(root), **option)
    with pytest.raises(UserError, match=rf"checkpointing.{key}={value} .* 2.*: set checkpointing.{key}="):
        CheckpointManager(config, "run", "model", Ranks(0, 2, "a"))
    assert not root.exists()


def test_two_ranks_save_one_checkpoint_that_one_rank_loads_whole(rank: MakeRank, root: Path):
    managers = [rank(0, verify="readback"), rank(1, verify="readback")]
    for step in (1, 2):
        for number, manager in enumerate(managers):
            save(manager, number, step)
    for manager in managers:
        manager.wait_committed(60)
    names = {step: assert_stored(root, step).name for step in (1, 2)}
    for manager in managers:
        assert any(note.startswith(f"committed {root / names[2]} ") for note in manager.take_news().notes)
    assert {file.path for file in read_manifest(root / names[1]).files} == {
        "policy/rank-00000.safetensors",
        "policy/rank-00001.safetensors",
        "value/rank-00001.safetensors",
        "trainer.json",
        "config.yaml",
    }
    for manager in managers:
        manager.close()
    assert sorted(path.name for path in root.iterdir()) == [".lock", names[1], names[2]]
    alone = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root)), "run", "model")
    latest = alone.latest()
    assert latest is not None
    assert latest.folder.name == names[2]
    assert latest.manifest.run_id == "run of 0"
    third = torch.empty(ROWS // 3, 2)
    latest.component("policy").read_into(Chunk("w", third, (ROWS, 2), (ROWS // 3, 0)))  # across both ranks' files
    assert torch.equal(third, whole(2)[ROWS // 3 : 2 * (ROWS // 3)])
    alone.close()


def test_nothing_commits_before_all_have_voted_and_each_keeps_its_buffers_until_then(rank: MakeRank, root: Path):
    first, second = rank(0), rank(1)
    save(first, 0, 1)
    wait_for(lambda: vote_of(root, 0, 1))
    time.sleep(0.3)
    (folder,) = root.glob("step_*")
    assert not committed(folder)
    os.kill(writer_of(first), signal.SIGSTOP)
    save(second, 1, 1)
    wait_for(lambda: vote_of(root, 1, 1))
    time.sleep(0.3)
    assert not committed(folder)
    assert [(manager.pending, free_sets(manager)) for manager in (first, second)] == [(1, 1), (1, 1)]
    go_on(writer_of(first))
    for manager in (first, second):
        manager.wait_committed(60)
    assert [(manager.pending, free_sets(manager)) for manager in (first, second)] == [(0, 2), (0, 2)]
    assert_stored(root, 1)


def test_a_step_saved_twice_is_two_saves_and_the_second_stays(rank: MakeRank, root: Path):
    managers = [rank(0), rank(1)]
    names = set()
    for _ in range(2):
        for number, manager in enumerate(managers):
            save(manager, number, 3)
        for manager in managers:
            manager.wait_committed(60)
        managers[0].wait_pruned()
        names.add(assert_stored(root, 3).name)
    assert len(names) == 2


@pytest.mark.parametrize("torn", [0, 1])
def test_a_torn_read_on_one_rank_refuses_the_save_of_all(
    torn: int, rank: MakeRank, root: Path, monkeypatch: pytest.MonkeyPatch
):
    managers = [rank(0), rank(1)]
    native, changes = managers[torn]._saver, list[Callable[[], object]]()
    assert native is not None
    real = Stager._copy

    def copy(self: Stager, *args: Any) -> float:
        if self is native._stager and changes:  # digested by now
            changes.pop()()
        return real(self, *args)

    monkeypatch.setattr(Stager, "_copy", copy)
    for step, seen_by in enumerate(["nobody", "staging", "nobody", "writer", "nobody"], 1):
        chunks = chunks_of(torn, step)
        own = chunks[1].tensor
        if seen_by != "nobody":
            changes.append(partial((own if seen_by == "staging" else own.data).add_, 1))
        for number, manager in enumerate(managers):
            save(manager, number, step, chunks if number == torn else None)
        if seen_by == "nobody":
            for manager in managers:
                manager.wait_committed(60)
            assert_stored(root, step)
            continue
        assert f"policy own{torn}" in str(failure(managers[torn]))
        other = str(failure(managers[1 - torn]))
        assert other.startswith(f"rank {torn}: ")
        assert f"policy own{torn}" in other
        assert f"policy own{1 - torn}" not in other
        assert step not in steps(root)
        for manager in managers:
            latest = manager.latest()
            assert latest is not None
            assert latest.manifest.step == step - 1
    assert not changes


def test_a_rank_that_cannot_even_stage_tells_the_others(rank: MakeRank, root: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = rank(0), rank(1, on_save_error="continue")

    def refuse(nbytes: int) -> None:
        raise UserError("there is no room")

    monkeypatch.setattr(second, "require_space", refuse)
    save(second, 1, 1)
    save(first, 0, 1)
    assert str(failure(first)) == "rank 1: there is no room"
    monkeypatch.undo()
    second.wait_committed(60)
    assert second.take_news().notes == ["not saved, training goes on: there is no room"]
    assert steps(root) == []
    for number, manager in enumerate((first, second)):
        save(manager, number, 1)
        save(manager, number, 2)
    first.wait_committed(60)
    assert_stored(root, 2)


def test_a_rank_refuses_in_the_order_of_the_saves(rank: MakeRank, root: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = rank(0, vote_timeout_s=3.0), rank(1)
    native, go = second._saver, threading.Event()
    assert native is not None
    real = Stager._copy

    def copy(self: Stager, *args: Any) -> float:
        assert self is not native._stager or go.wait(60)
        return real(self, *args)

    monkeypatch.setattr(Stager, "_copy", copy)
    save(second, 1, 1)
    with pytest.raises(ValueError, match="given twice"):
        save(second, 1, 2, [Chunk.whole("a", torch.ones(2))] * 2)
    save(first, 0, 1)
    save(first, 0, 2)
    time.sleep(0.5)  # in which the refusal would come first
    go.set()
    assert str(failure(first)) == "rank 1: chunk a at offset (0,) is given twice"
    second.wait_committed(60)
    assert steps(root) == [1]
    assert_stored(root, 1)


def test_a_full_disk_of_one_rank_is_told_by_all_with_the_remedy(rank: MakeRank, root: Path, plant: Callable[..., Path]):
    first = rank(0)
    marks = plant("in", "policy/rank-00001.safetensors", "full")
    second = rank(1)
    save(first, 0, 1)
    wait_for(lambda: vote_of(root, 0, 1))
    os.kill(writer_of(first), signal.SIGSTOP)
    save(second, 1, 1)
    line = f"saving step 1 to {root} failed: No space left on device: free space there, or lower "
    errors = [failure(second)]
    assert not list(root.glob(f"step_*/{TENSORS_1}"))  # which makes room for the vote
    go_on(writer_of(first))
    errors.insert(0, failure(first))
    assert [isinstance(error, UserError) for error in errors] == [True, True]
    assert str(errors[0]).startswith(f"rank 1: {line}")
    assert str(errors[1]).startswith(line)
    assert marks.exists()
    assert steps(root) == []
    save(first, 0, 2)
    save(second, 1, 2)
    second.wait_committed(60)
    assert_stored(root, 2)


def test_what_fails_after_the_commit_leaves_it_committed(rank: MakeRank, root: Path, plant: Callable[..., Path]):
    second = rank(1)
    marks = plant("before", "decision.json", "full")
    first = rank(0)
    save(first, 0, 1)
    save(second, 1, 1)
    for manager in (first, second):
        manager.wait_committed(60)
    assert marks.exists()
    assert_stored(root, 1)


TENSORS_0, TENSORS_1 = "policy/rank-00000.safetensors", "policy/rank-00001.safetensors"


@pytest.mark.parametrize(
    ("victim", "when", "place", "writes_again"),
    [
        (1, "in", TENSORS_1, True),
        pytest.param(1, "before", "rank-00001.json", True, marks=pytest.mark.slow),
        (1, "after", "rank-00001.json", False),
        (0, "mkdir", ".votes/step_", True),
        (0, "in", TENSORS_0, True),
        pytest.param(0, "before", "rank-00000.json", True, marks=pytest.mark.slow),
        (0, "after", "rank-00000.json", False),
        (0, "before", "manifest.json", False),
        (0, "after", "manifest.json", None),
        (0, "before", "decision.json", None),
    ],
)
def test_a_killed_writer_is_replaced_and_the_same_save_commits(
    victim: int,
    when: str,
    place: str,
    writes_again: bool | None,
    rank: MakeRank,
    root: Path,
    plant: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
):
    other = rank(1 - victim)
    marks = plant(when, place)
    manager = rank(victim)
    pid = writer_of(manager)
    monkeypatch.delenv("PLANT")
    managers = [manager, other] if victim == 0 else [other, manager]
    for number, each in enumerate(managers):
        save(each, number, 1)
    for each in managers:
        each.wait_committed(60)
    assert [mark.name for mark in marks.iterdir()] == [str(pid)]
    assert manager.writer_pid != pid
    news = manager.take_news().metrics
    assert news["checkpoint/writer_restarts"] == 1
    assert other.take_news().metrics["checkpoint/writer_restarts"] == 0
    if writes_again is not None:
        # Rank 0 may have committed before the death was noticed: then nothing was written, nor measured.
        assert (news.get("checkpoint/bytes", 0.0) > 0) == writes_again
    assert_stored(root, 1)
    for number, each in enumerate(managers):
        save(each, number, 2)
    for each in managers:
        each.wait_committed(60)
    assert_stored(root, 2)


@pytest.mark.slow
def test_a_stopped_writer_is_replaced_and_the_same_save_commits(rank: MakeRank, root: Path):
    first, second = rank(0), rank(1, writer_silence_s=3.0)
    pid = writer_of(second)
    save(second, 1, 1)  # waits for rank 0 to begin
    second.wait_staged()
    time.sleep(0.2)
    os.kill(pid, signal.SIGSTOP)
    save(first, 0, 1)
    first.wait_committed(60)
    second.wait_committed(60)
    assert not Path(f"/proc/{pid}").exists()
    assert_stored(root, 1)


@pytest.mark.parametrize(("dying", "file"), [(1, "rank-00001.json"), (0, "manifest.json")])
def test_a_writer_that_dies_at_each_attempt_refuses_for_all(
    rank: MakeRank, root: Path, plant: Callable[..., Path], dying: int, file: str
):
    managers = {1 - dying: rank(1 - dying)}
    marks = plant("before", file, always=True)
    managers[dying] = rank(dying)
    save(managers[0], 0, 1)
    save(managers[1], 1, 1)
    assert str(failure(managers[dying])) == "saving step 1 failed: its writer process died 3 times"
    assert str(failure(managers[1 - dying])) == f"rank {dying}: saving step 1 failed: its writer process died 3 times"
    assert len(list(marks.iterdir())) == 3
    assert steps(root) == []


def test_no_retry_writes_beside_a_writer_that_cannot_be_killed(
    rank: MakeRank, root: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = rank(0, vote_timeout_s=0.2), rank(1)
    assert second._saver is not None
    process = second._saver._supervisor._process
    assert process is not None

    def never(timeout: float | None = None) -> int:
        raise subprocess.TimeoutExpired("writer", 0)

    monkeypatch.setattr(process, "wait", never)
    save(second, 1, 1)
    second.wait_staged()
    os.kill(process.pid, signal.SIGKILL)
    assert str(failure(second)) == "saving step 1 failed: its writer process hangs in the kernel"
    save(first, 0, 1)
    assert "rank 1 did not vote within 0.2 s" in str(failure(first))
    monkeypatch.undo()
    process.wait(10)


def test_a_rank_that_is_late_cannot_write_into_what_was_given_up(
    rank: MakeRank, root: Path, plant: Callable[..., Path]
):
    first = rank(0, vote_timeout_s=0.5)
    marks = plant("mkdir", "/value", "stop")
    second = rank(1)
    save(first, 0, 1)
    wait_for(lambda: vote_of(root, 0, 1))
    os.kill(writer_of(first), signal.SIGSTOP)
    save(second, 1, 1)
    wait_for(marks.exists)
    assert vote_of(root, 1, 1) is None
    go_on(writer_of(first))
    line = "saving step 1 failed: rank 1 did not vote within 0.5 s (checkpointing.vote_timeout_s)"
    assert str(failure(first)) == line
    go_on(writer_of(second))
    assert str(failure(second)) == f"rank 0: {line}"
    assert steps(root) == []
    save(first, 0, 2)
    assert "rank 1 did not vote" in str(failure(first))
    save(second, 1, 2)  # rank 0 has ended this save before it begins here
    assert str(failure(second)).startswith("rank 0: saving step 2 failed: rank 1 did not vote")
    assert steps(root) == []


def test_a_rank_that_loses_patience_with_rank_0_does_not_spoil_the_commit(rank: MakeRank, root: Path):
    first, second = rank(0), rank(1, vote_timeout_s=0.2)
    save(first, 0, 1)
    wait_for(lambda: vote_of(root, 0, 1))
    os.kill(writer_of(first), signal.SIGSTOP)
    save(second, 1, 1)
    assert "within 0.4 s (twice checkpointing.vote_timeout_s) rank 0 neither committed nor" in str(failure(second))
    go_on(writer_of(first))
    first.wait_committed(60)
    assert_stored(root, 1)


def test_a_folder_that_is_given_up_loses_its_name_before_its_content(
    rank: MakeRank, root: Path, plant: Callable[..., Path]
):
    """Or a slower rank could write into it while it is being removed."""
    marks = plant("rmdir", "policy", "stop")
    first = rank(0, vote_timeout_s=0.2)
    save(first, 0, 1)
    wait_for(marks.exists)
    (name,) = os.listdir(root / ".votes")
    (left,) = root.glob("step_*")
    assert (left / "policy").exists()
    assert left.name != name
    go_on(writer_of(first))
    assert "rank 1 did not vote within 0.2 s" in str(failure(first))
    assert steps(root) == []


def test_a_save_that_rank_0_never_begins_ends_with_the_likely_cause(rank: MakeRank, root: Path):
    second = rank(1, vote_timeout_s=0.2)
    save(second, 1, 1)
    line = str(failure(second))
    assert line.startswith(
        "saving step 1 failed: within 0.4 s (twice checkpointing.vote_timeout_s) rank 0 did not begin"
    )
    assert "has to be one folder that all ranks see" in line
    assert steps(root) == []


def test_rank_0_that_begins_to_wait_again_gives_a_sign_and_the_others_are_as_patient_again(
    rank: MakeRank, root: Path, plant: Callable[..., Path]
):
    second = rank(1)
    plant("after", "rank-00000.json")
    first = rank(0)
    save(first, 0, 1)
    wait_for(lambda: vote_of(root, 0, 1))
    path = vote_of(root, 0, 1)
    assert path is not None
    voted, vote = path.stat().st_mtime_ns, path.read_bytes()
    wait_for(lambda: path.stat().st_mtime_ns != voted)
    assert path.read_bytes() == vote
    save(second, 1, 1)
    for manager in (first, second):
        manager.wait_committed(60)
    assert_stored(root, 1)


def ballot_of(number: int, root: Path, step: int = 1, attempt: int = 1) -> Ballot:
    root.mkdir(exist_ok=True)
    token = Ranks(number, 2, "first start").save_token(step, 0)
    request = WriteRequest(token, number, step, "", 0, "", 0, False, (), (), (), world=2, vote_timeout_s=0.05)
    return Ballot(root / f"step_{step:06d}-{token[:8]}", request, attempt)


def test_the_last_decision_stays_for_those_who_have_not_read_it(root: Path):
    seconds = {step: ballot_of(1, root, step) for step in (1, 2, 3)}
    for step, second in seconds.items():
        first = ballot_of(0, root, step)
        assert first.join()
        assert second.join()
        first.give_up(Refusal(None, None, f"reason {step}"))
        if step > 1:
            with pytest.raises(RefusedError, match=f"reason {step - 1}"):
                seconds[step - 1].settle()
    with pytest.raises(RefusedError, match="it gave up the save of step 1"):
        seconds[1].settle()
    assert len(list((root / ".votes").iterdir())) == 2


def test_a_refusal_is_final_for_the_writer_that_replaces_the_one_that_decided(root: Path):
    first = ballot_of(0, root)
    assert first.join()
    first.vote(Manifest("", "0" * 8, 1, 0, "", 0, (), ()))
    first.give_up(Refusal(None, None, "rank 1 did not vote"))
    with pytest.raises(RefusedError, match="rank 1 did not vote"):
        ballot_of(0, root, attempt=2).join()
    assert steps(root) == []


def test_a_decision_of_another_save_or_an_altered_one_is_not_believed(root: Path):
    for step in (1, 2):
        assert ballot_of(0, root, step).join()
        ballot_of(0, root, step)._decide(None)
    of_step_1, of_step_2 = sorted(root.glob(".votes/*/decision.json"))
    ballot_of(1, root, 2).settle()
    content = of_step_2.read_bytes()
    for wrong in (of_step_1.read_bytes(), content[:-1], content.replace(b"save", b"sane")):
        of_step_2.write_bytes(wrong)
        with pytest.raises(CorruptCheckpointError, match=r"it was altered|it is of another save"):
            ballot_of(1, root, 2).settle()


def test_a_commit_is_seen_by_who_asks_when_the_checkpoint_is_pruned_already(root: Path):
    first, second = ballot_of(0, root), ballot_of(1, root)
    assert first.join()
    assert second.join()
    first._decide(None)
    (folder,) = root.glob("step_*")
    folder.rmdir()
    second.settle()


@pytest.mark.parametrize("alive", [True, False])
def test_patience_begins_again_with_each_sign_of_life(alive: bool, root: Path):
    ballot = ballot_of(1, root)
    signs = iter(range(10**6))
    end = time.monotonic() + 0.5
    waited = partial(
        ballot._wait_until, lambda: time.monotonic() > end, "nobody came", (lambda: next(signs)) if alive else int
    )
    if alive:
        waited()
    else:
        with pytest.raises(HeadwaterError, match=r"within 0\.1 s .* nobody came"):
            waited()


def test_a_tensor_that_two_ranks_save_whole_is_refused(rank: MakeRank, root: Path):
    managers = [rank(0), rank(1)]
    for number, manager in enumerate(managers):
        save(manager, number, 1, [Chunk.whole("same", torch.ones(3))])
    for manager in managers:
        assert "chunk same: offset (0,) is listed twice" in str(failure(manager))
    assert steps(root) == []


def test_a_session_that_was_used_before_is_refused_and_the_old_checkpoint_holds(rank: MakeRank, root: Path):
    managers = [rank(0), rank(1)]
    for number, manager in enumerate(managers):
        save(manager, number, 1)
    for manager in managers:
        manager.wait_committed(60)
        manager.close()
    again = [rank(0), rank(1)]
    for number, manager in enumerate(again):
        save(manager, number, 1, [Chunk.whole("other", torch.ones(4))])
    for manager in again:
        assert "each start of the job needs a session that no other had" in str(failure(manager))
    assert_stored(root, 1)


def test_rank_0_alone_locks_cleans_and_prunes(rank: MakeRank, root: Path):
    leftover = root / "step_000001-00000000"
    leftover.mkdir(parents=True)
    second = rank(1, keep_latest_k=1)
    assert leftover.exists()
    first = rank(0, keep_latest_k=None)
    assert not leftover.exists()
    for step in (1, 2, 3):
        save(first, 0, step)
        save(second, 1, step)
        first.wait_committed(60)
        second.wait_committed(60)
        second.record_metric(step, 1.0)
    second.wait_pruned()
    assert steps(root) == [1, 2, 3]


def altered(vote: bytes, *_: Any) -> bytes:
    middle = len(vote) // 2
    return vote[:middle] + bytes([vote[middle] ^ 1]) + vote[middle + 1 :]


def torn(vote: bytes, *_: Any) -> bytes:
    return vote[: len(vote) // 2]


def without_its_part(vote: bytes, *_: Any) -> bytes:
    return replace(Vote.from_bytes(vote, ""), part=None).to_bytes()


def of_another_save(vote: bytes, of_step_1: bytes, _: bytes) -> bytes:
    return of_step_1


def of_another_rank(vote: bytes, _: bytes, of_rank_0: bytes) -> bytes:
    return of_rank_0


def of_another_world(vote: bytes, *_: Any) -> bytes:
    return replace(Vote.from_bytes(vote, ""), world=3).to_bytes()


def of_older_weights(vote: bytes, *_: Any) -> bytes:
    found = Vote.from_bytes(vote, "")
    assert found.part is not None
    return replace(found, part=replace(found.part, weight_version=1)).to_bytes()


def with_a_file_of_rank_0(vote: bytes, *_: Any) -> bytes:
    found = Vote.from_bytes(vote, "")
    assert found.part is not None
    files = (*found.part.files, replace(found.part.files[0], path="trainer.json"))
    return replace(found, part=replace(found.part, files=files)).to_bytes()


def with_a_larger_file(vote: bytes, *_: Any) -> bytes:
    found = Vote.from_bytes(vote, "")
    assert found.part is not None
    first, *others = found.part.files
    files = (replace(first, size=first.size + 1), *others)
    return replace(found, part=replace(found.part, files=files)).to_bytes()


def as_it_was(vote: bytes, *_: Any) -> bytes:
    return vote


FORGERIES = [
    (altered, "torn or was altered"),
    (torn, "torn or was altered"),
    (without_its_part, "torn or was altered"),
    (of_another_save, "no vote of rank 1 of 2 on this save"),
    (of_another_rank, "no vote of rank 1 of 2 on this save"),
    (of_another_world, "no vote of rank 1 of 2 on this save"),
    (of_older_weights, "rank 1 saved weight_version 1, rank 0 "),
    (with_a_file_of_rank_0, "trainer.json is no file of rank 1"),
    (with_a_larger_file, "is not the file of [0-9]+ bytes it tells of"),
    (as_it_was, None),
]


def test_a_vote_that_cannot_be_believed_refuses_the_save(rank: MakeRank, root: Path):
    """Rank 0's writer is stopped after its own vote, rank 1's vote is exchanged, and rank 0 goes on."""
    first, second = rank(0), rank(1, on_save_error="continue")
    of_step_1 = b""
    for step, (forge, said) in enumerate([(as_it_was, None), *FORGERIES], 1):
        save(first, 0, step)
        wait_for(lambda step=step: vote_of(root, 0, step))
        os.kill(writer_of(first), signal.SIGSTOP)
        save(second, 1, step)
        wait_for(lambda step=step: vote_of(root, 1, step))
        of_rank_0, path = vote_of(root, 0, step), vote_of(root, 1, step)
        assert of_rank_0 is not None
        assert path is not None
        vote = path.read_bytes()
        of_step_1 = of_step_1 or vote
        path.write_bytes(forge(vote, of_step_1, of_rank_0.read_bytes()))
        go_on(writer_of(first))
        second.wait_committed(60)
        if said is None:
            first.wait_committed(60)
            assert_stored(root, step)
        else:
            with pytest.raises(HeadwaterError, match=said):
                first.wait_committed(60)
            assert step not in steps(root)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, os.environ["TESTS"])
from pathlib import Path
from test_votes import save, writer_of
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.ranks import Ranks
from headwater.config.schema import CheckpointingConfig
root, number, last, then = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = CheckpointingConfig(checkpoint_dir=root, keep_latest_k=None, vote_timeout_s=60.0)
manager = CheckpointManager(config, "run", "model", Ranks(number, 2, "first start"))
for step in range(1, last + 1):
    save(manager, number, step)
    manager.wait_staged()
    if step == 1:
        print(flush=True)
if then == "die":
    manager.wait_committed(60)
    print(writer_of(manager), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
manager.close()
"""


def start(root: Path, number: int, last: int, then: str = "close") -> subprocess.Popen[str]:
    environment = {**os.environ, "TESTS": str(Path(__file__).parent)}
    words = [sys.executable, "-c", SCRIPT, str(root), str(number), str(last), then]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_save_together(root: Path):
    processes = [start(root, number, 3) for number in (1, 0)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert steps(root) == [1, 2, 3]
    for step in (1, 2, 3):
        assert_stored(root, step)
    assert not (root / ".votes").exists()


def test_a_killed_process_of_one_rank_costs_the_others_that_save_alone(rank: MakeRank, root: Path):
    process = start(root, 1, 1, "die")
    first = rank(0)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"  # its writer has the save
    save(first, 0, 1)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    wait_for(lambda: not Path(f"/proc/{output.strip()}").exists())  # its writer ended with it
    first.wait_committed(60)
    assert first._saver is not None
    first._saver._vote_timeout_s = 0.5
    save(first, 0, 2)
    line = "saving step 2 failed: rank 1 did not vote within 0.5 s (checkpointing.vote_timeout_s)"
    assert str(failure(first)) == line
    assert steps(root) == [1]
    assert_stored(root, 1)
    latest = first.latest()
    assert latest is not None
    assert latest.manifest.step == 1
    first.close()
    assert sorted(path.name[:5] for path in root.iterdir()) == [".lock", "step_"]
