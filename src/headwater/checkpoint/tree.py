"""A nested state dict as named tensors and JSON, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from headwater.errors import UserError

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def flatten(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a state dict apart into its tensors by name and a JSON value that refers to them.

    state: dicts (keys: str, int, float, bool or None), lists and tuples of tensors and of None, bool, int, float, str.
    A tensor that occurs twice is stored once and is one tensor again after loading. Names are the dotted paths.
    Raises UserError naming the path of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            _check_tensor(value, path)
            if id(value) not in names:
                names[id(value)] = _unused_name(".".join(path) or "tensor", tensors)
                tensors[names[id(value)]] = value
            return {"tensor": names[id(value)]}
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, Mapping):
            return {"dict": [[_key(key, path), visit(item, (*path, str(key)))] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [visit(item, (*path, str(index))) for index, item in enumerate(value)]}
        raise UserError(
            f"state_dict entry {_path(path)} is a {type(value).__name__}, which a checkpoint does not hold: "
            "save tensors, numbers, strings, and dicts, lists and tuples of them"
        )

    return tensors, visit(state, ())


def unflatten(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `flatten`. tensor: gives the tensor of a name; called once for each."""
    made: dict[str, torch.Tensor] = {}

    def visit(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        ((kind, value),) = node.items()
        if kind == "tensor":
            if value not in made:
                made[value] = tensor(value)
            return made[value]
        if kind == "float":
            return _FLOATS[value]
        if kind == "dict":
            return {visit(key): visit(item) for key, item in value}
        items = [visit(item) for item in value]
        return items if kind == "list" else tuple(items)

    return visit(tree)


def _check_tensor(value: torch.Tensor, path: tuple[str, ...]) -> None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
        raise UserError(
            f"state_dict entry {_path(path)} is a {type(value).__name__} of layout {value.layout}: "
            "save its plain local tensor"
        )


def _unused_name(wanted: str, taken: Mapping[str, torch.Tensor]) -> str:
    if not wanted.isprintable():
        wanted = "".join(char if char.isprintable() else "_" for char in wanted)
    name, count = wanted, 1
    while name in taken:  # a key may hold the dot that joins a path
        count += 1
        name = f"{wanted}#{count}"
    return name


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if key is None or type(key) in (str, int, bool) or (type(key) is float and math.isfinite(key)):
        return key
    raise UserError(f"state_dict entry {_path(path)} has the key {key!r}: keys are strings, numbers or None")


def _path(path: tuple[str, ...]) -> str:
    return ".".join(path) or "(the whole)"
