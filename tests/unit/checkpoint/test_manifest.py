import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headwater.checkpoint.manifest import ChunkEntry, CorruptCheckpointError, FileEntry, Manifest
from headwater.errors import UserError

FILE = "policy/rank-00000.safetensors"


def sample() -> Manifest:
    def chunk(name: str, shape: tuple[int, ...], begin: int, end: int, offset: tuple[int, ...]) -> ChunkEntry:
        return ChunkEntry("policy", name, (4, 2), offset, shape, "F32", FILE, begin, end, 0xFFFF_FFFF_FFFF_FFFF)

    return Manifest(
        run_id="run-1",
        save_id="0123abcd",
        step=10,
        weight_version=10,
        model_identity="model-a",
        saved_at_ns=1_700_000_000_000_000_000,
        chunks=(
            chunk("w", (2, 2), 4096, 4112, (0, 0)),
            chunk("w", (2, 2), 4112, 4128, (2, 0)),
            chunk("v", (4, 2), 4128, 4160, (0, 0)),
        ),
        files=(FileEntry(FILE, 4160, 1 << 63), FileEntry("trainer.json", 2, 5), FileEntry("tokenizer/a.json", 0, 7)),
    )


def document_of(manifest: Manifest) -> dict[str, Any]:
    return json.loads(manifest.to_json())


def parse(document: Any) -> Manifest:
    return Manifest.from_json(json.dumps(document), "here/manifest.json")


def altered(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    document = document_of(sample())
    change(document)
    return document


def refusal(manifest: Manifest) -> str:
    """The error for a manifest whose own checksum is right but whose content is not."""
    with pytest.raises(CorruptCheckpointError) as caught:
        Manifest.from_json(manifest.to_json(), "here/manifest.json")
    return str(caught.value)


def with_chunk(**changes: Any) -> Manifest:
    manifest = sample()
    return replace(manifest, chunks=(replace(manifest.chunks[0], **changes), *manifest.chunks[1:]))


def test_round_trip_through_json():
    assert Manifest.from_json(sample().to_json(), "x") == sample()


def test_digests_are_hex_text_since_json_readers_round_large_numbers():
    document = document_of(sample())
    assert document["chunks"][0]["digest"] == "ffffffffffffffff"
    assert document["files"][0]["checksum"] == "8000000000000000"


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


@pytest.mark.parametrize("path", leaves(document_of(sample())), ids=lambda path: ".".join(map(str, path)))
def test_any_altered_field_is_detected(path: tuple[Any, ...]):
    document = document_of(sample())
    target: Any = document
    for key in path[:-1]:
        target = target[key]
    value = target[path[-1]]
    target[path[-1]] = value + 1 if isinstance(value, int) else value[:-1] + ("0" if value[-1] != "0" else "1")
    with pytest.raises(UserError):
        parse(document)


def test_altered_field_that_is_otherwise_valid_is_told_by_the_checksum():
    with pytest.raises(CorruptCheckpointError, match="its own checksum"):
        parse(altered(lambda document: document.update(step=11)))


def test_reordered_chunks_are_detected():
    with pytest.raises(CorruptCheckpointError, match="its own checksum"):
        parse(altered(lambda document: document["chunks"].reverse()))


def test_missing_field_is_named_with_file_and_chunk():
    with pytest.raises(CorruptCheckpointError, match=r"chunk number 1 \(file '.*rank-00000.*', name 'w'\): .*'begin'"):
        parse(altered(lambda document: document["chunks"][1].pop("begin")))


@pytest.mark.parametrize("key", document_of(sample()))
def test_missing_field_of_the_manifest_is_named(key: str):
    with pytest.raises(CorruptCheckpointError, match=f"'{key}' is missing"):
        parse(altered(lambda document: document.pop(key)))


def test_unknown_field_is_named():
    with pytest.raises(CorruptCheckpointError, match="unknown field 'extra'"):
        parse(altered(lambda document: document["files"][0].update(extra=1)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "10"),
        ("step", 10.0),
        ("step", True),
        ("step", -1),
        ("step", 1 << 63),
        ("step", None),
        ("save_id", "0123ABCD"),
        ("save_id", "../../x"),
        ("run_id", 5),
        ("run_id", "two\nlines"),
        ("chunks", {}),
        ("files", None),
        ("checksum", 5),
    ],
)
def test_mistyped_field_is_named(key: str, value: Any):
    with pytest.raises(CorruptCheckpointError, match=f"field '{key}' must be"):
        parse(altered(lambda document: document.update({key: value})))


@pytest.mark.parametrize(
    ("key", "value"),
    [("shape", [2, "2"]), ("shape", 4), ("shape", [-2, -2]), ("digest", "ff"), ("name", None), ("component", "../x")],
)
def test_mistyped_field_of_a_chunk_is_named(key: str, value: Any):
    with pytest.raises(CorruptCheckpointError, match=rf"chunk number 0 .*field '{key}' must be"):
        parse(altered(lambda document: document["chunks"][0].update({key: value})))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "[" * 100_000, '{"format_version": 1}', '"\\ud800"'])
def test_text_that_is_no_manifest_is_refused_in_one_line(text: str):
    with pytest.raises(CorruptCheckpointError) as caught:
        Manifest.from_json(text, "here/manifest.json")
    assert str(caught.value).startswith("here/manifest.json: ")
    assert "\n" not in str(caught.value)


def test_format_version_of_the_future_is_no_corruption():
    with pytest.raises(UserError, match="format version 2") as caught:
        parse({"format_version": 2, "anything": "else"})
    assert not isinstance(caught.value, CorruptCheckpointError)


@pytest.mark.parametrize(
    "path",
    ["../x", "policy/../../x", "/etc/passwd", "", ".", "policy//x", "policy/", "..\\x", "a\0b", "a\ud800"],
)
def test_path_outside_of_the_folder_is_refused(path: str):
    manifest = sample()
    assert "file" in refusal(replace(manifest, files=(*manifest.files, FileEntry(path, 0, 0))))


def test_file_listed_twice_is_refused():
    manifest = sample()
    assert "twice" in refusal(replace(manifest, files=(*manifest.files, manifest.files[0])))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"file": "policy/other.safetensors"}, "not listed"),
        ({"dtype": "F31"}, "unknown dtype"),
        ({"shape": (2, 2, 1)}, "differ in length"),
        ({"offset": (3, 0)}, "outside of its global shape"),
        ({"begin": 5000, "end": 5016}, "outside of the file"),
        ({"begin": 4112, "end": 4096}, "outside of the file"),
        ({"end": 4111}, "15 bytes for shape"),
        ({"dtype": "BF16"}, "needs 8"),
        ({"begin": 4100, "end": 4116}, "overlap"),
        ({"global_shape": (5, 2)}, "different shape or dtype"),
        ({"offset": (2, 0)}, "listed twice"),
    ],
)
def test_contradicting_chunk_is_refused_naming_file_and_chunk(changes: dict[str, Any], expected: str):
    message = refusal(with_chunk(**changes))
    assert expected in message
    assert "chunk w" in message
    assert "rank-00000" in message or "other.safetensors" in message


def test_empty_tensors_share_a_place_without_overlapping():
    manifest = sample()
    empty = replace(manifest.chunks[0], name="e", global_shape=(0,), shape=(0,), offset=(0,), begin=4100, end=4100)
    more = replace(manifest, chunks=(*manifest.chunks, empty))
    assert Manifest.from_json(more.to_json(), "x") == more
