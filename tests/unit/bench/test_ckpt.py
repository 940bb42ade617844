import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from headwater.bench import ckpt, ckpt_sides
from headwater.bench.ckpt_ceilings import CeilingMeter
from headwater.bench.ckpt_guards import limited
from headwater.bench.ckpt_peers import PEERS, Way
from headwater.bench.ckpt_sides import Setup, TorchSave
from headwater.bench.ckpt_state import Training, empty_copy, fingerprints, named_tensors
from headwater.cli import bench
from headwater.cli.main import main
from headwater.errors import HeadwaterError


@pytest.fixture(autouse=True)
def _one_thread():
    """So small a model is many times slower with two, when the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "disk"
    made.mkdir()
    return made


@pytest.fixture
def run_whole(folder, tmp_path, monkeypatch):
    """The exit code and the JSON of a small run."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words, size="0.001", rounds="2"):
        file = tmp_path / "figures.json"
        sizes = ["--size-gb", size, "--rounds", rounds, "--steps", "1"]
        code = main(["bench", "ckpt", *sizes, "--folder", str(folder), "--json", str(file), *words])
        return code, json.loads(file.read_text() or "null") if file.exists() else None

    return run


@pytest.fixture
def run(run_whole, monkeypatch):
    """The same with `torch.save` in the place of Headwater, which needs no process, and short steps."""
    monkeypatch.setattr(ckpt, "OWN", Way("Headwater", TorchSave))
    monkeypatch.setattr(ckpt, "_STEP_PER_WRITE", 0.0)
    return run_whole


class Fake:
    """Keeps a copy of what is live at the save, and counts."""

    note = ""

    def __init__(self, setup):
        self.root = setup.root
        self.saves = []
        Fake.made = self

    def save(self, step, state):
        self.saves.append(next(iter(state["optimizer"]["state"].values()))["step"].item())
        self.live = state
        self.copy = clone(state)
        (self.root / "data").write_bytes(bytes(1000))

    def wait_safe_to_change(self):
        pass

    def wait_committed_and_synced(self):
        return self.root

    def load(self, like):
        return self.copy

    def close(self):
        self.closed = True


def clone(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return {key: clone(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_one_run_gives_the_figures_of_every_side_and_finds_the_right_values(run_whole, folder, capsys):
    code, result = run_whole("--peer", "torch-save", "--peer", "dcp-thread", size="0.01")
    assert code == 0
    assert [side["key"] for side in result["sides"]] == ["headwater", "torch-save", "dcp-thread"]
    assert 0.7e7 < result["nbytes"] < 1.4e7
    for side in result["sides"]:
        assert not side["problem"], side
        assert side["right"] is True
        assert side["nbytes"] >= result["nbytes"]
        for name in ("stall_s", "fence_s", "commit_s", "step_s", "saving_step_s", "loop_stall_s", "loop_fence_s"):
            assert len(side[name]) == 2, name
            assert all(seconds >= 0 for seconds in side[name])
        for stall, fence, commit in zip(side["stall_s"], side["fence_s"], side["commit_s"], strict=True):
            assert 0 < stall + fence <= commit
        for step, stall in zip(side["saving_step_s"], side["loop_stall_s"], strict=True):
            assert 0 < stall < step
    assert len(result["ceilings"]["memcpy"]) == len(result["ceilings"]["buffered"]) == 2
    assert list(folder.iterdir()) == []
    assert not dist.is_initialized()
    shown = capsys.readouterr().out
    assert "Headwater" in shown
    assert "memcpy" in shown


def test_every_save_is_of_a_state_that_training_moved_on(run, monkeypatch):
    monkeypatch.setitem(PEERS, "nvrx", Way("Fake", Fake))
    run("--peer", "nvrx", rounds="1")
    start, again, first, overlapped, alone, checked = Fake.made.saves
    assert start == again
    assert first - start >= 1  # steps without saves come first
    assert (overlapped - first, alone - overlapped, checked - alone) == (
        1,
        1,
        1,
    )  # the last one moved when the other side was checked
    after = next(iter(Fake.made.live["optimizer"]["state"].values()))["step"].item()
    assert after == checked + 1  # the tensors were changed after the last save, before it was looked at
    assert Fake.made.closed


def test_a_peer_whose_checkpoint_holds_later_values_is_marked(run, monkeypatch, capsys):
    class Lazy(Fake):
        def load(self, like):
            return self.live

    monkeypatch.setitem(PEERS, "nvrx", Way("Lazy", Lazy))
    code, result = run("--peer", "nvrx", rounds="1")
    own, lazy = result["sides"]
    assert code == 0
    assert own["right"] is True
    assert lazy["right"] is False
    assert set(lazy["wrong"]) == {path for path, _ in named_tensors(Fake.made.live)}
    assert f"NO: {len(lazy['wrong'])}" in capsys.readouterr().out


def test_the_exit_code_is_1_where_our_own_checkpoint_is_wrong(run, monkeypatch):
    class Lazy(Fake):
        def load(self, like):
            return self.live

    monkeypatch.setattr(ckpt, "OWN", Way("Lazy", Lazy))
    code, _ = run("--peer", "torch-save", rounds="1")
    assert code == 1


def test_a_peer_that_breaks_in_mid_run_is_left_out_with_its_reason(run, monkeypatch, folder, capsys):
    refused = []

    class Breaks(Fake):
        def save(self, step, state):
            if len(self.saves) == 5:  # in the second of three rounds
                refused.append(step)
                raise RuntimeError("the traceback of\nanother process\nValueError: out of luck\n")
            super().save(step, state)

    monkeypatch.setitem(PEERS, "nvrx", Way("Breaks", Breaks))
    code, result = run("--peer", "nvrx", "--peer", "torch-save", rounds="3")
    own, broken, other = result["sides"]
    assert code == 0
    assert broken["problem"] == "broke: RuntimeError: ValueError: out of luck"
    assert len(broken["commit_s"]) == len(refused) == 1
    assert broken["right"] is None
    assert Fake.made.closed
    assert len(own["commit_s"]) == len(other["commit_s"]) == 3
    assert other["right"] is True
    assert list(folder.iterdir()) == []
    assert "out of luck" in capsys.readouterr().out


def test_peers_that_are_missing_or_cannot_start_are_lines_of_the_table(run, monkeypatch):
    class Refuses(Fake):
        def __init__(self, setup):
            raise OSError("no such device")

    monkeypatch.setitem(PEERS, "nvrx", Way("Absent", Fake, package="no-such-package", module="no_such_package.part"))
    monkeypatch.setitem(PEERS, "dcp-process", Way("Refuses", Refuses))
    code, result = run("--peer", "nvrx", "--peer", "dcp-process", rounds="1")
    assert code == 0
    assert [side["problem"] for side in result["sides"]] == [
        "",
        "not installed (pip install no-such-package)",
        "does not run here: OSError: no such device",
    ]


def test_an_interrupt_leaves_nothing_behind(run, monkeypatch, folder):
    class Interrupted(Fake):
        def wait_committed_and_synced(self):
            if len(self.saves) >= 3:
                assert any(folder.iterdir())
                raise KeyboardInterrupt
            return super().wait_committed_and_synced()

    monkeypatch.setitem(PEERS, "nvrx", Way("Interrupted", Interrupted))
    code, _ = run("--peer", "nvrx", "--peer", "dcp-thread")
    assert code == 130
    assert Fake.made.closed
    assert list(folder.iterdir()) == []
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size-gb", "0"], "--size-gb must be above 0"),
        (["--size-gb", "-1"], "--size-gb must be above 0"),
        (["--size-gb", "nan"], "--size-gb must be above 0"),
        (["--size-gb", "much"], "invalid float value"),
        (["--rounds", "0"], "--rounds and --steps must be 1 or more"),
        (["--steps", "0"], "--rounds and --steps must be 1 or more"),
        (["--size-gb", "1e7"], "is free: free space, lower --size-gb, or name fewer sides"),
        (["--folder", "/no/such"], "--folder /no/such: no such folder"),
        (["--peer", "unknown"], "invalid choice: 'unknown'"),
        (["--json", "/no/such/file.json"], "--json /no/such/file.json: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(run, folder, words, says, capsys):
    sizes = [] if "--size-gb" in words or "--json" in words else ["--size-gb", "0.002"]
    code = main(["bench", "ckpt", "--folder", str(folder), *sizes, *words])
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_and_too_little_memory_are_said_before_the_run(run, monkeypatch, capsys):
    monkeypatch.setattr(ckpt.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**15))
    code, _ = run("--folder", "/proc")
    assert code == 2
    assert "--folder /proc: " in capsys.readouterr().err
    monkeypatch.setattr(ckpt, "available_bytes", lambda: 1_000_000)
    code, _ = run()
    assert code == 2
    assert "of memory, 1.0 MB is free" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_blocks(run, capsys):
    assert run("--device", "cuda")[0] == 3
    assert "no CUDA device" in capsys.readouterr().err


def test_the_command_line_names_every_peer():
    assert set(bench._CKPT_PEERS) == set(PEERS)


def test_the_peers_files_and_folders_are_synced(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        ckpt_sides.os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    side = TorchSave(Setup(tmp_path, {}, torch.device("cpu")))
    side.save(1, {"weight": torch.ones(3)})
    folder = tmp_path / "step_000001"
    assert set(synced) == {str(tmp_path), str(folder), str(folder / "state.pt")}
    side.close()


def test_no_more_than_two_checkpoints_of_a_peer_are_kept(tmp_path):
    side = TorchSave(Setup(tmp_path, {}, torch.device("cpu")))
    for step in range(1, 6):
        side.save(step, {"step": torch.tensor(step)})
    side.close()  # ends the removal too
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000004", "step_000005"]


def test_a_call_without_an_answer_is_given_up():
    started = threading.Event()

    def hang():
        started.set()
        threading.Event().wait()

    with pytest.raises(HeadwaterError, match=r"no answer in 0\.05 s"):
        limited(hang, 0.05)
    assert started.is_set()
    assert limited(lambda: time.sleep(0.1) or 7, 60.0) == 7  # the earlier timer does not ring any more


def test_the_step_becomes_longer_than_what_is_asked_for():
    training = Training(2e6, torch.device("cpu"))
    one = training.calibrate(0.0)
    assert training.microbatches == 1
    assert training.calibrate(3 * one) > 3 * one
    assert training.microbatches > 1


def test_the_ceilings_copy_the_whole_state_and_write_all_of_it(tmp_path):
    training = Training(2e6, torch.device("cpu"))
    meter = CeilingMeter(training.state, tmp_path, torch.device("cpu"))
    meter.measure()
    assert list(tmp_path.iterdir()) == []
    assert meter.found.nbytes == sum(target.numel() * target.element_size() for target, _ in meter._copies)
    assert all(torch.equal(target, source) for target, source in meter._copies)
    for threads in (1, 3):
        assert meter._write(os.O_WRONLY, threads) > 0
        assert (tmp_path / "ceiling").read_bytes() == meter._buffer.numpy().tobytes()


def test_fingerprints_tell_one_changed_element_and_a_tensor_that_was_never_filled():
    state = {"a": torch.arange(5.0), "b": [torch.tensor(2.0)]}
    before = fingerprints(state)
    assert before == fingerprints({"a": torch.arange(5.0), "b": [torch.tensor(2.0)]})
    state["a"][3] += 1
    assert {path for path, value in fingerprints(state).items() if value != before[path]} == {"/a"}
    assert all(value != before[path] for path, value in fingerprints(empty_copy(state)).items())
