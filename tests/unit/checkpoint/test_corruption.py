"""Whatever is altered in a committed checkpoint, `verify` and loading both refuse it and name where."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from headwater import AsyncCheckpointer
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.dcp import HeadwaterReader, HeadwaterWriter
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.manifest import FileEntry, Manifest, read_manifest
from headwater.checkpoint.reader import Checkpoint, verify
from headwater.config.schema import CheckpointingConfig
from headwater.errors import UserError

RecordProperty = Callable[[str, object], None]
FLIPS = 200
SMALL = {"trainer.json": 1, "config.yaml": 1, "tokenizer/tokenizer.json": 1, "tokenizer/extra/vocab.txt": 1}


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "added": ["<pad>"]}')
    (folder / "extra").mkdir()
    (folder / "extra" / "vocab.txt").write_text("a\nb\nc\n")


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.größe.weight": torch.randn(40, 25, generator=generator),
        "norm.weight": torch.randn(33, generator=generator).bfloat16(),
        "optimizer.state.step.norm.weight": torch.tensor(7 + seed),
        "mask": torch.randint(0, 2, (7,), generator=generator).bool(),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of steps 1 and 2, two components each."""
    root = tmp_path_factory.mktemp("made") / "checkpoints"
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), strategy="sync"), "run", "model")
    for step in (1, 2):
        components = {
            name: [Chunk.whole(key, tensor) for key, tensor in tensors(seed + step).items()]
            for name, seed in (("policy", 10), ("value", 20))
        }
        manager.save(step, components, {"step": step, "rng": [1, 2]}, "grpo: {}\n", write_tokenizer, step)
    manager.close()
    return root


class Damaged:
    """A copy of the run's folder to alter; `folder` is that of its newest checkpoint."""

    def __init__(self, root: Path) -> None:
        self.folder = max(root.glob("step_*"))
        self._manager = CheckpointManager(
            CheckpointingConfig(checkpoint_dir=str(root), strategy="sync"), "run", "model"
        )

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def refused_by_verify(self) -> str:
        try:
            return "\n".join(verify(Checkpoint.open(self.folder)))
        except UserError as error:
            return str(error)

    def refused_by_load(self) -> str:
        """What a run that resumes says, having read all; empty where it found nothing."""
        try:
            checkpoint = self._manager.latest()
            assert checkpoint is not None
            assert checkpoint.folder == self.folder
            checkpoint.trainer_state()
            for reader in map(checkpoint.component, checkpoint.components()):
                for name in reader.names():
                    reader.read(name)
        except UserError as error:
            return str(error)
        return ""

    def assert_refused(self, *words: str) -> None:
        by_load = self.refused_by_load()
        assert "\n" not in by_load
        for said in (self.refused_by_verify(), by_load):
            assert said
            for word in words:
                assert word in said

    def assert_holds(self) -> None:
        assert self.refused_by_verify() == self.refused_by_load() == ""

    def close(self) -> None:
        self._manager.close()


@pytest.fixture
def damaged(made: Path, tmp_path: Path) -> Iterator[Damaged]:
    shutil.copytree(made, tmp_path / "checkpoints", symlinks=True)
    copied = Damaged(tmp_path / "checkpoints")
    copied.assert_holds()
    yield copied
    copied.close()


def flips(files: list[Path], count: int, seed: int) -> Iterator[tuple[Path, int, int]]:
    """(file, position, mask to xor) of single bits and whole bytes: half over all bytes, half over the files."""
    rng = random.Random(seed)
    sizes = [path.stat().st_size for path in files]
    for index in range(count):
        (path,) = rng.choices(files, sizes if index % 2 else None)
        yield (
            path,
            rng.randrange(path.stat().st_size),
            1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256),
        )


def flip(path: Path, position: int, mask: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def test_random_flips_of_all_bytes_are_refused_by_verify_and_load(damaged: Damaged, record_property: RecordProperty):
    manifest = read_manifest(damaged.folder)
    missed: list[str] = []
    hits: dict[str, int] = {}
    for path, position, mask in flips(damaged.files(), FLIPS, seed=0):
        name = path.relative_to(damaged.folder).as_posix()
        chunk = next((c for c in manifest.chunks if c.file == name and c.begin <= position < c.end), None)
        header = name.endswith(".safetensors") and chunk is None
        what = (
            "chunks"
            if chunk
            else "headers"
            if header
            else "manifest"
            if path.parent == damaged.folder and name == "manifest.json"
            else "other files"
        )
        hits[what] = hits.get(what, 0) + 1
        flip(path, position, mask)
        for how, said in (("verify", damaged.refused_by_verify()), ("load", damaged.refused_by_load())):
            if name not in said or (chunk is not None and f"chunk {chunk.name} " not in said):
                missed.append(f"{how}: {name} byte {position} xor {mask}: {said!r}")
        flip(path, position, mask)
    damaged.assert_holds()
    assert sum(hits.values()) == FLIPS
    assert hits.keys() == {"chunks", "headers", "manifest", "other files"}
    where = ", ".join(f"{count} in {what}" for what, count in sorted(hits.items()))
    record_property("figure", f"corruption: {FLIPS} random flips ({where}): {len(missed)} missed by verify or load")
    assert missed == []


@pytest.mark.parametrize(
    "change",
    [lambda data: b"", lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda data: data + b"\0"],
    ids=["emptied", "one byte less", "half", "one byte more"],
)
def test_each_file_cut_or_extended_is_refused_by_name(change: Callable[[bytes], bytes], damaged: Damaged):
    files = damaged.files()
    assert len(files) == 2 + 1 + len(SMALL)
    for path in files:
        data = path.read_bytes()
        path.write_bytes(change(data))
        damaged.assert_refused(path.relative_to(damaged.folder).as_posix())
        path.write_bytes(data)
    damaged.assert_holds()


@pytest.mark.parametrize("file", ["policy/rank-00000.safetensors", "trainer.json", "tokenizer/extra/vocab.txt"])
def test_a_missing_file_is_refused_by_name(file: str, damaged: Damaged):
    (damaged.folder / file).unlink()
    damaged.assert_refused(file)


def test_the_tensors_of_another_step_or_component_are_refused_by_chunk(damaged: Damaged):
    older = min(damaged.folder.parent.glob("step_*"))
    assert older != damaged.folder
    target = damaged.folder / "policy" / "rank-00000.safetensors"
    own = target.read_bytes()
    for other in (older / "policy", damaged.folder / "value"):
        foreign = (other / target.name).read_bytes()
        assert len(foreign) == len(own)
        target.write_bytes(foreign)
        damaged.assert_refused("policy/rank-00000.safetensors: chunk ")
    target.write_bytes(own)
    damaged.assert_holds()


def other_values(value: Any) -> list[Any]:
    """What a field may be altered to: near values, lists of another length or order, and wrong types."""
    values: list[Any] = [None, True, {}, [], 1.5, "", [value]]
    if isinstance(value, int):
        values += [value + 1, value - 1, -value - 1, float(value), str(value), 1 << 70]
    elif isinstance(value, str):
        values += [value + "0", value[:-1], value.upper(), value[::-1], value[1:] + value[:1], "../" + value]
    elif isinstance(value, list):
        values += [value[:-1], value[1:], value * 2, value[::-1]]
    return [other for other in values if type(other) is not type(value) or other != value]


def alterations(document: Any) -> Iterator[tuple[str, Any]]:
    """Each single change of a JSON document: the place and what it is then."""
    places: list[tuple[Any, ...]] = [()]
    for place in places:
        value = document
        for key in place:
            value = value[key]
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        places += [(*place, key) for key in keys]
        for other in other_values(value):
            yield str(place), put(document, place, other)
        if place and isinstance(place[-1], str):
            yield f"{place} dropped", put(document, place, value, None)
            yield f"{place} renamed", put(document, place, value, place[-1] + "_")
        if isinstance(value, dict):
            yield f"{place} reordered", put(document, place, dict(reversed(value.items())))
            yield f"{place} with more", put(document, place, value | {"extra": 1})


_SAME_KEY = object()


def put(document: Any, place: tuple[Any, ...], value: Any, new_key: Any = _SAME_KEY) -> Any:
    """A copy with one value replaced, or with its key renamed (None: dropped)."""
    if not place:
        return value
    changed = copy.deepcopy(document)
    parent = changed
    for key in place[:-1]:
        parent = parent[key]
    if new_key is _SAME_KEY:
        parent[place[-1]] = value
    else:
        del parent[place[-1]]
        if new_key is not None:
            parent[new_key] = value
    return changed


def test_each_altered_field_of_the_manifest_is_refused(damaged: Damaged, record_property: RecordProperty):
    path = damaged.folder / "manifest.json"
    text = path.read_text()
    missed, count = [], 0
    for place, altered in alterations(json.loads(text)):
        count += 1
        path.write_text(json.dumps(altered, indent=1) + "\n")
        for how, said in (("verify", damaged.refused_by_verify()), ("load", damaged.refused_by_load())):
            if "manifest.json: " not in said:
                missed.append(f"{how}: {place}: {said!r}")
    path.write_text(text)
    damaged.assert_holds()
    record_property(
        "figure", f"corruption: {count} altered fields of manifest.json: {len(missed)} missed by verify or load"
    )
    assert count > 500
    assert missed == []


def test_each_altered_byte_of_the_manifest_is_refused(damaged: Damaged, record_property: RecordProperty):
    path = damaged.folder / "manifest.json"
    data = path.read_bytes()
    rng = random.Random(1)
    missed, refused = 0, []
    for position in range(len(data)):
        for mask in (1 << rng.randrange(8), rng.randrange(1, 256)):
            flip(path, position, mask)
            try:
                read_manifest(damaged.folder)
                missed += 1
            except UserError as error:
                refused.append(str(error))
            flip(path, position, mask)
    assert path.read_bytes() == data
    assert all(said.startswith(f"{path}: ") for said in refused)
    record_property("figure", f"corruption: {2 * len(data)} altered bytes of manifest.json: {missed} missed")
    assert missed == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.rstrip("\n"),
        lambda text: text + "\n",
        lambda text: json.dumps(json.loads(text)),
        lambda text: text.replace("\\u00f6", "\\u00F6"),
        lambda text: text.replace("\\u00f6", "ö"),
        lambda text: text.replace('"step": 2,', '"step": 1, "step": 2,'),
    ],
    ids=["CR", "CRLF", "no end", "two ends", "compact", "escape in capitals", "no escape", "key twice"],
)
def test_a_manifest_that_reads_the_same_but_was_rewritten_is_refused(change: Callable[[str], str], damaged: Damaged):
    path = damaged.folder / "manifest.json"
    text = path.read_text()
    assert change(text) != text
    path.write_bytes(change(text).encode())
    damaged.assert_refused("manifest.json: its content does not match its own checksum")


def rewrite(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Alter a manifest as someone would who computes its checksum anew."""
    (folder / "manifest.json").write_text(change(read_manifest(folder)).to_json())


@pytest.mark.parametrize("kind", ["parent", "inner parent", "absolute", "backslash"])
def test_a_path_out_of_the_folder_is_refused_although_the_file_is_there(kind: str, damaged: Damaged, tmp_path: Path):
    outside = damaged.folder.parent / "config.yaml"
    shutil.copy(damaged.folder / "config.yaml", outside)
    path = {
        "parent": "../config.yaml",
        "inner parent": "policy/../../config.yaml",
        "absolute": str(outside),
        "backslash": "..\\config.yaml",
    }[kind]

    def change(manifest: Manifest) -> Manifest:
        files = [replace(file, path=path) if file.path == "config.yaml" else file for file in manifest.files]
        return replace(manifest, files=tuple(files))

    rewrite(damaged.folder, change)
    damaged.assert_refused("manifest.json", repr(path), "outside of the checkpoint's folder")


def test_a_chunk_of_a_file_out_of_the_folder_is_refused(damaged: Damaged):
    other = f"../{min(damaged.folder.parent.glob('step_*')).name}/policy/rank-00000.safetensors"

    def change(manifest: Manifest) -> Manifest:
        chunks = [replace(chunk, file=other) if chunk.component == "policy" else chunk for chunk in manifest.chunks]
        (own,) = (file for file in manifest.files if file.path == "policy/rank-00000.safetensors")
        return replace(
            manifest, chunks=tuple(chunks), files=(*manifest.files, FileEntry(other, own.size, own.checksum))
        )

    rewrite(damaged.folder, change)
    damaged.assert_refused("manifest.json", repr(other), "outside of the checkpoint's folder")


@pytest.mark.parametrize("target", ["trainer.json", "policy/rank-00000.safetensors", "value", "manifest.json"])
def test_a_link_out_of_the_folder_is_refused(target: str, damaged: Damaged, tmp_path: Path):
    inside, outside = damaged.folder / target, tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    damaged.assert_refused(target, "leads out of the checkpoint's folder")


def test_flips_are_refused_when_a_state_dict_is_loaded(root: Path, record_property: RecordProperty):
    state = {"model": tensors(1), "note": "größe", "step": 5}
    with AsyncCheckpointer(root) as checkpointer:
        checkpointer.save(5, state)
        checkpointer.wait_committed()
        (folder,) = root.glob("step_*")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        missed, refused = 0, []
        for path, position, mask in flips([path for path in files if path.stat().st_size], 100, seed=2):
            flip(path, position, mask)
            for options in ({}, {"step": 5}):
                try:
                    checkpointer.load(**options)
                    missed += 1
                except UserError as error:
                    refused.append((path.name, str(error)))
            flip(path, position, mask)
        assert checkpointer.load()["step"] == 5
    assert all(name in said for name, said in refused)
    record_property("figure", f"corruption: 100 random flips under AsyncCheckpointer.load: {missed} missed")
    assert missed == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_flips_are_refused_when_torch_loads(root: Path, record_property: RecordProperty):
    dcp.save({"model": tensors(1), "step": 5}, storage_writer=HeadwaterWriter(root, 5), no_dist=True)
    (folder,) = root.glob("step_*")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    missed, refused = 0, []
    for path, position, mask in flips(files, 100, seed=3):
        flip(path, position, mask)
        try:
            dcp.load({"model": tensors(2), "step": 0}, storage_reader=HeadwaterReader(folder), no_dist=True)
            missed += 1
        except CheckpointException as error:  # torch wraps what reading the metadata raised
            (cause,) = error.failures.values()
            refused.append((path.name, str(cause[0])))
        flip(path, position, mask)
    state = {"model": tensors(2), "step": 0}
    dcp.load(state, storage_reader=HeadwaterReader(folder), no_dist=True)
    assert state["step"] == 5
    assert all(name in said for name, said in refused)
    record_property("figure", f"corruption: 100 random flips under dcp.load: {missed} missed")
    assert missed == 0
