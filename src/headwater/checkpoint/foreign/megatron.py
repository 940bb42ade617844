"""Megatron's `torch_dist` folders: torch.distributed.checkpoint's container, and `common.pt` beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.checkpoint.foreign.dcp import as_number, read_dcp
from headwater.checkpoint.foreign.pickles import load_values
from headwater.checkpoint.foreign.record import Contents

COMMON_NAME = "common.pt"


def read_megatron(folder: Path) -> Contents:
    """What a `torch_dist` folder holds, in any of its optimizer's forms. Raises UserError as `read_dcp` does.

    The step comes from the optimizer's groups in `common.pt`, else from the iteration. Where neither can be read, a
    note says so, and every parameter is taken for trained.
    """
    contents = replace(read_dcp(folder), kind="Megatron torch_dist")
    path = folder / COMMON_NAME
    common = load_values(path, 0, path.stat().st_size) if path.is_file() else None
    if not isinstance(common, dict):
        note = f"{path}: cannot be read" if path.exists() else f"{folder}: has no {COMMON_NAME}"
        return replace(contents, notes=(*contents.notes, f"{note}, so no step is known: advance is assumed"))
    steps = sorted(set(_group_steps(common)))
    iteration = as_number(common.get("iteration"))
    if not steps and iteration is not None:
        steps = [iteration]
    if not steps:
        return contents
    components = {chunk.component for chunk in contents.chunks} or {""}
    return replace(contents, group_steps={component: tuple(steps) for component in components} | contents.group_steps)


def _group_steps(value: Any, depth: int = 0) -> Iterator[float]:
    """The `step` of every parameter group, wherever the optimizers (chained ones too) keep their groups."""
    if depth > 8:
        return
    if isinstance(value, dict):
        groups = value.get("param_groups")
        for group in groups.values() if isinstance(groups, dict) else groups if isinstance(groups, list) else ():
            step = as_number(group.get("step")) if isinstance(group, dict) else None
            if step is not None:
                yield step
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, dict | list | tuple):
                yield from _group_steps(item, depth + 1)
