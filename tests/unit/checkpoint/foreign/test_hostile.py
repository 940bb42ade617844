"""Pickles made to run something, to crash or to fill the memory: each is refused in one line, and nothing runs."""

import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.cli.main import main

SOURCE = str(Path(sys.modules["headwater"].__file__ or "").parents[1])
pytestmark = pytest.mark.filterwarnings("ignore")
both = pytest.mark.parametrize("name", [".metadata", "common.pt"])


class Evil:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def run_directly(marker: Path) -> Evil:
    return Evil(os.system, f"touch {marker}")


def run_by_subprocess(marker: Path) -> Evil:
    return Evil(subprocess.check_call, ["touch", str(marker)])


def run_by_eval(marker: Path) -> Evil:
    return Evil(eval, f"open({str(marker)!r}, 'w').close()")


@pytest.fixture
def put(save_dcp: Callable[..., Path]) -> Callable[[str, bytes], Path]:
    """A Megatron folder that is intact but for one file: the pickle, in the archive that the file usually is."""

    def run(name: str, pickled: bytes) -> Path:
        folder = save_dcp("folder", {"w": torch.ones(4), "optimizer.state.exp_avg.w": torch.ones(4)})
        torch.save({"iteration": 7}, folder / "common.pt")
        assert main(["ckpt", "freshness", str(folder), str(folder)]) == 1
        if name == "common.pt":
            with zipfile.ZipFile(folder / name, "w") as archive:
                archive.writestr("common/data.pkl", pickled)
        else:
            (folder / name).write_bytes(pickled)
        return folder

    return run


def assert_one_line(code: int, out: str, err: str, path: Path) -> None:
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.isprintable() or err[:-1].isprintable()
    assert err.startswith(f"headwater: error: {path}: ")


@both
@pytest.mark.parametrize("make", [run_directly, run_by_subprocess, run_by_eval])
def test_a_command_is_refused_and_not_run(
    make: Callable[[Path], Evil],
    name: str,
    put: Callable[[str, bytes], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    pickle.loads(pickle.dumps(make(tmp_path / "control")))
    assert (tmp_path / "control").exists()  # it runs wherever it is loaded
    marker = tmp_path / "ran"
    for value in (make(marker), {"iteration": 7, "args": make(marker)}):
        folder = put(name, pickle.dumps(value))
        capfd.readouterr()
        code = main(["ckpt", "freshness", str(folder), str(folder)])
        assert_one_line(code, *capfd.readouterr(), folder / name)
        assert not marker.exists()


@pytest.mark.parametrize("pickled", [pickle.dumps(Counter("a")), b"cmy\x1b[2J\nbad\rname\n."])
def test_a_class_beyond_metadata_is_refused_by_name(
    pickled: bytes, put: Callable[[str, bytes], Path], capsys: pytest.CaptureFixture[str]
):
    folder = put(".metadata", pickled)
    capsys.readouterr()
    code = main(["ckpt", "freshness", str(folder), str(folder)])
    printed = capsys.readouterr()
    assert_one_line(code, *printed, folder / ".metadata")
    assert "which no metadata needs; nothing of it was run" in printed.err
    assert "collections.Counter" in printed.err or r"my\x1b[2J.bad\rname" in printed.err


def doubled_paths() -> bytes:
    """Each path is the one before, twice."""
    return b"cpathlib\nPosixPath\nq\x000X\x09\x00\x00\x00something" + b"q\x010h\x00h\x01h\x01\x86R" * 60 + b"."


def many_shapes() -> bytes:
    """One long list, copied into shape after shape."""
    return b"ctorch\nSize\nq\x000](" + b"N" * 200_000 + b"eq\x010" + b"h\x00h\x01\x85R" * 20_000 + b"."


def doubled_size() -> bytes:
    """A tensor of one element whose shape is a tuple of tuples of tuples."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00K\x01" + b"2\x86" * 26 + b"tR."


BOMBS = {
    "memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "bytearray": b"\x80\x05\x96" + (1 << 36).to_bytes(8, "little") + b".",
    "bytes": b"\x80\x04\x8e" + (1 << 36).to_bytes(8, "little") + b".",
    "string": b"\x80\x04\x8d" + (1 << 36).to_bytes(8, "little") + b".",
    "frame": b"\x80\x04\x95" + (1 << 36).to_bytes(8, "little") + b".",
    "nested lists": b"]" * 200_000 + b"a" * 199_999 + b".",
    "nested key": b"})" + b"\x85" * 200_000 + b"Ns.",
    "nested keys": b"}()" + b"\x85" * 200_000 + b"Nu.",
    "nested key, early protocol": b"()" + b"\x85" * 200_000 + b"Nd.",
    "nested member": b"\x8f()" + b"\x85" * 200_000 + b"\x90.",
    "nested frozen member": b"()" + b"\x85" * 200_000 + b"\x91.",
    "nested key of an OrderedDict": b"ccollections\nOrderedDict\n]]()" + b"\x85" * 200_000 + b"Nea\x85R.",
    "doubled key": b"})" + b"2\x86" * 60 + b"Ns.",
    "doubled paths": doubled_paths(),
    "many shapes": many_shapes(),
    "doubled size": doubled_size(),
}


def in_two_gigabytes() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def test_pickles_that_would_crash_hang_or_fill_the_memory_are_refused(put: Callable[[str, bytes], Path]):
    """In a process of its own, for all of them: one that is not refused would end it."""
    script = (
        "import os, resource, sys; from headwater.cli.main import main\n"
        "def used(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for line in sys.stdin:\n"
        "    folder, name, bomb = line.split()\n"
        "    os.replace(bomb, folder + '/' + name)\n"
        "    print(main(['ckpt', 'freshness', folder, folder]), used() >> 10, flush=True)\n"
    )
    folder = put("common.pt", b"")
    lines, expected = [], []
    for name in ("common.pt", ".metadata"):
        for number, (bomb, pickled) in enumerate(BOMBS.items()):
            if bomb == "many shapes" and name == "common.pt":
                continue  # a shape there is an inert record
            made = folder / f"{name}-{number}"
            if name == "common.pt":
                with zipfile.ZipFile(made, "w") as archive:
                    archive.writestr("common/data.pkl", pickled)
                    archive.writestr("common/data/0", bytes(4))
            else:
                made.write_bytes(pickled)
            lines.append(f"{folder} {name} {made}")
            expected.append(f"headwater: error: {folder / name}: ")
    ended = subprocess.run(
        [sys.executable, "-c", script],
        input="\n".join(lines),
        env={**os.environ, "PYTHONPATH": SOURCE},
        preexec_fn=in_two_gigabytes,
        timeout=100,
        capture_output=True,
        text=True,
    )
    codes_and_mebibytes = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert (ended.returncode, [code for code, _ in codes_and_mebibytes]) == (0, [2] * len(lines)), ended.stderr
    assert codes_and_mebibytes[-1][1] < codes_and_mebibytes[0][1] + 300  # the first one names only a number
    assert "MemoryError" not in ended.stderr
    errors = ended.stderr.splitlines()
    assert len(errors) == len(lines)
    assert all(error.startswith(start) for error, start in zip(errors, expected, strict=True)), ended.stderr


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
def test_a_pipe_is_not_waited_for(name: str, put: Callable[[str, bytes], Path]):
    folder = put("none", b"")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert main(["ckpt", "freshness", str(folder), str(folder)]) == (1 if name == "metadata.json" else 2)


def test_metadata_larger_than_any_is_refused_unread(
    put: Callable[[str, bytes], Path], capsys: pytest.CaptureFixture[str]
):
    folder = put(".metadata", b"")
    os.truncate(folder / ".metadata", 1 << 40)
    capsys.readouterr()
    code = main(["ckpt", "freshness", str(folder), str(folder)])
    printed = capsys.readouterr()
    assert_one_line(code, *printed, folder / ".metadata")
    assert "larger than 1024 MiB" in printed.err
