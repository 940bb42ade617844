import os
import threading
from pathlib import Path

import pytest

from headwater.errors import UserError
from headwater.models import cache


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HEADWATER_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"XDG_CACHE_HOME": "/two"}, "/two/headwater"),
        ({"HEADWATER_CACHE": ""}, "/home/me/.cache/headwater"),
        ({"HEADWATER_CACHE": "~/models"}, "/home/me/models"),
    ],
)
def test_cache_folder_follows_the_environment(environment, expected, monkeypatch):
    for name in ("HEADWATER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_dir() == Path(expected)


def test_a_folder_is_built_once_and_then_reused(tmp_path):
    target = cache.make_folder(tmp_path / "models" / "m-1", write_model)
    assert sorted(file.name for file in target.iterdir()) == ["config.json"]

    def never(folder: Path) -> None:
        raise AssertionError("built twice")

    assert cache.make_folder(target, never) == target


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fails(folder: Path) -> None:
        write_model(folder)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        cache.make_folder(tmp_path / "m-1", fails)
    assert [path.name for path in tmp_path.iterdir()] == ["m-1.lock"]


def test_the_folder_has_its_name_only_when_the_build_is_done(tmp_path):
    target = tmp_path / "m-1"

    def build(folder: Path) -> None:
        assert folder.parent == tmp_path
        assert not target.exists()
        write_model(folder)

    cache.make_folder(target, build)
    assert target.is_dir()


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path):
    leftover = tmp_path / ".m-1.killed"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    cache.make_folder(tmp_path / "m-1", write_model)
    assert not leftover.exists()


def test_two_builders_at_once_build_one_folder(tmp_path):
    target = tmp_path / "m-1"
    builds: list[Path] = []
    second_came = threading.Event()

    def build(folder: Path) -> None:
        builds.append(folder)
        if len(builds) == 2:
            second_came.set()
        else:
            second_came.wait(0.3)
        write_model(folder)

    threads = [threading.Thread(target=cache.make_folder, args=(target, build)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert (target / "config.json").is_file()


def test_without_locks_the_first_to_finish_wins_and_the_other_takes_its_folder(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    target = tmp_path / "m-1"

    def build(folder: Path) -> None:
        write_model(folder)
        target.mkdir()
        (target / "config.json").write_text("the other's")

    assert cache.make_folder(target, build) == target
    assert (target / "config.json").read_text() == "the other's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-1", "m-1.lock"]


def test_a_full_disk_names_the_cache_and_the_remedy(tmp_path):
    def full(folder: Path) -> None:
        raise OSError(28, os.strerror(28))

    with pytest.raises(UserError, match=r"cannot write the model cache .*No space left.*HEADWATER_CACHE") as caught:
        cache.make_folder(tmp_path / "m-1", full)
    assert "\n" not in str(caught.value)


def test_a_cache_that_is_a_file_names_the_remedy(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match="HEADWATER_CACHE"):
        cache.make_folder(tmp_path / "cache" / "models" / "m-1", write_model)
