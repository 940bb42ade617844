import os
from pathlib import Path

import pytest

from headwater.checkpoint import commit as commit_module
from headwater.checkpoint.commit import commit, committed, discard, new_folder, parse_folder_name, remove
from headwater.checkpoint.manifest import Manifest, read_manifest


def sample(save_id: str) -> Manifest:
    return Manifest("run-1", save_id, 10, 10, "model-a", 1, (), ())


def test_folder_is_named_by_step_and_a_unique_save_id(tmp_path: Path):
    folder, save_id = new_folder(tmp_path, 10)
    assert folder.name == f"step_000010-{save_id}"
    assert parse_folder_name(folder.name) == (10, save_id)
    assert len({new_folder(tmp_path, 10)[1] for _ in range(50)} | {save_id}) == 51


def test_taken_save_id_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = iter(["aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr(commit_module.secrets, "token_hex", lambda count: next(drawn))
    assert [new_folder(tmp_path, 1)[1] for _ in range(2)] == ["aaaaaaaa", "bbbbbbbb"]


@pytest.mark.parametrize(
    "name", ["step_10-0123abcd", "step_000010", "step_000010-xyz", "step_000010-0123abcd.tmp", "a"]
)
def test_other_names_are_no_checkpoint_folders(name: str):
    assert parse_folder_name(name) is None


def test_steps_beyond_a_million_have_longer_names(tmp_path: Path):
    folder, save_id = new_folder(tmp_path, 12_345_678)
    assert parse_folder_name(folder.name) == (12_345_678, save_id)


def test_folder_is_committed_by_its_manifest(tmp_path: Path):
    folder, save_id = new_folder(tmp_path, 10)
    assert not committed(folder)
    commit(folder, sample(save_id))
    assert committed(folder)
    assert read_manifest(folder) == sample(save_id)
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


def test_files_and_folders_are_durable_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, save_id = new_folder(tmp_path, 10)
    (folder / "policy").mkdir()
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(commit_module.os, "fsync", fsync)
    monkeypatch.setattr(commit_module.os, "rename", rename)
    commit(folder, sample(save_id))
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert before == ["manifest.json.tmp", "policy", folder.name, tmp_path.name]
    assert after == [folder.name]


def test_death_before_the_rename_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, save_id = new_folder(tmp_path, 10)

    def die(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commit_module.os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        commit(folder, sample(save_id))
    assert not committed(folder)


def test_half_a_deletion_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, save_id = new_folder(tmp_path, 10)
    commit(folder, sample(save_id))

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commit_module.shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        remove(folder)
    assert folder.exists()
    assert not committed(folder)


def test_remove_and_discard_delete_the_folder(tmp_path: Path):
    kept, save_id = new_folder(tmp_path, 1)
    commit(kept, sample(save_id))
    remove(kept)
    dropped, _ = new_folder(tmp_path, 2)
    discard(dropped)
    assert list(tmp_path.iterdir()) == []


def test_discard_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    discard(tmp_path / "absent")
    assert "could not remove" in caplog.text
