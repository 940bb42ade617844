"""What differs between two checkpoints, down to the byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headwater.checkpoint.reader import TRAINER_NAME, Checkpoint, ComponentReader, OnBytes

_SLICE = 1 << 22
_MISSING = "(missing)"
_RUN_FILES = (TRAINER_NAME, "config.yaml")


@dataclass(frozen=True)
class ComponentDiff:
    """One component's tensors.

    compared: tensors in both. changed: names of those that differ in bytes, shape or dtype.
    max_abs_difference: largest over all elements of `changed`; NaN where a NaN meets a number or a shape differs.
    """

    component: str
    compared: int
    changed: tuple[str, ...]
    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    max_abs_difference: float

    @property
    def identical(self) -> bool:
        return not (self.changed or self.only_in_first or self.only_in_second)


@dataclass(frozen=True)
class FieldDiff:
    """A value of the trainer's state or of the manifest; path: dotted."""

    path: str
    first: Any
    second: Any


@dataclass(frozen=True)
class Diff:
    """files: tokenizer files that differ or are in one only. The resolved configuration is not compared."""

    components: tuple[ComponentDiff, ...]
    fields: tuple[FieldDiff, ...]
    files: tuple[str, ...]

    @property
    def identical(self) -> bool:
        return not (self.fields or self.files) and all(component.identical for component in self.components)


def diff(first: Checkpoint, second: Checkpoint, on_bytes: OnBytes | None = None) -> Diff:
    """Compare tensors as whole global tensors, the trainer's state, and the tokenizer's files.

    Every byte is read and checked on the way, so "identical" is never said of a corrupt file; however each side was
    cut into boxes makes no difference. Run id, save id, time and configuration are allowed to differ.
    on_bytes: called with the number of bytes compared since the last call.
    Raises UserError naming file and chunk where one side cannot be read or is corrupt.
    """
    names = sorted({*first.components(), *second.components()})
    components = tuple(_component(name, _reader(first, name), _reader(second, name), on_bytes) for name in names)
    fields: list[FieldDiff] = []
    for name in ("step", "weight_version", "model_identity"):
        _compare_values(name, getattr(first.manifest, name), getattr(second.manifest, name), fields)
    _compare_values("trainer", first.trainer_state(), second.trainer_state(), fields)
    return Diff(components, tuple(fields), _files(first, second))


def _reader(checkpoint: Checkpoint, component: str) -> ComponentReader | None:
    return checkpoint.component(component) if component in checkpoint.components() else None


def _component(
    name: str, first: ComponentReader | None, second: ComponentReader | None, on_bytes: OnBytes | None
) -> ComponentDiff:
    first_names = set(first.names()) if first else set()
    second_names = set(second.names()) if second else set()
    changed: list[str] = []
    largest = 0.0
    if first and second:
        for tensor in sorted(first_names & second_names):
            a, b = first.read(tensor), second.read(tensor)
            if not _same_bytes(a, b):
                changed.append(tensor)
                largest = _larger(largest, _max_abs_difference(a, b))
            if on_bytes:
                on_bytes(a.numel() * a.element_size())
    return ComponentDiff(
        component=name,
        compared=len(first_names & second_names),
        changed=tuple(changed),
        only_in_first=tuple(sorted(first_names - second_names)),
        only_in_second=tuple(sorted(second_names - first_names)),
        max_abs_difference=largest,
    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _max_abs_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return math.nan
    largest = 0.0
    for part_a, part_b in zip(a.reshape(-1).split(_SLICE), b.reshape(-1).split(_SLICE), strict=True):
        largest = _larger(largest, (part_a.double() - part_b.double()).abs().max().item())
    return largest


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _compare_values(path: str, first: Any, second: Any, found: list[FieldDiff]) -> None:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in sorted({*first, *second}):
            _compare_values(f"{path}.{key}", first.get(key, _MISSING), second.get(key, _MISSING), found)
    elif type(first) is not type(second) or first != second:
        found.append(FieldDiff(path, first, second))


def _files(first: Checkpoint, second: Checkpoint) -> tuple[str, ...]:
    def checksums(checkpoint: Checkpoint) -> dict[str, int]:
        tensors = {chunk.file for chunk in checkpoint.manifest.chunks}
        skipped = tensors | set(_RUN_FILES)
        return {file.path: file.checksum for file in checkpoint.manifest.files if file.path not in skipped}

    a, b = checksums(first), checksums(second)
    return tuple(sorted(path for path in {*a, *b} if a.get(path) != b.get(path)))
