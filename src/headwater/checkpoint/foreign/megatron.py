"""Megatron's `torch_dist` folders: torch.distributed.checkpoint's container, and `common.pt` beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headwater.checkpoint.foreign.dcp import as_number, group_steps, read_dcp
from headwater.checkpoint.foreign.pickles import load_values
from headwater.checkpoint.foreign.record import Contents
from headwater.errors import UserError

COMMON_NAME = "common.pt"


def read_megatron(folder: Path) -> Contents:
    """What a `torch_dist` folder holds, in any of its optimizer's forms. Raises UserError as `read_dcp` does.

    The step comes from the optimizer's groups in `common.pt`, else from the iteration. Where the file is missing, a
    note says so, and every parameter is taken for trained. Raises UserError for one that is damaged or refused.
    """
    contents = replace(read_dcp(folder), kind="Megatron torch_dist")
    path = folder / COMMON_NAME
    if not path.exists():
        note = f"{folder}: has no {COMMON_NAME}, so no step is known: advance is assumed"
        return replace(contents, notes=(*contents.notes, note))
    common = load_values(path, 0, path.stat().st_size) if path.is_file() else None
    if not isinstance(common, dict):
        raise UserError(f"{path}: damaged, not a torch.save archive of a dictionary")
    steps = sorted(set(group_steps(common)))
    iteration = as_number(common.get("iteration"))
    if not steps and iteration is not None:
        steps = [iteration]
    if not steps:
        return contents
    components = {chunk.component for chunk in contents.chunks} or {""}
    return replace(contents, group_steps={component: tuple(steps) for component in components} | contents.group_steps)
